"""Golomb-Rice coding of runs of non-negative integers with numpy: what the sparse form of a weight delta is made of.

Each value is split into a quotient ``v >> k``, written in unary, and its k low bits, written as they are; every run has
its own k, and all runs share one stream of quotients and one of low bits. For gaps between changes that fall
independently this is within 0.03 bits a value of the entropy. Pure; decoding never trusts a length. Used by ``sparse``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from temper.common.errors import ProtocolError

MAX_SHIFT = 40
_LOG_GOLDEN = math.log((math.sqrt(5.0) - 1.0) / 2.0)
_LANES = ((8, 0x0001000100010001), (16, 0x0000000100000001), (32, 1))  # (half a lane's width, ones a lane apart)

Run = tuple[np.ndarray, int]


def best_shift(mean: float) -> int:
    """The k under which non-negative integers of this mean are coded shortest if they are geometrically distributed."""
    if mean <= 0.0:
        return 0
    return max(0, 1 + math.floor(math.log2(_LOG_GOLDEN / math.log1p(-1.0 / (mean + 1.0)))))


def cost_bits(values: np.ndarray, k: int) -> int:
    """Coded size of `values` in bits."""
    return values.size * (k + 1) + int((values >> k).sum())


def encode(runs: Sequence[Run]) -> tuple[bytes, bytes]:
    """(unary quotients, low bits) of runs of (non-negative int64[n], k)."""
    ends = np.empty(sum(values.size for values, _ in runs), np.int64)
    if not ends.size:
        return b"", b""
    start = 0
    for values, k in runs:
        np.right_shift(values, k, out=ends[start : start + values.size])
        start += values.size
    ends += 1
    ends.cumsum(out=ends)
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    return np.packbits(unary[1:], bitorder="little").tobytes(), b"".join(_pack_low(values, k) for values, k in runs)


class Reader:
    """Reads runs back in the order in which they were written. ProtocolError if the streams do not hold them."""

    def __init__(self, unary: memoryview, low: memoryview) -> None:
        ends = np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little").view(bool).nonzero()[0]
        self._quotients = np.empty_like(ends)
        self._quotients[:1] = ends[:1]
        np.subtract(ends[1:], ends[:-1], out=self._quotients[1:])
        self._quotients[1:] -= 1
        self._low = np.frombuffer(low, np.uint8)
        self._at = self._low_at = 0

    def take(self, n: int, k: int) -> np.ndarray:
        """The next run: int64[n], every value below 2**60."""
        if not 0 <= k <= MAX_SHIFT:
            raise ProtocolError(f"Rice parameter {k}, at most {MAX_SHIFT}")
        quotients = self._quotients[self._at : self._at + n]
        low = self._low[self._low_at : self._low_at + low_bytes(n, k)]
        if n < 0 or quotients.size != n or low.size != low_bytes(n, k):
            raise ProtocolError(f"{quotients.size} quotients and {low.size} bytes of low bits for {n} values")
        self._at += n
        self._low_at += low.size
        if n and int(quotients.max()) >> (60 - k):
            raise ProtocolError("a value beyond 2**60")
        return (quotients << k) | _unpack_low(n, k, low) if k else quotients

    def finish(self) -> None:
        """ProtocolError if anything is left."""
        if self._at != self._quotients.size or self._low_at != self._low.size:
            raise ProtocolError(
                f"{self._quotients.size - self._at} values and {self._low.size - self._low_at} bytes of low bits too many"
            )


def low_bytes(n: int, k: int) -> int:
    """Size of the low bits of `n` values: whole byte planes, then the rest bit by bit."""
    return n * (k // 8) + (n * (k % 8) + 7) // 8


def _pack_low(values: np.ndarray, k: int) -> bytes:
    planes = [byte(values, shift).tobytes() for shift in range(0, k - 7, 8)]
    if bits := k % 8:
        planes.append(_tight(byte(values, k - bits), bits))
    return b"".join(planes)


def byte(values: np.ndarray, shift: int) -> np.ndarray:
    """uint8[n]: the eight bits of each from `shift` on."""
    return (values >> shift if shift else values).astype(np.uint8)


def _unpack_low(n: int, k: int, data: np.ndarray) -> np.ndarray:
    values = np.zeros(n, np.int64)
    for plane in range(k // 8):
        values |= data[plane * n : (plane + 1) * n].astype(np.int64) << (8 * plane)
    if bits := k % 8:
        values |= _loose(data[n * (k // 8) :], n, bits).astype(np.int64) << (k - bits)
    return values


def _tight(rest: np.ndarray, bits: int) -> bytes:
    """The lowest `bits` bits of each byte one after the other, lowest first: eight bytes in a word, of which neighbours are
    moved together, then pairs, then fours."""
    words = np.zeros((rest.size + 7) // 8, "<u8")
    words.view(np.uint8)[: rest.size] = rest
    words &= np.uint64(((1 << bits) - 1) * 0x0101010101010101)
    for width, ones in _LANES:
        held = bits * width // 8
        upper = words >> np.uint64(width - held)
        upper &= np.uint64(ones * ((1 << held) - 1) << held)
        words &= np.uint64(ones * ((1 << width) - 1))
        words |= upper
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()[: (rest.size * bits + 7) // 8]


def _loose(data: np.ndarray, n: int, bits: int) -> np.ndarray:
    """uint8[n]: what `_tight` made `data` of."""
    words = np.zeros((n + 7) // 8, "<u8")
    padded = np.zeros(words.size * bits, np.uint8)
    padded[: data.size] = data
    words.view(np.uint8).reshape(-1, 8)[:, :bits] = padded.reshape(-1, bits)
    for width, ones in reversed(_LANES):
        held = bits * width // 8
        upper = words << np.uint64(width - held)
        upper &= np.uint64(ones * ((1 << held) - 1) << width)
        words &= np.uint64(ones * ((1 << held) - 1))
        words |= upper
    return words.view(np.uint8)[:n]
