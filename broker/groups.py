"""The book of groups: assembling, queued, leased, trained(v), void(reason); evaluation groups end as reported.

One group per lease, under the same id. A group is *active* while it is assembling, queued or leased to the learner:
that is what pacing counts. Queued groups keep their place for ever: a group that a resume puts back is ahead of
everything queued after it. Pure; called by `BrokerCore` only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec
from temper.common.schema import Lane, SampleMeta

GroupStateName = Literal["assembling", "queued", "leased", "trained", "void", "reported"]
ACTIVE = ("assembling", "queued", "leased")


class GroupRecord(msgspec.Struct, gc=False):
    """One group. `order` is its place in the queue (its first time complete), `version` that of its training step."""

    group_id: int
    lane: Lane
    domain: str
    state: GroupStateName = "assembling"
    version: int | None = None
    reason: str = ""
    order: int = 0
    nbytes: int = 0
    samples: int = 0
    scored: int = 0
    right: int = 0
    wrong: int = 0

    def add(self, samples: Sequence[SampleMeta], nbytes: int) -> None:
        """Count accepted samples in."""
        judged = [sample.correct for sample in samples]
        self.nbytes += nbytes
        self.samples += len(judged)
        self.scored += len(judged) - [sample.reward for sample in samples].count(None)
        self.right += judged.count(True)
        self.wrong += judged.count(False)

    @property
    def contrast(self) -> bool:
        """Some samples are right and some wrong by raw correctness, or nothing is known about it."""
        judged = self.right + self.wrong
        return judged == 0 or 0 < self.right < judged


class GroupBook:
    """All groups that may still matter, and the counts of all that ever were."""

    def __init__(self, lease_order: bool) -> None:
        self.lease_order = lease_order
        self.groups: dict[int, GroupRecord] = {}
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)  # lane -> state -> groups
        self.voids: dict[str, Counter[str]] = defaultdict(Counter)  # lane -> reason -> groups
        self.active: dict[str, list[int]] = defaultdict(list)  # lane -> ids, oldest first
        self.dirty: dict[int, GroupRecord] = {}
        self.order = 0
        self._assembling: dict[str, list[int]] = defaultdict(list)
        self._queue: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (place, id)

    def create(self, group_id: int, lane: Lane, domain: str) -> None:
        """The group of a new lease."""
        record = self.groups[group_id] = self.dirty[group_id] = GroupRecord(group_id, lane, domain)
        self.counts[lane]["assembling"] += 1
        self._list(record)

    def ahead(self, group_id: int, lane: str) -> int:
        """Active groups of the lane with a lower id."""
        return bisect_left(self.active[lane], group_id)

    def add(self, group_id: int, samples: Sequence[SampleMeta], nbytes: int) -> None:
        """Samples of the group were accepted."""
        record = self.groups[group_id]
        record.add(samples, nbytes)
        self.dirty[group_id] = record

    def enqueue(self, record: GroupRecord) -> None:
        """The group is complete, or a resume puts it back at its old place."""
        if record.state == "assembling":
            self.order += 1
            record.order = self.order
        self._move(record, "queued")

    def ready(self, lane: str) -> GroupRecord | None:
        """The next group to train: the oldest complete one; in lease order only if no older one is assembling."""
        queue, assembling = self._queue[lane], self._assembling[lane]
        if not queue or (self.lease_order and assembling and assembling[0] < queue[0][1]):
            return None
        return self.groups[queue[0][1]]

    def lease(self, record: GroupRecord) -> None:
        """The group goes to the learner."""
        self._move(record, "leased")

    def train(self, record: GroupRecord, version: int) -> None:
        """The group was trained in the step from `version`; provisional until a checkpoint covers it."""
        record.version = version
        self._move(record, "trained")

    def void(self, record: GroupRecord, reason: str) -> None:
        """The group is given up for a reason; that is final."""
        record.reason = reason
        self.voids[record.lane][reason] += 1
        self._move(record, "void")

    def report(self, record: GroupRecord) -> None:
        """An evaluation group reached the learner."""
        self._move(record, "reported")

    def forget(self, group_id: int) -> None:
        """Drop a finished group from memory; it stays counted, and in the ledger."""
        del self.groups[group_id]

    def restore(self, record: GroupRecord) -> None:
        """Take a record of an earlier process, in any order; the counts come separately."""
        self.groups[record.group_id] = record
        self._list(record)

    def nbytes(self) -> dict[str, int]:
        """Bytes of the active groups by state."""
        total = dict.fromkeys(ACTIVE, 0)
        for ids in self.active.values():
            for group_id in ids:
                record = self.groups[group_id]
                total[record.state] += record.nbytes
        return total

    def _move(self, record: GroupRecord, state: GroupStateName) -> None:
        lane, before = record.lane, record.state
        counts = self.counts[lane]
        counts[before] -= 1
        counts[state] += 1
        stays = before in ACTIVE and state in ACTIVE
        if before in ACTIVE and not stays:
            _remove(self.active[lane], record.group_id)
        if before == "assembling":
            _remove(self._assembling[lane], record.group_id)
        elif before == "queued":
            _remove(self._queue[lane], self._place(record))
        record.state = state
        self._list(record, stays)
        self.dirty[record.group_id] = record

    def _place(self, record: GroupRecord) -> tuple[int, int]:
        return (record.group_id if self.lease_order else record.order, record.group_id)

    def _list(self, record: GroupRecord, stays: bool = False) -> None:
        """Put the record where its state belongs; `stays`: it was active and was not taken from these."""
        state = record.state
        if state not in ACTIVE:
            return
        if not stays:
            insort(self.active[record.lane], record.group_id)
        if state == "assembling":
            insort(self._assembling[record.lane], record.group_id)
        elif state == "queued":
            insort(self._queue[record.lane], self._place(record))


def _remove(ordered: list, value: object) -> None:
    position = bisect_left(ordered, value)
    if position == len(ordered) or ordered[position] != value:
        raise AssertionError(f"{value} is not listed")
    del ordered[position]
