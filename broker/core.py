"""The broker's state machine: `BrokerCore.on(event, now) -> actions`.

Pure: no sockets, clock or files, so that its whole behaviour is simulated in tests. It guarantees, whatever the order
of events: every lease created is in flight, accepted, quarantined or cancelled; every group is in one state, with a
reason when void; a group is handed to the learner of a lineage once; late answers of abandoned attempts are refused;
admission follows `pacing`. The daemon feeds it, writes `changes()` to the ledger, then carries the actions out.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from temper.broker import pacing
from temper.broker.events import (
    Action,
    Availability,
    Closing,
    Deliver,
    Event,
    Fail,
    Finish,
    Ignore,
    Joined,
    Left,
    Note,
    PeerKey,
    Received,
    RefuseAttempt,
    RefusePeer,
    Release,
    SamplesArrived,
    SendLease,
    Store,
    Tick,
    Unsendable,
)
from temper.broker.groups import GroupBook, GroupRecord
from temper.broker.jobs import JobBook
from temper.broker.leases import AttemptState, LeaseBook, LeaseRecord
from temper.common import schema
from temper.common.config import Recipe
from temper.common.schedule import Assignment, Schedule
from temper.common.schema import Lane

QUARANTINES_IN_A_ROW = 8
"""So many quarantined tasks of a domain without an accepted group between them pause the domain."""

LANE_OF_PHASE: dict[str, Lane] = {"warm": "demo", "train": "train"}


@dataclass(slots=True)
class PeerRecord:
    """A peer that is there. `joined` orders peers by arrival."""

    peer: PeerKey
    role: schema.Role
    name: str
    slots: int
    joined: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Changes:
    """What a batch of events changed: rows to write before any action is carried out."""

    leases: list[LeaseRecord]
    groups: list[GroupRecord]
    ended: list[tuple[int, int, PeerKey, AttemptState]]  # attempts that ended: (lease, attempt, peer, how)
    state: dict[str, Any]


class BrokerCore:
    """See the module. `on` is the only way in; `status` and `changes` the ways out."""

    def __init__(self, recipe: Recipe) -> None:
        self.pacing = recipe.pacing
        self.max_steps = recipe.run.max_steps
        lease_order = (
            recipe.pacing.batch_order == "lease" or recipe.pacing.max_staleness == 0 or recipe.run.deterministic
        )
        self.leases = LeaseBook()
        self.groups = GroupBook(lease_order)
        self.jobs = JobBook()
        self.schedule = Schedule(recipe.run.seed)
        self.peers: dict[PeerKey, PeerRecord] = {}
        self.learner: PeerKey | None = None
        self.owner: PeerKey | None = None  # the learner whose lineage it is; it may be gone, or there again
        self.lineage: int | None = None
        self.version = 0  # ordinal: steps done, warm-start steps included
        self.steps_done = 0  # RL steps
        self.phase: schema.Phase | None = None
        self.demand: Counter[str] = Counter()
        self.reports: deque[int] = deque()  # evaluation groups to send, oldest first
        self.void_row: Counter[str] = Counter()  # voids in a row, by who decided them: "broker", "learner"
        self.void_causes: Counter[tuple[str, str]] = Counter()  # (domain, reason) of the present row
        self.quarantine_row: Counter[str] = Counter()
        self.paused: dict[str, str] = {}  # domain -> why
        self.letters: deque[dict[str, Any]] = deque(maxlen=200)  # dead letters: what was given up, and why
        self.oldest_checkpoint: int | None = None
        self.failed: Fail | None = None
        self.over: Finish | None = None
        self.closing = False
        self._joined = 0
        self._handlers: dict[type[schema.Body], tuple[str, Callable[[PeerKey, Any, float], list[Action]]]] = {
            schema.Touch: ("actor", self._touch),
            schema.Return: ("actor", self._return),
            schema.JobCancel: ("actor", lambda peer, body, now: self.jobs.cancel(peer, body.job_id)),
            schema.JobDone: ("sandbox", lambda peer, body, now: self.jobs.done(peer, body)),
            schema.LearnerReady: ("learner", self._learner_ready),
            schema.Phase: ("learner", self._phase),
            schema.Demand: ("learner", self._demand),
            schema.Done: ("learner", self._done),
            schema.Void: ("learner", self._void),
            schema.Covered: ("learner", self._covered),
            schema.Evaluate: ("learner", self._evaluate),
            schema.RunOver: ("learner", self._run_over),
        }

    # ------------------------------------------------------------ the way in

    def on(self, event: Event, now: float) -> list[Action]:
        """Take one event at time `now` (seconds, monotonic); returns what has to be done, in order."""
        match event:
            case Received():
                actions = self._received(event, now)
            case SamplesArrived():
                actions = self._samples(event)
            case Joined():
                actions = self._join(event)
            case Left(peer, reason, clean):
                actions = self._leave(peer, reason, clean)
            case Availability(peer, draining):
                actions = self._availability(peer, draining)
            case Closing():
                self.closing, actions = True, []
            case Unsendable(group_id):
                actions = self._unsendable(group_id)
            case Tick():
                actions = self._expire(now)
        return [*actions, *self._deliver(), *self._issue(now), *self.jobs.assign()]

    @property
    def dirty(self) -> bool:
        """Whether `changes` has records to write."""
        return bool(self.leases.dirty or self.groups.dirty or self.leases.ended)

    def changes(self) -> Changes:
        """Records touched since the last call, and the small state; call once per batch of events."""
        leases, groups = self.leases, self.groups
        changed = Changes(list(leases.dirty.values()), list(groups.dirty.values()), leases.ended, self.state())
        leases.dirty.clear()
        groups.dirty.clear()
        leases.ended = []
        return changed

    # ------------------------------------------------------------ peers

    def _join(self, event: Joined) -> list[Action]:
        if event.role == "learner":
            if self.learner not in (None, event.peer):
                name = self.peers[self.learner].name
                return [RefusePeer(event.peer, "role_taken", f"this run already has a learner: {name}")]
            self.learner = event.peer
        if event.peer not in self.peers:
            self._joined += 1
        self.peers[event.peer] = PeerRecord(event.peer, event.role, event.name, event.slots, self._joined)
        if event.role == "sandbox" and event.peer not in self.jobs.slots:
            self.jobs.add_worker(event.peer, event.slots)
        return []

    def _leave(self, peer: PeerKey, reason: str, clean: bool = False) -> list[Action]:
        record = self.peers.pop(peer, None)
        if record is None:
            return []
        if peer == self.learner:
            self.learner = None
        actions = [*self.jobs.worker_left(peer, reason, clean), *self.jobs.requester_left(peer)]
        for lease_id in sorted(self.leases.held.get(peer, ())):
            lease = self.leases.leases[lease_id]
            if clean:
                self.leases.take_back(lease, "returned")
            else:
                actions += self._lost(lease, f"{record.name} is gone: {reason}")
        return actions

    def _availability(self, peer: PeerKey, draining: bool) -> list[Action]:
        record = self.peers.get(peer)
        if record is not None and record.draining != draining:
            record.draining = draining
            if record.role == "sandbox":
                self.jobs.set_slots(peer, 0 if draining else record.slots)
        return []

    def _received(self, event: Received, now: float) -> list[Action]:
        peer, body = event.peer, event.body
        record = self.peers.get(peer)
        if record is None:
            return []
        role, handler = self._handlers.get(type(body), ("", None))
        spoken = "actor" if record.role == "eval" else record.role
        if isinstance(body, schema.Job) and spoken == "actor":
            return self.jobs.submit(peer, body, event.nbytes)
        if handler is None or role != spoken:
            kind = type(body).__name__
            return [
                *self._leave(peer, f"sent {kind}"),
                RefusePeer(peer, "malformed", f"{kind} came from a peer of role {record.role}"),
            ]
        return handler(peer, body, now)

    # ------------------------------------------------------------ leases

    def _attempt(self, peer: PeerKey, lease_id: int, attempt: int) -> LeaseRecord | None:
        """The lease, if this attempt of it is out with this peer."""
        record = self.leases.leases.get(lease_id)
        if record is None or not record.out or record.attempt != attempt or record.peer != peer:
            return None
        return record

    def _touch(self, peer: PeerKey, body: schema.Touch, now: float) -> list[Action]:
        record = self._attempt(peer, body.lease_id, body.attempt)
        if record is None:
            return [RefuseAttempt(peer, body.lease_id, body.attempt, "this attempt was abandoned")]
        self.leases.touch(record, now + self.pacing.lease_timeout_s)
        return []

    def _return(self, peer: PeerKey, body: schema.Return, now: float) -> list[Action]:
        record = self._attempt(peer, body.lease_id, body.attempt)
        if record is None:
            return []
        if body.cause == "infra":
            return self._lost(record, body.error)
        self.leases.take_back(record, "returned")
        if body.cause == "drain":
            self.peers[peer].draining = True  # until its heartbeats say otherwise
            return []
        record.task_failures += 1
        record.error = body.error
        return self._quarantine(record) if record.task_failures >= self.pacing.task_attempts else []

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for record in self.leases.overdue(now):
            peer, attempt, touched = record.peer, record.attempt, record.touched
            name = self.peers[peer].name if peer in self.peers else peer
            waited = "its samples" if touched else f"weights of version {record.min_version}"
            reason = f"the attempt's deadline passed while {name} waited for {waited}"
            if touched:
                actions += self._lost(record, reason, "expired")
            else:  # nothing was run, so nothing failed
                record.error = reason
                self.leases.take_back(record, "expired")
            actions += [
                RefuseAttempt(peer, record.lease_id, attempt, reason),
                Note(f"lease {record.lease_id}: {reason}"),
            ]
        return actions

    def _lost(self, record: LeaseRecord, error: str, how: Literal["returned", "expired"] = "returned") -> list[Action]:
        """An attempt died of infrastructure."""
        self.leases.take_back(record, how)
        record.infra_failures += 1
        record.error = error
        if record.infra_failures < self.pacing.infra_attempts:
            return []
        record.filled = tuple(record.missing)
        self._letter(record, "infra")
        return self._complete(record)

    def _quarantine(self, record: LeaseRecord) -> list[Action]:
        self.leases.close(record, "quarantined")
        self._letter(record, "quarantined")
        domain = record.domain
        self.quarantine_row[domain] += 1
        actions: list[Action] = [Note(f"lease {record.lease_id} ({domain}) is quarantined: {record.error}")]
        actions += self._give_up(self.groups.groups[record.lease_id], "quarantined", "broker")
        if self.quarantine_row[domain] >= QUARANTINES_IN_A_ROW and domain not in self.paused:
            why = f"{self.quarantine_row[domain]} quarantined tasks in a row, last: {record.error}"
            self.paused[domain] = why
            actions.append(Note(f"domain {domain} is paused: {why}"))
            if self.phase is not None and self.phase.shares and not self._shares():
                actions += self._fail(f"no domain is left: {'; '.join(f'{d}: {w}' for d, w in self.paused.items())}")
        return actions

    def _samples(self, event: SamplesArrived) -> list[Action]:
        lease_id, attempt = event.lease_id, event.attempt
        indices = tuple(sample.index for sample in event.samples)

        def refuse(reason: str) -> list[Action]:
            return [RefuseAttempt(event.peer, lease_id, attempt, reason)]

        record = self._attempt(event.peer, lease_id, attempt)
        if record is None:
            known = self.leases.leases.get(lease_id)
            if known is not None and known.last_peer == event.peer and known.have.issuperset(indices):
                return [Ignore(lease_id, indices)]
            return refuse("this attempt was abandoned")
        if record.have.issuperset(indices):
            return [Ignore(lease_id, indices)]
        wrong = [index for index in indices if index not in range(record.size) or index in record.have]
        if wrong or len(set(indices)) != len(indices):
            return refuse(f"sample indices {list(indices)}, missing are {record.missing}")
        self.leases.accept(record, indices)
        self.groups.groups[lease_id].add(event.samples, event.nbytes)
        self.groups.dirty[lease_id] = self.groups.groups[lease_id]
        actions: list[Action] = [Store(lease_id, indices)]
        return actions + (self._complete(record) if not record.missing else [])

    def _complete(self, record: LeaseRecord) -> list[Action]:
        """Every sample is there or given up: the lease is accepted and its group's fate decided."""
        self.leases.close(record, "accepted")
        if record.have:
            self.quarantine_row.pop(record.domain, None)
        group = self.groups.groups[record.lease_id]
        if not record.have:
            return self._give_up(group, "infra", "broker")
        if record.lane == "eval":
            self.groups.enqueue(group)
            self.reports.append(group.group_id)
            return []
        if record.lane == "train":
            if group.scored < min(2, record.size):
                return self._give_up(group, "infra", "broker")
            if self.pacing.dynamic_sampling and not group.contrast:
                return self._give_up(group, "no contrast", "broker")
        self.groups.enqueue(group)
        if record.lane == "train":
            self._row_ends("broker")
        return []

    def _letter(self, record: LeaseRecord, reason: str) -> None:
        self.letters.append(
            {
                "lease_id": record.lease_id,
                "lane": record.lane,
                "domain": record.domain,
                "task_seed": record.task_seed,
                "reason": reason,
                "attempts": record.attempt,
                "error": record.error,
            }
        )

    # ------------------------------------------------------------ groups

    def _give_up(self, group: GroupRecord, reason: str, by: str) -> list[Action]:
        self.groups.void(group, reason)
        if group.lane == "eval":
            self.reports.append(group.group_id)
            return []
        self._forget(group)
        actions: list[Action] = [Release((group.group_id,))]
        if group.lane == "train":
            self.void_row[by] += 1
            self.void_causes[group.domain, reason] += 1
            limit = self.pacing.max_void_in_a_row or 20 * (self.phase or self.pacing).groups_per_step
            if self.void_row[by] >= limit:
                (domain, why), times = self.void_causes.most_common(1)[0]
                actions += self._fail(
                    f"{self.void_row[by]} groups in a row were void; most often {why!r} in domain {domain} "
                    f"({times} times): make its tasks easier or harder, or raise pacing.max_void_in_a_row ({limit})"
                )
        return actions

    def _unsendable(self, group_id: int) -> list[Action]:
        group = self.groups.groups.get(group_id)
        if group is None or group.state != "leased":
            return []
        self.demand[group.lane] += 1
        return self._give_up(group, "too large", "broker")

    def _row_ends(self, by: str) -> None:
        self.void_row.pop(by, None)
        if not self.void_row:
            self.void_causes.clear()

    def _forget(self, group: GroupRecord) -> None:
        self.groups.forget(group.group_id)
        self.leases.forget(group.group_id)

    def _deliver(self) -> list[Action]:
        """Groups the learner asked for, as they become ready, and evaluation groups."""
        actions: list[Action] = []
        if self.learner is None or self.learner != self.owner:
            return actions
        while self.reports:
            group = self.groups.groups[self.reports.popleft()]
            void = group.reason if group.state == "void" else None
            if void is None:
                self.groups.report(group)
            actions.append(Deliver(self.learner, group.group_id, void))
        for lane in ("demo", "train"):
            while self.demand[lane] > 0 and (ready := self.groups.ready(lane)) is not None:
                self.groups.lease(ready)
                self.demand[lane] -= 1
                actions.append(Deliver(self.learner, ready.group_id))
        return actions

    # ------------------------------------------------------------ issuing

    def _shares(self) -> dict[str, tuple[int, float]]:
        """The phase's shares without paused domains."""
        if self.phase is None:
            return {}
        return {d: s for d, s in self.phase.shares.items() if d not in self.paused and 0 < s[1] < math.inf}

    def _taker(self, role: str, record: LeaseRecord | None) -> PeerRecord | None:
        """The peer with the most free slots; not the one that just failed this lease, if another is free."""
        best, best_key = None, (False, 0, 0)
        for peer in self.peers.values():
            held = self.leases.held.get(peer.peer, ())
            free = peer.slots - len(held)
            if peer.role != role or free <= 0 or peer.draining:
                continue
            if record is not None and record.pinned_version is not None:
                pins = {self.leases.leases[lease_id].pinned_version for lease_id in held}
                if pins - {record.pinned_version}:
                    continue  # an evaluator holds one version at a time
            key = (record is None or record.last_peer != peer.peer, free, -peer.joined)
            if best is None or key > best_key:
                best, best_key = peer, key
        return best

    def _issue(self, now: float) -> list[Action]:
        if self.learner is None or self.learner != self.owner:
            return []  # what is begun without a learner may be of a dead lineage when it is done
        if self.failed is not None or self.over is not None or self.closing:
            return []
        actions: list[Action] = []
        self._send_waiting("eval", "eval", now, actions)
        lane = LANE_OF_PHASE.get(self.phase.phase) if self.phase is not None else None
        if lane is None or self.phase is None:
            return actions
        self._send_waiting(lane, "actor", now, actions)
        shares = self._shares()
        while shares and self._room(lane) and (taker := self._taker("actor", None)) is not None:
            record = self._create(lane, self.schedule.next(lane, shares), self.phase.samples_per_group)
            self._send(record, taker, now, actions)
        return actions

    def _room(self, lane: Lane) -> int:
        assert self.phase is not None
        left = self.max_steps - self.steps_done if lane == "train" else None
        active = len(self.groups.active[lane])
        return pacing.capacity(self.pacing.max_staleness, self.phase.groups_per_step, active, left)

    def _send_waiting(self, lane: Lane, role: str, now: float, actions: list[Action]) -> None:
        """Leases that came back go out before any new one, the oldest first."""
        for lease_id in list(self.leases.waiting[lane]):
            if lane != "eval":
                assert self.phase is not None
                ahead = self.groups.ahead(lease_id, lane)
                if not pacing.may_go_out(self.pacing.max_staleness, self.phase.groups_per_step, ahead):
                    return
            record = self.leases.leases[lease_id]
            taker = self._taker(role, record)
            if taker is None:
                return
            self._send(record, taker, now, actions)

    def _create(self, lane: Lane, task: Assignment, size: int, pinned: int | None = None) -> LeaseRecord:
        record = LeaseRecord(task.lease_id, lane, task.domain, task.level, task.task_seed, size, pinned)
        self.leases.create(record)
        self.groups.create(record.lease_id, lane, record.domain)
        return record

    def _send(self, record: LeaseRecord, taker: PeerRecord, now: float, actions: list[Action]) -> None:
        assert self.lineage is not None
        if record.lane == "eval" and record.pinned_version is not None:
            version = record.pinned_version
        else:
            version = 0 if record.lane == "demo" else self.version
        self.leases.put_out(record, taker.peer, version, now + self.pacing.weights_timeout_s)
        lease = schema.Lease(
            lease_id=record.lease_id,
            attempt=record.attempt,
            lineage=self.lineage,
            lane=record.lane,
            domain=record.domain,
            level=record.level,
            task_seed=record.task_seed,
            indices=record.missing,
            min_version=version,
            pinned_version=record.pinned_version,
            deadline_s=self.pacing.lease_timeout_s,
        )
        actions.append(SendLease(taker.peer, lease))

    # ------------------------------------------------------------ learner

    def _learner_ready(self, peer: PeerKey, body: schema.LearnerReady, now: float) -> list[Action]:
        """A new epoch of the learner: attempts in flight are taken back, provisional groups queued again."""
        if body.lineage == self.lineage and peer == self.owner:
            return []  # the same learner, reconnected
        actions: list[Action] = []
        self.owner = peer
        self.lineage, self.version, self.steps_done = body.lineage, body.version, body.steps_done
        self.phase = None
        self.demand.clear()
        self.void_row.clear()
        self.void_causes.clear()
        actions += self._clear_lane("eval", "learner restarted")
        actions += self._recall("a new learner started")
        since = body.resumed_from or 0
        again = [g for g in self.groups.groups.values() if g.state == "leased"]
        again += [g for g in self.groups.groups.values() if g.state == "trained" and (g.version or 0) >= since]
        for group in again:
            group.version = None
            self.groups.enqueue(group)
        if again:
            actions.append(
                Note(f"{len(again)} groups are queued again: the learner starts from version {body.version}")
            )
        return actions

    def _recall(self, reason: str) -> list[Action]:
        """Take every train and demo attempt back; their leases keep their places."""
        actions: list[Action] = []
        for record in list(self.leases.leases.values()):
            if record.out and record.lane != "eval":
                actions.append(RefuseAttempt(record.peer, record.lease_id, record.attempt, reason))
                self.leases.take_back(record, "returned")
        return actions

    def _clear_lane(self, lane: Lane, reason: str) -> list[Action]:
        """Give up every active group of a lane: its leases are cancelled, its groups void(reason)."""
        actions: list[Action] = []
        ids = list(self.groups.active[lane])
        for group_id in ids:
            record, group = self.leases.leases[group_id], self.groups.groups[group_id]
            if record.out:
                actions.append(RefuseAttempt(record.peer, group_id, record.attempt, reason))
            if record.state == "in flight":
                self.leases.close(record, "cancelled")
            self.groups.void(group, reason)
        if lane == "eval":
            ids = [g.group_id for g in self.groups.groups.values() if g.lane == "eval"]
            self.reports.clear()
        for group_id in ids:
            self._forget(self.groups.groups[group_id])
        if ids:
            actions.append(Release(tuple(ids)))
        return actions

    def _phase(self, peer: PeerKey, body: schema.Phase, now: float) -> list[Action]:
        before, self.phase = self.phase, body
        actions: list[Action] = []
        if body.phase != "warm":
            actions += self._clear_lane("demo", "warm start over")
        if body.phase in ("eval", "over"):
            actions += self._recall(body.reason or "no more training")
        if before is None or before.phase != body.phase:
            actions.append(Note(f"phase {body.phase}{': ' + body.reason if body.reason else ''}"))
        if body.phase in LANE_OF_PHASE and not self._shares():
            actions += self._fail(f"no domain is left to lease: shares {body.shares}, paused {self.paused}")
        return actions

    def _demand(self, peer: PeerKey, body: schema.Demand, now: float) -> list[Action]:
        if body.lane != "eval":  # evaluation groups come without being asked for
            self.demand[body.lane] += max(0, body.groups)
        return []

    def _done(self, peer: PeerKey, body: schema.Done, now: float) -> list[Action]:
        trained = [g for i in body.trained if (g := self.groups.groups.get(i)) is not None and g.state == "leased"]
        for group in trained:
            self.groups.train(group, body.version)
        if trained:
            self._row_ends("learner")
        actions = self._void(peer, schema.Void(body.void), now)
        self.version = body.version + 1
        self.steps_done += body.counted
        if len(trained) != len(body.trained):
            actions.append(Note(f"Done names {len(body.trained)} groups, {len(trained)} of them leased to the learner"))
        return actions

    def _void(self, peer: PeerKey, body: schema.Void, now: float) -> list[Action]:
        actions: list[Action] = []
        for key, reason in body.groups.items():
            group = self.groups.groups.get(int(key)) if key.isdecimal() else None
            if group is not None and group.state == "leased":
                actions += self._give_up(group, reason, "learner")
        return actions

    def _covered(self, peer: PeerKey, body: schema.Covered, now: float) -> list[Action]:
        self.oldest_checkpoint = body.oldest
        final = [g for g in self.groups.groups.values() if g.state == "trained" and (g.version or 0) < body.oldest]
        pending = set(self.reports)
        final += [
            g
            for g in self.groups.groups.values()
            if g.lane == "eval" and g.state in ("reported", "void") and g.group_id not in pending
        ]
        for group in final:
            self._forget(group)
        return [Release(tuple(group.group_id for group in final))] if final else []

    def _evaluate(self, peer: PeerKey, body: schema.Evaluate, now: float) -> list[Action]:
        for domain, level, tasks in body.tasks:
            for index in range(tasks):
                task = self.schedule.held_out(domain, level, index)
                self._create("eval", task, body.samples_per_task, body.version)
        return []

    def _run_over(self, peer: PeerKey, body: schema.RunOver, now: float) -> list[Action]:
        self.over = Finish(body.reason, body.exit_code)
        actions: list[Action] = []
        for lane in ("train", "demo", "eval"):
            actions += self._clear_lane(lane, "run over")
        return [*actions, self.over]

    def _fail(self, reason: str) -> list[Action]:
        if self.failed is not None:
            return []
        self.failed = Fail(reason, 2)
        return [self.failed, Note(reason)]

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Everything beside the records, as plain values."""
        return {
            "owner": self.owner,
            "lineage": self.lineage,
            "version": self.version,
            "steps_done": self.steps_done,
            "order": self.groups.order,
            "oldest_checkpoint": self.oldest_checkpoint,
            "schedule": self.schedule.state(),
            "phase": None if self.phase is None else msgspec.to_builtins(self.phase),
            "demand": dict(self.demand),
            "paused": dict(self.paused),
            "quarantine_row": dict(self.quarantine_row),
            "leases": {lane: dict(counts) for lane, counts in self.leases.counts.items()},
            "attempts": dict(self.leases.attempts),
            "groups": {lane: dict(counts) for lane, counts in self.groups.counts.items()},
            "voids": {lane: dict(counts) for lane, counts in self.groups.voids.items()},
        }

    def load(self, state: dict[str, Any], leases: list[LeaseRecord], groups: list[GroupRecord], now: float) -> None:
        """Continue from what `changes` wrote. Call before any event.

        Attempts that were out stay with their peers, which have `weights_timeout_s` to show up again.
        """
        self.owner, self.lineage = state["owner"], state["lineage"]
        self.version, self.steps_done = state["version"], state["steps_done"]
        self.groups.order = state["order"]
        self.oldest_checkpoint = state["oldest_checkpoint"]
        self.schedule.load(state["schedule"])
        self.phase = None if state["phase"] is None else msgspec.convert(state["phase"], schema.Phase)
        self.demand.update(state["demand"])
        self.paused.update(state["paused"])
        self.quarantine_row.update(state["quarantine_row"])
        self.leases.attempts.update(state["attempts"])
        for book, key in ((self.leases.counts, "leases"), (self.groups.counts, "groups"), (self.groups.voids, "voids")):
            for lane, counts in state[key].items():
                book[lane].update(counts)
        for lease in leases:
            lease.deadline = now + self.pacing.weights_timeout_s
            self.leases.restore(lease)
        for group in groups:
            self.groups.restore(group)
            if group.lane == "eval" and group.state == "queued":
                self.reports.append(group.group_id)
