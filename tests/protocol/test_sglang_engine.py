"""The SGLang engine against a server that misbehaves: nothing hangs, nothing wrong is taken, generation always goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from temper.actor.engines import sglang_server
from temper.actor.engines.base import Cancel, GenerateRequest, OnSwap, SamplingParams
from temper.actor.engines.sglang import SglangEngine
from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import encode, stage
from temper.common.errors import EngineError, EnvironmentFault

STUB = Path(__file__).with_name("sglang_stub")
pytestmark = pytest.mark.timeout(90)


def weights(ordinal: int, base: Weights | None = None) -> Weights:
    tensors = {"a": TensorBits.of(np.full((3, 2), ordinal, np.float32)), "b": TensorBits.of(np.zeros(1, np.float32))}
    return seal(ordinal, 5, tensors, base)


def update(new: Weights, base: Weights | None = None) -> Any:
    return stage(list(encode(base, new)), base)


def ask(**params: Any) -> GenerateRequest:
    return GenerateRequest([1, 2], SamplingParams(**({"max_new_tokens": 6} | params)))


def made(
    folder: Path,
    *,
    recompute: bool = False,
    on_swap: OnSwap = "in_flight",
    host: dict[str, Any] | None = None,
    experts: bool = False,
    **environment: str,
) -> SglangEngine:
    described = {
        "python": sys.executable,
        "environment": {"PYTHONPATH": str(STUB), **environment},
        "log_dir": str(folder),
        "start_timeout_s": 60,
    } | (host or {})
    shape = ServerShape("float32", 4, 512, experts)
    files = {"config.json": b"{}"}
    return SglangEngine(SglangHost(**described), shape, files, 64, recompute=recompute, on_swap=on_swap)


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[SglangEngine]:
    engine = made(folder, **options)
    await engine.start()
    try:
        await engine.apply(update(weights(0)))
        yield engine
    finally:
        await engine.close()


async def told(engine: SglangEngine, number: int = 0, **how: Any) -> Any:
    return await engine.fleet.servers[number].client.post("/misbehave", how)


async def misbehave(engine: SglangEngine, **how: Any) -> list[str]:
    return list((await told(engine, **how))["calls"])


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` holds."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it never came")


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(80):
            await scenario()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_server, "BACKOFF_S", (0.05,))
    monkeypatch.setattr(sglang_server, "POLL_S", 0.1)


def test_generation_updates_and_cancelling(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, STUB_STEP_S="0.02") as engine:
            first = await engine.generate(ask())
            assert (
                first.ids == [7, 8, 7, 8, 7, 8] and first.version_runs == [(5, 0, 6)] and first.logprobs == [-1.0] * 6
            )
            stopped = await engine.generate(ask(stop_token_ids=(8,)))
            assert stopped.ids == [7, 8] and stopped.finish_reason == "stop"
            long = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=100))) for _ in range(6)]
            await engine.generate(ask(max_new_tokens=1))  # waits for a row: the first four are under way
            cancel = Cancel()
            cancelled = asyncio.ensure_future(engine.generate(ask(max_new_tokens=400), cancel))
            old, new = weights(0), weights(1, weights(0))
            assert await engine.apply(update(new, old)) == new.version.digest
            cancel.set()
            assert (await cancelled).finish_reason == "abort"
            runs = [one.version_runs for one in await asyncio.gather(*long)]
            assert {ordinal for run in runs for _, ordinal, _ in run} == {0, 1}
            assert all(sum(count for _, _, count in run) == 100 for run in runs)
            assert engine.counts.swaps == 2 and engine.version == new.version
            assert not engine.caps.seeded

    play(scenario)


def test_domains_call_it_from_their_own_threads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, STUB_STEP_S="0.01") as engine:
            cancel = Cancel()

            async def elsewhere() -> list[Any]:
                long = asyncio.ensure_future(engine.generate(ask(max_new_tokens=400), cancel))
                short = [await engine.generate(ask()) for _ in range(2)]
                cancel.set()
                return [*short, await long]

            first, second, long = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
            assert first.ids == second.ids == [7, 8, 7, 8, 7, 8]
            assert long.finish_reason == "abort" and 6 <= len(long.ids) < 400
            assert len((await engine.generate(ask())).ids) == 6

    play(scenario)


def test_a_500_is_tried_again_and_a_bad_request_is_not(tmp_path: Path) -> None:
    """One of 16 generation requests returns HTTP 500 -> 15 delivered, 1 retried."""

    async def scenario() -> None:
        async with running(tmp_path) as engine:
            await misbehave(engine, status=1)
            many = await asyncio.gather(*(engine.generate(ask()) for _ in range(16)))
            assert [len(one.ids) for one in many] == [6] * 16
            await misbehave(engine, status=99)
            with pytest.raises(EngineError, match="status 500"):
                await engine.generate(ask())
            with pytest.raises(EngineError, match="prompt of 0 tokens"):
                await engine.generate(GenerateRequest([], SamplingParams()))

    play(scenario)


def test_no_token_of_an_unverified_version_leaves(tmp_path: Path) -> None:
    """What ends before its version is found to be right waits for that, and loses what was sampled from wrong weights."""

    async def scenario() -> None:
        async with running(tmp_path) as engine:
            old, new = weights(0), weights(1, weights(0))
            under_way = asyncio.ensure_future(engine.generate(ask(max_new_tokens=100)))
            await until(lambda: engine.counts.rows)
            await misbehave(engine, lose=1)
            async with engine.fleet._updating:  # nothing is decided while this is held
                server = engine.fleet.servers[0]
                server.open = False
                pusher = engine.fleet._pushers[id(server)]
                names = engine.fleet.mirror.overwrite(update(new, old))
                with pytest.raises(EngineError, match="did not take the update"):
                    await pusher.push(server.client, names, new.version)
                await until(lambda: not engine.counts.rows)
                assert not under_way.done()
            await engine.apply(update(new))
            whole = await under_way
            assert len(whole.ids) == 100 and {run[:2] for run in whole.version_runs} == {(5, 0), (5, 1)}
            assert len(engine.fleet._verified) == 2

    play(scenario)


def test_what_started_under_old_weights_runs_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as engine:
            await misbehave(engine, stale=2)
            assert (await engine.generate(ask())).version_runs == [(5, 0, 6)]

    play(scenario)


def test_an_abort_that_nobody_asked_for_is_continued(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as engine:
            running_ = asyncio.ensure_future(engine.generate(ask(max_new_tokens=50)))
            await until(lambda: engine.counts.rows > 0)
            await misbehave(engine, abort=1)
            whole = await running_
            assert len(whole.ids) == 50 and whole.finish_reason == "length" and whole.version_runs == [(5, 0, 50)]

    play(scenario)


@pytest.mark.parametrize("how", ["refuse", "lose"])
def test_an_update_that_is_not_taken_is_noticed_and_mended_by_a_full_copy(tmp_path: Path, how: str) -> None:
    """An engine answers (False, message) to a delta and the sender moves on; or the version rises although nothing was
    transferred; or generation stays paused after it -> the version is not served, a full copy mends it, generation goes on."""

    async def scenario() -> None:
        async with running(tmp_path) as engine:
            running_ = asyncio.ensure_future(engine.generate(ask(max_new_tokens=300)))
            await until(lambda: engine.counts.rows)
            await misbehave(engine, **{how: 1})
            old, new = weights(0), weights(1, weights(0))
            with pytest.raises(EngineError, match=r"out of memory|did not take the update"):
                await engine.apply(update(new, old))
            assert engine.version is None
            await until(lambda: not engine.counts.rows)  # generation was not left paused, what ran was given up
            calls = await misbehave(engine)
            assert calls.count("/pause_generation") == calls.count("/continue_generation") == 2
            assert not running_.done()
            await engine.apply(update(new))
            whole = await running_  # nothing of it is from the weights in between
            assert len(whole.ids) == 300 and {run[:2] for run in whole.version_runs} == {(5, 0), (5, 1)}
            assert (await engine.generate(ask())).version_runs == [(5, 1, 6)]

    play(scenario)


def test_a_model_that_cannot_be_read_is_checked_by_its_checksum(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as engine:
            await misbehave(engine, unreadable=1)
            chain = [weights(0)]
            for ordinal in (1, 2):
                chain.append(weights(ordinal, chain[-1]))
                await engine.apply(update(chain[-1], chain[-2]))
            await misbehave(engine, lose=1)
            with pytest.raises(EngineError, match="checksum is still that of before"):
                await engine.apply(update(weights(3, chain[-1]), chain[-1]))
            await engine.apply(update(weights(3)))
            assert (await engine.generate(ask())).version_runs == [(5, 3, 6)]
            with pytest.raises(EngineError):
                await misbehave(engine, die=True)
            await until(lambda: engine.counts.restarts == 1)
            assert (await engine.generate(ask())).version_runs == [(5, 3, 6)]  # the same weights again

    play(scenario)


def test_recomputing_retracts_and_flushes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, recompute=True) as engine:
            assert "/flush_cache" in await misbehave(engine)
            same = seal(9, 5, dict(weights(0).tensors), weights(0))
            await engine.apply(update(same, weights(0)))  # equal bits under a new name
            assert (await engine.generate(ask())).version_runs == [(5, 9, 6)]

    play(scenario)


def test_a_killed_server_comes_back_with_its_weights_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, STUB_STEP_S="0.01") as engine:
            under_way = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=50))) for _ in range(3)]
            await until(lambda: engine.counts.rows == 3)
            with pytest.raises(EngineError):
                await misbehave(engine, die=True)
            for one in await asyncio.gather(*under_way):
                assert one.ids[0] == 7 and one.version_runs == [(5, 0, 50)]
            assert engine.counts.restarts == 1 and engine.failure is None

    play(scenario)


def test_a_deaf_server_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_server, "HEALTH_EVERY_S", 0.1)
    monkeypatch.setattr(sglang_server, "HEALTH_TIMEOUT_S", 2.0)
    monkeypatch.setattr(sglang_server, "HEALTH_FAILURES", 2)

    async def scenario() -> None:
        async with running(tmp_path) as engine:
            deaf = asyncio.ensure_future(misbehave(engine, deaf=True))
            with contextlib.suppress(EngineError):
                await deaf
            await until(lambda: engine.counts.restarts)
            assert (await engine.generate(ask())).version_runs == [(5, 0, 6)]

    play(scenario)


ALONE = """
import asyncio, os, signal, sys
from pathlib import Path
from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.actor.engines.sglang_process import ServerProcess
async def main():
    host = SglangHost(python=sys.executable, environment={"PYTHONPATH": sys.argv[1]}, log_dir=sys.argv[2])
    place = ServerProcess(host, ServerShape("float32", 4, 512), {"config.json": b"{}"})
    await place.start()
    print(place._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_a_server_does_not_outlive_its_killed_parent(tmp_path: Path) -> None:
    """Whether the parent is killed before or after the server asked to follow it."""
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", ALONE, str(STUB), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            assert select.select([ended], [], [], 30)[0], f"{pid} still runs"
            os.close(ended)
        assert parent.wait(20) == -signal.SIGKILL
    finally:
        parent.kill()
        parent.communicate()


def test_a_server_that_never_starts_is_an_environment_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A child exits at once during launch; the launcher waits out its whole timeout -> it fails at once, its last lines
    shown: three starts of a minute each would be over this test's time."""

    async def scenario() -> None:
        engine = made(tmp_path, STUB_DIES="1")
        with pytest.raises(EnvironmentFault, match="did not become ready in 3 starts"):
            await engine.start()
        assert "sglang| no such device" in capsys.readouterr().err
        await engine.close()
        host, files = SglangHost(python="/no/such/python"), {"config.json": b"{}"}
        other = SglangEngine(host, ServerShape("float32", 4, 512), files, 64, recompute=False)
        with pytest.raises(EnvironmentFault, match="engine install"):
            await other.start()
        await other.close()

    play(scenario)


def test_a_server_beyond_repair_fails_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as engine:

            async def broken() -> None:
                raise EnvironmentFault("the card is gone")

            monkeypatch.setattr(engine.fleet.servers[0], "start", broken)
            with pytest.raises(EngineError):
                await misbehave(engine, die=True)
            with pytest.raises(EngineError):
                await engine.generate(ask())
            await until(lambda: engine.failure is not None)
            with pytest.raises(EngineError, match="the card is gone"):
                await engine.generate(ask())
            with pytest.raises(EngineError, match="the card is gone"):
                await engine.apply(update(weights(1)))

    play(scenario)


def test_a_request_is_aborted_alone(tmp_path: Path) -> None:
    """A server aborts every request whose id begins with the one named: ids are made so that none does."""

    async def scenario() -> None:
        async with running(tmp_path, STUB_STEP_S="0.01") as engine:
            for _ in range(2):
                await engine.generate(ask(max_new_tokens=1))
            cancels = [Cancel() for _ in range(4)]
            under_way = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=60), each)) for each in cancels]
            await until(lambda: engine.counts.rows == 4)
            cancels[0].set()
            ended = await asyncio.gather(*under_way)
            assert [one.finish_reason for one in ended] == ["abort", "length", "length", "length"]
            ids = [body["rid"] for body in (await told(engine))["bodies"]]
            assert len(set(ids)) == len(ids) == 6 and len({len(each) for each in ids}) == 1

    play(scenario)


