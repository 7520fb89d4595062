"""Episodes with a tool: one session a sample, resumed by every later step, ended with the episode whatever ends that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from temper.actor.engines.base import Generation
from temper.actor.episodes import LeaseResult, run_lease
from temper.actor.rewards import SandboxGrader
from temper.common.config import Sandbox
from temper.common.domains import Completion, Driver, Grader, Score, SingleTurn, Split, Task
from temper.common.errors import EngineError
from temper.common.schema import Job, JobCancel, SandboxJob, Verdict

from tests.unit.test_episodes import LEASE, RECIPE, TEXT, Echo


class Box:
    """Answers steps of sessions and remembers who did what."""

    def __init__(self, answer: Callable[[SandboxJob], Verdict] | None = None) -> None:
        self.steps: dict[str, list[SandboxJob]] = {}
        self.ended: list[str] = []
        self._answer = answer or (lambda job: Verdict("ok", stdout=b"5"))

    async def run(self, job: SandboxJob) -> Verdict:
        assert job.session_id is not None
        self.steps.setdefault(job.session_id, []).append(job)
        await asyncio.sleep(0)
        if job.close_session:
            return Verdict("ok", files={"note": job.session_id.encode()})
        return self._answer(job)

    def end_session(self, name: str) -> None:
        self.ended.append(name)


class Tooled(SingleTurn):
    """Two steps around a turn; `episode` may be replaced."""

    def __init__(self, told: Callable[[Driver], Any] | None = None) -> None:
        self.told = told
        self.files: list[dict[str, bytes]] = []

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        return Task("t", "abc>")

    async def episode(self, task: Task, driver: Driver) -> None:
        if self.told is not None:
            await self.told(driver)
            return
        await driver.generate()
        verdict = await driver.tool("x = 5")
        await driver.append(">" + "a" * len(verdict.stdout))
        await driver.tool("x")
        await driver.generate()

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        self.files.append(completion.files)
        return Score(1.0, True)


def run(domain: Tooled, box: Any, engine: Any = None, deadline_s: float = 30.0) -> LeaseResult:
    lease = type(LEASE)(
        *(deadline_s if name == "deadline_s" else getattr(LEASE, name) for name in LEASE.__struct_fields__)
    )
    return asyncio.run(run_lease(lease, domain, engine or Echo(), TEXT, box, RECIPE))


def test_each_sample_has_a_session_of_its_own_and_its_files_are_scored() -> None:
    box, domain = Box(), Tooled()
    result = run(domain, box)
    assert result.cause is None and len(result.samples) == 4, result.error
    assert len(box.steps) == 4 and box.ended == []
    for name, jobs in box.steps.items():
        assert [job.resume for job in jobs] == [False, True, True]
        assert [job.close_session for job in jobs] == [False, False, True]
        assert {"note": name.encode()} in domain.files
    assert len({jobs[0].seed for jobs in box.steps.values()}) == 4


def test_an_episode_without_a_tool_opens_no_session() -> None:
    async def told(driver: Driver) -> None:
        await driver.generate()

    box, domain = Box(), Tooled(told)
    assert run(domain, box).cause is None and box.steps == {} and domain.files == [{}] * 4


def test_the_session_outlives_the_lease_so_that_nothing_runs_on_a_dead_box() -> None:
    box = Box()
    run(Tooled(), box, deadline_s=30.0)
    assert {job.session_s for jobs in box.steps.values() for job in jobs} == {30.0 + RECIPE.sandbox.wall_s}


@pytest.mark.parametrize("how", ["raises", "engine", "aborted", "deadline", "bash too"])
def test_an_episode_that_dies_ends_its_sessions(how: str) -> None:
    async def told(driver: Driver) -> None:
        await driver.generate()
        await driver.tool("1")
        if how == "raises":
            raise RuntimeError("the domain is broken")
        if how == "deadline":
            await asyncio.Event().wait()
        if how == "bash too":
            await driver.tool("ls", "bash")
        asked.append(1)
        await driver.generate()

    asked: list[int] = []

    def answer(request: Any) -> Generation:
        if asked and how == "engine":
            raise EngineError("gone")
        if asked and how == "aborted":
            return Generation([], [], [], "abort")
        return Generation([4, 0], [-0.5, -0.25], [(77, 3, 2)], "stop")

    box = Box()
    result = run(Tooled(told), box, Echo(answer), deadline_s=0.2 if how == "deadline" else 30.0)
    expected = {"raises": "task", "engine": "infra", "aborted": "drain", "deadline": "infra", "bash too": "task"}
    assert result.cause == expected[how], result.error
    assert sorted(box.ended) == sorted(box.steps), "each session that was opened"


def test_a_lost_session_costs_the_attempt_and_is_never_a_score() -> None:
    domain = Tooled()
    box = Box(lambda job: Verdict("infra", detail="its worker is gone") if job.resume else Verdict("ok"))
    result = run(domain, box)
    assert result.cause == "infra" and "its worker is gone" in result.error
    assert domain.files == [] and result.samples == []


def test_over_the_wire_the_closing_job_says_so_and_an_end_names_the_session() -> None:
    class Link:
        sent: list[Any] = []  # noqa: RUF012

        async def send(self, body: Any, frames: Any = ()) -> None:
            self.sent.append(body)

        def post(self, body: Any, frames: Any = ()) -> bool:
            self.sent.append(body)
            return True

    async def main() -> list[Any]:
        link = Link()
        grader = SandboxGrader(link, replace(Sandbox()))
        bound = grader.bound(3, "toy")
        job = SandboxJob("", "python", {}, [], session_id="s", close_session=True)
        waiting = asyncio.ensure_future(bound.run(job))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bound.end_session("s")
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return link.sent

    job, end, *_ = asyncio.run(main())
    assert isinstance(job, Job) and job.session_id == "s" and job.close_session
    assert end == JobCancel("s", session=True)
