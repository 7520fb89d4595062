"""From facts to a verdict: pure functions, so that every rule can be tested without a jail.

Order matters: what the kernel or the worker did to a program decides before what the program says about itself, and an
infrastructure failure is never taken for a result.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from temper.common.schema import Limits, Outcome, TestCase, TestResult, Verdict

Judgement = tuple[Outcome, int | None, int | None, str]
Killed = Literal["wall", "cpu", "memory", "output", "cancel"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about one run of a program. Times in seconds, sizes in bytes.

    `status` is the wait status of its main process, None when the jail died without reporting. `killed` says why the
    worker (or the init, for cpu) killed it, None when nobody did. `failure` is set when the jail itself failed.
    """

    status: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_cut: bool = False
    stderr_cut: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int | None = None
    oom_kills: int = 0
    killed: Killed | None = None
    failure: str = ""


# What runtimes say of a refused allocation: in their last lines, or before a long trace of their own. It only ever turns
# an error or a signal into memory.
LAST_WORDS = (
    b"MemoryError",
    b"terminate called after throwing an instance of 'std::bad_alloc'",
    b"  what():  std::bad_alloc",
)
WORDS = (b"FATAL ERROR: Reached heap limit", b"FATAL ERROR: invalid array length Allocation failed",
         b"FATAL ERROR: Ineffective mark-compacts near heap limit")  # fmt: skip


def classify(facts: Facts, limits: Limits) -> Judgement:
    """(outcome, exit code, signal, detail) of a run, before its output is compared."""
    if facts.failure:
        return "infra", None, None, facts.failure
    if facts.killed == "cancel":
        return "infra", None, None, "cancelled"
    if facts.stdout_cut or facts.stderr_cut or facts.killed == "output":
        return "output", None, None, f"more than {limits.output_bytes} bytes of output"
    if facts.oom_kills or facts.killed == "memory":
        return "memory", None, signal.SIGKILL, f"more than {limits.memory_bytes} bytes of memory"
    if facts.killed == "cpu" or facts.cpu_s > limits.cpu_s:
        return "timeout", None, None, f"more than {limits.cpu_s:g} s of cpu time"
    if facts.killed == "wall":
        return "timeout", None, None, f"more than {limits.wall_s:g} s of wall time"
    if facts.status is None:
        return "infra", None, None, "the jail ended without a report"
    if os.WIFSIGNALED(facts.status):
        number = os.WTERMSIG(facts.status)
        if number == signal.SIGSYS:
            return "policy", None, number, "a forbidden system call"
        if number == signal.SIGXCPU:
            return "timeout", None, number, f"more than {limits.cpu_s:g} s of cpu time"
        if refused_memory(facts.stderr):
            return "memory", None, number, "an allocation was refused"
        return "signal", None, number, f"died of {signal_name(number)}"
    code = os.WEXITSTATUS(facts.status)
    if code == 0:
        return "ok", 0, None, ""
    if refused_memory(facts.stderr):
        return "memory", code, None, "an allocation was refused"
    return "error", code, None, f"exit code {code}"


def refused_memory(stderr: bytes) -> bool:
    """Whether stderr ends with a runtime's report of a refused allocation."""
    lines = [line for line in stderr[-16384:].splitlines() if line.strip()]
    return any(line.startswith(LAST_WORDS) for line in lines[-3:]) or any(line.startswith(WORDS) for line in lines)


