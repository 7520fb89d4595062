"""One piece of one tensor, from bits to the smallest of four forms and back. Pure; used by ``delta`` alone.

``RAW``     the bits as they are
``PLANES``  the bits as byte planes, each compressed with zstd where it pays
``DENSE``   the difference to the base as byte planes, each compressed where it pays
``SPARSE``  the gaps between changed values (Rice) and by how many representable values each moved (sign, Rice)

Differences are taken between *ordered keys*: a bijection of the bits in which neighbouring numbers of the dtype are
neighbouring integers, so that most changes of a training step are +-1. Every form is exact for every bit pattern.
Decoding trusts nothing: lengths, counts and ranges are checked, expansion is bounded by the piece's own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from temper.common import rice
from temper.common.errors import ProtocolError

RAW, PLANES, DENSE, SPARSE = range(4)
SPARSE_BELOW = 0.25  # share of changed values under which the sparse form is tried
ZSTD_LEVEL = 1
ZSTD_MIN_BYTES = 64 * 1024  # smaller pieces travel raw: compressing them costs more time than it saves
ZSTD_PAYS = 0.97  # a compressed plane is kept when it is smaller than this share of the plane

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


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded piece: `values` (bits) overwrite the piece whole (`indices` None) or at ascending int64 `indices`."""

    indices: np.ndarray | None
    values: np.ndarray


def encode(base: np.ndarray | None, new: np.ndarray, dtype: str) -> Coded | None:
    """The smallest form of `new`[n] given `base`[n] (None: without one); None when nothing changed."""
    if base is None:
        return _encode_full(new, None, dtype, new.size)
    changed = np.flatnonzero(base != new)
    if changed.size == 0:
        return None
    if changed.size < SPARSE_BELOW * new.size:
        sparse = _encode_sparse(changed, base[changed], new[changed], new.size, dtype)
        if sparse.nbytes < new.nbytes // 2:
            return sparse
        return min(sparse, _encode_full(new, base, dtype, changed.size), key=lambda coded: coded.nbytes)
    return _encode_full(new, base, dtype, changed.size)


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
        return Patch(None, _from_key(_to_key(base, dtype) + step, dtype))
    if coded.kind == SPARSE and base is not None:
        return _decode_sparse(coded, base, dtype)
    raise ProtocolError(f"unknown form {coded.kind}, known are 0 to {SPARSE}")


# ---------------------------------------------------------------- ordered keys


