"""The broker's core, case by case: lanes, late answers, learners that come and go, refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.broker import events as ev
from temper.broker.core import BrokerCore
from temper.common import schema
from temper.common.config import Pacing, Recipe, Run


class Desk:
    """A core with a learner, driven by hand."""

    def __init__(self, recipe: Recipe | None = None, **pacing: object) -> None:
        defaults = {"groups_per_step": 2, "samples_per_group": 2, "max_staleness": 0, **pacing}
        self.core = BrokerCore(recipe or Recipe(run=Run(max_steps=10), pacing=Pacing(**defaults)))  # type: ignore[arg-type]
        self.now = 0.0
        self.tell(ev.Joined("learner", "learner", "learner"))

    def tell(self, event: ev.Event) -> list[ev.Action]:
        return self.core.on(event, self.now)

    def say(self, body: schema.Body, peer: str = "learner") -> list[ev.Action]:
        return self.tell(ev.Received(peer, body))

    def ready(
        self,
        lineage: int = 1,
        resumed: int | None = None,
        version: int = 0,
        trained: Sequence[tuple[int, list[int]]] = (),
    ) -> list[ev.Action]:
        return self.say(schema.LearnerReady(lineage, resumed, version, version, list(trained)))

    def phase(self, name: str = "train", groups: int = 2, samples: int = 2) -> list[ev.Action]:
        return self.say(schema.Phase(name, {"a": (0, 1.0)}, groups, samples))  # type: ignore[arg-type]

    def actor(self, name: str = "actor", slots: int = 8, role: str = "actor") -> list[ev.Action]:
        return self.tell(ev.Joined(name, role, name, slots))  # type: ignore[arg-type]

    def samples(
        self, lease: schema.Lease, rewards: Iterable[float | None] = (1.0, 0.0), peer: str = "actor"
    ) -> list[ev.Action]:
        metas = tuple(
            schema.SampleMeta(i, "stop", r, None if r is None else r > 0, {}, "ok", [])
            for i, r in zip(lease.indices, rewards, strict=False)
        )
        return self.tell(ev.SamplesArrived(peer, lease.lease_id, lease.attempt, metas, 100))


def leases(actions: list[ev.Action]) -> list[schema.Lease]:
    return [action.lease for action in actions if isinstance(action, ev.SendLease)]


def delivered(actions: list[ev.Action]) -> list[int]:
    return [action.group_id for action in actions if isinstance(action, ev.Deliver)]


def test_nothing_is_leased_before_learner_and_phase() -> None:
    desk = Desk()
    assert leases(desk.actor()) == []
    assert leases(desk.ready()) == []
    assert len(leases(desk.phase())) == 2


def test_groups_reach_the_learner_only_as_it_asks() -> None:
    desk = Desk()
    desk.actor()
    desk.ready()
    one, two = leases(desk.phase())
    assert delivered(desk.samples(one)) == []
    assert delivered(desk.say(schema.Demand("train", 1))) == [one.lease_id]
    assert delivered(desk.samples(two)) == []
    assert delivered(desk.say(schema.Demand("train", 1))) == [two.lease_id]
    again = leases(desk.say(schema.Done(0, [one.lease_id, two.lease_id], {}, True)))
    assert [lease.min_version for lease in again] == [1, 1]


def test_an_infra_sample_is_outside_the_group_but_the_group_is_trained() -> None:
    desk = Desk(infra_attempts=1, samples_per_group=4, groups_per_step=1)
    desk.actor()
    desk.ready()
    (lease,) = leases(desk.phase(groups=1, samples=4))
    desk.say(schema.Demand("train", 1))
    assert delivered(desk.samples(lease, (1.0, 0.0, 1.0))) == []
    back = schema.Return(lease.lease_id, lease.attempt, "infra", "sandbox gone")
    assert delivered(desk.say(back, "actor")) == [lease.lease_id]
    assert desk.core.leases.leases[lease.lease_id].filled == (3,)


def test_fewer_than_two_scored_samples_are_void_infra_and_replaced() -> None:
    desk = Desk(groups_per_step=1)
    desk.actor()
    desk.ready()
    (lease,) = leases(desk.phase(groups=1))
    (replacement,) = leases(desk.samples(lease, (1.0, None)))
    assert desk.core.groups.voids["train"] == {"infra": 1}
    assert replacement.lease_id == lease.lease_id + 1


def test_no_contrast_is_decided_on_raw_correctness_not_on_shaped_rewards() -> None:
    desk = Desk(dynamic_sampling=True, groups_per_step=1)
    desk.actor()
    desk.ready()
    (lease,) = leases(desk.phase(groups=1))
    desk.samples(lease, (1.0, 0.25))  # both right, one with a length penalty
    assert desk.core.groups.voids["train"] == {"no contrast": 1}


def test_a_clean_return_costs_no_attempt_and_goes_out_before_new_leases() -> None:
    desk = Desk(task_attempts=1, infra_attempts=1)
    desk.actor("one", 2)
    desk.ready()
    first, _ = leases(desk.phase())
    desk.actor("two", 2)
    (again,) = leases(desk.say(schema.Return(first.lease_id, 1, "drain", ""), "one"))
    assert (again.lease_id, again.attempt, again.task_seed) == (first.lease_id, 2, first.task_seed)


def test_the_learner_is_told_what_last_went_wrong_with_an_actor_once() -> None:
    desk = Desk(task_attempts=3)
    desk.actor("one", 2)
    desk.ready()
    first, _ = leases(desk.phase())

    def told(actions: list) -> list[str]:
        return [action.reason for action in actions if isinstance(action, ev.Inform)]

    assert told(desk.tell(ev.Tick())) == []
    desk.say(schema.Return(first.lease_id, 1, "task", "ValueError: bad task"), "one")
    assert told(desk.tell(ev.Tick())) == ["ValueError: bad task"]
    assert told(desk.tell(ev.Tick())) == []
    desk.tell(ev.Left("one", "killed"))
    assert told(desk.tell(ev.Tick())) == ["one is gone: killed"]
    desk.tell(ev.Left("learner", "crash"))
    desk.tell(ev.Joined("heir", "learner", "heir"))
    assert told(desk.tell(ev.Tick())) == ["one is gone: killed"]


def test_waiting_for_weights_has_its_own_deadline_and_is_no_failure() -> None:
    desk = Desk(weights_timeout_s=5.0, lease_timeout_s=50.0, infra_attempts=1, groups_per_step=1)
    desk.actor()
    desk.ready()
    desk.phase(groups=1)
    desk.now = 6.0
    (again,) = leases(desk.tell(ev.Tick()))
    assert again.attempt == 2
    desk.say(schema.Touch(again.lease_id, 2), "actor")
    desk.now = 12.0
    assert leases(desk.tell(ev.Tick())) == []
    desk.now = 57.0
    actions = desk.tell(ev.Tick())
    assert desk.core.groups.voids["train"] == {"infra": 1}
    assert any(isinstance(a, ev.RefuseAttempt) and a.attempt == 2 for a in actions)


def test_a_repeated_sample_message_is_acknowledged_and_not_stored_twice() -> None:
    desk = Desk()
    desk.actor()
    desk.ready()
    lease, _ = leases(desk.phase())
    assert ev.Store(lease.lease_id, (0,)) in desk.samples(lease, (1.0,))
    assert desk.samples(lease, (1.0,)) == [ev.Ignore(lease.lease_id, (0,))]
    assert desk.core.groups.groups[lease.lease_id].samples == 1


@pytest.mark.parametrize("indices", [[0, 0], [2], [70000]])
def test_indices_that_the_attempt_does_not_have_are_refused(indices: list[int]) -> None:
    desk = Desk()
    desk.actor()
    desk.ready()
    lease, _ = leases(desk.phase())
    metas = tuple(schema.SampleMeta(i, "stop", 1.0, True, {}, "ok", []) for i in indices)
    (refusal,) = desk.tell(ev.SamplesArrived("actor", lease.lease_id, 1, metas, 1))
    assert isinstance(refusal, ev.RefuseAttempt)
    assert "missing are [0, 1]" in refusal.reason


def test_the_attempt_of_another_peer_is_refused() -> None:
    desk = Desk()
    desk.actor("actor")
    desk.ready()
    lease, _ = leases(desk.phase())
    desk.actor("thief")
    (refusal,) = desk.samples(lease, peer="thief")
    assert isinstance(refusal, ev.RefuseAttempt)
    assert desk.say(schema.Return(lease.lease_id, 1, "task", "x"), "thief") == []
    assert desk.core.leases.leases[lease.lease_id].out


def test_demonstrations_complete_without_scores_and_end_with_the_warm_start() -> None:
    desk = Desk()
    desk.actor(slots=4)
    desk.ready()
    one, two = leases(desk.phase("warm"))
    assert (one.lane, one.min_version) == ("demo", 0)
    desk.say(schema.Demand("demo", 1))
    assert delivered(desk.samples(one, (None, None))) == [one.lease_id]
    desk.say(schema.Done(0, [one.lease_id], {}, False))
    actions = desk.phase("train")
    stopped = [action.lease_id for action in actions if isinstance(action, ev.RefuseAttempt)]
    assert stopped == [two.lease_id, two.lease_id + 1]
    train = leases(actions)
    assert [lease.lane for lease in train] == ["train", "train"]
    assert [lease.min_version for lease in train] == [1, 1]
    assert desk.core.steps_done == 0
    assert desk.core.groups.voids["demo"] == {"warm start over": 2}
    late = desk.samples(two, (None, None))
    assert isinstance(late[0], ev.RefuseAttempt)


def test_the_eval_lane_is_pinned_uncounted_and_always_complete() -> None:
    desk = Desk(task_attempts=1, infra_attempts=1)
    desk.actor()
    desk.ready()
    assert len(leases(desk.phase())) == 2
    assert leases(desk.say(schema.Evaluate(0, [("a", 0, 3)], 2))) == []  # no evaluator yet
    held = leases(desk.actor("judge", 8, "eval"))
    assert [(lease.lane, lease.pinned_version) for lease in held] == [("eval", 0)] * 3
    assert delivered(desk.samples(held[0], (0.0, 0.0), "judge")) == [held[0].lease_id]
    desk.samples(held[1], (1.0,), "judge")
    partial = desk.say(schema.Return(held[1].lease_id, 1, "task", "template"), "judge")
    assert ev.Deliver("learner", held[1].lease_id, "quarantined") in partial
    lost = desk.say(schema.Return(held[2].lease_id, 1, "infra", "engine"), "judge")
    assert ev.Deliver("learner", held[2].lease_id, "infra") in lost


def test_an_evaluator_holds_one_version_at_a_time() -> None:
    desk = Desk()
    desk.ready()
    desk.actor("judge", 8, "eval")
    first = leases(desk.say(schema.Evaluate(0, [("a", 0, 2)], 1)))
    assert leases(desk.say(schema.Evaluate(5, [("a", 0, 2)], 1))) == []
    desk.samples(first[0], (1.0,), "judge")
    second = leases(desk.samples(first[1], (1.0,), "judge"))
    assert [lease.pinned_version for lease in second] == [5, 5]
    assert [lease.task_seed for lease in second] == [lease.task_seed for lease in first]


def test_a_checkpoint_forgets_no_evaluation_under_way() -> None:
    """Its groups may still be on their way to the learner when the checkpoint of a later version is complete."""
    desk = Desk()
    desk.ready()
    desk.actor("judge", 8, "eval")
    early, late = leases(desk.say(schema.Evaluate(0, [("a", 0, 2)], 1)))
    assert delivered(desk.samples(early, (1.0,), "judge")) == [early.lease_id]
    assert desk.say(schema.Covered(3, 0, "", 0)) == []
    assert early.lease_id in desk.core.leases.leases
    assert delivered(desk.samples(late, (1.0,), "judge")) == [late.lease_id]
    assert desk.say(schema.Covered(4, 0, "", 4)) == [ev.Release((early.lease_id, late.lease_id))]
    assert early.lease_id not in desk.core.leases.leases


def test_a_new_learner_takes_back_attempts_and_queues_provisional_groups_in_the_old_order() -> None:
    desk = Desk(max_staleness=2, batch_order="completion")
    desk.actor(slots=20)
    desk.ready()
    out = leases(desk.phase())
    assert len(out) == 6
    for position in (3, 0, 4, 1):  # completion order
        desk.samples(out[position])
    desk.say(schema.Demand("train", 3))  # 3, 0, 4 are leased, 1 is queued
    desk.say(schema.Done(0, [3, 0], {}, True))
    desk.say(schema.Covered(1, 1, "", 1))
    refused = desk.tell(ev.Left("learner", "crash"))
    assert delivered(refused) == []
    desk.tell(ev.Joined("heir", "learner", "heir"))
    actions = desk.say(schema.LearnerReady(2, 0, 0, 0), "heir")
    abandoned = [a.lease_id for a in actions if isinstance(a, ev.RefuseAttempt)]
    assert abandoned == [lease.lease_id for lease in out[2:3] + out[5:]] + [6, 7]
    phase = schema.Phase("train", {"a": (0, 1.0)}, 2, 2)
    again = leases(desk.say(phase, "heir"))
    assert {lease.lineage for lease in again} == {2}
    assert delivered(desk.say(schema.Demand("train", 9), "heir")) == [4, 1]  # 3 and 0 are covered for ever


def test_groups_trained_after_the_checkpoint_are_queued_again() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0)
    desk.actor()
    desk.ready()
    desk.phase(groups=1)
    for version in range(3):
        desk.say(schema.Demand("train", 1))
        (record,) = (r for r in desk.core.leases.leases.values() if r.out)
        metas = tuple(schema.SampleMeta(i, "stop", float(i), bool(i), {}, "ok", []) for i in range(2))
        desk.tell(ev.SamplesArrived("actor", record.lease_id, record.attempt, metas, 1))
        desk.say(schema.Done(version, [record.lease_id], {}, True))
    desk.say(schema.Covered(1, 0, "", 1))
    desk.ready(lineage=2, resumed=1, version=1)
    assert leases(desk.phase(groups=1)) == []  # two groups wait, nothing new is begun
    assert delivered(desk.say(schema.Demand("train", 2))) == [1, 2]


@pytest.mark.parametrize("told", ["leased", "queued"])
def test_groups_that_the_checkpoint_has_trained_are_not_trained_again_though_their_done_was_lost(told: str) -> None:
    """Broker and learner are killed after the checkpoint of version 1, before the books say that step 0 is done; they say that its
    group is with the learner, or not even that."""
    desk = Desk()
    desk.ready()
    desk.phase()
    for lease in leases(desk.actor()):
        desk.samples(lease)
    if told == "leased":
        assert 0 in delivered(desk.say(schema.Demand("train", 1)))
    changes = desk.core.changes()
    again = Desk()
    again.core = BrokerCore(Recipe(run=Run(max_steps=10), pacing=desk.core.pacing))
    again.core.load(changes.state, changes.leases, changes.groups, 0.0)
    assert again.core.groups.groups[0].state == told
    again.tell(ev.Joined("heir", "learner", "learner"))
    assert delivered(again.say(schema.LearnerReady(2, 1, 1, 1, [(0, [0])]), "heir")) == []
    assert (again.core.groups.groups[0].state, again.core.groups.groups[0].version) == ("trained", 0)
    again.say(schema.Phase("train", {"a": (0, 1.0)}, 2, 2), "heir")
    later = delivered(again.say(schema.Demand("train", 9), "heir"))
    assert later and 0 not in later
    assert (
        delivered(again.say(schema.LearnerReady(3, 0, 0, 0, []), "heir")) == []
    )  # from an older one it is needed again
    again.say(schema.Phase("train", {"a": (0, 1.0)}, 2, 2), "heir")
    assert 0 in delivered(again.say(schema.Demand("train", 9), "heir"))


@pytest.mark.parametrize("said", ["Holding", "Done", "Void"])
def test_a_group_that_the_learner_got_before_the_books_said_so_is_not_delivered_again(said: str) -> None:
    """As after a kill: the books know it as queued."""
    desk = Desk()
    desk.ready()
    desk.phase()
    for lease in leases(desk.actor()):
        desk.samples(lease)
    changes = desk.core.changes()
    again = Desk()
    again.core = BrokerCore(Recipe(run=Run(max_steps=10), pacing=desk.core.pacing))
    again.core.load(changes.state, changes.leases, changes.groups, 0.0)
    again.tell(ev.Joined("learner", "learner", "learner", returning=True))
    held = []
    if said == "Done":
        assert delivered(again.say(schema.Done(0, [0], {}, True))) == []
    elif said == "Void":
        assert delivered(again.say(schema.Void({"0": "malformed"}))) == []
    else:
        held = [0]
    assert delivered(again.say(schema.Holding(1, groups=held, demand={"train": 2}))) == [1]
    counts = {"Holding": ("leased", 2), "Done": ("trained", 1), "Void": ("void", 1)}
    state, n = counts[said]
    assert again.core.groups.counts["train"][state] == n
    assert delivered(again.say(schema.Demand("train", 2))) == []


def test_a_second_learner_is_refused_and_the_first_goes_on() -> None:
    desk = Desk()
    desk.ready()
    (refusal,) = desk.tell(ev.Joined("rival", "learner", "rival"))
    assert refusal == ev.RefusePeer("rival", "role_taken", "this run already has a learner: learner")
    assert desk.say(schema.RunOver("mine now", 0), "rival") == []
    assert desk.core.over is None


def test_a_learner_that_reconnects_gets_what_became_ready_meanwhile() -> None:
    desk = Desk()
    desk.actor()
    desk.ready()
    lease, _ = leases(desk.phase())
    desk.say(schema.Demand("train", 1))
    desk.tell(ev.Left("learner", "silent"))
    assert delivered(desk.samples(lease)) == []
    assert delivered(desk.tell(ev.Joined("learner", "learner", "learner"))) == [lease.lease_id]


def test_a_role_that_speaks_out_of_turn_is_closed_and_its_leases_go_out_again() -> None:
    desk = Desk()
    desk.actor("one", 2)
    desk.actor("two", 2)
    desk.ready()
    desk.phase()
    holder = next(iter(desk.core.leases.held))
    other = {"one": "two", "two": "one"}[holder]
    actions = desk.say(schema.RunOver("stop", 0), holder)
    assert ev.RefusePeer(holder, "malformed", "RunOver came from a peer of role actor") in actions
    assert {a.peer for a in actions if isinstance(a, ev.SendLease)} == {other}
    assert desk.core.over is None


def test_the_end_voids_what_is_left_with_its_reason() -> None:
    desk = Desk(max_staleness=1)
    desk.actor()
    desk.ready()
    out = leases(desk.phase())
    desk.samples(out[0])
    actions = desk.say(schema.RunOver("max_steps reached", 0))
    assert actions[-1] == ev.Finish("max_steps reached", 0)
    assert desk.core.groups.voids["train"] == {"run over": 4}
    assert desk.core.leases.counts["train"] == {"created": 4, "in flight": 0, "accepted": 1, "cancelled": 3}
    assert leases(desk.actor("late")) == []


def test_a_resume_gives_a_paused_domain_another_chance() -> None:
    desk = Desk(task_attempts=1)
    desk.actor()
    desk.ready()
    actions = desk.phase()
    for _ in range(8):
        (lease, *_) = (r for r in desk.core.leases.leases.values() if r.out)
        actions = desk.say(schema.Return(lease.lease_id, lease.attempt, "task", "broken"), "actor")
    assert any(isinstance(action, ev.Fail) for action in actions)
    assert leases(actions) == []
    desk.tell(ev.Left("learner", "run failed"))
    desk.tell(ev.Joined("heir", "learner", "heir"))
    desk.say(schema.LearnerReady(2, None, 0, 0), "heir")
    phase = schema.Phase("train", {"a": (0, 1.0)}, 2, 2)
    assert len(leases(desk.say(phase, "heir"))) == 2
    assert desk.core.paused == {}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_samples_taken_together_fare_as_one_after_another(data: st.DataObject) -> None:
    """Repeats, wrong indices, abandoned attempts and strangers among them; joined, they are stored wholly or left alone."""
    desks = [Desk(max_staleness=2), Desk(max_staleness=2), Desk(max_staleness=2)]
    for desk in desks:
        desk.actor(slots=4)
        desk.ready()
        desk.phase()
        desk.say(schema.Demand("train", 3))
    for _ in range(data.draw(st.integers(1, 4))):
        known = sorted(desks[0].core.leases.leases)
        draws = data.draw(
            st.lists(
                st.tuples(
                    st.sampled_from(known),
                    st.integers(1, 2),
                    st.lists(st.integers(-1, 2), min_size=1, max_size=2),
                    st.sampled_from(["actor", "stranger"]),
                ),
                max_size=8,
            )
        )
        arrivals = [
            ev.SamplesArrived(
                peer, lease, attempt, [schema.SampleMeta(i, "stop", 1.0, i == 0, {}, "ok", []) for i in indices], 10
            )
            for lease, attempt, indices, peer in draws
        ]
        verdicts = [desks[0].tell(arrival)[0] for arrival in arrivals]
        together = desks[1].tell(ev.SamplesBatch(arrivals))
        assert together[: len(arrivals)] == verdicts
        by_attempt: dict[tuple[str, int, int], list[ev.SamplesArrived]] = {}
        for arrival in arrivals:
            by_attempt.setdefault((arrival.peer, arrival.lease_id, arrival.attempt), []).append(arrival)
        for (peer, lease, attempt), own in by_attempt.items():
            samples = [sample for arrival in own for sample in arrival.samples]
            before = copy.deepcopy(desks[2].core.leases.leases[lease])
            joined = ev.SamplesArrived(peer, lease, attempt, samples, 10 * len(own), joined=True)
            verdict = desks[2].tell(joined)[0]
            alone = [verdicts[i] for i, arrival in enumerate(arrivals) if any(arrival is each for each in own)]
            if all(isinstance(each, ev.Store) for each in alone):
                assert verdict == ev.Store(lease, tuple(sample.index for sample in samples))
                continue
            assert verdict == ev.Apart(lease) and desks[2].core.leases.leases[lease] == before
            for arrival in own:
                desks[2].tell(arrival)
        first, second, third = (desk.core.save() for desk in desks)
        assert first == second
        assert {k: v for k, v in third.items() if k != "order"} == {k: v for k, v in first.items() if k != "order"}
        leases_of = [desk.core.leases.leases for desk in desks]
        groups_of = [desk.core.groups.groups for desk in desks]
        assert leases_of[0] == leases_of[1] and groups_of[0] == groups_of[1]
        placeless = [{i: msgspec.structs.replace(g, order=0) for i, g in groups.items()} for groups in groups_of]
        assert leases_of[0] == leases_of[2] and placeless[0] == placeless[2]  # leases may be complete in another order


def test_touches_of_one_burst_count_as_if_each_had_come_alone() -> None:
    together, apart = Desk(), Desk()
    for desk in (together, apart):
        desk.actor()
        desk.ready()
        one, two = leases(desk.phase())
        desk.now = 5.0
    touches = [schema.Touch(one.lease_id, 1), schema.Touch(two.lease_id, 7), schema.Touch(two.lease_id, 1)]
    told = [action for touch in touches for action in apart.say(touch, "actor")]
    assert together.tell(ev.Touched("actor", touches)) == told
    assert [(action.lease_id, action.attempt) for action in told] == [(two.lease_id, 7)]  # type: ignore[union-attr]
    assert together.core.leases.leases == apart.core.leases.leases
    assert all(record.touched for record in together.core.leases.leases.values())
    assert together.tell(ev.Touched("nobody", touches)) == []
    (offence,) = together.tell(ev.Touched("learner", touches))
    assert isinstance(offence, ev.RefusePeer) and offence.code == "malformed"
