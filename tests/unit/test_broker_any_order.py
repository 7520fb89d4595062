"""Whatever peers say, in whatever order, repeated, late or out of turn: the core never fails and its books add up."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from temper.broker import events as ev
from temper.broker.core import BrokerCore
from temper.common import schema
from temper.common.config import Pacing, Recipe, Run
from temper.common.schedule import FIRST_LEASE_ID

PEERS = {
    "learner-1": "learner",
    "learner-2": "learner",
    "actor-1": "actor",
    "actor-2": "actor",
    "eval-1": "eval",
    "box-1": "sandbox",
}
number = st.integers(0, 7)
lease_id = st.one_of(number, *(st.integers(first, first + 3) for first in FIRST_LEASE_ID.values()))
attempt = st.integers(0, 3)
reason = st.sampled_from(["no contrast", "late", ""])
lane = st.sampled_from(["train", "demo", "eval"])
domains = st.dictionaries(st.sampled_from("ab"), st.tuples(number, st.floats(-1, 2)), max_size=2)
voids = st.dictionaries(st.one_of(lease_id.map(str), st.just("nonsense"), st.just("-1")), reason, max_size=3)

actor_bodies = st.one_of(
    st.builds(schema.Touch, lease_id, attempt),
    st.builds(schema.Return, lease_id, attempt, st.sampled_from(["drain", "task", "infra"]), reason),
    st.builds(schema.Job, st.sampled_from("xyz"), lease_id, st.sampled_from("ab"), st.sampled_from([None, "s"])),
    st.builds(schema.JobCancel, st.sampled_from("xyz")),
)
learner_bodies = st.one_of(
    st.builds(schema.LearnerReady, number, st.one_of(st.none(), number), number, number),
    st.builds(
        schema.Phase, st.sampled_from(["warm", "train", "eval", "over"]), domains, st.integers(1, 3), st.integers(1, 3)
    ),
    st.just(schema.Phase("train", {"a": (0, 1.0)}, 2, 2)),
    st.builds(schema.Demand, lane, st.integers(-2, 4)),
    st.builds(schema.Done, number, st.lists(lease_id, max_size=4), voids, st.booleans()),
    st.builds(schema.Void, voids),
    st.builds(schema.Covered, number, number, st.just(""), number),
    st.builds(
        schema.Evaluate,
        number,
        st.lists(st.tuples(st.sampled_from("ab"), number, st.integers(0, 2)), max_size=2),
        st.integers(1, 2),
        number,
    ),
)
other_bodies = st.one_of(
    st.builds(schema.JobDone, st.sampled_from("xyz"), st.sampled_from(["ok", "infra"])),
    st.builds(
        schema.Holding,
        st.just(1),
        st.lists(st.tuples(lease_id, attempt), max_size=3),
        st.lists(lease_id, max_size=3),
        st.dictionaries(st.sampled_from(["train", "demo", "odd"]), st.integers(-1, 3), max_size=2),
        st.lists(st.sampled_from("xyz"), max_size=2),
    ),
    st.builds(schema.RunOver, reason, st.just(0)),
)


def metas(indices: list[int], rewards: list[float | None]) -> tuple[schema.SampleMeta, ...]:
    pairs = zip(indices, rewards * len(indices), strict=False)
    return tuple(schema.SampleMeta(i, "stop", r, None if r is None else r > 0, {}, "ok", []) for i, r in pairs)


peer = st.sampled_from(sorted(PEERS))
samples = st.builds(
    metas,
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=2),
)
moves = st.one_of(
    st.tuples(st.just("join"), peer, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("left"), peer, st.booleans()),
    st.tuples(st.just("says"), peer, st.one_of(actor_bodies, learner_bodies, other_bodies)),
    st.tuples(st.just("says"), st.sampled_from(["learner-1", "learner-2"]), learner_bodies),
    st.tuples(st.just("samples"), peer, lease_id, attempt, samples),
    st.tuples(st.just("answer"), st.integers(0, 5), samples),
    st.tuples(st.just("tick"), st.floats(0, 40)),
    st.tuples(st.just("draining"), peer, st.booleans()),
    st.tuples(st.just("unsendable"), lease_id),
)


class Story:
    """A core that is told things; leases that went out are remembered, so that some answers are right."""

    def __init__(self) -> None:
        pacing = Pacing(
            groups_per_step=2, samples_per_group=2, max_staleness=1, lease_timeout_s=20, weights_timeout_s=30
        )
        self.core = BrokerCore(Recipe(run=Run(max_steps=4), pacing=pacing))
        self.now = 0.0
        self.out: list[tuple[str, schema.Lease]] = []
        self.leased: set[tuple[int, int]] = set()

    def tell(self, event: ev.Event) -> None:
        for action in self.core.on(event, self.now):
            if isinstance(action, ev.SendLease):
                key = (action.lease.lease_id, action.lease.attempt)
                assert key not in self.leased, "an attempt token was given out twice"
                self.leased.add(key)
                self.out.append((action.peer, action.lease))
            elif isinstance(action, ev.RefusePeer):
                self.core.on(ev.Left(action.peer, action.reason), self.now)
        self.check()

    def play(self, move: tuple[Any, ...]) -> None:
        match move:
            case ("join", name, slots, returning):
                self.tell(ev.Joined(name, PEERS[name], name, slots, returning))  # type: ignore[arg-type]
            case ("left", name, clean):
                self.tell(ev.Left(name, "gone", clean))
            case ("says", name, body):
                self.tell(ev.Received(name, body))
            case ("samples", name, lease, token, parts):
                self.tell(ev.SamplesArrived(name, lease, token, parts, 1))
            case ("answer", n, parts) if self.out:
                name, lease = self.out[n % len(self.out)]
                self.tell(ev.SamplesArrived(name, lease.lease_id, lease.attempt, parts, 1))
            case ("tick", seconds):
                self.now += seconds
                self.tell(ev.Tick())
            case ("draining", name, draining):
                self.tell(ev.Availability(name, draining))
            case ("unsendable", group):
                self.tell(ev.Unsendable(group))

    def check(self) -> None:
        leases, groups = self.core.leases, self.core.groups
        for name, counts in leases.counts.items():
            fates = [counts[fate] for fate in ("in flight", "accepted", "quarantined", "cancelled")]
            assert min(fates) >= 0
            assert counts["created"] == sum(fates) == sum(groups.counts[name].values())
            assert counts["in flight"] == len(leases.waiting[name]) + sum(
                record.out for record in leases.leases.values() if record.lane == name
            )
            assert groups.counts[name]["void"] == sum(groups.voids[name].values())
            active = [
                g.group_id
                for g in groups.groups.values()
                if g.lane == name and g.state in ("assembling", "queued", "leased")
            ]
            assert sorted(active) == groups.active[name]
        held = {lease for leases_of in leases.held.values() for lease in leases_of}
        assert held == {lease for lease, record in leases.leases.items() if record.out}
        for worker, jobs in self.core.jobs.running.items():
            assert worker in self.core.peers
            assert all(self.core.jobs.jobs[job].worker == worker for job in jobs if job in self.core.jobs.jobs)


@settings(max_examples=400, deadline=None)
@given(st.lists(moves, max_size=60))
def test_no_order_of_messages_breaks_the_core(story: list[tuple[Any, ...]]) -> None:
    told = Story()
    for move in story:
        told.play(move)
    told.core.changes()


@settings(max_examples=150, deadline=None)
@given(st.lists(moves, min_size=10, max_size=60))
def test_no_order_of_messages_breaks_a_run_that_is_going_on(story: list[tuple[Any, ...]]) -> None:
    told = Story()
    told.tell(ev.Joined("learner-1", "learner", "learner-1"))
    told.tell(ev.Joined("actor-1", "actor", "actor-1", 8))
    told.tell(ev.Joined("eval-1", "eval", "eval-1", 2))
    told.tell(ev.Joined("box-1", "sandbox", "box-1", 1))
    told.tell(ev.Received("learner-1", schema.LearnerReady(1, None, 0, 0)))
    told.tell(ev.Received("learner-1", schema.Phase("train", {"a": (0, 1.0)}, 2, 2)))
    told.tell(ev.Received("learner-1", schema.Demand("train", 8)))
    told.tell(ev.Received("learner-1", schema.Evaluate(0, [("a", 0, 2)], 1)))
    for move in story:
        told.play(move)
