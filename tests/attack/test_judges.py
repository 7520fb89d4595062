"""Suites of asserts and checkers: right programs pass, and no program can forge a pass or hide behind a broken judge."""

import asyncio
import shutil

import pytest
from temper.common.schema import Checker, Limits, SandboxJob, TestCase, Verdict
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

SUITE = b"""
def check(candidate):
    assert candidate([3, 1, 2]) == [1, 2, 3]
    assert candidate([]) == []
check(ordered)
numbers = [2, 1]
sort_in_place(numbers)
assert numbers == [1, 2]
try:
    refuse()
    assert False
except ValueError as error:
    assert str(error) == 'no'
assert list(count(3)) == [0, 1, 2]
assert pair() == (1, {2, 3}, {'a': None, (1, 2): b'x'}) and type(pair()) is tuple
assert 10 ** 30 == big() and infinite() == float('inf') and CONSTANT() == 7
"""
RIGHT = b"""
def ordered(x): print('noise'); return sorted(x)
def sort_in_place(x): x.sort()
def refuse(): raise ValueError('no')
def count(n):
    for i in range(n): yield i
def pair(): return (1, {2, 3}, {'a': None, (1, 2): b'x'})
def big(): return 10 ** 30
def infinite(): return float('inf')
def CONSTANT(): return 7
if __name__ == '__main__': raise SystemExit(9)
"""


def ordered(body: bytes) -> bytes:
    return RIGHT.replace(b"print('noise'); return sorted(x)", body)


PROGRAMS = {  # name: (program, outcome across the boundary, outcome in one interpreter)
    "right": (RIGHT, "ok", "ok"),
    "wrong": (ordered(b"return x"), "wrong", "wrong"),
    "exit_before_the_asserts": (b"import os; os._exit(0)", "error", "wrong"),
    "exit_in_a_call": (ordered(b"__import__('os')._exit(0)"), "error", "wrong"),
    "system_exit_in_a_call": (ordered(b"raise SystemExit(0)"), "error", "wrong"),
    "raise_in_a_call": (ordered(b"1 / 0"), "error", "error"),
    "kill_itself_in_a_call": (ordered(b"__import__('os').kill(__import__('os').getpid(), 9)"), "signal", "signal"),
    "loop_in_a_call": (ordered(b"\n    while True: pass"), "timeout", "timeout"),
    "sleep_in_a_call": (ordered(b"__import__('time').sleep(99)"), "timeout", "timeout"),
    "flood_in_a_call": (ordered(b"\n    while True: print('x' * 999)"), "output", "output"),
    "fill_memory_in_a_call": (ordered(b"return [0] * 10 ** 11"), "memory", "memory"),
    "forbidden_call": (ordered(b"__import__('ctypes').CDLL(None).chroot(b'/')"), "policy", "policy"),
    "equal_to_everything": (
        b"class A(list):\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\ndef ordered(x): return A(x)",
        "error",
        "error",
    ),
    "no_such_function": (b"pass", "error", "error"),
    "does_not_compile": (b"def ordered(:", "error", "error"),
    "shadow_the_builtins": (
        ordered(b"return x") + b"\nimport builtins\nAssertionError = ValueError\nbuiltins.AssertionError = ValueError\n"
        b"def len(x): return 0\ndef sorted(x): return x\nlist = tuple = lambda x: x",
        "wrong", "error",
    ),
    "trace_the_suite": (
        ordered(b"return x") + b"\nimport sys\nsys.settrace(lambda f, e, a: f.f_locals.clear())", "error", "error",
    ),
    "write_to_every_descriptor": (
        b"import os, json, struct\nreply = json.dumps({'value': [1, 2, 3]}).encode()\nfor fd in range(1, 99):\n"
        b"    try: os.write(fd, struct.pack('<Q', len(reply)) + reply)\n    except OSError: pass\ndef ordered(x): return x",
        None,
        "wrong",
    ),
    "announce_an_endless_message": (
        b"import os, struct\nfor fd in range(3, 99):\n    try: os.write(fd, struct.pack('<Q', 1 << 60))\n    except OSError: pass",
        "error",
        "error",
    ),
    "send_no_message": (
        b"import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'\\5\\0\\0\\0\\0\\0\\0\\0hello')\n    except OSError: pass",
        "error",
        "error",
    ),
    "return_a_deep_value": (ordered(b"\n    for _ in range(400): x = [x]\n    return x"), "wrong", "wrong"),
}  # fmt: skip


