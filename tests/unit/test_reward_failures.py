"""What users of comparable systems reported about rewards, where no jail is needed to show it; the rest is in tests/attack."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.actor.episodes import run_lease
from temper.actor.rewards import SandboxGrader
from temper.broker.events import SendLease, Tick
from temper.common import recipe as recipes
from temper.common.config import Sandbox
from temper.common.domains import Completion, Grader, Score, Task
from temper.common.errors import ConfigError
from temper.common.grading import MOST_SLACK, job_budget_s, program_budget_s
from temper.common.schema import Checker, JobDone, Limits, SandboxJob, TestCase, Touch, Verdict, pack_frames
from temper.learner.advantages import GroupRewards, advantages
from temper.learner.objectives import TABLE

from tests.unit.test_broker_core import Desk, leases
from tests.unit.test_episodes import LEASE, RECIPE, TEXT, Echo, Toy, hanging, run

EXECUTES = """
[model]
vocabulary = "abc"
[pacing]
lease_timeout_s = {lease:g}
[sandbox]
wall_s = {wall:g}
[[domains]]
name = "code"
module = "temper.actor.domains.tinycode"
needs_sandbox = true
"""


@pytest.mark.parametrize(("lease", "wall", "allowed"), [(60.0, 60.0, False), (60.0, 90.0, False), (60.0, 20.0, True)])
def test_a_deadline_without_a_grading_budget_is_refused_at_configuration(
    tmp_path: Any, lease: float, wall: float, allowed: bool
) -> None:
    """Where the sandbox's deadline is the rollout's, the last programs are graded on a dead box."""
    path = tmp_path / "r.toml"
    path.write_text(EXECUTES.format(lease=lease, wall=wall))
    if allowed:
        assert recipes.load(str(path)).sandbox.wall_s == wall
        return
    with pytest.raises(ConfigError, match=r"lease_timeout_s = 60 leaves no time for grading"):
        recipes.load(str(path))


def test_a_stall_that_comes_before_a_program_on_a_loaded_host_has_ended_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[run]\nstall_timeout_s = 100\n" + EXECUTES.format(lease=60.0, wall=20.0))
    with pytest.raises(ConfigError, match=r"stall_timeout_s = 100 leaves no time for grading.*at least 183"):
        recipes.load(str(path))


@given(st.integers(0, 50), st.floats(0.01, 3600), st.sampled_from(["plain", "suite", "weak", "checked", "built"]))
def test_a_jobs_budget_covers_all_of_its_tests_on_a_loaded_host(tests: int, wall_s: float, kind: str) -> None:
    test = TestCase(suite=b"assert f()" if kind in ("suite", "weak") else b"", weak=kind == "weak")
    checker = Checker("python", {}, Limits(wall_s=2.0)) if kind == "checked" else None
    language = "c" if kind == "built" else "python"
    job = SandboxJob("", language, {}, [test] * tests, Limits(wall_s=wall_s), checker=checker)
    one = wall_s * (1 + MOST_SLACK)
    if kind == "suite" and tests:
        one = (2 * wall_s + 5) * (1 + MOST_SLACK)
    if kind == "checked":
        one += 2.0 * (1 + MOST_SLACK)
    assert job_budget_s(job) >= max(1, tests) * one + (60.0 * (1 + MOST_SLACK) if kind == "built" else 0)
    more = msgspec.structs.replace(job, tests=[test] * (max(1, tests) + 1))
    assert job_budget_s(more) >= job_budget_s(job) + wall_s * (1 + MOST_SLACK)


class Judged(Toy):
    """Each sample's program has `tests` tests."""

    def __init__(self, tests: int) -> None:
        self.tests = tests

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        verdict = await grader.run(SandboxJob("", "python", {}, [TestCase()] * self.tests))
        return Score(float(verdict.outcome == "ok"), verdict.outcome == "ok")


class Late:
    """Answers long after the lease's own deadline."""

    queue_s = 7.0

    async def run(self, job: SandboxJob) -> Verdict:
        await asyncio.sleep(0.2)
        return Verdict("ok")


