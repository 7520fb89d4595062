"""What actors say about their attempts: started, samples, returned, still held; and what their silence means.

An attempt is known by (lease, attempt token, peer); whatever comes for another one is refused. Pure; a part of
`BrokerCore`.
"""

from __future__ import annotations

from collections.abc import Sequence

from temper.broker.events import Action, Apart, Ignore, Note, PeerKey, RefuseAttempt, SamplesArrived, Store
from temper.broker.fates import Fates
from temper.broker.leases import LeaseRecord
from temper.broker.state import RunState
from temper.common import schema
from temper.common.grading import MOST_GRADING_S

ABANDONED = "this attempt was abandoned"


class Attempts:
    """Handlers of the actors' and evaluators' messages."""

    def __init__(self, run: RunState, fates: Fates) -> None:
        self.run = run
        self.fates = fates
        self.ended = False

    def _find(self, peer: PeerKey, lease_id: int, attempt: int) -> LeaseRecord | None:
        """The lease, if this attempt of it is out with this peer."""
        record = self.run.leases.leases.get(lease_id)
        if record is None or not record.out or record.attempt != attempt or record.peer != peer:
            return None
        return record

    def touch(self, peer: PeerKey, body: schema.Touch, now: float) -> list[Action]:
        """The attempt has its weights and begins: its deadline runs from here. Later touches leave its jobs their time."""
        record = self._find(peer, body.lease_id, body.attempt)
        if record is None:
            return [RefuseAttempt(peer, body.lease_id, body.attempt, ABANDONED)]
        if not record.touched:
            self.run.leases.touch(record, now + self.run.pacing.lease_timeout_s)
        elif 0 < body.grading_s <= MOST_GRADING_S:
            self.run.leases.prolong(record, now + body.grading_s)
        return []

    def returned(self, peer: PeerKey, body: schema.Return, now: float) -> list[Action]:
        """The attempt ends without its missing samples."""
        record = self._find(peer, body.lease_id, body.attempt)
        if record is None:
            return []
        if body.cause == "task":
            return self.fates.task_failed(record, body.error)
        if body.cause == "infra":
            return self.fates.lost(record, body.error)
        self.run.leases.take_back(record, "returned")
        self.run.peers[peer].draining = True  # until its heartbeats say otherwise
        return []

    def batch(self, arrivals: Sequence[SamplesArrived]) -> list[Action]:
        """Samples as they came, in order: first what becomes of each, then what follows from it: the last missing one
        completes the lease. `ended`: of a lease that is not out, or is not any more."""
        followed: list[Action] = []
        found: list[Action] = []
        self.ended = False
        leases, groups, dirty = self.run.leases.leases, self.run.groups.groups, self.run.groups.dirty
        for event in arrivals:
            samples, lease_id = event.samples, event.lease_id
            record = leases.get(lease_id)
            indices = (samples[0].index,) if len(samples) == 1 else tuple([sample.index for sample in samples])
            if (  # what comes most: new samples of an attempt that is out with that peer
                record is not None
                and record.attempt_state == "out"
                and record.attempt == event.attempt
                and record.peer == event.peer
                and indices
                and (have := record.have).isdisjoint(indices)
                and min(indices) >= 0
                and max(indices) < record.size
                and (len(indices) == 1 or len(set(indices)) == len(indices))
            ):
                have.update(indices)
                group = dirty[lease_id] = groups[lease_id]
                group.add(samples, event.nbytes)
                found.append(Store(lease_id, indices))
                if len(have) == record.size:
                    self.ended = True
                    followed += self.fates.complete(record)
            else:
                found.append(self._not_stored(record, event, indices))
        return found + followed

    def _not_stored(self, record: LeaseRecord | None, event: SamplesArrived, indices: tuple[int, ...]) -> Action:
        """Ignore samples (a repeated message) or refuse them; joined ones come again one by one."""
        lease_id, peer = event.lease_id, event.peer
        if event.joined:
            return Apart(lease_id)
        if record is None or not record.out or record.attempt != event.attempt or record.peer != peer:
            self.ended = True
            if record is not None and record.last_peer == peer and record.have.issuperset(indices):
                return Ignore(lease_id, indices)
            return RefuseAttempt(peer, lease_id, event.attempt, ABANDONED)
        if record.have.issuperset(indices):
            return Ignore(lease_id, indices)
        reason = f"sample indices {list(indices)}, missing are {record.missing}"
        return RefuseAttempt(peer, lease_id, event.attempt, reason)

    def holding(self, peer: PeerKey, body: schema.Holding) -> list[Action]:
        """What the peer still works on after this broker came back: what it never got goes out again, what it should not
        have is refused."""
        told = set(body.attempts)
        actions: list[Action] = []
        for lease_id in sorted(self.run.leases.held.get(peer, ())):
            record = self.run.leases.leases[lease_id]
            if (lease_id, record.attempt) in told:
                told.discard((lease_id, record.attempt))
            else:
                self.run.leases.take_back(record, "returned")
        return actions + [RefuseAttempt(peer, lease_id, attempt, ABANDONED) for lease_id, attempt in sorted(told)]

    def expire(self, now: float) -> list[Action]:
        """Attempts whose deadline has passed go out again; only those that had started count as failures."""
        actions: list[Action] = []
        for record in self.run.leases.overdue(now):
            peer, attempt = record.peer, record.attempt
            name = self.run.peers[peer].name if peer in self.run.peers else peer
            waited = "its samples" if record.touched else f"weights of version {record.min_version}"
            reason = f"the attempt's deadline passed while {name} waited for {waited}"
            if record.touched:
                actions += self.fates.lost(record, reason, "expired")
            else:
                record.error = self.run.trouble = reason
                self.run.leases.take_back(record, "expired")
            actions += [
                RefuseAttempt(peer, record.lease_id, attempt, reason),
                Note(f"lease {record.lease_id}: {reason}"),
            ]
        return actions
