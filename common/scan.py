"""The passes over all values of a piece: which changed, and where those of a class lie. Pure; used by ``coding`` and ``sparse``.

These are what coding a version costs most of, so they go block by block through buffers that stay in the cache, and in
words of eight bytes where few of many values matter: numpy finds set flags fast when they are dense, slowly when they are
sparse.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from temper.common.float_bits import class_shift

BLOCK = 1 << 17  # values
DENSE = 0.1  # share of set flags above which numpy finds them without a branch for each
_WORD = np.dtype("<u8")
_BITS = 64
_BELOW = (np.uint64(1) << np.arange(_BITS, dtype=np.uint64)) - np.uint64(1)  # the bits below each of a word


class _Buffers(threading.local):
    """One set a thread."""

    def __init__(self) -> None:
        self.flags = np.empty(BLOCK, bool)
        self._differ = np.empty(0, bool)
        self.doubled = {size: np.empty(BLOCK, f"<u{size}") for size in (1, 2, 4)}
        self._bits, self._ends = np.empty(0, _WORD), np.empty(0, np.int32)

    def differ(self, size: int) -> np.ndarray:
        """bool[size]"""
        if self._differ.size < size:
            self._differ = np.empty(size, bool)
        return self._differ[:size]

    def members(self, classes: int, words: int) -> tuple[np.ndarray, np.ndarray]:
        """(u64[classes, words], int32[classes, words + 1])"""
        if self._ends.size < classes * (words + 1):
            self._bits = np.empty(classes * words, _WORD)
            self._ends = np.empty(classes * (words + 1), np.int32)
        bits, ends = self._bits[: classes * words], self._ends[: classes * (words + 1)]
        return bits.reshape(classes, words), ends.reshape(classes, words + 1)


_buffers = _Buffers()


@dataclass(frozen=True, slots=True)
class Changes:
    """Where values differ (int64[k], ascending), and their bits before and after (u8/u16/u32[k])."""

    where: np.ndarray
    before: np.ndarray
    after: np.ndarray


def true(flags: np.ndarray) -> np.ndarray:
    """int64[k]: where flags (bool[n]) are set, ascending."""
    whole = flags.size >> 3 << 3
    if not whole or np.count_nonzero(flags) > DENSE * flags.size:
        return flags.nonzero()[0]
    words = flags[:whole].view(_WORD)
    among = (words != 0).nonzero()[0]
    inside = words.take(among).view(bool).nonzero()[0]
    where = among.take(inside >> 3)
    where <<= 3
    inside &= 7
    where += inside
    if whole != flags.size:
        where = np.concatenate([where, flags[whole:].nonzero()[0] + whole])
    return where


def changes(base: np.ndarray, new: np.ndarray, limit: float) -> tuple[int, Changes | None]:
    """(how many values differ, which; None if none or at least `limit` do). What is equal costs one compare."""
    per_word = _WORD.itemsize // base.itemsize
    whole = base.size // per_word * per_word
    if whole != base.size and (base[whole:] != new[whole:]).any():
        return _few(base, new, limit)
    old_words, new_words = base[:whole].view(_WORD), new[:whole].view(_WORD)
    among = true(np.not_equal(old_words, new_words, out=_buffers.differ(old_words.size)))
    if among.size >= limit:  # each word holds a change at least
        return int(np.count_nonzero(base != new)), None
    if not among.size:
        return 0, None
    before, after = old_words.take(among).view(base.dtype), new_words.take(among).view(base.dtype)
    inside = (before != after).nonzero()[0]
    if inside.size >= limit:
        return inside.size, None
    where = among.take(inside >> (per_word.bit_length() - 1))
    where *= per_word
    where += inside & (per_word - 1)
    return inside.size, Changes(where, before.take(inside), after.take(inside))


class Members:
    """The values of a piece class by class, as bitmaps in this thread's buffers: the next piece overwrites them.

    The lowest class holds all below it too.
    """

    def __init__(self, base: np.ndarray, dtype: str, lowest: int, bound: int) -> None:
        """Classes [lowest, bound) of `base`."""
        shift, count = class_shift(dtype), bound - lowest
        doubled = _buffers.doubled[base.itemsize]
        self._words = -(-base.size // _BITS)
        bits, before = _buffers.members(count, self._words)
        flat = bits.view(np.uint8)
        flat[:, -_WORD.itemsize :] = 0
        for start in range(0, base.size, BLOCK):
            block = base[start : start + BLOCK]
            twice = np.add(block, block, out=doubled[: block.size])
            for i in range(count):
                below = np.less(twice, base.dtype.type((lowest + 1 + i) << shift), out=_buffers.flags[: block.size])
                packed = np.packbits(below, bitorder="little")
                flat[i, start >> 3 : (start >> 3) + packed.size] = packed
        for i in range(count - 1, 0, -1):
            bits[i] ^= bits[i - 1]
        before[:, 0] = 0
        np.bitwise_count(bits).cumsum(axis=1, dtype=np.int32, out=before[:, 1:])
        self.sizes: list[int] = before[:, -1].tolist()
        self._bits, self._before = bits.reshape(-1), before.reshape(-1)

    def ranks(self, where: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
        """int32[k]: how many values of the same class come before the value at each of `where` (int64[k]), of which
        cuts[i]:cuts[i + 1] are of the i-th class."""
        at = where >> 6
        for i, (first, last) in enumerate(pairwise(cuts)):
            at[first:last] += i * self._words
        inside = self._bits.take(at)
        inside &= _BELOW.take(where & (_BITS - 1))
        for i, (first, last) in enumerate(pairwise(cuts)):
            at[first:last] += i  # `before` is a word longer
        return self._before.take(at) + np.bitwise_count(inside)


def small(base: np.ndarray, dtype: str, bound: int) -> np.ndarray:
    """int64[m]: where the class of a value is below `bound`, ascending."""
    limit = base.dtype.type(bound << class_shift(dtype))
    doubled = _buffers.doubled[base.itemsize]
    places: list[np.ndarray] = []
    for start in range(0, base.size, BLOCK):
        block = base[start : start + BLOCK]
        twice = np.add(block, block, out=doubled[: block.size])
        where = true(np.less(twice, limit, out=_buffers.flags[: block.size]))
        where += start
        places.append(where)
    return places[0] if len(places) == 1 else np.concatenate(places)


def by_kind(kinds: np.ndarray, count: int) -> tuple[np.ndarray, list[int]]:
    """(int64[m]: the order that sorts `kinds` (uint8[m] below `count`), equal ones as they come; where each kind begins in
    it, and the end)."""
    each = [true(kinds == kind) for kind in range(count)]
    return np.concatenate(each), [0, *accumulate(part.size for part in each)]


def _few(base: np.ndarray, new: np.ndarray, limit: float) -> tuple[int, Changes | None]:
    """`changes` for a piece that does not end with a whole word, value by value."""
    where = (base != new).nonzero()[0]
    return where.size, Changes(where, base[where], new[where]) if where.size < limit else None
