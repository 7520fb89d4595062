"""The broker's core under hundreds of random schedules, in virtual time: actors that are slow, fail, vanish or die, a
learner that voids, crashes and resumes. Checked at every step: the books add up; in lease order no token's lag passes
S; a group is trained once in the surviving lineage; the run ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from temper.broker import events as ev
from temper.broker.core import BrokerCore
from temper.common import schema
from temper.common.config import Pacing, Recipe, Run

from tests.unit.broker_kit import Sim, World, random_world


@pytest.mark.parametrize("start", range(0, 400, 50))
def test_random_schedules_end_with_every_group_accounted_for(start: int) -> None:
    for seed in range(start, start + 50):
        world = random_world(seed)
        sim = Sim(world)
        sim.run()
        if sim.failed is not None:
            assert "no domain is left" in sim.failed.reason
            continue
        sim.accounted()
        if world.batch_order == "lease" or world.max_staleness == 0:
            assert max(sim.lags, default=0) <= world.max_staleness, seed


def test_half_of_all_groups_void_at_staleness_0_reaches_max_steps() -> None:
    sim = Sim(World(max_staleness=0, dynamic_sampling=True, uniform=0.5, max_steps=10))
    sim.run()
    sim.accounted()
    assert sim.finished == ev.Finish("over", 0)
    assert set(sim.lags) == {0}
    assert sim.core.groups.voids["train"]["no contrast"] > 10


def test_half_of_all_groups_void_by_the_learner_at_staleness_0_reaches_max_steps() -> None:
    sim = Sim(World(max_staleness=0, learner_void=0.5, max_steps=10))
    sim.run()
    sim.accounted()
    assert set(sim.lags) == {0}


@pytest.mark.parametrize("staleness", [0, 2])
def test_all_groups_void_ends_the_run_with_domain_and_reason(staleness: int) -> None:
    sim = Sim(World(max_staleness=staleness, dynamic_sampling=True, uniform=1.0, durations_s={"twins": 1.0}))
    sim.run()
    assert sim.finished == ev.Finish("over", 2)
    assert sim.failed is not None
    assert "no contrast" in sim.failed.reason
    assert "twins" in sim.failed.reason
    assert sim.core.groups.voids["train"]["no contrast"] == 20 * 4


def test_all_groups_void_by_the_learner_ends_the_run() -> None:
    sim = Sim(World(learner_void=1.0))
    sim.run()
    assert sim.finished == ev.Finish("over", 2)


def test_a_domain_that_always_fails_is_paused_and_the_others_go_on() -> None:
    world = World(durations_s={"good": 1.0, "broken": 1.0}, max_steps=12)
    sim = Sim(world)
    fine = sim.begin

    def begin(peer: str, lease: schema.Lease) -> None:
        if lease.domain == "broken":
            back = schema.Return(lease.lease_id, lease.attempt, "task", "ValueError: no tasks")
            sim.tell(ev.Received(peer, back))
        else:
            fine(peer, lease)

    sim.begin = begin  # type: ignore[method-assign]
    sim.run()
    sim.accounted()
    assert set(sim.core.paused) == {"broken"}
    assert "ValueError: no tasks" in sim.core.paused["broken"]
    assert sim.domains["broken"] == 0


def test_no_domain_left_ends_the_run_with_the_reason() -> None:
    sim = Sim(World(task_error=1.0, durations_s={"only": 1.0}))
    sim.run()
    assert sim.finished == ev.Finish("over", 2)
    assert sim.failed is not None
    assert "no domain is left: only: 8 quarantined tasks in a row" in sim.failed.reason


def test_one_bad_task_in_a_batch_of_four_is_quarantined_and_replaced() -> None:
    sim = Sim(World(max_staleness=0, max_steps=1, durations_s={"a": 1.0}))
    fine = sim.begin

    def begin(peer: str, lease: schema.Lease) -> None:
        if lease.lease_id == 2:
            sim.tell(ev.Received(peer, schema.Return(2, lease.attempt, "task", "prompt too long")))
        else:
            fine(peer, lease)

    sim.begin = begin  # type: ignore[method-assign]
    sim.run()
    sim.accounted()
    assert sim.core.leases.counts["train"]["quarantined"] == 1
    assert sorted(sim.trained) == [0, 1, 3, 4]
    (letter,) = sim.core.letters
    assert (letter["lease_id"], letter["attempts"], letter["error"]) == (2, 2, "prompt too long")


def test_expired_leases_that_fill_the_capacity_at_staleness_0_go_out_again() -> None:
    sim = Sim(World(max_staleness=0, max_steps=3, slots=2))
    fine = sim.begin
    swallowed: list[int] = []

    def begin(peer: str, lease: schema.Lease) -> None:
        if len(swallowed) < 4:
            swallowed.append(lease.lease_id)
            sim.tell(ev.Received(peer, schema.Touch(lease.lease_id, lease.attempt)))
        else:
            fine(peer, lease)

    sim.begin = begin  # type: ignore[method-assign]
    sim.run()
    sim.accounted()
    assert swallowed == [0, 1, 2, 3]
    assert sim.core.leases.attempts["expired"] == 4
    assert sorted(sim.trained) == list(range(12))
    assert set(sim.lags) == {0}


def test_fast_and_slow_classes_are_trained_as_often_as_sampled() -> None:
    world = World(
        max_staleness=2,
        batch_order="completion",
        durations_s={"fast": 1.0, "slow": 10.0},
        step_s=2.0,
        groups_per_step=8,
        max_steps=60,
        actors=4,
        slots=16,
    )
    sim = Sim(world)
    sim.run()
    sim.accounted()
    share = sim.domains["slow"] / sim.domains.total()
    assert abs(share - 0.5) <= 0.02
    assert set(sim.core.groups.voids["train"]) <= {"run over"}


def test_restarts_of_the_learner_do_not_change_which_lengths_are_trained() -> None:
    """A resume that skips what was under way skips the long ones."""
    calm = World(
        max_staleness=2,
        batch_order="completion",
        durations_s={"short": 0.5, "middle": 2.0, "long": 6.0, "longest": 12.0},
        groups_per_step=8,
        max_steps=40,
        actors=4,
        slots=16,
    )
    found = []
    for world in (calm, replace(calm, learner_crash=0.15, seed=2)):
        sim = Sim(world)
        sim.run()
        sim.accounted()
        assert set(sim.core.groups.voids["train"]) <= {"run over"}
        found.append(Counter(sim.first_out[group] for group in sim.trained))
    crashes = sim.incarnation // 2  # each one makes two incarnations: the dead one's end and the next one's start
    assert crashes >= 5
    without, restarted = found
    assert without.total() == restarted.total() == 320
    for length in calm.durations_s:
        assert abs(without[length] - 80) <= 2 and abs(restarted[length] - 80) <= 2, found


def test_killing_an_actor_with_8_rollouts_in_flight_leases_all_8_again() -> None:
    core = BrokerCore(Recipe(pacing=Pacing(groups_per_step=8, samples_per_group=2, max_staleness=0)))
    core.on(ev.Joined("one", "actor", "one", 8), 0.0)
    core.on(ev.Joined("learner", "learner", "learner"), 0.0)
    core.on(ev.Received("learner", schema.LearnerReady(1, None, 0, 0)), 0.0)
    out = core.on(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, 8, 2)), 0.0)
    first = [action.lease for action in out if isinstance(action, ev.SendLease)]
    assert len(first) == 8
    done = schema.SampleMeta(1, "stop", 1.0, True, {}, "ok", [])
    core.on(ev.SamplesArrived("one", first[3].lease_id, 1, (done,), 1), 1.0)
    core.on(ev.Joined("two", "actor", "two", 8), 1.0)
    again = [action.lease for action in core.on(ev.Left("one", "kill -9"), 2.0)]  # type: ignore[union-attr]
    assert [replace_attempt(lease) for lease in again] == [
        replace_attempt(lease, [0] if lease is first[3] else None) for lease in first
    ]
    assert all(lease.attempt == 2 for lease in again)
    late = core.on(ev.SamplesArrived("one", first[0].lease_id, 1, (done,), 1), 3.0)
    assert late == [ev.RefuseAttempt("one", first[0].lease_id, 1, "this attempt was abandoned")]


def replace_attempt(lease: schema.Lease, indices: list[int] | None = None) -> tuple:
    return (lease.lease_id, lease.task_seed, indices or lease.indices)


def test_capacity_after_a_resume_is_96_not_3296() -> None:
    core = BrokerCore(Recipe(run=Run(max_steps=1000), pacing=Pacing(groups_per_step=32, max_staleness=2)))
    core.on(ev.Joined("actor", "actor", "actor", 10_000), 0.0)
    core.on(ev.Joined("learner", "learner", "learner"), 0.0)
    core.on(ev.Received("learner", schema.LearnerReady(1, 100, 100, 100)), 0.0)
    out = core.on(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, 32, 2)), 0.0)
    assert sum(isinstance(action, ev.SendLease) for action in out) == 96
    assert all(action.lease.min_version == 100 for action in out if isinstance(action, ev.SendLease))


def test_the_simulation_notices_a_broken_pacing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.broker.pacing.capacity", lambda s, g, active, left: max(0, (s + 3) * g - active))
    sim = Sim(replace(World(max_staleness=0), max_steps=8))
    sim.run()
    assert max(sim.lags) > 0