def test_two_servers_share_the_load_and_one_may_die(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, host={"count": 2}, STUB_STEP_S="0.01") as engine:
            under_way = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=40))) for _ in range(8)]
            await until(lambda: engine.counts.rows == 8)
            assert [server.rows for server in engine.fleet.servers] == [4, 4]
            with pytest.raises(EngineError):
                await told(engine, 1, die=True)
            assert [len(one.ids) for one in await asyncio.gather(*under_way)] == [40] * 8
            chain = weights(1, weights(0))
            assert await engine.apply(update(chain, weights(0))) == chain.version.digest  # also while one is away
            await until(lambda: engine.fleet.servers[1].open)
            assert engine.counts.restarts == 1 and engine.trouble == ""
            many = await asyncio.gather(*(engine.generate(ask()) for _ in range(8)))
            assert {one.version_runs[0] for one in many} == {(5, 1, 6)}
            for number in (0, 1):
                bodies = (await told(engine, number))["bodies"]
                assert any(body.get("extra_key") == "5:1" for body in bodies)

    play(scenario)


def test_one_of_two_that_refuses_an_update_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, host={"count": 2}) as engine:
            await told(engine, 0, lose=1)
            await engine.apply(update(weights(1, weights(0)), weights(0)))
            assert [server.open for server in engine.fleet.servers] == [False, True]
            assert (await engine.generate(ask())).version_runs == [(5, 1, 6)]
            await until(lambda: engine.fleet.servers[0].open)
            assert engine.counts.restarts == 1

    play(scenario)


