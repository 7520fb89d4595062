"""The accepted samples themselves: in memory while there is room, in segment files always or beyond it.

What came is kept as it came: each message's encoded meta and its array frames, lease by lease. Memory is bounded by bytes: the
newest leases stay cached, older ones are read back from their segments when their group goes to the learner. Called by
`Ledger` only, on the event loop; the one thing that happens elsewhere is `SegmentLog.write`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from temper.broker.segments import Message, Ref, SegmentLog

Indices = tuple[int, ...]


class Shelf(msgspec.Struct, gc=False):
    """What is there of one lease, part by part (a part is one accepted message).

    `messages` are None once only a segment holds them. `queued` parts have a place in `refs`, `written` ones lie there.
    """

    lease_id: int
    indices: list[Indices]
    have: set[int]
    messages: list[Message | None]
    refs: list[Ref]
    nbytes: int = 0  # of what is cached
    queued: int = 0
    written: int = 0


class Run(msgspec.Struct, frozen=True, gc=False):
    """Parts of one lease in one record, from number `first` on: a row of the ledger's table `parts`."""

    lease_id: int
    first: int
    indices: list[Indices]
    ref: Ref


class PayloadStore:
    """All payloads that may still be needed."""

    def __init__(self, segments: SegmentLog, *, cache_bytes: int) -> None:
        self.segments = segments
        self.cache_bytes = cache_bytes
        self.cached_bytes = 0
        self.shelves: dict[int, Shelf] = {}
        self._cached: dict[int, Shelf] = {}  # those with messages in memory, the oldest first
        self._unwritten: dict[int, Shelf] = {}  # those with parts that have no place yet
        self._unneeded: list[Ref] = []
        self.dropped: list[
            tuple[int, int, list[Indices]]
        ] = []  # released before they had a place: (lease, first, indices)

    def adopt(self, runs: Iterable[Run]) -> None:
        """At start: everything that the ledger names, in order."""
        for run in runs:
            shelf = self.shelves.get(run.lease_id)
            if shelf is None:
                shelf = self.shelves[run.lease_id] = Shelf(run.lease_id, [], set(), [], [])
            shelf.indices += run.indices
            shelf.have.update(*run.indices)
            shelf.messages += [None] * len(run.indices)
            shelf.refs.append(run.ref)
            shelf.queued = shelf.written = len(shelf.indices)
        self.segments.adopt(ref for shelf in self.shelves.values() for ref in shelf.refs)

    def add(self, lease_id: int, indices: Indices, meta: bytes, frames: Sequence[Any], nbytes: int) -> int:
        """Keep one message's samples, `nbytes` of frames; returns the number of the part."""
        return self.add_run(lease_id, [indices], [(meta, frames)], nbytes, indices)

    def add_run(
        self,
        lease_id: int,
        indices: Sequence[Indices],
        messages: Sequence[Message],
        nbytes: int,
        flat: Iterable[int],
    ) -> int:
        """`add` for several messages, `flat` are all of their indices; returns the number of the first part."""
        shelf = self.shelves.get(lease_id)
        if shelf is None:
            shelf = self.shelves[lease_id] = Shelf(lease_id, [], set(), [], [])
        part = len(shelf.indices)
        shelf.indices += indices
        shelf.have.update(flat)
        shelf.messages += messages
        shelf.nbytes += nbytes
        self.cached_bytes += nbytes
        self._cached[lease_id] = self._unwritten[lease_id] = shelf
        return part

    def place(self, everything: bool) -> list[Run]:
        """Queue unwritten parts for their segments: all, or the oldest leases that the cache has no room for."""
        runs: list[Run] = []
        excess = self.cached_bytes - self.cache_bytes
        if not everything and excess <= 0:
            return runs
        for lease_id in list(self._unwritten):
            if not everything and excess <= 0:
                break
            shelf = self._unwritten.pop(lease_id)
            excess -= shelf.nbytes
            first = shelf.queued
            messages = [message for message in shelf.messages[first:] if message is not None]
            ref = self.segments.append(lease_id, messages)
            shelf.refs.append(ref)
            shelf.queued = len(shelf.indices)
            runs.append(Run(lease_id, first, shelf.indices[first:], ref))
        return runs

    def written(self, runs: Iterable[Run]) -> None:
        """What these runs name can be read back now."""
        for run in runs:
            shelf = self.shelves.get(run.lease_id)
            if shelf is not None:
                shelf.written = run.first + len(run.indices)
        self._trim()

    def _trim(self) -> None:
        """Let go of the oldest cached leases that can be read back."""
        if self.cached_bytes <= self.cache_bytes:
            return
        for lease_id, shelf in list(self._cached.items()):
            if self.cached_bytes <= self.cache_bytes:
                return
            if shelf.written == len(shelf.messages):
                del self._cached[lease_id]
                shelf.messages = [None] * len(shelf.messages)
                self.cached_bytes -= shelf.nbytes
                shelf.nbytes = 0

    def cached(self, lease_id: int) -> list[Message] | None:
        """`read`, if all of it is in memory; else None."""
        shelf = self._cached.get(lease_id)
        if shelf is None or None in shelf.messages:
            return None
        return shelf.messages.copy()  # type: ignore[return-value]

    def read(self, lease_id: int) -> list[Message]:
        """The parts of a group in order of arrival: their encoded metas and array frames."""
        if (cached := self.cached(lease_id)) is not None:
            return cached
        shelf = self.shelves.get(lease_id)
        if shelf is None:
            return []
        found: list[Message] = []
        evicted, refs = shelf.messages.count(None), iter(shelf.refs)
        while len(found) < evicted:
            found += self.segments.read(next(refs))[1]
        return found + [message for message in shelf.messages[len(found) :] if message is not None]

    def release(self, lease_id: int) -> bool:
        """These samples are not needed any more. True if some of them have a place, which the ledger must forget."""
        shelf = self.shelves.pop(lease_id, None)
        if shelf is None:
            return False
        if self._unwritten.pop(lease_id, None) is not None:
            self.dropped.append((lease_id, shelf.queued, shelf.indices[shelf.queued :]))
        if self._cached.pop(lease_id, None) is not None:
            self.cached_bytes -= shelf.nbytes
        self._unneeded += shelf.refs
        return bool(shelf.refs)

    def unneeded(self) -> list[Ref]:
        """Places that nothing needs any more since the last call: to be released when the transaction that no longer
        names them is durable."""
        refs, self._unneeded = self._unneeded, []
        return refs
