"""The passes over all values of a piece: which changed, and which are small enough to be hot. Pure; used by ``sparse``.

These two are what coding a version costs most of, so they go block by block through buffers that stay in the cache.
Where few flags of many are set they are first looked for in words of eight: numpy finds set flags fast when they are
dense, slowly when they are sparse.
"""

from __future__ import annotations

import threading

import numpy as np
from temper.common.float_bits import class_shift

BLOCK = 1 << 17  # values
DENSE = 0.09  # share of set flags from which they are looked for one by one
_WORD = np.dtype("<u8")


class _Buffers(threading.local):
    """One set a thread."""

    def __init__(self) -> None:
        self.flags = np.empty(BLOCK, bool)
        self.differ = np.empty(BLOCK, bool)
        self.doubled = {size: np.empty(BLOCK, f"<u{size}") for size in (1, 2, 4)}


_buffers = _Buffers()


def true(flags: np.ndarray) -> np.ndarray:
    """int64[k]: where flags (bool[n]) are set, ascending."""
    whole = flags.size >> 3 << 3
    if not whole or np.count_nonzero(flags) > DENSE * flags.size:
        return flags.nonzero()[0]
    words = flags[:whole].view(_WORD)
    among = (words != 0).nonzero()[0]
    inside = words[among].view(bool).nonzero()[0]
    where = among[inside >> 3]
    where <<= 3
    inside &= 7
    where += inside
    if whole != flags.size:
        where = np.concatenate([where, flags[whole:].nonzero()[0] + whole])
    return where


def differing(base: np.ndarray, new: np.ndarray) -> np.ndarray:
    """bool[n]: which values differ. A view of this thread's buffer: valid until the next call."""
    if _buffers.differ.size < base.size:
        _buffers.differ = np.empty(base.size, bool)
    flags: np.ndarray = np.not_equal(base, new, out=_buffers.differ[: base.size])
    return flags


def small(base: np.ndarray, dtype: str, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64[m] ascending, uint8[m]): where the class of a value is below `bound`, and its class."""
    shift = class_shift(dtype)
    limit = base.dtype.type(bound << shift)
    doubled = _buffers.doubled[base.dtype.itemsize]
    places: list[np.ndarray] = []
    kinds: list[np.ndarray] = []
    for start in range(0, base.size, BLOCK):
        block = base[start : start + BLOCK]
        twice = np.add(block, block, out=doubled[: block.size])
        where = true(np.less(twice, limit, out=_buffers.flags[: block.size]))
        kinds.append((twice[where] >> shift).astype(np.uint8))
        where += start
        places.append(where)
    if len(places) == 1:
        return places[0], kinds[0]
    return np.concatenate(places), np.concatenate(kinds)


def by_kind(kinds: np.ndarray, count: int) -> tuple[np.ndarray, list[int]]:
    """(int64[m]: the order that sorts `kinds` (uint8[m] below `count`), equal ones as they come; where each kind begins in
    it, and the end)."""
    if kinds.size >= 1 << 24:
        return kinds.argsort(kind="stable"), [0, *np.cumsum(np.bincount(kinds, minlength=count)).tolist()]
    if count == 1:
        return np.arange(kinds.size), [0, kinds.size]
    keys = kinds.astype(np.uint32)
    keys <<= 24
    keys |= np.arange(keys.size, dtype=np.uint32)
    keys.sort()
    starts = keys.searchsorted((np.arange(1, count) << 24).astype(np.uint32)).tolist()
    keys &= (1 << 24) - 1
    return keys.astype(np.int64), [0, *starts, keys.size]
