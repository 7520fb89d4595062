"""The layout of a weight log entry: chunks, their records, and how a chain of entries is checked for order.

A chunk is ``u32 length | MessagePack ChunkMeta | streams``; the streams of a piece follow one another in the order of the
records. Only the first chunk of an entry has a `Head`; a snapshot's holds the table of tensors, a delta refers to it by
digest. Everything read here may come from the wire or a damaged disk: it is checked, bounded, never trusted.
Used by ``delta`` and ``weight_chain``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from temper.common import coding
from temper.common.bits import Weights, digest_of
from temper.common.errors import TemperError
from temper.common.schema import Version
from temper.common.wire import FRAME_LIMIT_BYTES

FORMAT = "temper-weights"
FORMAT_VERSION = 1
CHUNK_BYTES = FRAME_LIMIT_BYTES
SEGMENT_VALUES = 1 << 20  # a longer tensor is coded in pieces of this many values
_LENGTH = struct.Struct("<I")

Chunk = bytes
Table = list[tuple[str, str, tuple[int, ...]]]  # (name, dtype, shape), sorted by name
Reason = Literal["gap", "base", "layout", "malformed", "truncated", "digest", "engine"]


class DeltaError(TemperError):
    """These chunks do not lead from this base to the version they claim. `reason` is a short label for counting."""

    exit_code = 3

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Head(msgspec.Struct, array_like=True, frozen=True):
    """First chunk of an entry. `layout` is the digest of the table, `table` rows are (name, dtype, shape)."""

    format: str
    format_version: int
    version: Version
    base: Version | None
    layout: bytes
    table: Table | None = None


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One piece: values [start, start + count) of the tensor at index `tensor` of the table (sorted by name)."""

    tensor: int
    start: int
    count: int
    kind: int
    parameters: tuple[int, ...]
    sizes: tuple[int, ...]


class ChunkMeta(msgspec.Struct, array_like=True, frozen=True):
    """The head of a chunk: its place in the entry, whether it ends it, and the records whose streams follow."""

    index: int
    last: bool
    records: list[Record]
    head: Head | None = None


@dataclass(slots=True)
class Tally:
    """What an `encode` did, filled in as its chunks come out: values of the model, how many changed, coded bytes."""

    values: int = 0
    changed: int = 0
    nbytes: int = 0

    @property
    def density(self) -> float:
        """Share of the values that changed."""
        return self.changed / self.values if self.values else 0.0


def table_of(weights: Weights) -> Table:
    """(name, dtype, shape) of every tensor, sorted by name: what a record's tensor index refers to."""
    return [(name, weights.tensors[name].dtype, weights.tensors[name].shape) for name in sorted(weights.tensors)]


def layout_of(table: Table) -> bytes:
    """blake2b-16 of a table: two versions can be chained only if theirs are equal."""
    return digest_of(np.frombuffer(msgspec.msgpack.encode(table), np.uint8))


def record_of(tensor: int, start: int, count: int, coded: coding.Coded) -> Record:
    return Record(tensor, start, count, coded.kind, coded.parameters, tuple(len(s) for s in coded.streams))


def pack(head: Head | None, pieces: Iterable[tuple[Record, coding.Coded]], tally: Tally) -> Iterator[Chunk]:
    """Pieces into chunks. The last chunk comes out only after `pieces` is exhausted, so an error there withholds it."""
    room = CHUNK_BYTES - len(msgspec.msgpack.encode(head)) - 64
    if room < CHUNK_BYTES // 2:
        raise DeltaError(
            "layout", f"{len(head.table or ()) if head else 0} tensors have too long a table for one chunk"
        )
    index, used = 0, 0
    records: list[Record] = []
    streams: list[coding.Frame] = []

    def flush(last: bool) -> Chunk:
        meta = msgspec.msgpack.encode(ChunkMeta(index, last, records, head))
        chunk = b"".join([_LENGTH.pack(len(meta)), meta, *streams])
        tally.nbytes += len(chunk)
        return chunk

    for record, coded in pieces:
        tally.changed += coded.changed
        need = coded.nbytes + 32 + 10 * (len(record.parameters) + len(record.sizes))
        if used + need > room:
            yield flush(last=False)
            index, used, head, room = index + 1, 0, None, CHUNK_BYTES - 64
            records, streams = [], []
        records.append(record)
        streams.extend(coded.streams)
        used += need
    yield flush(last=True)


def unpack(chunk: coding.Frame) -> tuple[ChunkMeta, list[coding.Coded]]:
    """A chunk's meta and the coded piece of each of its records (views, uncopied)."""
    view = memoryview(chunk).cast("B")
    try:
        (size,) = _LENGTH.unpack_from(view)
        meta = msgspec.msgpack.decode(view[_LENGTH.size : _LENGTH.size + size], type=ChunkMeta)
    except (struct.error, msgspec.DecodeError, RecursionError) as error:
        raise DeltaError("malformed", f"not a chunk of weights: {error}") from error
    if meta.head is not None and (meta.head.format, meta.head.format_version) != (FORMAT, FORMAT_VERSION):
        raise DeltaError(
            "malformed",
            f"weights in format {meta.head.format} {meta.head.format_version}, this process reads {FORMAT}"
            f" {FORMAT_VERSION}: install the same version everywhere",
        )
    at = _LENGTH.size + size
    pieces = []
    for record in meta.records:
        streams = []
        for n in record.sizes:
            if not 0 <= n <= len(view) - at:
                raise DeltaError("truncated", f"a stream of {n} bytes where {len(view) - at} are left")
            streams.append(view[at : at + n])
            at += n
        pieces.append(coding.Coded(record.kind, record.parameters, tuple(streams)))
    if at != len(view):
        raise DeltaError("malformed", f"{len(view) - at} bytes after the last stream of a chunk")
    return meta, pieces
