"""Reading a chain of log entries: their order is checked first, then each tensor is rebuilt through all of them.

Rebuilding goes tensor by tensor, so that a long chain over a large model holds one tensor per thread, not one copy per
entry. Used by ``delta`` alone; `DeltaError` says why a chain does not lead where it claims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np
from temper.common import coding, sparse
from temper.common.bits import Digest, digest_of, root_of, unsigned
from temper.common.errors import ProtocolError, TemperError
from temper.common.schema import Version
from temper.common.weight_format import SEGMENT_VALUES, DeltaError, Record, Table, layout_of, unpack


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """New bits of one tensor. `kind` full: `values` is the whole tensor, flat; sparse: at distinct flat `indices`.

    indices int64[n] or None, values u8/u16/u32[n]; overwrite, never add.
    """

    name: str
    kind: Literal["full", "sparse"]
    indices: np.ndarray | None
    values: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


@dataclass(slots=True)
class Chain:
    """A chain whose order is right. `whole`: it starts with a snapshot and needs no base.

    `pieces` maps a tensor's index in `table` to its coded pieces in the order in which they apply.
    """

    version: Version
    table: Table
    whole: bool
    entries: int
    nbytes: int
    pieces: dict[int, list[tuple[Record, coding.Coded]]] = field(default_factory=lambda: defaultdict(list))

    def rebuild(self, i: int, base: np.ndarray | None) -> TensorPatch:
        """The patch of tensor `i` through all entries; `base` bits are only read, None where the chain is whole."""
        name, dtype, shape = self.table[i]
        bits, size = unsigned(dtype), prod(shape)
        pieces = self.pieces.get(i, [])
        try:
            for record, _ in pieces:
                if record.start + record.count > size:
                    raise ProtocolError(f"values {record.start} + {record.count} of a tensor of {size}")
            if base is not None and all(_is_sparse_segment(*piece) for piece in pieces):
                indices, values, digest = _through_sparse(base, pieces, dtype)
                return TensorPatch(name, "sparse", indices, values, dtype, shape, digest)
            values = np.empty(size, bits) if base is None else base.copy()
            for record, coded in pieces:
                piece = values[record.start : record.start + record.count]
                patch = coding.decode(coded, piece, piece.size, bits, dtype)
                piece[_everything(patch.indices)] = patch.values
        except (ProtocolError, MemoryError, ValueError, OverflowError) as error:
            raise DeltaError("malformed", f"{name}: {error}") from error
        return TensorPatch(name, "full", None, values, dtype, shape, digest_of(values))

    def check(self, digests: Mapping[str, bytes]) -> None:
        """DeltaError unless the root over `digests` of all tensors is that of the version claimed."""
        root = root_of({name: (dtype, shape, digests[name]) for name, dtype, shape in self.table})
        if root != self.version.digest:
            raise DeltaError("digest", f"version {self.version.ordinal} came out as {root}, not {self.version.digest}")


def _everything(indices: np.ndarray | None) -> np.ndarray | slice:
    return slice(None) if indices is None else indices


def _is_sparse_segment(record: Record, coded: coding.Coded) -> bool:
    return coded.kind == coding.SPARSE and record.start % SEGMENT_VALUES == 0


def _through_sparse(
    base: np.ndarray, pieces: Sequence[tuple[Record, coding.Coded]], dtype: str
) -> tuple[np.ndarray, np.ndarray, bytes]:
    """(int64[k] distinct indices, new bits[k], digest of the tensor) of sparse segments in the order in which they apply.

    Segment by segment, so that what is hashed is still in the cache and no copy of the tensor is held.
    """
    segments: dict[int, list[tuple[int, coding.Coded]]] = defaultdict(list)
    for record, coded in pieces:
        segments[record.start].append((record.count, coded))
    room = np.empty(min(base.size, SEGMENT_VALUES), base.dtype)
    indices: list[np.ndarray] = []
    values: list[np.ndarray] = []
    digest = Digest()
    for start in range(0, base.size, SEGMENT_VALUES):
        segment = base[start : start + SEGMENT_VALUES]
        if start in segments:
            now = room[: segment.size]
            now[:] = segment
            touched = []
            for count, coded in segments[start]:
                places, bits = sparse.decode(coded.parameters, coded.views(), now[:count], dtype)
                now[places] = bits
                touched.append(places)
            places = touched[0] if len(touched) == 1 else np.unique(np.concatenate(touched))
            values.append(now[places])
            places += start
            indices.append(places)
            segment = now
        digest.update(segment)
    return np.concatenate(indices), np.concatenate(values), digest.value()


def read_chain(chunks: Iterable[coding.Frame], base_digest: str | None, base_table: Table | None) -> Chain:
    """The chain in `chunks`, checked: whole entries, each based on the one before, the first on `base_digest`."""
    chain: Chain | None = None
    at, table, expected = base_digest, base_table, 0
    nbytes = 0
    for chunk in chunks:
        meta, pieces = unpack(chunk)
        nbytes += len(chunk)
        if meta.index != expected or (meta.head is None) == (expected == 0):
            raise DeltaError("gap", f"chunk {meta.index} of an entry where {expected} was expected")
        expected = 0 if meta.last else expected + 1
        head = meta.head
        if head is not None:
            if head.base is None:
                table = _checked_table(head.table)
                chain = None
            elif head.base.digest != at:
                raise DeltaError(
                    "gap" if chain else "base",
                    f"version {head.version.ordinal} is based on {head.base.ordinal} ({head.base.digest}),"
                    f" found {at or 'nothing'}",
                )
            if table is None or layout_of(table) != head.layout:
                raise DeltaError("layout", f"version {head.version.ordinal} holds other tensors than its base")
            if chain is None:
                chain = Chain(head.version, table, head.base is None, 0, 0)
            at = head.version.digest
            chain.version = head.version
            chain.entries += 1
        if chain is None or table is None:
            raise DeltaError("gap", "a chain that does not start with a head")
        for record, coded in zip(meta.records, pieces, strict=True):
            if not 0 <= record.tensor < len(table) or not 0 <= record.count <= SEGMENT_VALUES or record.start < 0:
                raise DeltaError("malformed", f"piece {record.start} + {record.count} of tensor {record.tensor}")
            chain.pieces[record.tensor].append((record, coded))
    if chain is None or expected != 0:
        raise DeltaError("truncated", "the chain ends in the middle of an entry" if chain else "an empty chain")
    chain.nbytes = nbytes
    if chain.whole:
        _check_tiling(chain)
    return chain


def _checked_table(table: Table | None) -> Table:
    if table is None:
        raise DeltaError("malformed", "a snapshot without its table of tensors")
    names = [name for name, _, _ in table]
    if names != sorted(set(names)):
        raise DeltaError("malformed", "a table whose names are not sorted and unique")
    for name, dtype, shape in table:
        try:
            unsigned(dtype)
        except TemperError as error:
            raise DeltaError("malformed", f"{name}: {error}") from error
        if any(n < 0 for n in shape):
            raise DeltaError("malformed", f"{name}: shape {list(shape)}")
    return table


def _check_tiling(chain: Chain) -> None:
    """A snapshot's pieces cover every tensor: no value of the result is left to chance."""
    for i, (name, _, shape) in enumerate(chain.table):
        size, covered = prod(shape), 0
        for record, coded in chain.pieces.get(i, []):
            if covered == size:
                break
            if record.start != covered or coded.kind not in (coding.RAW, coding.PLANES):
                raise DeltaError("gap", f"{name}: the snapshot has no piece at {covered}")
            covered += record.count
        if covered != size:
            raise DeltaError("gap", f"{name}: the snapshot ends at {covered} of {size}")
