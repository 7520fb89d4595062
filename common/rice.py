"""Golomb-Rice coding of non-negative integers with numpy: what the sparse form of a weight delta is made of.

Each value is split into a quotient ``v >> k``, written in unary, and its k low bits, written as they are. For gaps
between changes that fall independently this is within 0.03 bits a value of the entropy. Pure functions, no limits on
the input but the ones they check: decoding never trusts a length. Used by ``delta`` alone.
"""

from __future__ import annotations

import numpy as np
from temper.common.errors import ProtocolError

MAX_SHIFT = 32


def best_shift(values: np.ndarray) -> int:
    """The k that makes the coded size of `values` (non-negative int64[n], n > 0) least."""
    mean = float(values.mean())
    guess = max(0, int(np.log2(mean * 0.6931 + 1e-9))) if mean > 0 else 0
    candidates = range(max(0, guess - 1), min(MAX_SHIFT, guess + 1) + 1)
    return min(candidates, key=lambda k: values.size * k + int((values >> k).sum()))


def encode(values: np.ndarray, k: int) -> tuple[bytes, bytes]:
    """(unary quotients, low bits) of non-negative int64[n]."""
    ends = np.cumsum((values >> k) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if ends.size else 0, np.uint8)
    unary[ends] = 1
    return np.packbits(unary, bitorder="little").tobytes(), _pack_low(values, k)


def decode(n: int, k: int, unary: memoryview, low: memoryview) -> np.ndarray:
    """int64[n] from what `encode` made; ProtocolError if the streams do not hold exactly `n` values."""
    if not 0 <= k <= MAX_SHIFT:
        raise ProtocolError(f"Rice parameter {k}, at most {MAX_SHIFT}")
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little"))
    if ends.size != n:
        raise ProtocolError(f"{ends.size} quotients where {n} are announced")
    quotients = np.diff(ends, prepend=-1) - 1
    if k == 0:
        return quotients
    return (quotients << k) | _unpack_low(n, k, low)


def low_bytes(n: int, k: int) -> int:
    """Size of the low-bit stream of `n` values: whole byte planes, then the rest bit by bit."""
    return n * (k // 8) + (n * (k % 8) + 7) // 8


def _pack_low(values: np.ndarray, k: int) -> bytes:
    planes = [(values >> shift).astype(np.uint8).tobytes() for shift in range(0, k - 7, 8)]
    if k % 8:
        rest = (values >> (k - k % 8)).astype(np.uint8)
        bits = np.unpackbits(rest[:, None], axis=1, count=k % 8, bitorder="little")
        planes.append(np.packbits(bits, bitorder="little").tobytes())
    return b"".join(planes)


def _unpack_low(n: int, k: int, low: memoryview) -> np.ndarray:
    if low.nbytes != low_bytes(n, k):
        raise ProtocolError(f"{low.nbytes} bytes of low bits, expected {low_bytes(n, k)}")
    data = np.frombuffer(low, np.uint8)
    values = np.zeros(n, np.int64)
    for plane in range(k // 8):
        values |= data[plane * n : (plane + 1) * n].astype(np.int64) << (8 * plane)
    if k % 8:
        bits = np.unpackbits(data[n * (k // 8) :], count=n * (k % 8), bitorder="little").reshape(n, k % 8)
        values |= np.packbits(bits, axis=1, bitorder="little")[:, 0].astype(np.int64) << (k - k % 8)
    return values