def test_it_attaches_to_running_servers_and_a_router(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as other:
            place = other.fleet.servers[0].place
            key = tmp_path / "key"
            key.write_text(place.admin_key + "\n")
            pid = (await told(other))["pid"]
            host = {"python": "", "servers": (place.url,), "router": place.url, "admin_key_file": str(key)}
            engine = made(tmp_path, host=host)
            await engine.start()
            try:
                await engine.apply(update(weights(3)))
                assert (await engine.generate(ask())).version_runs == [(5, 3, 6)]
                cancel = Cancel()
                long = asyncio.ensure_future(engine.generate(ask(max_new_tokens=400), cancel))
                await until(lambda: engine.counts.rows)
                cancel.set()
                assert (await long).finish_reason == "abort"
            finally:
                await engine.close()
            assert (await told(other))["pid"] == pid  # it was not ours to end
            wrong = made(tmp_path, host=host | {"admin_key_file": ""})
            with pytest.raises(EnvironmentFault, match="admin key"):
                await wrong.start()
            await wrong.close()

    play(scenario)


def test_retractions_are_counted_and_experts_come_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, experts=True) as engine:
            await told(engine, retract=2)
            routed = await engine.generate(ask(want_experts=True))
            assert routed.experts is not None and routed.experts.shape == (2 + 6 - 1, 4)
            assert routed.experts.dtype == np.int16 and engine.caps.routed_experts
            assert (await engine.generate(ask())).experts is None
            assert engine.counts.retractions == 2

    play(scenario)


