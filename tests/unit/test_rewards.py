"""Verdicts for domains: shared executions, what is remembered, cancelled jobs, the recipe's limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temper.actor import rewards
from temper.actor.rewards import SandboxGrader, content_key, limited
from temper.common.config import Sandbox
from temper.common.errors import PeerLost
from temper.common.schema import (
    Job,
    JobCancel,
    JobDone,
    Limits,
    SandboxJob,
    TestCase,
    Verdict,
    pack_frames,
    unpack_frames,
)


class Broker:
    """Takes jobs, answers when told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, SandboxJob]] = []
        self.posted: list[Any] = []
        self.arrived = asyncio.Condition()
        self.credit = asyncio.Event()
        self.credit.set()
        self.grader = SandboxGrader(self, Sandbox())

    async def send(self, body: Any, frames: Any = ()) -> None:
        await self.credit.wait()
        async with self.arrived:
            self.jobs.append((body, unpack_frames(list(frames), SandboxJob)))
            self.arrived.notify_all()

    def post(self, body: Any, frames: Any = ()) -> bool:
        self.posted.append(body)
        return True

    async def has(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.jobs) >= count)

    def answer(self, number: int, verdict: Verdict) -> None:
        job_id = self.jobs[number][0].job_id
        self.grader.on_done(JobDone(job_id, verdict.outcome), pack_frames(verdict))


def program(text: str = "print(1)", seed: int = 0) -> SandboxJob:
    return SandboxJob("", "python", {"main.py": text.encode()}, [TestCase(b"", b"1\n")], seed=seed)


def play(scenario: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Broker())

    asyncio.run(main())


def test_identical_jobs_share_one_execution_and_its_memory() -> None:
    async def scenario(broker: Broker) -> None:
        grader = broker.grader.bound(7, "toy")
        asked = [asyncio.ensure_future(grader.run(program())) for _ in range(5)]
        other = asyncio.ensure_future(grader.run(program(seed=1)))
        await broker.has(2)
        assert {body.lease_id for body, _ in broker.jobs} == {7} and broker.jobs[0][0].domain == "toy"
        broker.answer(0, Verdict("ok", 0))
        broker.answer(1, Verdict("wrong", 0))
        assert [v.outcome for v in await asyncio.gather(*asked)] == ["ok"] * 5
        assert (await other).outcome == "wrong"
        assert (await grader.run(program())).outcome == "ok"  # remembered
        assert len(broker.jobs) == 2 and broker.grader.counts.jobs == 2 and broker.grader.counts.shared == 5
        assert broker.grader.counts.outcomes == {"ok": 1, "wrong": 1} and broker.grader.waiting == 0

    play(scenario)


def test_infra_is_never_remembered_and_malformed_verdicts_are_infra() -> None:
    async def scenario(broker: Broker) -> None:
        for number, send in enumerate((lambda n: broker.answer(n, Verdict("infra")), None)):
            asked = asyncio.ensure_future(broker.grader.run(program(), 1, "toy"))
            await broker.has(number + 1)
            if send is None:
                broker.grader.on_done(JobDone(broker.jobs[number][0].job_id, "ok"), [memoryview(b"\xc1")])
            else:
                send(number)
            assert (await asked).outcome == "infra"

    play(scenario)


def test_sessions_are_never_shared() -> None:
    async def scenario(broker: Broker) -> None:
        job = SandboxJob("", "python", {}, [], session_id="s")
        asked = [asyncio.ensure_future(broker.grader.run(job, 1, "toy")) for _ in range(2)]
        await broker.has(2)
        broker.answer(1, Verdict("ok"))
        broker.answer(0, Verdict("error"))
        assert [v.outcome for v in await asyncio.gather(*asked)] == ["error", "ok"]

    play(scenario)


def test_a_job_is_cancelled_when_its_last_waiter_has_gone() -> None:
    async def scenario(broker: Broker) -> None:
        first, second = (asyncio.ensure_future(broker.grader.run(program(), 1, "toy")) for _ in range(2))
        await broker.has(1)
        first.cancel()
        await asyncio.wait([first])
        assert broker.posted == []
        second.cancel()
        await asyncio.wait([second])
        job_id = broker.jobs[0][0].job_id
        assert broker.posted == [JobCancel(job_id)] and broker.grader.waiting == 0
        broker.grader.on_done(JobDone(job_id, "ok"), pack_frames(Verdict("ok")))  # too late: ignored
        again = asyncio.ensure_future(broker.grader.run(program(), 1, "toy"))
        await broker.has(2)
        broker.answer(1, Verdict("ok"))
        assert (await again).outcome == "ok"

    play(scenario)


def test_a_job_that_never_left_needs_no_cancel() -> None:
    async def scenario(broker: Broker) -> None:
        broker.credit.clear()
        asked = asyncio.ensure_future(broker.grader.run(program(), 1, "toy"))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        broker.credit.set()
        await asyncio.sleep(0)
        assert broker.jobs == [] and broker.posted == []

    play(scenario)


def test_a_lost_broker_fails_the_waiter() -> None:
    async def scenario(broker: Broker) -> None:
        async def lost(body: Any, frames: Any = ()) -> None:
            raise PeerLost("the broker is gone")

        broker.send = lost  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match="gone"):
            await broker.grader.run(program(), 1, "toy")

    play(scenario)


def test_the_memory_of_verdicts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: Broker) -> None:
        async def verdict(number: int, text: str) -> None:
            asked = asyncio.ensure_future(broker.grader.run(program(text), 1, "toy"))
            await broker.has(number + 1)
            broker.answer(number, Verdict("ok", stdout=b"x" * 2000))
            await asked

        monkeypatch.setattr(rewards, "REMEMBERED_BYTES", 6000)
        for number, text in enumerate(("a", "b", "c")):
            await verdict(number, text)
        await verdict(3, "a")  # forgotten: the oldest
        assert (await broker.grader.run(program("c"), 1, "toy")).outcome == "ok" and len(broker.jobs) == 4

    play(scenario)


def test_a_grader_works_from_another_threads_loop() -> None:
    async def scenario(broker: Broker) -> None:
        grader, found = broker.grader.bound(1, "toy"), []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(grader.run(program()))))
        thread.start()
        await broker.has(1)
        broker.answer(0, Verdict("ok"))
        await asyncio.to_thread(thread.join)
        assert found == [Verdict("ok")]

    play(scenario)


def test_limits_and_mode_come_from_the_recipe() -> None:
    sandbox = Sandbox(mode="pool", wall_s=30, cpu_s=20, memory_mb=512, output_kb=8)
    plain = limited(program(), sandbox)
    assert plain.mode == "pool"
    assert plain.limits == Limits(30, 20, 512 * 1024 * 1024, 32, 8192)
    own = SandboxJob("", "python", {}, [], Limits(wall_s=60, cpu_s=1, memory_bytes=1 << 20, pids=4))
    assert limited(own, sandbox).limits == Limits(30, 1, 1 << 20, 4, 8192)
    assert content_key(program()) != content_key(program(seed=1))