def signal_name(number: int) -> str:
    """SIGSEGV, or the bare number for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def same_output(found: bytes, expected: bytes) -> bool:
    """Equal but for white space at line ends and empty lines at the end; bytes, so any encoding is fine."""
    return _lines(found) == _lines(expected)


def _lines(data: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in data.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


HELD, FAILED, RAISED, GONE = 0, 10, 11, 12  # exit codes of sandbox/inside/suite.py


def judge(facts: Facts, test: TestCase, limits: Limits) -> Judgement:
    """(outcome, exit code, signal, detail) of one test whose output is compared."""
    outcome, code, number, detail = classify(facts, limits)
    if outcome == "ok" and test.expected is not None and not same_output(facts.stdout, test.expected):
        return "wrong", code, number, "stdout differs from the expected answer"
    return outcome, code, number, detail


def judge_checked(facts: Facts, checker: Facts | None, limits: Limits, checker_limits: Limits) -> Judgement:
    """One test whose output a checker judged (None: the program did not end in order, nothing was checked)."""
    judged = classify(facts, limits)
    if judged[0] != "ok" or checker is None:
        return judged
    outcome, code, _, detail = classify(checker, checker_limits)
    if outcome == "ok":
        return judged
    if outcome == "error" and code == 1:
        return "wrong", judged[1], None, "the checker refused the output"
    return "infra", None, None, f"the checker failed: {detail}: {_last_line(checker.stderr)}"


def judge_suite(program: Facts, suite: Facts, limits: Limits, suite_limits: Limits) -> Judgement:
    """One suite that ran beside the program: what became of the program decides, then what became of the suite.

    A suite that runs out of time or memory is the program's failure, for it could bring that about with what it returns;
    only what a program cannot bring about (the suite does not compile, misses a module) is `infra`.
    """
    judged = classify(program, limits)
    if judged[0] not in ("ok", "error"):
        return judged
    outcome, _, _, detail = classify(suite, suite_limits)
    said = _last_line(suite.stderr)
    if outcome in ("timeout", "memory", "output", "signal", "policy") and _exit_code(suite) is None:
        return outcome, judged[1], None, f"while the suite ran: {detail}"
    verdict: dict[int | None, Judgement] = {
        HELD: ("ok", 0, None, ""),
        FAILED: ("wrong", judged[1], None, said),
        RAISED: ("memory" if said.startswith("MemoryError") else "error", judged[1], None, said),
        GONE: ("error", judged[1], None, "the program ended before the suite did"),
    }
    broken: Judgement = ("infra", None, None, f"the suite failed ({detail}): {said}")
    return broken if outcome == "infra" else verdict.get(_exit_code(suite), broken)


def _exit_code(facts: Facts) -> int | None:
    return os.WEXITSTATUS(facts.status) if facts.status is not None and os.WIFEXITED(facts.status) else None


def judge_weak(facts: Facts, nonce: bytes, limits: Limits) -> Judgement:
    """One suite that ran in the program's own interpreter: passed if the nonce came after its last assert."""
    outcome, code, number, detail = classify(facts, limits)
    if outcome == "error" and code == FAILED:
        return "wrong", code, number, _last_line(facts.stderr)
    if outcome == "ok" and not facts.stdout.endswith(b"\n" + nonce):
        return "wrong", code, number, "the program ended before the suite's last assert"
    return outcome, code, number, detail


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def combine(tests: Sequence[TestCase], runs: Sequence[Facts], limits: Limits) -> Verdict:
    """The verdict of a job whose outputs are compared."""
    return verdict_of(runs, [judge(facts, test, limits) for facts, test in zip(runs, tests, strict=True)])


def verdict_of(runs: Sequence[Facts], judged: Sequence[Judgement], weak: bool = False) -> Verdict:
    """The verdict of a job: its outcome is the first that is not ok; `infra` anywhere is infra, for nothing was measured."""
    results = [
        TestResult(outcome=outcome, stdout=facts.stdout, wall_s=facts.wall_s, cpu_s=facts.cpu_s)
        for facts, (outcome, *_) in zip(runs, judged, strict=True)
    ]
    outcomes = [outcome for outcome, *_ in judged]
    if "infra" in outcomes:
        at = outcomes.index("infra")
    else:
        at = next((i for i, outcome in enumerate(outcomes) if outcome != "ok"), len(outcomes) - 1)
    outcome, code, number, detail = judged[at]
    shown = runs[at]
    peaks = [facts.peak_bytes for facts in runs if facts.peak_bytes is not None]
    return Verdict(
        outcome=outcome,
        exit_code=code,
        signal=None if number is None else int(number),
        stdout=shown.stdout,
        stderr=shown.stderr,
        truncated=shown.stdout_cut or shown.stderr_cut,
        wall_s=sum(facts.wall_s for facts in runs),
        cpu_s=sum(facts.cpu_s for facts in runs),
        peak_bytes=max(peaks) if peaks else None,
        tests=results,
        detail=detail,
        weak=weak,
    )


def not_built(facts: Facts, limits: Limits) -> Verdict:
    """The verdict of a program that did not compile, whatever stopped the compiler: the program is to blame."""
    outcome, code, number, detail = classify(facts, limits)
    if outcome != "infra":
        detail = "the compiler reported errors" if outcome == "error" else f"the compiler was stopped: {detail}"
        outcome = "compile"
    return Verdict(
        outcome=outcome,
        exit_code=code,
        signal=None if number is None else int(number),
        stderr=facts.stderr,
        truncated=facts.stderr_cut,
        wall_s=facts.wall_s,
        cpu_s=facts.cpu_s,
        peak_bytes=facts.peak_bytes,
        detail=detail,
    )


def infra(detail: str) -> Verdict:
    """A job that could not be judged: never a reward."""
    return Verdict(outcome="infra", detail=detail)