@pytest.mark.parametrize("transfer", ["shared", "copy", "disk"])
def test_weights_reach_it_in_every_way(tmp_path: Path, transfer: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path, host={"transfer": transfer}) as engine:
            first, new = weights(0), weights(1, weights(0))
            await engine.apply(update(new, first))
            assert (await engine.generate(ask())).version_runs == [(5, 1, 6)]
            calls = await misbehave(engine)
            path = "/update_weights_from_disk" if transfer == "disk" else "/update_weights_from_tensor"
            assert calls.count(path) == 2
            found = await engine.fleet.servers[0].client.post("/get_weights_by_name", {"name": "a", "truncate_size": 2})
            assert found == [[1.0, 1.0], [1.0, 1.0]]

    play(scenario)


def test_a_start_takes_its_time_and_its_key_stays_off_the_command_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, STUB_STARTING="3") as engine:
            calls = await misbehave(engine)
            assert calls[:4].count("/health") == 4
            pid = (await told(engine))["pid"]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            place = engine.fleet.servers[0].place
            assert place.admin_key not in command and "127.0.0.1" in command

    play(scenario)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"STUB_LENGTH": "100"}, "--context-length 512"),
        ({"STUB_VERSION": "0.9.0", "STUB_LACKS": "1"}, "lacks /abort_request"),
    ],
)
def test_a_server_that_cannot_do_it_is_named(tmp_path: Path, environment: dict[str, str], named: str) -> None:
    async def scenario() -> None:
        engine = made(tmp_path, **environment)
        with pytest.raises(EnvironmentFault, match=named):
            await engine.start()
        await engine.close()

    play(scenario)


