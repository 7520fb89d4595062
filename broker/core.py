"""The broker's state machine: `BrokerCore.on(event, now) -> actions`.

Pure: no sockets, clock or files, so that its whole behaviour is simulated in tests. It guarantees, whatever the order
of events: every lease created is in flight, accepted, quarantined or cancelled; every group is in one state, with a
reason when void; a group is handed to the learner of a lineage once; late answers of abandoned attempts are refused;
admission follows `pacing`. The daemon feeds it, writes `changes()` to the ledger, then carries the actions out.

Its parts: `attempts` (what actors say), `learning` (what the learner says), `issuing` (who gets which lease), `fates`
(what becomes of leases and groups), the books `leases`, `groups`, `jobs`, and `state` (everything else).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from temper.broker.attempts import Attempts
from temper.broker.events import (
    Action,
    Availability,
    Closing,
    Event,
    Inform,
    Joined,
    Left,
    PeerKey,
    Received,
    RefusePeer,
    SamplesArrived,
    SamplesBatch,
    Tick,
    Touched,
    Unsendable,
)
from temper.broker.fates import Fates
from temper.broker.groups import GroupRecord
from temper.broker.issuing import Issuing
from temper.broker.learning import TRAINING_LANES, Learning
from temper.broker.leases import AttemptState, LeaseRecord
from temper.broker.state import PeerRecord, RunState
from temper.common import schema
from temper.common.config import Recipe
from temper.common.schema import Lane

Handler = Callable[[PeerKey, Any, float], list[Action]]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a batch of events changed: rows to write before actions are carried out (but for those of ``ahead``)."""

    leases: list[LeaseRecord]
    groups: list[GroupRecord]
    attempts: dict[tuple[int, int], tuple[PeerKey, AttemptState]]  # (lease, attempt) out or ended: peer, how
    state: dict[str, Any]
    fresh: dict[Lane, range] = field(default_factory=dict)
    """By lane: ids of leases that are not begun yet, and that a core which is loaded with `state` will not give out."""