def _to_key(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Bits as unsigned integers in the order of the numbers they stand for (a bijection, exact for NaN and -0.0)."""
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    if dtype.startswith("float8_e8m0") or dtype.startswith("uint") or dtype == "bool":
        return bits
    if dtype.startswith("int"):
        return bits ^ top
    return np.where(bits & top, ~bits, bits | top)


def _from_key(key: np.ndarray, dtype: str) -> np.ndarray:
    top = key.dtype.type(1 << (8 * key.dtype.itemsize - 1))
    if dtype.startswith("float8_e8m0") or dtype.startswith("uint") or dtype == "bool":
        return key
    if dtype.startswith("int"):
        return key ^ top
    return np.where(key & top, key ^ top, ~key)


# ---------------------------------------------------------------- whole pieces


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data


def _bits(data: Frame, size: int, bits: np.dtype) -> np.ndarray:
    if len(data) != size * bits.itemsize:
        raise ProtocolError(f"{len(data)} bytes for {size} values of {bits.itemsize} bytes")
    return np.frombuffer(data, bits)


def _encode_full(new: np.ndarray, base: np.ndarray | None, dtype: str, changed: int) -> Coded:
    best = Coded(RAW, (), (_bytes(new),), changed)
    if new.nbytes < ZSTD_MIN_BYTES:
        return best
    candidates = [(PLANES, new)] if base is None else [(PLANES, new), (DENSE, _zigzag(base, new, dtype))]
    for kind, values in candidates:
        coded = _split_planes(kind, values, changed)
        if coded.nbytes < ZSTD_PAYS * best.nbytes:
            best = coded
    return best


def _zigzag(base: np.ndarray, new: np.ndarray, dtype: str) -> np.ndarray:
    """Steps from base to new modulo the dtype's range: small ones, either way, become small unsigned numbers."""
    step = _to_key(new, dtype) - _to_key(base, dtype)
    sign = step >> (8 * step.dtype.itemsize - 1)
    return (step << 1) ^ (0 - sign).astype(step.dtype)


def _unzigzag(code: np.ndarray) -> np.ndarray:
    return (code >> 1) ^ (0 - (code & 1)).astype(code.dtype)


def _split_planes(kind: int, values: np.ndarray, changed: int) -> Coded:
    """Byte planes, lowest first; parameter i is 1 where plane i is compressed."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True)
    flags, streams = [], []
    for plane in values.view(np.uint8).reshape(-1, values.dtype.itemsize).T:
        data = plane.tobytes()
        packed = compressor.compress(data)
        pays = len(packed) < ZSTD_PAYS * len(data)
        flags.append(int(pays))
        streams.append(packed if pays else data)
    return Coded(kind, tuple(flags), tuple(streams), changed)


def _join_planes(coded: Coded, size: int, bits: np.dtype) -> np.ndarray:
    streams = _exactly(coded, bits.itemsize, bits.itemsize)
    values = np.empty((size, bits.itemsize), np.uint8)
    for i, (flag, stream) in enumerate(zip(coded.parameters, streams, strict=True)):
        data: Frame = stream
        if flag:
            try:
                parameters = zstandard.get_frame_parameters(stream)
                if parameters.content_size != size:
                    raise ProtocolError(f"a plane of {parameters.content_size} bytes, expected {size}")
                data = zstandard.ZstdDecompressor().decompress(stream, max_output_size=size)
            except zstandard.ZstdError as error:
                raise ProtocolError(f"damaged plane: {error}") from error
        values[:, i] = _bits(data, size, np.dtype("u1"))
    return values.reshape(-1).view(bits)


# ---------------------------------------------------------------- sparse pieces


def _encode_sparse(changed: np.ndarray, base: np.ndarray, new: np.ndarray, size: int, dtype: str) -> Coded:
    """Parameters: n, k of the gaps, escapes, k of their gaps, k of their excess."""
    gaps = np.diff(changed, prepend=-1) - 1
    k_gap = rice.best_shift(gaps)
    steps = _to_key(new, dtype).astype(np.int64) - _to_key(base, dtype).astype(np.int64)
    signs = np.packbits(steps < 0, bitorder="little").tobytes()
    excess = np.abs(steps) - 1
    escapes = np.flatnonzero(excess)
    if not escapes.size:
        return Coded(SPARSE, (changed.size, k_gap, 0, 0, 0), (*rice.encode(gaps, k_gap), signs), changed.size)
    escape_gaps = np.diff(escapes, prepend=-1) - 1
    more = excess[escapes] - 1
    k_escape, k_more = rice.best_shift(escape_gaps), rice.best_shift(more)
    streams = (*rice.encode(gaps, k_gap), signs, *rice.encode(escape_gaps, k_escape), *rice.encode(more, k_more))
    return Coded(SPARSE, (changed.size, k_gap, escapes.size, k_escape, k_more), streams, changed.size)


def _decode_sparse(coded: Coded, base: np.ndarray, dtype: str) -> Patch:
    n, k_gap, escapes, k_escape, k_more = _checked(coded, 5)
    if not 0 < n <= base.size or not 0 <= escapes <= n:
        raise ProtocolError(f"{n} changes with {escapes} escapes in a piece of {base.size} values")
    streams = _exactly(coded, 5, 7 if escapes else 3)
    indices = _positions(n, k_gap, streams[0], streams[1], base.size)
    signs = np.frombuffer(streams[2], np.uint8)
    if signs.size != (n + 7) // 8:
        raise ProtocolError(f"{signs.size} bytes of signs for {n} changes")
    steps = 1 - 2 * np.unpackbits(signs, count=n, bitorder="little").astype(np.int64)
    if escapes:
        where = _positions(escapes, k_escape, streams[3], streams[4], n)
        steps[where] *= 2 + rice.decode(escapes, k_more, streams[5], streams[6])
    keys = _to_key(base[indices], dtype).astype(np.int64) + steps
    if keys.min() < 0 or keys.max() >= 1 << (8 * base.dtype.itemsize):
        raise ProtocolError("a step leaves the range of its dtype: damaged, or applied to another base")
    return Patch(indices, _from_key(keys.astype(base.dtype), dtype))


def _positions(n: int, k: int, unary: memoryview, low: memoryview, size: int) -> np.ndarray:
    gaps = rice.decode(n, k, unary, low)
    if int(gaps.max()) >= size:
        raise ProtocolError(f"a gap of {int(gaps.max())} in a piece of {size} values")
    positions = np.cumsum(gaps + 1) - 1
    if int(positions[-1]) >= size:
        raise ProtocolError(f"a change at {int(positions[-1])} in a piece of {size} values")
    return positions


def _checked(coded: Coded, parameters: int) -> tuple[int, ...]:
    if len(coded.parameters) != parameters:
        raise ProtocolError(f"{len(coded.parameters)} parameters in form {coded.kind}, expected {parameters}")
    return coded.parameters


def _exactly(coded: Coded, parameters: int, streams: int) -> Sequence[memoryview]:
    _checked(coded, parameters)
    if len(coded.streams) != streams:
        raise ProtocolError(f"{len(coded.streams)} streams in form {coded.kind}, expected {streams}")
    return [memoryview(stream) for stream in coded.streams]