def test_a_job_with_many_tests_is_graded_beyond_the_leases_own_deadline() -> None:
    """With one deadline for both, the programs that take longest are never scored, and training is biased against them."""
    lease, told = msgspec.structs.replace(LEASE, deadline_s=0.05, indices=[0, 1]), []
    recipe = replace(RECIPE, sandbox=Sandbox(wall_s=5.0))
    result = asyncio.run(run_lease(lease, Judged(40), Echo(), TEXT, Late(), recipe, on_prolonged=told.append))
    assert result.cause is None and [sample.meta.reward for sample in result.samples] == [1.0, 1.0], result
    budget_s = 40 * program_budget_s(5.0)
    assert told[0] >= budget_s + 2 * Late.queue_s and told[-1] >= 2 * budget_s, "each job's tests, and the queue"


def test_the_broker_leaves_a_lease_the_time_that_its_jobs_need() -> None:
    desk = Desk(lease_timeout_s=50.0, groups_per_step=1, infra_attempts=2)
    desk.actor()
    desk.ready()
    (lease,) = leases(desk.phase(groups=1))
    desk.say(Touch(lease.lease_id, lease.attempt), "actor")
    desk.now = 40.0
    for seconds in (1000.0, 5.0, math.nan, math.inf, -1.0, 1e9):  # none of the later ones moves it
        assert desk.say(Touch(lease.lease_id, lease.attempt, seconds), "actor") == []
    for now, out in ((51.0, False), (1039.0, False), (1041.0, True)):
        desk.now = now
        again = [action.lease for action in desk.tell(Tick()) if isinstance(action, SendLease)]
        assert bool(again) == out, now
    assert again[0].lease_id == lease.lease_id and again[0].attempt == lease.attempt + 1


def test_how_long_jobs_wait_for_their_turn_is_measured() -> None:
    async def main() -> None:
        class Link:
            def __init__(self) -> None:
                self.sent: asyncio.Queue[str] = asyncio.Queue()

            async def send(self, body: Any, frames: Any = ()) -> None:
                self.sent.put_nowait(body.job_id)

            def post(self, body: Any, frames: Any = ()) -> bool:
                return True

        link = Link()
        grader = SandboxGrader(link, Sandbox())
        loop, verdict = asyncio.get_running_loop(), Verdict("ok")
        for number, (waits_s, wall_s) in enumerate(((8.0, 3.0), (1.0, 1.0), (60.0, 0.0))):
            job = SandboxJob("", "python", {"main.py": b"%d" % number}, [])
            waiting = asyncio.ensure_future(grader.run(job, 1, "toy"))
            job_id = await link.sent.get()
            grader._by_id[job_id].began = loop.time() - waits_s
            grader.on_done(JobDone(job_id, "ok", wall_s), pack_frames(verdict))
            await waiting
            found.append(grader.queue_s)

    found: list[float] = []
    asyncio.run(main())
    assert found[0] >= 5.0 and found[1] >= 4.5 and found[2] >= 60.0
    assert found[1] <= max(1.0, 0.95 * found[0]), "a wait that was measured fades"


def test_a_timeout_of_the_longest_rollouts_does_not_bias_training() -> None:
    """The rollouts that a deadline cuts are the longest ones: as zeros, or as shortened samples, they would teach brevity."""

    def longest_hangs(task: Task, completion: Completion) -> Any:
        asked.append(1)
        return hanging() if len(asked) == 4 else Score(float(len(asked) != 2), len(asked) != 2)

    asked: list[int] = []
    result = run(Toy(longest_hangs), msgspec.structs.replace(LEASE, deadline_s=0.05))
    assert result.cause == "infra" and len(result.samples) == 3, "not a task's failure, and no sample"
    rewards: list[float | None] = [sample.meta.reward for sample in result.samples]
    (found,) = advantages(TABLE["dr_grpo"], [GroupRewards([*rewards, None])])
    mean = 2 / 3
    assert [round(value, 6) if value is not None else None for value in found] == [
        *(round((reward or 0.0) - mean, 6) for reward in rewards),
        None,
    ]
