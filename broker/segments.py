"""Append-only segment files for the payloads of accepted samples.

Records are appended in batches and synced once a batch, *before* the transaction that refers to them: what the ledger
names is on disk, and a torn tail is never named. A new process always begins a new segment and removes files that
nothing refers to. A segment is deleted when its last record is released. Called by `Ledger` only.

Record: ``<4s crc32:u32 lease:u64 meta:u32 frames:u32>`` ``frame lengths:u64[frames]`` ``meta`` ``frames``; the checksum
covers everything after itself.
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

MAGIC = b"TSEG"
SEGMENT_BYTES = 64 * 1024 * 1024
_PREFIX = struct.Struct("<4sI")
_HEAD = struct.Struct("<QII")
_VECTORS = 512  # buffers in one writev; Linux takes 1024


class Ref(NamedTuple):
    """Where a record lies."""

    segment: int
    offset: int
    length: int


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
        self._file = -1
        self._size = 0
        self._pending: list[Any] = []
        self._readers: dict[int, int] = {}

    def adopt(self, refs: Iterable[Ref]) -> None:
        """At start: the records that the ledger names; files without any are removed."""
        self.live.update(ref.segment for ref in refs)
        for segment in self._files():
            if not self.live[segment]:
                self._path(segment).unlink()

    def append(self, lease_id: int, meta: bytes, frames: Sequence[Any]) -> Ref:
        """Queue a record for the next `flush`; its place is known at once."""
        if self._file < 0 or self._size >= self.segment_bytes:
            self._roll()
        lengths = [len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames]
        head = _HEAD.pack(lease_id, len(meta), len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths) + meta
        checksum = zlib.crc32(head)
        for frame in frames:
            checksum = zlib.crc32(frame, checksum)
        parts: list[Any] = [_PREFIX.pack(MAGIC, checksum) + head, *frames]
        length = _PREFIX.size + len(head) + sum(lengths)
        ref = Ref(self._current, self._size, length)
        self._pending += parts
        self._size += length
        self.live[ref.segment] += 1
        return ref

    def flush(self) -> None:
        """Write what was appended and, if this log syncs, wait until it is on disk."""
        if not self._pending:
            return
        self._write()
        if self.sync:
            os.fdatasync(self._file)

    def read(self, ref: Ref) -> tuple[int, bytes, list[memoryview]]:
        """(lease id, meta, frames) of a flushed record; EnvironmentFault if the file does not hold it."""
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
        lease_id, meta_bytes, count = _HEAD.unpack_from(view, _PREFIX.size)
        at = _PREFIX.size + _HEAD.size
        lengths = struct.unpack_from(f"<{count}Q", view, at)
        at += 8 * count
        meta = bytes(view[at : at + meta_bytes])
        at += meta_bytes
        frames = []
        for length in lengths:
            frames.append(view[at : at + length])
            at += length
        return lease_id, meta, frames

    def release(self, refs: Iterable[Ref]) -> None:
        """These records are not needed any more; empty segments disappear (but not the one being written)."""
        for ref in refs:
            self.live[ref.segment] -= 1
            if self.live[ref.segment] == 0:
                del self.live[ref.segment]
                if ref.segment != self._current:
                    self._delete(ref.segment)

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

    def _roll(self) -> None:
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            if not self.live[self._current]:
                self._delete(self._current)
        self._current += 1
        self._size = 0
        self._file = os.open(self._path(self._current), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        if self.sync:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        for start in range(0, len(pending), _VECTORS):
            vectors = pending[start : start + _VECTORS]
            left = sum(memoryview(part).nbytes for part in vectors)
            written = os.writev(self._file, vectors)
            self.written_bytes += written
            if written < left:  # rare: a signal, or the last bytes of a disk
                rest = memoryview(b"".join(vectors))[written:]
                while rest:
                    step = os.write(self._file, rest)
                    self.written_bytes += step
                    rest = rest[step:]

    def _delete(self, segment: int) -> None:
        reader = self._readers.pop(segment, None)
        if reader is not None:
            os.close(reader)
        with contextlib.suppress(FileNotFoundError):
            self._path(segment).unlink()

    def _damaged(self, ref: Ref, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._path(ref.segment)} is damaged at byte {ref.offset}: {what}")
