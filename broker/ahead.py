"""What may be told before the transaction that writes it down is on disk. Everything else waits for it.

A new lease to its actor
    The books on disk keep ids back for leases that they do not know yet (`Changes.fresh`). A broker that starts from them gives
    out ids beyond those, so that nobody is ever given this lease's id again. Killed now, the lease never was: its attempt is
    refused when its actor says that it holds it, or sends samples of it. None of these had been acknowledged: an
    acknowledgement waits for a transaction, and that one has the lease too.
A group to the learner
    if the books on disk call it queued, so that all its samples are there and acknowledged. Killed now, it still is queued, and
    no group goes out before the learner has said what became of those it had: first its `Done` or `Void` comes once more,
    because nobody acknowledged it, then its `Holding` names what it still has. What it names neither way has never arrived, and
    goes out again. A learner that is gone cannot say so; its successor begins a new lineage, for which queued and leased to the
    old one is the same.

Both only while the books on disk name the present learner and lineage: it is this learner's `Holding` that a broker started
from them waits for. Batches in lease order stay that: there no group goes ahead of one that waits. A deterministic run keeps no
ids back, so that a crash does not change its tasks. Pure; used by `Commits`.
"""

from __future__ import annotations

from collections.abc import Sequence

from temper.broker.core import Changes
from temper.broker.events import Action, Deliver, SendLease
from temper.broker.learning import TRAINING_LANES
from temper.broker.state import RunState
from temper.common.schedule import lane_of
from temper.common.schema import Lane

SPARE_IDS = 1024  # so many leases of a lane may be told between two transactions, and so many ids a crash skips


class Ahead:
    """What the books on disk say, as far as it lets actions be told at once. It hears of each transaction twice."""

    def __init__(self) -> None:
        self._fresh: dict[Lane, range] = {}
        self._queued: set[int] = set()
        self._learner: tuple[str | None, int | None] = None, None
        self._begun: Changes | None = None
        self._begun_queued: dict[int, bool] = {}  # group -> whether it was queued then: records go on changing

    def begun(self, changes: Changes) -> None:
        """A transaction with these changes is on its way to the disk."""
        self._begun = changes
        self._begun_queued = {group.group_id: group.state == "queued" for group in changes.groups}

    def written(self) -> None:
        """The transaction last begun is on disk."""
        changes, self._begun = self._begun, None
        if changes is None:
            return
        self._fresh, self._learner = changes.fresh, (changes.state["owner"], changes.state["lineage"])
        for group_id, queued in self._begun_queued.items():
            (self._queued.add if queued else self._queued.discard)(group_id)

    def divide(self, actions: Sequence[Action], run: RunState) -> tuple[list[Action], list[Action]]:
        """Of what `run` decided: (what is told now, what waits), each in its order."""
        now: list[Action] = []
        wait: list[Action] = []
        if self._learner != (run.owner, run.lineage):
            return now, list(actions)
        queued = set() if run.groups.lease_order else self._queued
        for action in actions:
            early = False
            if isinstance(action, SendLease):
                lease = action.lease
                early = lease.attempt == 1 and lease.lease_id in self._fresh.get(lease.lane, ())
            elif isinstance(action, Deliver):
                early = action.group_id in queued and lane_of(action.group_id) in TRAINING_LANES
            (now if early else wait).append(action)
        return now, wait
