"""What may be told before it is written, case by case; that nothing goes twice or is lost is the simulation's to show."""

from __future__ import annotations

from temper.broker import events as ev
from temper.broker.ahead import Ahead
from temper.broker.core import BrokerCore
from temper.common import schema
from temper.common.config import Pacing, Recipe, Run

SPARE = 3


class Desk:
    """A core with a learner and one actor, and what the books on disk say of it."""

    def __init__(self, order: str = "completion", deterministic: bool = False) -> None:
        pacing = Pacing(groups_per_step=4, samples_per_group=1, max_staleness=1, batch_order=order)  # type: ignore[arg-type]
        self.core = BrokerCore(Recipe(run=Run(max_steps=10, deterministic=deterministic), pacing=pacing))
        self.ahead = Ahead()
        self.open: list[ev.Action] = []
        self.tell(ev.Joined("learner", "learner", "learner"))
        self.say(schema.LearnerReady(1, None, 0, 0))
        self.say(schema.Phase("train", {"a": (0, 1.0)}, 4, 1))

    def tell(self, event: ev.Event) -> None:
        self.open += self.core.on(event, 0.0)

    def say(self, body: schema.Body) -> None:
        self.tell(ev.Received("learner", body))

    def answer(self, lease_id: int, peer: str = "actor") -> None:
        meta = schema.SampleMeta(0, "stop", 1.0, True, {}, "ok", [])
        self.tell(ev.SamplesArrived(peer, lease_id, self.core.leases.leases[lease_id].attempt, (meta,), 1))

    def begin(self) -> None:
        """All so far is on its way to the disk: what is told after it does not count any more."""
        self.ahead.begun(self.core.changes(SPARE))
        self.open.clear()

    def write(self) -> None:
        self.begin()
        self.ahead.written()

    def told(self) -> list[tuple[int, int]]:
        """(lease, attempt) and (group, 0) of what is told now."""
        now, self.open = self.ahead.divide(self.open, self.core)
        return [(a.lease.lease_id, a.lease.attempt) if isinstance(a, ev.SendLease) else (a.group_id, 0) for a in now]  # type: ignore[union-attr]


def test_only_leases_whose_ids_the_books_on_disk_keep_back_go_out_at_once() -> None:
    desk = Desk()
    desk.write()
    desk.tell(ev.Joined("actor", "actor", "actor", 5))
    assert desk.told() == [(0, 1), (1, 1), (2, 1)]
    assert [a.lease.lease_id for a in desk.open if isinstance(a, ev.SendLease)] == [3, 4]
    desk.write()
    desk.answer(0)
    assert desk.told() == [(5, 1)]


def test_a_lease_that_comes_back_waits_for_the_books_whichever_ids_they_keep() -> None:
    """The books under way say that its first attempt is out: a broker that starts from them gives out the second one."""
    desk = Desk()
    desk.write()
    desk.tell(ev.Joined("actor", "actor", "actor", 1))
    assert desk.told() == [(0, 1)]
    desk.begin()
    desk.tell(ev.Joined("other", "actor", "other", 1))
    assert desk.told() == [(1, 1)]
    desk.tell(ev.Left("actor", "killed"))
    desk.answer(1, "other")
    assert desk.told() == []
    assert [(a.lease.lease_id, a.lease.attempt) for a in desk.open if isinstance(a, ev.SendLease)] == [(0, 2)]


def test_only_groups_that_the_books_on_disk_call_queued_go_out_at_once() -> None:
    desk = Desk()
    desk.tell(ev.Joined("actor", "actor", "actor", 3))
    desk.write()
    desk.answer(0)
    desk.answer(1)
    desk.begin()
    desk.say(schema.Demand("train", 1))
    desk.answer(2)
    assert (0, 0) not in desk.told()
    desk.ahead.written()
    assert desk.told() == [(0, 0)]
    desk.write()
    desk.say(schema.Demand("train", 2))
    assert desk.told() == [(1, 0), (2, 0)]


def test_a_group_that_was_delivered_is_not_called_queued_any_more() -> None:
    desk = Desk()
    desk.tell(ev.Joined("actor", "actor", "actor", 1))
    desk.answer(0)
    desk.write()
    desk.say(schema.Demand("train", 1))
    assert desk.told() == [(0, 0)]
    desk.write()
    desk.tell(ev.Left("learner", "killed"))
    desk.tell(ev.Joined("learner", "learner", "learner", returning=True))
    desk.say(schema.Holding(1, demand={"train": 1}))
    assert (0, 0) not in desk.told()


def test_nothing_goes_out_at_once_for_a_learner_that_the_books_on_disk_do_not_name() -> None:
    desk = Desk()
    desk.tell(ev.Joined("actor", "actor", "actor", 1))
    desk.answer(0)
    desk.write()
    desk.tell(ev.Left("learner", "killed"))
    desk.tell(ev.Joined("heir", "learner", "heir"))
    for body in (
        schema.LearnerReady(2, None, 0, 0),
        schema.Phase("train", {"a": (0, 1.0)}, 4, 1),
        schema.Demand("train", 1),
    ):
        desk.tell(ev.Received("heir", body))
    desk.tell(ev.Joined("other", "actor", "other", 2))
    assert desk.told() == []
    assert sum(isinstance(action, ev.Deliver | ev.SendLease) for action in desk.open) >= 3


def test_in_lease_order_no_group_goes_ahead_of_one_that_waits() -> None:
    desk = Desk("lease")
    desk.tell(ev.Joined("actor", "actor", "actor", 2))
    desk.answer(1)
    desk.write()
    desk.answer(0)
    desk.say(schema.Demand("train", 2))
    assert not {(0, 0), (1, 0)} & set(desk.told())
    assert [a.group_id for a in desk.open if isinstance(a, ev.Deliver)] == [0, 1]


def test_evaluations_wait_for_the_books() -> None:
    desk = Desk()
    desk.tell(ev.Joined("eval", "eval", "eval", 2))
    desk.write()
    desk.say(schema.Evaluate(0, [("a", 0, 1)], 1, 1))
    (sent,) = [action for action in desk.open if isinstance(action, ev.SendLease)]
    assert desk.told() == []
    desk.tell(ev.Left("learner", "its line is cut"))
    desk.answer(sent.lease.lease_id, "eval")
    desk.write()
    desk.tell(ev.Joined("learner", "learner", "learner", returning=True))
    desk.say(schema.Holding(1))
    assert desk.told() == []
    assert any(isinstance(action, ev.Deliver) for action in desk.open)


def test_a_core_loaded_from_the_books_gives_out_none_of_the_ids_kept_back() -> None:
    desk = Desk()
    desk.tell(ev.Joined("actor", "actor", "actor", 2))
    changes = desk.core.changes(SPARE)
    assert changes.fresh["train"] == range(2, 2 + SPARE)
    again = BrokerCore(Recipe())
    again.load(changes.state, changes.leases, changes.groups, 0.0)
    assert again.schedule.next("train", {"a": (0, 1.0)}).lease_id == 2 + SPARE
    assert desk.core.schedule.next("train", {"a": (0, 1.0)}).lease_id == 2
