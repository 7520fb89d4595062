"""Graders as jobs: what judges an answer runs in a jail of its own, never in a daemon's loop, and can be killed.

A grader is a Python program that reads a JSON request from stdin and prints a JSON reply. Jobs of the language ``grader`` run
in jails that no program under test ever enters, with the host's judging libraries (sympy, math-verify) imported already. Its
own failure is an outcome (`error`, `timeout`, `memory`), never a silent 0: `reply_of` gives None for it.
"""

from __future__ import annotations

import json
from typing import Any

from temper.common.schema import Limits, SandboxJob, TestCase, Verdict

GRADER_LIMITS = Limits(wall_s=20.0, cpu_s=5.0, memory_bytes=1 << 30, pids=8, output_bytes=64 * 1024)

# The library's own time limits use SIGALRM, which raises off the main thread and is swallowed; the job's limits hold instead.
MATH = b"""
import json, logging, sys
logging.disable(logging.WARNING)
from math_verify import parse, verify
request = json.load(sys.stdin)
gold = parse(request["gold"], parsing_timeout=None, raise_on_error=True)
if not gold:
    raise ValueError(f"the reference answer {request['gold']!r} cannot be parsed")
answer = parse(request["answer"], parsing_timeout=None, raise_on_error=True)
json.dump({"correct": bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True)), "parsed": bool(answer)}, sys.stdout)
"""


def grader_job(job_id: str, source: bytes, request: Any, limits: Limits = GRADER_LIMITS) -> SandboxJob:
    """Run the grader `source` on `request` (anything JSON can say)."""
    test = TestCase(stdin=json.dumps(request).encode())
    return SandboxJob(job_id, "grader", {"main.py": source}, [test], limits, mode="fork")


def math_job(job_id: str, answer: str, gold: str, limits: Limits = GRADER_LIMITS) -> SandboxJob:
    """Whether `answer` says the same as `gold` (LaTeX or plain expressions), by math-verify: {"correct", "parsed"}."""
    return grader_job(job_id, MATH, {"answer": answer, "gold": gold}, limits)


def reply_of(verdict: Verdict) -> Any | None:
    """What a grader replied; None when it failed (`verdict.outcome` says how) or replied no JSON."""
    if verdict.outcome != "ok":
        return None
    try:
        return json.loads(verdict.stdout)
    except ValueError:
        return None
