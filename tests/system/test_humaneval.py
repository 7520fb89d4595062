"""HumanEval in real jails: every reference solution passes, and nothing passes that does nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from temper.actor.domains.humaneval import Problem, problems, program
from temper.common.schema import Limits, Verdict
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def verdicts(found: list[Problem], text: Callable[[Problem], str]) -> list[Verdict]:
    jobs = [msgspec.structs.replace(program(each, text(each)), job_id=each.task_id, limits=Limits()) for each in found]

    async def main() -> list[Verdict]:
        async with Worker(Host.here(), 2) as worker:
            return list(await asyncio.gather(*(worker.execute(job) for job in jobs)))

    return asyncio.run(main())


def test_the_reference_solution_of_every_problem_passes_whatever_follows_it() -> None:
    judged = verdicts(list(problems()), lambda p: p.canonical_solution + "\n\n\ndef other(:\n  not Python")
    assert Counter(verdict.outcome for verdict in judged) == {"ok": 164}, [v for v in judged if v.outcome != "ok"]


def test_a_solution_that_returns_nothing_is_wrong_and_one_that_does_not_compile_an_error() -> None:
    some = list(problems())[30:54]  # with those whose asserts use helpers of the prompt
    assert Counter(v.outcome for v in verdicts(some, lambda p: "    return None\n")) == {"wrong": len(some)}
    assert Counter(v.outcome for v in verdicts(some[:6], lambda p: "    return ((\n")) == {"error": 6}