def run(*jobs: SandboxJob) -> list[Verdict]:
    async def main() -> list[Verdict]:
        async with Worker(Host.here(), 4) as worker:
            return list(await asyncio.gather(*(worker.execute(job) for job in jobs)))

    return asyncio.run(main())


LIMITS = Limits(wall_s=1.5, cpu_s=0.6, memory_bytes=128 << 20)


def job(program: bytes, test: TestCase, checker: Checker | None = None) -> SandboxJob:
    return SandboxJob("job", "python", {"main.py": program}, [test], LIMITS, mode="fork", checker=checker)


@pytest.fixture(scope="module")
def suites() -> dict[tuple[str, bool], Verdict]:
    asked = [(name, weak) for name in PROGRAMS for weak in (False, True)]
    return dict(
        zip(asked, run(*(job(PROGRAMS[n][0], TestCase(suite=SUITE, weak=weak)) for n, weak in asked)), strict=True)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_across_the_process_boundary(suites: dict[tuple[str, bool], Verdict], name: str) -> None:
    verdict, outcome = suites[name, False], PROGRAMS[name][1]
    assert verdict.outcome == outcome if outcome else verdict.outcome in ("wrong", "error"), verdict
    assert not verdict.weak


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_interpreter_it_is_marked_weak(suites: dict[tuple[str, bool], Verdict], name: str) -> None:
    verdict, outcome = suites[name, True], PROGRAMS[name][2]
    assert verdict.outcome == outcome, verdict
    assert verdict.weak


BROKEN_SUITES = {
    b"assert 1 ==": "SyntaxError",
    b"import no_such_module": "ModuleNotFoundError",
    b"assert f(lambda x: x)": "cannot cross",
    b"raise SystemExit(0)": "called exit",
}


def test_a_broken_suite_is_infra_never_a_score() -> None:
    verdicts = run(*(job(b"def f(x): return 1", TestCase(suite=suite)) for suite in BROKEN_SUITES))
    for verdict, detail in zip(verdicts, BROKEN_SUITES.values(), strict=True):
        assert verdict.outcome == "infra" and detail in verdict.detail, verdict


def test_a_suite_never_sees_the_program_and_the_program_never_the_suite() -> None:
    program = b"import os\ndef look(): return sorted(os.listdir('/tmp'))"
    suite = b"import os\nassert 'suite.txt' not in look(), look()\nassert 'main.py' not in os.listdir('/tmp')"
    (verdict,) = run(job(program, TestCase(suite=suite)))
    assert verdict.outcome == "ok", verdict


CLOSE = b"import sys\no, e = (float(open(n).read()) for n in ('output', 'expected'))\nsys.exit(abs(o - e) > 1e-3)"


CHECKED = [  # program, checker, outcome
    (b"print(3.14159)", CLOSE, "ok"),
    (b"print(3)", CLOSE, "wrong"),
    (b"print(1 / 0)", CLOSE, "error"),
    (b"print('x')", CLOSE, "infra"),
    (b"import os; os.abort()", CLOSE, "signal"),
    (b"print(1)", b"while True: pass", "infra"),
    (b"print(1)", b"import os; os.kill(os.getpid(), 9)", "infra"),
    (b"open('/tmp/expected', 'w').write('1'); print(1)", CLOSE, "wrong"),
    (b"print(3.1416); open('/tmp/checker', 'w').write('raise SystemExit(0)')", CLOSE, "ok"),
]


@pytest.fixture(scope="module")
def checked() -> list[Verdict]:
    limits, test = Limits(wall_s=2, cpu_s=0.4), TestCase(expected=b"3.1416")
    return run(*(job(program, test, Checker("python", {"main.py": text}, limits)) for program, text, _ in CHECKED))


@pytest.mark.parametrize("number", range(len(CHECKED)))
def test_a_checker_decides_from_its_own_jail(checked: list[Verdict], number: int) -> None:
    verdict, outcome = checked[number], CHECKED[number][2]
    assert verdict.outcome == outcome, verdict
    assert outcome != "infra" or "the checker failed" in verdict.detail


def test_a_checker_in_another_language() -> None:
    if shutil.which("diff") is None:
        pytest.skip("no diff on this host")
    checker = Checker("bash", {"main.sh": b"diff -q output expected >&2"})
    right, wrong = run(
        job(b"print(1)", TestCase(expected=b"1\n"), checker), job(b"print(2)", TestCase(expected=b"1\n"), checker)
    )
    assert (right.outcome, wrong.outcome) == ("ok", "wrong")
