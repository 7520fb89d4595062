"""Graders run in jails: they hang, raise and exhaust memory without hurting the next grade, and never score by failing."""

from __future__ import annotations

import asyncio
import importlib.util
import threading

import pytest
from temper.common.graders import grader_job, math_job, reply_of
from temper.common.schema import Limits, SandboxJob, Verdict
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

QUICK = Limits(wall_s=5.0, cpu_s=1.0, memory_bytes=256 << 20)
SYMPY = b"""
import json, sys
import sympy
request = json.load(sys.stdin)
json.dump({"correct": bool(sympy.simplify(sympy.sympify(request["answer"]) - sympy.sympify(request["gold"])) == 0)}, sys.stdout)
"""


def run(*jobs: SandboxJob) -> list[Verdict]:
    async def main() -> list[Verdict]:
        async with Worker(Host.here(), 2) as worker:
            return list(await asyncio.gather(*(worker.execute(job) for job in jobs)))

    return asyncio.run(main())


def test_sympy_that_hangs_is_killed_and_the_next_grades_are_unaffected() -> None:
    hang = grader_job("hang", SYMPY, {"answer": "9**9**9", "gold": "1"}, QUICK)
    rest = [grader_job(f"g{i}", SYMPY, {"answer": f"x + {i} + x", "gold": f"2*x + {i % 3}"}) for i in range(20)]
    first, *others = run(hang, *rest)
    assert first.outcome in ("timeout", "memory") and reply_of(first) is None, first
    assert [reply_of(verdict) for verdict in others] == [{"correct": i < 3} for i in range(20)]


BROKEN = {
    b"raise RuntimeError('the grader is broken')": "error",
    b"import signal; signal.alarm(1); import time; time.sleep(30)": "signal",
    b"while True: pass": "timeout",
    b"x = bytearray(1 << 40)": "memory",
    b"import os; os._exit(1)": "error",
    b"print('no json')": "ok",
}


def test_a_broken_grader_gives_no_score() -> None:
    verdicts = run(*(grader_job("g", source, {}, QUICK) for source in BROKEN))
    for verdict, outcome in zip(verdicts, BROKEN.values(), strict=True):
        assert verdict.outcome == outcome, verdict
        assert reply_of(verdict) is None


def test_a_grader_works_off_the_main_thread_too() -> None:
    """Where libraries set SIGALRM, a grade asked for by another thread used to raise and score 0."""
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.extend(run(grader_job("t", SYMPY, {"answer": "2", "gold": "1+1"}))))
    thread.start()
    thread.join()
    assert reply_of(found[0]) == {"correct": True}


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_math_verify() -> None:
    asked = [("$\\frac{1}{2}$", "$0.5$", True), ("$x^2+2x+1$", "$(x+1)^2$", True), ("the answer is 3", "$4$", False)]
    verdicts = run(*(math_job(f"m{i}", answer, gold) for i, (answer, gold, _) in enumerate(asked)))
    assert [(reply_of(v) or {}).get("correct") for v in verdicts] == [right for *_, right in asked], verdicts