def test_another_version_is_probed_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with running(tmp_path, STUB_VERSION="0.6.1") as engine:
            assert len((await engine.generate(ask())).ids) == 6

    play(scenario)
    assert "is version 0.6.1, tested is" in capsys.readouterr().err


def test_a_hung_scheduler_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It still answers, with 503, and generates nothing."""
    monkeypatch.setattr(sglang_server, "HEALTH_EVERY_S", 0.1)

    async def scenario() -> None:
        async with running(tmp_path) as engine:
            await told(engine, hung=True)
            assert (await engine.generate(ask())).version_runs == [(5, 0, 6)]
            assert engine.counts.restarts == 1

    play(scenario)


def test_one_that_dies_again_and_again_is_given_up_with_its_cause(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = made(tmp_path, STUB_SHORT="1")
        await engine.start()
        try:
            await until(lambda: engine.failure is not None)
            assert "5 times in a row soon after its start" in str(engine.failure)
            assert "exit code 1" in str(engine.failure)
        finally:
            await engine.close()

    play(scenario)


@pytest.mark.parametrize(("on_swap", "versions"), [("drain", {1}), ("abort", {1, 2})])
def test_running_requests_may_end_or_stop_at_a_swap(tmp_path: Path, on_swap: OnSwap, versions: set[int]) -> None:
    async def scenario() -> None:
        async with running(tmp_path, on_swap=on_swap, STUB_STEP_S="0.01") as engine:
            await engine.apply(update(weights(1, weights(0)), weights(0)))
            under_way = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=60))) for _ in range(3)]
            while len((await told(engine))["bodies"]) < 3:
                pass
            await engine.apply(update(weights(2, weights(1)), weights(1)))
            ended = await asyncio.gather(*under_way)
            assert [len(one.ids) for one in ended] == [60] * 3
            assert {ordinal for one in ended for _, ordinal, _ in one.version_runs} <= versions
            assert (await engine.generate(ask())).version_runs == [(5, 2, 6)]

    play(scenario)
