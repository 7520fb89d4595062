"""The supervisor's decisions, by examples and over random lives of processes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.cli.policy import (
    ABORT_S,
    BACKOFF_S,
    BROKER_BACKOFF_S,
    GRACE_S,
    INTERRUPTED_CODE,
    RESTARTS,
    STABLE_S,
    STOP_ORDER,
    Action,
    Kill,
    Policy,
    Role,
    Say,
    Start,
    Terminate,
    describe_exit,
)

CHILDREN: list[tuple[str, Role]] = [
    ("broker", "broker"),
    ("learner", "learner"),
    ("sandbox-1", "sandbox"),
    ("eval-1", "eval"),
    ("actor-1", "actor"),
    ("actor-2", "actor"),
]


def running(children: list[tuple[str, Role]] = CHILDREN) -> Policy:
    policy = Policy(children, drain_timeout_s=20.0)
    assert policy.start(0.0) == [Start(name) for name, _ in children]
    for name, _ in children:
        policy.ready(name, 0.0)
    return policy


def of(actions: list[Action], kind: type) -> list[str]:
    return [action.name for action in actions if isinstance(action, kind)]


def test_exit_before_the_first_ready_ends_the_run_with_its_code() -> None:
    policy = Policy(CHILDREN, 20.0)
    policy.start(0.0)
    policy.ready("broker", 0.1)
    actions = policy.exited("actor-2", 2, 1.0)
    assert policy.ending is not None
    assert (policy.ending.exit_code, policy.ending.blamed) == (2, "actor-2")
    assert set(of(actions, Terminate)) == {name for name, _ in CHILDREN} - {"actor-2"}
    assert set(of(policy.tick(1.0 + ABORT_S), Kill)) == {name for name, _ in CHILDREN} - {"actor-2"}


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (4, 4), (-signal.SIGKILL, 3), (77, 1)])
def test_death_of_the_learner_ends_the_run(code: int, expected: int) -> None:
    policy = running()
    policy.exited("learner", code, 50.0)
    assert policy.mode == "aborting"
    assert policy.ending is not None
    assert (policy.ending.exit_code, policy.ending.blamed) == (expected, "learner")


@pytest.mark.parametrize("code", [2, 4])
def test_a_broker_that_a_restart_would_not_help_ends_the_run(code: int) -> None:
    policy = running()
    policy.exited("broker", code, 50.0)
    assert policy.ending is not None
    assert (policy.ending.exit_code, policy.ending.blamed) == (code, "broker")


@pytest.mark.parametrize("code", [1, -signal.SIGKILL])
def test_a_killed_broker_is_restarted_at_once(code: int) -> None:
    policy = running()
    policy.exited("broker", code, 50.0)
    assert policy.mode == "running"
    assert policy.tick(50.0 + BROKER_BACKOFF_S[0]) == [Start("broker")]


def test_restart_with_backoff_then_the_run_ends_when_the_role_is_empty() -> None:
    policy = running([*CHILDREN[:4], ("actor-1", "actor")])
    now = 1.0
    for delay in BACKOFF_S:
        actions = policy.exited("actor-1", 1, now)
        assert any(isinstance(action, Say) and action.tail for action in actions)
        assert policy.tick(now + delay - 0.01) == []
        assert policy.tick(now + delay) == [Start("actor-1")]
        now += delay
    policy.exited("actor-1", 1, now)
    assert policy.mode == "aborting"
    assert policy.ending is not None
    assert "given up after 3 restarts" in policy.ending.reason


def test_a_stable_process_starts_the_row_anew() -> None:
    policy = running()
    now = 0.0
    for _ in range(3 * RESTARTS):
        policy.ready("actor-1", now)
        now += STABLE_S
        policy.exited("actor-1", -9, now)
        now += BACKOFF_S[0]
        assert policy.tick(now) == [Start("actor-1")]
    assert policy.mode == "running"


def test_another_actor_keeps_the_run_alive() -> None:
    policy = running()
    now = 1.0
    for delay in (*BACKOFF_S, 0.0):
        policy.exited("actor-1", 1, now)
        now += delay
        policy.tick(now)
    assert policy.mode == "running"
    assert policy.children["actor-1"].given_up


def test_clean_end_waits_then_drains_in_order() -> None:
    policy = running()
    assert policy.exited("learner", 0, 100.0) == []
    assert policy.exited("actor-1", 0, 100.5) == []
    assert policy.tick(101.0) == []
    now = 100.0 + GRACE_S
    order = []
    while policy.mode != "over":
        for name in of(policy.tick(now), Terminate):
            order.append(name)
            policy.exited(name, 0, now)
    assert order == ["actor-2", "eval-1", "sandbox-1", "broker"]
    assert policy.ending is not None
    assert policy.ending.exit_code == 0


def test_interrupt_drains_in_order_and_kills_what_does_not() -> None:
    policy = running()
    assert of(policy.interrupt(10.0), Terminate) == ["actor-1", "actor-2"]
    policy.exited("actor-1", 0, 11.0)
    assert policy.tick(12.0) == []
    assert of(policy.tick(30.0), Kill) == ["actor-2"]
    policy.exited("actor-2", -9, 30.0)
    assert of(policy.tick(30.1), Terminate) == ["eval-1"]
    policy.exited("eval-1", 0, 30.2)
    assert of(policy.interrupt(30.3), Kill) == ["broker", "learner", "sandbox-1"]
    assert policy.ending is not None
    assert policy.ending.exit_code == INTERRUPTED_CODE


def test_second_interrupt_kills_everything_alive() -> None:
    policy = running()
    policy.interrupt(10.0)
    assert set(of(policy.interrupt(10.1), Kill)) == {name for name, _ in CHILDREN}


def test_clean_exits_after_the_end_are_no_failures() -> None:
    policy = running()
    policy.over()
    for name, role in CHILDREN:
        if role not in ("learner", "broker"):
            assert policy.exited(name, 0, 5.0) == []
    assert policy.exited("broker", 0, 5.0) == []
    assert policy.tick(5.1) == []
    policy.exited("learner", 0, 5.2)
    policy.tick(5.3)
    assert policy.mode == "over"
    assert policy.ending is not None
    assert policy.ending.exit_code == 0


def test_a_clean_end_that_the_supervisor_learns_of_in_any_order_starts_nothing_again() -> None:
    policy = running()
    policy.exited("sandbox-1", 0, 5.0)
    policy.exited("eval-1", 0, 5.1)
    policy.exited("broker", 0, 5.2)
    policy.exited("actor-1", 0, 5.3)
    assert of(policy.tick(15.0), Start) == []
    policy.exited("learner", 0, 16.0)
    assert policy.ending is not None
    assert policy.ending.exit_code == 0


def test_broker_that_leaves_for_good_before_the_learner_ends_the_run() -> None:
    policy = running()
    policy.exited("broker", 0, 5.0)
    assert policy.tick(24.9) == []
    policy.tick(25.0)
    assert policy.ending is not None
    assert (policy.ending.exit_code, policy.mode) == (3, "aborting")


def test_exits_are_described() -> None:
    assert describe_exit(2) == "exit code 2 (configuration)"
    assert describe_exit(-9) == "killed by SIGKILL (out of memory?)"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(99) == "exit code 99"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "exit", "exit", "tick", "tick", "over", "interrupt"]),
        st.sampled_from([name for name, _ in CHILDREN]),
        st.sampled_from([0, 1, 2, 3, 4, -9, -15, 99]),
        st.floats(0.0, 40.0),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_any_life_of_the_processes_ends_well(events: list[tuple[str, str, int, float]]) -> None:
    """Over random lives: nothing starts once the run is ending, no row of restarts exceeds the limit, stages are in
    order, and whatever happened before, an interrupt with obedient or killed processes brings the policy to `over`."""
    policy = Policy(CHILDREN, drain_timeout_s=20.0)
    now = 0.0
    row = dict.fromkeys(policy.children, 0)

    def apply(actions: list[Action], mode_before: str) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert mode_before == "running"
                if now > 0:
                    row[action.name] += 1
                    assert row[action.name] <= RESTARTS
            elif isinstance(action, Terminate | Kill):
                assert policy.mode != "running"
                assert policy.children[action.name].alive

    apply(policy.start(now), "running")
    for kind, name, code, pause in events:
        now += pause
        mode = policy.mode
        if kind == "ready":
            policy.ready(name, now)
        elif kind == "exit":
            child = policy.children[name]
            if child.ready and now - child.ready_at >= STABLE_S:
                row[name] = 0
            apply(policy.exited(name, code, now), mode)
        elif kind == "over":
            policy.over()
        elif kind == "interrupt":
            apply(policy.interrupt(now), mode)
        else:
            apply(policy.tick(now), mode)
        if policy.mode != "running":
            assert policy.ending is not None
            assert all(child.restart_at is None for child in policy.children.values())

    apply(policy.interrupt(now), policy.mode)
    stages: list[Role] = []
    for _ in range(40):
        mode = policy.mode
        if mode == "over":
            break
        actions = policy.tick(now)
        apply(actions, mode)
        for action in actions:
            if isinstance(action, Terminate):
                stages.append(policy.children[action.name].role)
                policy.exited(action.name, 0, now)
            elif isinstance(action, Kill):
                policy.exited(action.name, -9, now)
        now += 5.0
    assert policy.mode == "over"
    assert stages == sorted(stages, key=STOP_ORDER.index)