class BrokerCore(RunState):
    """See the module. `on` is the only way in."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._fates = Fates(self)
        self._issuing = Issuing(self)
        self._attempts = Attempts(self, self._fates)
        self._learning = learning = Learning(self, self._fates, self._issuing)
        self._arrivals = 0
        self._informed: tuple[PeerKey | None, str] = (None, "")
        self._handlers: dict[type[schema.Body], tuple[str, Handler]] = {
            schema.Touch: ("actor", self._attempts.touch),
            schema.Return: ("actor", self._attempts.returned),
            schema.JobCancel: ("actor", lambda peer, body, now: self._cancelled(peer, body)),
            schema.JobDone: ("sandbox", lambda peer, body, now: self.jobs.done(peer, body)),
            schema.LearnerReady: ("learner", learning.ready),
            schema.Phase: ("learner", learning.phase),
            schema.Demand: ("learner", learning.demand),
            schema.Done: ("learner", learning.done),
            schema.Void: ("learner", learning.void),
            schema.Covered: ("learner", learning.covered),
            schema.Evaluate: ("learner", learning.evaluate),
            schema.RunOver: ("learner", learning.run_over),
        }

    def on(self, event: Event, now: float) -> list[Action]:
        """Take one event at time `now` (seconds, monotonic); returns what has to be done, in order."""
        actions = self._take(event, now)
        kind = type(event)
        if kind is SamplesBatch or kind is SamplesArrived:
            if not self._attempts.ended:
                return actions  # parts of groups: nobody's turn comes of them
        elif kind is Touched or (isinstance(event, Received) and type(event.body) is schema.Touch):
            return actions
        actions += self._learning.deliver()
        actions += self._issuing.issue(now)
        if self.jobs.jobs:
            actions += self.jobs.assign()
        return actions

    def _take(self, event: Event, now: float) -> list[Action]:
        match event:
            case SamplesBatch():
                return self._attempts.batch(event.arrivals)
            case Touched():
                return self._touched(event, now)
            case Received():
                return self._received(event, now)
            case SamplesArrived():
                return self._attempts.batch((event,))
            case Joined():
                return self._join(event)
            case Left(peer, reason, clean):
                return self._leave(peer, reason, clean)
            case Availability(peer, draining):
                return self._availability(peer, draining)
            case Unsendable(group_id):
                return self._fates.unsendable(group_id)
            case Closing():
                self.closing = True
                return []
            case Tick():
                return [*self._attempts.expire(now), *self._inform()]

    def _inform(self) -> list[Action]:
        """What went wrong since the learner was last told, if anything did."""
        told = (self.learner, self.trouble)
        if self.learner is None or not self.trouble or told == self._informed:
            return []
        self._informed = told
        return [Inform(self.learner, self.trouble)]

    # ------------------------------------------------------------ what has to be written down

    @property
    def dirty(self) -> bool:
        """Whether `changes` has records to write."""
        return bool(self.leases.dirty or self.groups.dirty or self.leases.attempted)

    def changes(self, spare_ids: int = 0) -> Changes:
        """Records touched since the last call, and the small state; call once per batch of events. `spare_ids`: so many ids of
        the train and demo lanes are kept back (`Changes.fresh`)."""
        leases, groups, state = self.leases, self.groups, self.save()
        fresh = {lane: self.schedule.fresh(lane, spare_ids) for lane in TRAINING_LANES}
        state["schedule"]["next"] |= {lane: ids.stop for lane, ids in fresh.items()}
        changed = Changes(list(leases.dirty.values()), list(groups.dirty.values()), leases.attempted, state, fresh)
        leases.dirty.clear()
        groups.dirty.clear()
        leases.attempted = {}
        return changed

    # ------------------------------------------------------------ peers

    def _join(self, event: Joined) -> list[Action]:
        if event.role == "learner":
            if self.learner not in (None, event.peer):
                name = self.peers[self.learner].name
                return [RefusePeer(event.peer, "role_taken", f"this run already has a learner: {name}")]
            self.learner = event.peer
        self._arrivals += 1
        record = PeerRecord(
            event.peer,
            event.role,
            event.name,
            event.slots,
            self._arrivals,
            draining=not event.ready,
            returning=event.returning,
        )
        self.peers[event.peer] = record
        self.leases.changed.add(event.peer)
        if event.role == "sandbox" and event.peer not in self.jobs.slots:
            self.jobs.add_worker(event.peer, 0 if event.returning else event.slots)
        return []

    def _leave(self, peer: PeerKey, reason: str, clean: bool = False) -> list[Action]:
        record = self.peers.pop(peer, None)
        if record is None:
            return []
        if peer == self.learner:
            self.learner = None
        elif record.role in ("actor", "eval"):
            self.trouble = f"{record.name} left: {reason}"
        actions = [*self.jobs.worker_left(peer, reason, clean), *self.jobs.requester_left(peer)]
        for lease_id in sorted(self.leases.held.get(peer, ())):
            lease = self.leases.leases[lease_id]
            if clean:
                self.leases.take_back(lease, "returned")
            else:
                actions += self._fates.lost(lease, f"{record.name} is gone: {reason}")
        self.leases.changed.discard(peer)
        return actions

    def _availability(self, peer: PeerKey, draining: bool) -> list[Action]:
        record = self.peers.get(peer)
        if record is not None and record.draining != draining:
            record.draining = draining
            self.leases.changed.add(peer)
            if record.role == "sandbox":
                self.jobs.set_slots(peer, 0 if draining else record.slots)
        return []

    def _received(self, event: Received, now: float) -> list[Action]:
        peer, body = event.peer, event.body
        record = self.peers.get(peer)
        if record is None:
            return []
        role = "actor" if record.role == "eval" else record.role
        speaker, handler = self._handlers.get(type(body), ("", None))
        if handler is not None and speaker == role:
            return handler(peer, body, now)
        if isinstance(body, schema.Job) and role == "actor":
            return self.jobs.submit(peer, body, event.nbytes)
        if isinstance(body, schema.Holding):
            return self._holding(record, body)
        kind = type(body).__name__
        offence = RefusePeer(peer, "malformed", f"{kind} came from a peer of role {record.role}")
        return [*self._leave(peer, f"sent {kind}"), offence]

    def _touched(self, event: Touched, now: float) -> list[Action]:
        record = self.peers.get(event.peer)
        if record is not None and record.role not in ("actor", "eval"):
            return self._received(Received(event.peer, event.touches[0]), now)  # an offence
        actions: list[Action] = []
        if record is not None:
            for touch in event.touches:
                actions += self._attempts.touch(event.peer, touch, now)
        return actions

    def _cancelled(self, peer: PeerKey, body: schema.JobCancel) -> list[Action]:
        return self.jobs.end_session(peer, body.job_id) if body.session else self.jobs.cancel(peer, body.job_id)

    def _holding(self, record: PeerRecord, body: schema.Holding) -> list[Action]:
        """A peer that knew an earlier incarnation of this broker says what it still holds."""
        if not record.returning:
            return []
        record.returning = False
        self.leases.changed.add(record.peer)
        if record.role == "learner":
            return self._learning.holding(body) if record.peer == self.owner else []
        if record.role == "sandbox":
            self.jobs.adopt(record.peer, record.slots, body.jobs, body.sessions)
            return []
        return self._attempts.holding(record.peer, body)
