"""One piece of one tensor, from bits to the smallest of four forms and back. Pure; used by ``delta`` alone.

``RAW``     the bits as they are
``PLANES``  the bits as byte planes, each compressed with zstd where it pays
``DENSE``   the difference to the base as byte planes, each compressed where it pays
``SPARSE``  where values changed and by how many steps (see ``sparse``)

Differences are taken between ordered keys (see ``float_bits``). Every form is exact for every bit pattern. Decoding
trusts nothing: lengths, counts and ranges are checked, expansion is bounded by the piece's own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from temper.common import scan, sparse
from temper.common.errors import ProtocolError
from temper.common.float_bits import fold
from temper.common.squeeze import PAYS, squeeze, unsqueeze

RAW, PLANES, DENSE, SPARSE = range(4)
SPARSE_BELOW = 0.25  # share of changed values under which the sparse form is tried
SPARSE_SURE = 0.3  # share of the bits under which it is taken without a look at the others
SQUEEZE_FROM_BYTES = 64 * 1024  # smaller pieces travel raw: compressing them costs more time than it saves

Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded piece: `kind`, its integer `parameters`, the streams it consists of; `changed` values, if encoded here."""

    kind: int
    parameters: tuple[int, ...]
    streams: tuple[Frame, ...]
    changed: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the streams in bytes."""
        return sum(len(stream) for stream in self.streams)

    def views(self) -> list[memoryview]:
        """The streams, to be sliced uncopied."""
        return [memoryview(stream) for stream in self.streams]


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded piece: `values` (bits) overwrite the piece whole (`indices` None) or at distinct int64 `indices`."""

    indices: np.ndarray | None
    values: np.ndarray


def encode(base: np.ndarray | None, new: np.ndarray, dtype: str) -> Coded | None:
    """The smallest form of `new`[n] given `base`[n] (None: without one); None when nothing changed."""
    if base is None:
        return _encode_full(new, None, dtype, new.size)
    changed, changes = scan.changes(base, new, SPARSE_BELOW * new.size)
    if changed == 0:
        return None
    if changes is None:
        return _encode_full(new, base, dtype, changed)
    parameters, streams = sparse.encode(base, changes, dtype)
    coded = Coded(SPARSE, tuple(parameters), tuple(streams), changed)
    if coded.nbytes < SPARSE_SURE * new.nbytes:
        return coded
    return min(coded, _encode_full(new, base, dtype, changed), key=lambda other: other.nbytes)


def decode(coded: Coded, base: np.ndarray | None, size: int, bits: np.dtype, dtype: str) -> Patch:
    """The patch that `coded` stands for, for a piece of `size` values; `base` is needed by DENSE and SPARSE."""
    if coded.kind == RAW:
        (raw,) = _exactly(coded, 0, 1)
        return Patch(None, _bits(raw, size, bits))
    if base is None and coded.kind in (DENSE, SPARSE):
        raise ProtocolError("a difference without a base to apply it to")
    if coded.kind == PLANES:
        return Patch(None, _join_planes(coded, size, bits))
    if coded.kind == DENSE and base is not None:
        step = _unzigzag(_join_planes(coded, size, bits))
        return Patch(None, fold(fold(base, dtype) + step, dtype))
    if coded.kind == SPARSE and base is not None:
        return Patch(*sparse.decode(coded.parameters, coded.views(), base, dtype))
    raise ProtocolError(f"unknown form {coded.kind}, known are 0 to {SPARSE}")


# ---------------------------------------------------------------- whole pieces


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _bits(data: Frame, size: int, bits: np.dtype) -> np.ndarray:
    if len(data) != size * bits.itemsize:
        raise ProtocolError(f"{len(data)} bytes for {size} values of {bits.itemsize} bytes")
    return np.frombuffer(data, bits)


def _encode_full(new: np.ndarray, base: np.ndarray | None, dtype: str, changed: int) -> Coded:
    best = Coded(RAW, (), (_bytes(new),), changed)
    if new.nbytes < SQUEEZE_FROM_BYTES:
        return best
    candidates = [(PLANES, new)] if base is None else [(PLANES, new), (DENSE, _zigzag(base, new, dtype))]
    for kind, values in candidates:
        coded = _split_planes(kind, values, changed)
        if coded.nbytes < PAYS * best.nbytes:
            best = coded
    return best


def _zigzag(base: np.ndarray, new: np.ndarray, dtype: str) -> np.ndarray:
    """Steps from base to new modulo the dtype's range: small ones, either way, become small unsigned numbers."""
    step = fold(new, dtype) - fold(base, dtype)
    sign = step >> (8 * step.dtype.itemsize - 1)
    return (step << 1) ^ (0 - sign).astype(step.dtype)


def _unzigzag(code: np.ndarray) -> np.ndarray:
    return (code >> 1) ^ (0 - (code & 1)).astype(code.dtype)


def _split_planes(kind: int, values: np.ndarray, changed: int) -> Coded:
    """Byte planes, lowest first; parameter i is 1 where plane i is compressed."""
    flags: list[int] = []
    streams: list[bytes] = []
    for plane in values.view(np.uint8).reshape(-1, values.dtype.itemsize).T:
        data = plane.tobytes()
        packed = squeeze(data)
        flags.append(int(packed is not None))
        streams.append(data if packed is None else packed)
    return Coded(kind, tuple(flags), tuple(streams), changed)


def _join_planes(coded: Coded, size: int, bits: np.dtype) -> np.ndarray:
    streams = _exactly(coded, bits.itemsize, bits.itemsize)
    values = np.empty((size, bits.itemsize), np.uint8)
    for i, (flag, stream) in enumerate(zip(coded.parameters, streams, strict=True)):
        data = unsqueeze(stream, size) if flag else stream
        values[:, i] = _bits(data, size, np.dtype("u1"))
    return values.reshape(-1).view(bits)


def _checked(coded: Coded, parameters: int) -> tuple[int, ...]:
    if len(coded.parameters) != parameters:
        raise ProtocolError(f"{len(coded.parameters)} parameters in form {coded.kind}, expected {parameters}")
    return coded.parameters


def _exactly(coded: Coded, parameters: int, streams: int) -> Sequence[memoryview]:
    _checked(coded, parameters)
    if len(coded.streams) != streams:
        raise ProtocolError(f"{len(coded.streams)} streams in form {coded.kind}, expected {streams}")
    return coded.views()
