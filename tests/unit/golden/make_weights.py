"""Writes the golden weight log of this folder: run it only when the format's version number is raised.

    python -P tests/unit/golden/make_weights.py

Two files, a snapshot and a delta, in which every form and every mode of the sparse form occurs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from temper.broker.weights import WeightStore
from temper.common import delta, sparse
from temper.common.bits import TensorBits, Weights, seal
from temper.common.schema import Chunk, Manifest, Publish

FOLDER = Path(__file__).parent / "weights"


def versions() -> tuple[Weights, Weights]:
    """The two versions; from numpy's PCG64, which is stable across releases."""
    rng = np.random.Generator(np.random.PCG64(1))
    before = (rng.integers(-1000, 1000, 60_000) * 2.0 ** -rng.integers(12, 24, 60_000)).astype(np.float32)
    after = before + (rng.integers(-3, 4, 60_000) * 2.0**-22).astype(np.float32)
    few = np.where(np.abs(before) * 2.0**17 < rng.integers(1, 60, 60_000), after, before)
    old: dict[str, TensorBits] = {}
    new: dict[str, TensorBits] = {}

    def add(name: str, dtype: str, a: np.ndarray, b: np.ndarray) -> None:
        old[name], new[name] = TensorBits(dtype, (a.size,), a), TensorBits(dtype, (b.size,), b)

    def half(x: np.ndarray) -> np.ndarray:
        return (x.view(np.uint32) >> 16).astype(np.uint16)

    add("bf16.classes", "bfloat16", half(before), half(few))
    add("fp32.dense", "float32", before[:20_000].view(np.uint32).copy(), after[:20_000].view(np.uint32).copy())
    raw = rng.integers(0, 256, 300, np.uint8)
    add("int8.sparse", "int8", raw, np.where(np.arange(300) % 40 == 0, raw + np.uint8(3), raw).astype(np.uint8))
    add("fp8.raw", "float8_e4m3fn", raw.copy(), rng.integers(0, 256, 300, np.uint8))
    special = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0, 0x7F800000, 0xFF800000, 1, 0x80000001] * 8, np.uint32)
    moved = special.copy()
    moved[3] = 0x80000000
    moved[10] = 0x7FFFFFFF
    add("fp32.special", "float32", special, moved)
    add("unchanged", "float16", half(before[:50]), half(before[:50]))
    add("empty", "bfloat16", np.empty(0, np.uint16), np.empty(0, np.uint16))
    base = seal(3, 0x60D1, old)
    return base, seal(7, 0x60D1, new, base)


def main() -> None:
    """Write the files."""
    sparse.WRITTEN_CLASSES = 4  # a reader takes any number up to `sparse.CLASSES`
    base, new = versions()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.iterdir():
        path.unlink()
    store = WeightStore(FOLDER, "golden")
    for of, version in ((None, base), (base, new)):
        (chunk,) = delta.encode(of, version)
        digest = hashlib.blake2b(chunk, digest_size=16).hexdigest()
        manifest = Manifest(version.version, of.version if of else None, 1, len(chunk), version.nbytes, 0.5)
        store.begin("golden", Publish(manifest))
        store.chunk("golden", Chunk(version.version.ordinal, of is None, 0, digest), memoryview(chunk))


if __name__ == "__main__":
    main()
