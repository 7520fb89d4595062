"""What the bits of a dtype mean to the codec: an order-preserving key, and the magnitude class of a value. Pure.

Differences are taken between *ordered keys*: a bijection of the bits in which neighbouring numbers of the dtype are
neighbouring integers, so most changes of a training step are +-1. The *class* of a value is its exponent: an optimiser
moves all weights by about the same amount, so whether a value changes when it is rounded, and by how many steps,
hangs on its exponent before all else.
"""

from __future__ import annotations

import numpy as np

_MANTISSA_BITS = {
    "float32": 23,
    "bfloat16": 7,
    "float16": 10,
    "float8_e4m3fn": 3,
    "float8_e4m3fnuz": 3,
    "float8_e5m2": 2,
    "float8_e5m2fnuz": 2,
}
_SIGNED: dict[int, np.dtype] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}


def fold(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Bits to ordered keys (signed integers in two's complement, seen as unsigned ones) and, being its own inverse, back.

    A bijection, so exact for NaN and -0.0; integers are their own keys.
    """
    if dtype not in _MANTISSA_BITS:
        return bits
    signed = bits.view(_SIGNED[bits.dtype.itemsize])
    key = signed >> (8 * bits.dtype.itemsize - 1)
    key &= signed.dtype.type((1 << (8 * bits.dtype.itemsize - 1)) - 1)
    key ^= signed
    return key.view(bits.dtype)


def steps(base: np.ndarray, new: np.ndarray, dtype: str) -> np.ndarray:
    """int32[n] (int64[n] for dtypes of four bytes): how many representable values lie between each base and new value,
    with sign."""
    signed = _SIGNED[base.dtype.itemsize]
    wide = np.int64 if base.dtype.itemsize == 4 else np.int32
    return np.subtract(fold(new, dtype).view(signed), fold(base, dtype).view(signed), dtype=wide)


def moved(base: np.ndarray, by: np.ndarray, dtype: str) -> np.ndarray | None:
    """The bits `by` (int32[n] or int64[n]) steps away from `base`; None if any leaves the range of the dtype."""
    signed = _SIGNED[base.dtype.itemsize]
    keys = by + fold(base, dtype).view(signed)
    limit = 1 << (8 * base.dtype.itemsize - 1)
    if keys.size and (int(keys.min()) < -limit or int(keys.max()) >= limit):
        return None
    return fold(keys.astype(signed).view(base.dtype), dtype)


def classes(bits: np.ndarray, dtype: str) -> np.ndarray:
    """uint8[n]: the class (biased exponent) of each value of a dtype that has classes."""
    doubled = bits + bits
    doubled >>= bits.dtype.type(_MANTISSA_BITS[dtype] + 1)
    return doubled.astype(np.uint8)


def class_shift(dtype: str) -> int:
    """How far twice the bits of a value are shifted to give its class."""
    return _MANTISSA_BITS[dtype] + 1


def class_count(dtype: str) -> int:
    """How many classes the dtype has; 0 if it has none (integers)."""
    if dtype not in _MANTISSA_BITS:
        return 0
    width = 32 if dtype == "float32" else 16 if dtype in ("bfloat16", "float16") else 8
    return 1 << (width - 1 - _MANTISSA_BITS[dtype])
