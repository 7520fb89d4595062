"""From facts to verdicts: every rule, and properties over arbitrary facts."""

import os
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.common.schema import Limits, TestCase, Verdict, pack_frames, unpack_frames
from temper.sandbox.verdicts import Facts, classify, combine, judge, same_output

LIMITS = Limits(wall_s=5, cpu_s=2, memory_bytes=1 << 28, output_bytes=100)
EXIT_0 = 0
EXIT_3 = 3 << 8


@pytest.mark.parametrize(
    ("facts", "outcome", "code", "number"),
    [
        (Facts(EXIT_0), "ok", 0, None),
        (Facts(EXIT_3), "error", 3, None),
        (Facts(signal.SIGSEGV), "signal", None, 11),
        (Facts(signal.SIGSYS), "policy", None, 31),
        (Facts(signal.SIGXCPU), "timeout", None, 24),
        (Facts(signal.SIGKILL, killed="wall"), "timeout", None, None),
        (Facts(signal.SIGKILL, killed="cpu"), "timeout", None, None),
        (Facts(EXIT_0, cpu_s=2.01), "timeout", None, None),
        (Facts(signal.SIGKILL, oom_kills=1), "memory", None, 9),
        (Facts(None, oom_kills=1), "memory", None, 9),
        (Facts(1 << 8, stderr=b"Traceback\nMemoryError\n"), "memory", 1, None),
        (Facts(EXIT_0, stderr=b"MemoryError\n"), "ok", 0, None),
        (Facts(signal.SIGKILL, stdout_cut=True, killed="output"), "output", None, None),
        (Facts(EXIT_0, stdout_cut=True), "output", None, None),
        (Facts(None), "infra", None, None),
        (Facts(EXIT_0, failure="jail"), "infra", None, None),
        (Facts(signal.SIGKILL, killed="cancel"), "infra", None, None),
    ],
)
def test_each_rule(facts, outcome, code, number):
    assert classify(facts, LIMITS)[:3] == (outcome, code, number)


FACTS = st.builds(
    Facts,
    status=st.none() | st.integers(0, 0xFFFF).filter(lambda s: os.WIFEXITED(s) or os.WIFSIGNALED(s)),
    stdout=st.binary(max_size=20),
    stderr=st.binary(max_size=20),
    stdout_cut=st.booleans(),
    stderr_cut=st.booleans(),
    cpu_s=st.floats(0, 10),
    wall_s=st.floats(0, 10),
    peak_bytes=st.none() | st.integers(0, 1 << 40),
    oom_kills=st.integers(0, 3),
    killed=st.sampled_from([None, "wall", "cpu", "memory", "output", "cancel"]),
    failure=st.sampled_from(["", "jail failed"]),
)


@given(FACTS)
def test_only_a_clean_exit_within_all_limits_is_ok(facts):
    outcome, code, number, _ = classify(facts, LIMITS)
    clean = (
        facts.status == 0
        and not (facts.stdout_cut or facts.stderr_cut or facts.oom_kills or facts.killed or facts.failure)
        and facts.cpu_s <= LIMITS.cpu_s
    )
    assert (outcome == "ok") == clean
    assert outcome != "ok" or (code, number) == (0, None)


@given(FACTS, st.binary(max_size=20))
def test_what_a_program_prints_never_turns_a_failure_into_a_pass(facts, output):
    assert judge(replace(facts, stdout=output, stderr=output), TestCase(expected=output), LIMITS)[0] == "ok" or (
        classify(facts, LIMITS)[0] != "ok"
    )
    if classify(facts, LIMITS)[0] != "ok":
        assert judge(replace(facts, stdout=output, stderr=output), TestCase(expected=output), LIMITS)[0] != "ok"


@given(st.lists(st.tuples(FACTS, st.binary(max_size=5)), min_size=1, max_size=5))
def test_a_job_is_its_first_failure_unless_infrastructure_failed(pairs):
    runs = [facts for facts, _ in pairs]
    tests = [TestCase(expected=expected) for _, expected in pairs]
    verdict = combine(tests, runs, LIMITS)
    outcomes = [test.outcome for test in verdict.tests]
    if "infra" in outcomes:
        assert verdict.outcome == "infra"
    else:
        assert verdict.outcome == next((o for o in outcomes if o != "ok"), "ok")
    assert len(outcomes) == len(pairs)
    assert unpack_frames(pack_frames(verdict), Verdict) == verdict


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (b"1\n", b"1", True),
        (b"1 \r\n2\n\n\n", b"1\n2", True),
        (b"1\n\n2", b"1\n2", False),
        (b" 1", b"1", False),
        (b"", b"\n", True),
        (b"\xff\x00", b"\xff\x00\n", True),
        (b"12", b"1", False),
    ],
)
def test_output_comparison_ignores_trailing_white_space_only(found, expected, same):
    assert same_output(found, expected) is same
