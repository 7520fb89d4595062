"""Append-only segment files for the payloads of accepted samples.

A record holds the messages of one lease that one transaction names. Records are queued on the event loop (`append`; their
place is known at once), and written and synced once a batch, in any one thread (`write`), *before* the transaction that
refers to them: what the ledger names is on disk, and a torn tail is never named. A new process always begins a new segment
and removes files that nothing refers to. A segment is deleted when its last record is released. Called by `Ledger` only.

Record: ``<4s crc32:u32 lease:u64 parts:u32>`` ``(meta bytes:u32, frames:u32)[parts]`` ``frame bytes:u64[all frames]`` and, part
by part, ``meta`` ``frames``; the checksum covers everything after itself.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from temper.common.errors import EnvironmentFault
from temper.common.wire import nbytes

MAGIC = b"TSEG"
SEGMENT_BYTES = 64 * 1024 * 1024
JOIN_BYTES = 64 * 1024  # a record up to here is one buffer: copying it is cheaper than handing out its pieces
_PREFIX = struct.Struct("<4sI")
_HEAD = struct.Struct("<QI")
_VECTORS = 512  # buffers in one writev; Linux takes 1024

Message = tuple[bytes, Sequence[Any]]  # a part: the meta as it came, its frames


class Ref(NamedTuple):
    """Where a record lies."""

    segment: int
    offset: int
    length: int


Chunk = tuple[
    int, list[Any], int | None
]  # segment, the buffers of a record to append to it, their checksum if it is known


class SegmentLog:
    """The segment files of one folder."""

    def __init__(self, folder: Path, *, sync: bool, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.sync = sync
        self.segment_bytes = segment_bytes
        self.live: Counter[int] = Counter()  # segment -> records that are still needed
        self.written_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._current = max(self._files(), default=0)
        self._size = segment_bytes  # the first record begins a segment of its own
        self._queue: list[Chunk] = []
        self._readers: dict[int, int] = {}
        self._file = -1  # the writing thread's: the open segment
        self._open = 0

    def adopt(self, refs: Iterable[Ref]) -> None:
        """At start: the records that the ledger names; files without any are removed."""
        self.live.update(ref.segment for ref in refs)
        for segment in self._files():
            if not self.live[segment]:
                self._path(segment).unlink()

    def append(self, lease_id: int, parts: Sequence[Message]) -> Ref:
        """Queue a record for the next `take`."""
        if self._size >= self.segment_bytes:
            self._current += 1
            self._size = 0
        counts: list[int] = []
        lengths: list[int] = []
        buffers: list[Any] = []
        for meta, frames in parts:
            counts += (len(meta), len(frames))
            buffers.append(meta)
            for frame in frames:
                lengths.append(len(frame) if type(frame) is bytes else nbytes(frame))
            buffers += frames
        head = _HEAD.pack(lease_id, len(parts)) + struct.pack(f"<{len(counts)}I{len(lengths)}Q", *counts, *lengths)
        size = len(head) + sum(counts[::2]) + sum(lengths)
        checksum = None
        if size <= JOIN_BYTES:
            buffers = [b"".join([head, *buffers])]
            checksum = zlib.crc32(
                buffers[0]
            )  # while it is in the cache, and without two threads taking turns for each record
        else:
            buffers.insert(0, head)
        ref = Ref(self._current, self._size, _PREFIX.size + size)
        self._queue.append((self._current, buffers, checksum))
        self._size += ref.length
        self.live[ref.segment] += 1
        return ref

    def take(self) -> list[Chunk]:
        """What was appended since the last call, to be handed to `write` in this order."""
        queue, self._queue = self._queue, []
        return queue

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Write what `take` gave and, if this log syncs, wait until it is on disk. One caller at a time, in any thread."""
        pending: list[Any] = []
        for segment, buffers, known in chunks:
            if segment != self._open:
                self._flush(pending)
                pending = []
                self._roll(segment)
            pending.append(_PREFIX.pack(MAGIC, _checksum(buffers) if known is None else known))
            pending += buffers
        self._flush(pending)

    def flush(self) -> None:
        """`write` what is queued, here and now."""
        self.write(self.take())

    def read(self, ref: Ref) -> tuple[int, list[tuple[bytes, list[memoryview]]]]:
        """(lease id, its parts) of a written record; EnvironmentFault if the file does not hold it."""
        file = self._readers.get(ref.segment)
        if file is None:
            try:
                file = self._readers[ref.segment] = os.open(self._path(ref.segment), os.O_RDONLY)
            except OSError as error:
                raise EnvironmentFault(f"{self._path(ref.segment)}: {error.strerror}") from error
        data = os.pread(file, ref.length, ref.offset)
        view = memoryview(data)
        if len(data) != ref.length or len(data) < _PREFIX.size + _HEAD.size:
            raise self._damaged(ref, f"{len(data)} bytes, expected {ref.length}")
        magic, checksum = _PREFIX.unpack_from(view)
        if magic != MAGIC or zlib.crc32(view[_PREFIX.size :]) != checksum:
            raise self._damaged(ref, "its checksum is wrong")
        lease_id, count = _HEAD.unpack_from(view, _PREFIX.size)
        at = _PREFIX.size + _HEAD.size
        counts = struct.unpack_from(f"<{2 * count}I", view, at)
        at += 8 * count
        lengths = iter(struct.unpack_from(f"<{sum(counts[1::2])}Q", view, at))
        at += 8 * sum(counts[1::2])
        parts = []
        for meta_bytes, frames in zip(counts[::2], counts[1::2], strict=True):
            meta = bytes(view[at : at + meta_bytes])
            at += meta_bytes
            found = []
            for _ in range(frames):
                length = next(lengths)
                found.append(view[at : at + length])
                at += length
            parts.append((meta, found))
        return lease_id, parts

    def release(self, refs: Iterable[Ref]) -> None:
        """These records are not needed any more; segments without any disappear (but not the one being written)."""
        for ref in refs:
            self.live[ref.segment] -= 1
        for segment in [number for number, count in self.live.items() if not count and number != self._current]:
            del self.live[segment]
            self._delete(segment)

    def close(self) -> None:
        """Write what is queued and close the files."""
        self.flush()
        for file in [*self._readers.values(), *([self._file] if self._file >= 0 else [])]:
            os.close(file)
        self._readers.clear()
        self._file = -1

    def _files(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.seg") if path.stem.isdecimal())

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}.seg"

    def _roll(self, segment: int) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._open = segment
        if self.sync:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _flush(self, pending: list[Any]) -> None:
        if not pending:
            return
        for start in range(0, len(pending), _VECTORS):
            vectors = pending[start : start + _VECTORS]
            left = sum(map(nbytes, vectors))
            written = os.writev(self._file, vectors)
            self.written_bytes += written
            if written < left:  # rare: a signal, or the last bytes of a disk
                rest = memoryview(b"".join(vectors))[written:]
                while rest:
                    step = os.write(self._file, rest)
                    self.written_bytes += step
                    rest = rest[step:]
        if self.sync:
            os.fdatasync(self._file)

    def _delete(self, segment: int) -> None:
        reader = self._readers.pop(segment, None)
        if reader is not None:
            os.close(reader)
        with contextlib.suppress(FileNotFoundError):
            self._path(segment).unlink()

    def _damaged(self, ref: Ref, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._path(ref.segment)} is damaged at byte {ref.offset}: {what}")


def _checksum(buffers: Iterable[Any]) -> int:
    checksum = 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum
