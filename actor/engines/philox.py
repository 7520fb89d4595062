"""Counter-based random numbers: the uniform of a token is a pure function of (seed, absolute position).

Philox4x32-10 (Salmon et al., SC 2011), vectorised over rows and positions. A rerun of a sample therefore draws the
same numbers whatever else is in the batch, and a continuation after an abort goes on where it stopped. Called by
`decoder` when a row is admitted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four 32-bit words (held in u64) for each 128-bit counter under each 64-bit key; all arrays broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + np.uint64(_W0)) & _LOW, (k1 + np.uint64(_W1)) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], start: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float32]:
    """f32[rows, count] in [0, 1), multiples of 2^-24: row r holds the numbers of positions start[r] ... + count - 1.

    `seeds` are non-negative and below 2^64; `start` i64[rows]. One counter yields the numbers of four positions.
    """
    seed = np.array(seeds, dtype=np.uint64)[:, None]
    first = start.astype(np.uint64) // np.uint64(4)
    blocks: Words = (first[:, None] + np.arange(count // 4 + 2, dtype=np.uint64)).astype(np.uint64)
    zero = np.zeros_like(blocks)
    words = philox4x32((blocks & _LOW, blocks >> _SHIFT, zero, zero), (seed & _LOW, seed >> _SHIFT))
    lanes = np.stack(words, axis=-1).reshape(len(seeds), -1)
    columns = (start % 4)[:, None] + np.arange(count)
    picked = np.take_along_axis(lanes, columns, axis=1)
    return ((picked >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)).astype(np.float32)
