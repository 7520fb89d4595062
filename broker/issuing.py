"""Which lease goes out to whom, and when a new one is begun. Pure; a part of `BrokerCore`."""

from __future__ import annotations

import heapq

from temper.broker import pacing
from temper.broker.events import Action, PeerKey, SendLease
from temper.broker.leases import LeaseRecord
from temper.broker.state import PeerRecord, RunState
from temper.common import schema
from temper.common.schedule import Assignment
from temper.common.schema import Lane


class Issuing:
    """Hands leases out by the rules of `pacing`: those that came back first, the oldest first."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self._free: list[tuple[int, int, PeerKey]] = []  # a heap of places, some of them outdated

    def create(self, lane: Lane, task: Assignment, size: int, pinned: int | None = None) -> LeaseRecord:
        """A new lease and its group, waiting to go out."""
        record = LeaseRecord(task.lease_id, lane, task.domain, task.level, task.task_seed, size, pinned)
        self.run.leases.create(record)
        self.run.groups.create(record.lease_id, lane, record.domain)
        return record

    def issue(self, now: float) -> list[Action]:
        """Everything that may go out now. Without the lineage's learner nothing does: what is begun without it may be of
        a dead lineage when it is done."""
        run = self.run
        actions: list[Action] = []
        if not run.learner_serves or run.failed is not None or run.over is not None or run.closing:
            return actions
        if run.leases.waiting["eval"]:
            self._send_waiting("eval", "eval", now, actions)
        lane = run.lane
        if lane is None or run.phase is None:
            return actions
        if run.leases.waiting[lane]:
            self._send_waiting(lane, "actor", now, actions)
        room = self._room(lane, run.phase)
        if room > 0 and (shares := run.shares()):
            self._begin_new(lane, run.phase, shares, room, now, actions)
        return actions

    def _begin_new(
        self,
        lane: Lane,
        phase: schema.Phase,
        shares: dict[str, tuple[int, float]],
        room: int,
        now: float,
        actions: list[Action],
    ) -> None:
        """New leases, each to the actor with the most free slots (of those the one that came first), as far as any has some."""
        self._reckon()
        while room > 0 and (taker := self._freest()) is not None:
            record = self.create(lane, self.run.schedule.next(lane, shares), phase.samples_per_group)
            self._send(record, taker, now, actions)
            room -= 1
            self.run.leases.changed.discard(taker.peer)
            if (place := self._place(taker.peer)) is not None:  # in place of the one that `_freest` left on top
                heapq.heapreplace(self._free, place)
            else:
                heapq.heappop(self._free)

    def _place(self, key: PeerKey) -> tuple[int, int, PeerKey] | None:
        """The place of an actor among those with free slots, None if it is not among them."""
        peer = self.run.peers.get(key)
        if peer is None or peer.role != "actor" or peer.draining or peer.returning:
            return None
        excess = len(self.run.leases.held.get(key, ())) - peer.slots
        return (excess, peer.joined, key) if excess < 0 else None

    def _reckon(self) -> None:
        """Note the places of actors that changed. Old ones stay in the heap until they come up: the work is that of the
        changes, not of all peers."""
        changed = self.run.leases.changed
        for key in changed:
            if (place := self._place(key)) is not None:
                heapq.heappush(self._free, place)
        changed.clear()
        if len(self._free) > 64 + 4 * len(self.run.peers):
            self._free = [place for key in self.run.peers if (place := self._place(key)) is not None]
            heapq.heapify(self._free)

    def _freest(self) -> PeerRecord | None:
        while self._free:
            place = self._free[0]
            if place == self._place(place[2]):
                return self.run.peers[place[2]]
            heapq.heappop(self._free)
        return None

    def _room(self, lane: Lane, phase: schema.Phase) -> int:
        run = self.run
        left = run.max_steps - run.steps_done if lane == "train" else None
        active = len(run.groups.active[lane])
        return pacing.capacity(run.pacing.max_staleness, phase.groups_per_step, active, left)

    def _send_waiting(self, lane: Lane, role: str, now: float, actions: list[Action]) -> None:
        """Leases that came back go out before any new one, the oldest first."""
        run = self.run
        for lease_id in list(run.leases.waiting[lane]):
            if lane != "eval":
                assert run.phase is not None
                ahead = run.groups.ahead(lease_id, lane)
                if not pacing.may_go_out(run.pacing.max_staleness, run.phase.groups_per_step, ahead):
                    return
            record = run.leases.leases[lease_id]
            taker = self._taker(role, record)
            if taker is None:
                return
            self._send(record, taker, now, actions)

    def _taker(self, role: str, record: LeaseRecord) -> PeerRecord | None:
        """Who gets a lease that came back: the peer with the most free slots; not the one that just failed it, if another is
        free."""
        best, best_key = None, (False, 0, 0)
        for peer in self.run.peers.values():
            if peer.role != role or peer.draining or peer.returning:
                continue
            held = self.run.leases.held.get(peer.peer, ())
            free = peer.slots - len(held)
            if free <= 0:
                continue
            if record.pinned_version is not None:
                pins = {self.run.leases.leases[lease_id].pinned_version for lease_id in held}
                if pins - {record.pinned_version}:
                    continue  # an evaluator holds one version at a time
            key = (record.last_peer != peer.peer, free, -peer.joined)
            if best is None or key > best_key:
                best, best_key = peer, key
        return best

    def _send(self, record: LeaseRecord, taker: PeerRecord, now: float, actions: list[Action]) -> None:
        run = self.run
        assert run.lineage is not None
        if record.pinned_version is not None:
            version = record.pinned_version
        else:
            version = 0 if record.lane == "demo" else run.version
        run.leases.put_out(record, taker.peer, version, now + run.pacing.weights_timeout_s)
        lease = schema.Lease(
            lease_id=record.lease_id,
            attempt=record.attempt,
            lineage=run.lineage,
            lane=record.lane,
            domain=record.domain,
            level=record.level,
            task_seed=record.task_seed,
            indices=record.missing,
            min_version=version,
            pinned_version=record.pinned_version,
            deadline_s=run.pacing.lease_timeout_s,
        )
        actions.append(SendLease(taker.peer, lease))
