"""The arrays of accepted samples: in memory while there is room, in segment files always or beyond it.

Memory is bounded by bytes: the newest parts stay cached, older ones are read back from their segments when their group
goes to the learner. Called by `Ledger` only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.broker.segments import Ref, SegmentLog
from temper.common.schema import SamplePart
from temper.common.wire import pack_meta, unpack_meta

Payload = tuple[SamplePart, Sequence[Any]]
Key = tuple[int, int]  # lease, number of the part


@dataclass(slots=True)
class Part:
    """The samples of one accepted message; `ref` None until they lie in a segment."""

    indices: tuple[int, ...]
    nbytes: int
    ref: Ref | None = None


class PayloadStore:
    """All payloads that may still be needed."""

    def __init__(self, folder: Path, *, sync: bool, cache_bytes: int) -> None:
        self.segments = SegmentLog(folder, sync=sync)
        self.cache_bytes = cache_bytes
        self.cached_bytes = 0
        self.parts: dict[int, list[Part]] = {}
        self.have: dict[int, set[int]] = {}  # sample indices that are here, by lease
        self._cache: OrderedDict[Key, Payload] = OrderedDict()
        self._unwritten: OrderedDict[Key, Part] = OrderedDict()
        self._unneeded: list[Ref] = []

    def adopt(self, rows: Iterable[tuple[int, tuple[int, ...], Ref]]) -> None:
        """At start: (lease, indices, place) of every part that the ledger names, in order."""
        for lease_id, indices, ref in rows:
            self.parts.setdefault(lease_id, []).append(Part(indices, ref.length, ref))
            self.have.setdefault(lease_id, set()).update(indices)
        self.segments.adopt(part.ref for parts in self.parts.values() for part in parts if part.ref is not None)

    def add(
        self,
        lease_id: int,
        part: SamplePart,
        indices: tuple[int, ...],
        frames: Sequence[Any],
        nbytes: int | None = None,
    ) -> int:
        """Keep one message's samples; returns the number of the part. `nbytes` of the frames, if known."""
        parts = self.parts.get(lease_id)
        if parts is None:
            parts, self.have[lease_id] = self.parts.setdefault(lease_id, []), set()
        self.have[lease_id].update(indices)
        key = (lease_id, len(parts))
        kept = Part(indices, _nbytes(frames) if nbytes is None else nbytes)
        parts.append(kept)
        self._cache[key] = (part, frames)
        self._unwritten[key] = kept
        self.cached_bytes += kept.nbytes
        return key[1]

    def write(self, everything: bool) -> list[tuple[Key, Part]]:
        """Write what is only in memory to the segments: all of it, or what the cache has no room for.

        Returns the parts written; they are on disk if the log syncs.
        """
        written = []
        while self._unwritten and (everything or self.cached_bytes > self.cache_bytes):
            key, part = self._unwritten.popitem(last=False)
            meta, frames = self._cache[key]
            part.ref = self.segments.append(key[0], pack_meta(meta), frames)
            written.append((key, part))
            if not everything:
                del self._cache[key]
                self.cached_bytes -= part.nbytes
        self.segments.flush()
        return written

    def trim(self) -> None:
        """Let go of the oldest cached parts that can be read back."""
        for key in list(self._cache) if self.cached_bytes > self.cache_bytes else ():
            if self.cached_bytes <= self.cache_bytes:
                return
            if key not in self._unwritten:
                del self._cache[key]
                self.cached_bytes -= self.parts[key[0]][key[1]].nbytes

    def read(self, lease_id: int) -> list[Payload]:
        """The parts of a group in order of arrival: their metas and array frames."""
        found: list[Payload] = []
        for number, part in enumerate(self.parts.get(lease_id, ())):
            payload = self._cache.get((lease_id, number))
            if payload is None:
                assert part.ref is not None
                _, meta, frames = self.segments.read(part.ref)
                payload = (unpack_meta(meta, SamplePart), frames)
            found.append(payload)
        return found

    def release(self, lease_id: int) -> bool:
        """These samples are not needed any more; False if there are none."""
        parts = self.parts.pop(lease_id, None)
        self.have.pop(lease_id, None)
        for number, part in enumerate(parts or ()):
            key = (lease_id, number)
            self._unwritten.pop(key, None)
            if self._cache.pop(key, None) is not None:
                self.cached_bytes -= part.nbytes
            if part.ref is not None:
                self._unneeded.append(part.ref)
        return parts is not None

    def sweep(self) -> None:
        """Remove segments that nothing needs: call when the transaction that no longer names them is durable."""
        self.segments.release(self._unneeded)
        self._unneeded = []


def _nbytes(frames: Sequence[Any]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
