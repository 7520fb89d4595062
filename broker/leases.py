"""The book of leases: who runs what, until when, and what is still missing.

A lease is *in flight* from its creation until all its samples are there (*accepted*), its task failed too often
(*quarantined*), or nobody wants it any more (*cancelled*: the warm start, an evaluation or the run is over). While in
flight it is either *out* (one attempt, one peer, one deadline) or *waiting* to go out again under the same id and
seeds, for the indices that are missing. Pure; called by `BrokerCore` only.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from typing import Any, Literal

import msgspec
from temper.broker.events import PeerKey
from temper.common.schema import Lane

LeaseState = Literal["in flight", "accepted", "quarantined", "cancelled"]
AttemptState = Literal["none", "out", "returned", "expired", "done"]


class LeaseRecord(msgspec.Struct, gc=False):
    """One lease. `attempt` is the last token given out; `have` the indices accepted; `filled` those that
    infrastructure lost for good."""

    lease_id: int
    lane: Lane
    domain: str
    level: int
    task_seed: int
    size: int
    pinned_version: int | None = None
    state: LeaseState = "in flight"
    attempt: int = 0
    attempt_state: AttemptState = "none"
    peer: PeerKey = ""
    last_peer: PeerKey = ""
    min_version: int = 0
    touched: bool = False
    deadline: float = math.inf
    have: set[int] = msgspec.field(default_factory=set)
    filled: tuple[int, ...] = ()
    task_failures: int = 0
    infra_failures: int = 0
    error: str = ""

    @property
    def out(self) -> bool:
        """An attempt is with a peer."""
        return self.attempt_state == "out"

    @property
    def missing(self) -> list[int]:
        """Indices that no sample was accepted for."""
        have = self.have
        return [index for index in range(self.size) if index not in have] if have else list(range(self.size))


def dead_letter(record: LeaseRecord) -> dict[str, Any]:
    """What is kept of a lease that was given up, wholly or in part."""
    return {
        "lease_id": record.lease_id,
        "lane": record.lane,
        "domain": record.domain,
        "task_seed": record.task_seed,
        "reason": "quarantined" if record.state == "quarantined" else "infra",
        "attempts": record.attempt,
        "error": record.error,
    }


class LeaseBook:
    """All leases that may still matter, and the counts of all that ever were."""

    def __init__(self) -> None:
        self.leases: dict[int, LeaseRecord] = {}
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # lane -> state (and "created") -> leases
        self.attempts: Counter[str] = Counter()  # ended attempts by how
        self.waiting: dict[str, list[int]] = defaultdict(list)  # lane -> ids in flight but not out, oldest first
        self.held: dict[PeerKey, set[int]] = defaultdict(set)  # peer -> leases out with it
        self.changed: set[PeerKey] = set()  # peers that may have more or fewer free slots than when it was last looked
        self.dirty: dict[int, LeaseRecord] = {}
        self.attempted: dict[tuple[int, int], tuple[PeerKey, AttemptState]] = {}  # (lease, attempt) to write down
        self._deadlines: list[tuple[float, int, int]] = []

    def create(self, record: LeaseRecord) -> None:
        """A new lease, waiting for its first attempt."""
        self.leases[record.lease_id] = record
        self.counts[record.lane]["created"] += 1
        self.counts[record.lane]["in flight"] += 1
        insort(self.waiting[record.lane], record.lease_id)
        self.dirty[record.lease_id] = record

    def put_out(self, record: LeaseRecord, peer: PeerKey, min_version: int, deadline: float) -> None:
        """Start a new attempt with `peer`; until it is touched `deadline` bounds the wait for weights."""
        self._unwait(record)
        record.attempt += 1
        record.attempt_state, record.touched = "out", False
        record.peer, record.min_version = peer, min_version
        self.attempted[record.lease_id, record.attempt] = peer, "out"
        self.held[peer].add(record.lease_id)
        self.changed.add(peer)
        self._arm(record, deadline)

    def touch(self, record: LeaseRecord, deadline: float) -> None:
        """The attempt started: from here its own deadline counts."""
        if not record.touched:
            record.touched = True
            self._arm(record, deadline)

    def prolong(self, record: LeaseRecord, deadline: float) -> None:
        """The attempt's deadline does not come before this one."""
        if deadline > record.deadline:
            self._arm(record, deadline)

    def take_back(self, record: LeaseRecord, how: AttemptState) -> None:
        """The attempt out with a peer ended without its missing samples: the lease waits to go out again."""
        self._end_attempt(record, how)
        insort(self.waiting[record.lane], record.lease_id)

    def close(self, record: LeaseRecord, state: LeaseState) -> None:
        """The lease is in flight no more."""
        if record.out:
            self._end_attempt(record, "done" if state == "accepted" else "returned")
        else:
            self._unwait(record)
        self.counts[record.lane]["in flight"] -= 1
        self.counts[record.lane][state] += 1
        record.state = state
        self.dirty[record.lease_id] = record

    def forget(self, lease_id: int) -> None:
        """Drop a closed lease from memory; it stays counted, and in the ledger."""
        del self.leases[lease_id]

    def overdue(self, now: float) -> list[LeaseRecord]:
        """Leases whose attempt has passed its deadline."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease_id, attempt = heapq.heappop(self._deadlines)
            record = self.leases.get(lease_id)
            if record and record.out and record.attempt == attempt and record.deadline == deadline:
                found.append(record)
        return found

    def restore(self, record: LeaseRecord) -> None:
        """Take a record of an earlier process; whoever held its attempt has to show up again before `deadline`."""
        self.leases[record.lease_id] = record
        if record.out:
            self.held[record.peer].add(record.lease_id)
            self._arm(record, record.deadline)
        elif record.state == "in flight":
            insort(self.waiting[record.lane], record.lease_id)

    def _arm(self, record: LeaseRecord, deadline: float) -> None:
        record.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, record.lease_id, record.attempt))
        self.dirty[record.lease_id] = record

    def _end_attempt(self, record: LeaseRecord, how: AttemptState) -> None:
        held = self.held[record.peer]
        held.discard(record.lease_id)
        self.changed.add(record.peer)
        if not held:
            del self.held[record.peer]
        self.attempted[record.lease_id, record.attempt] = record.peer, how
        record.attempt_state, record.last_peer, record.peer = how, record.peer, ""
        record.deadline = math.inf
        self.attempts[how] += 1
        self.dirty[record.lease_id] = record

    def _unwait(self, record: LeaseRecord) -> None:
        waiting = self.waiting[record.lane]
        position = bisect_left(waiting, record.lease_id)
        if position < len(waiting) and waiting[position] == record.lease_id:
            del waiting[position]
