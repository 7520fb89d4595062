"""Weights as bits: named tensors of unsigned integers, their digests, and one sealed version of a model.

Everything that moves, stores or compares weights works on bit views, so NaN payloads and -0.0 are as exact as any
other value. The digest of a tensor is blake2b-16 of its little-endian bytes; the root digest of a version is blake2b-16
over (name, dtype, shape, digest) in the order of names. Pure values; used by the codec, publisher, store and actors.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from temper.common.errors import TemperError
from temper.common.schema import Version

if sys.byteorder != "little":  # the formats are little-endian and bit views are hashed and sent uncopied
    raise TemperError(f"this host is {sys.byteorder}-endian; Temper's weight format needs a little-endian one")

DIGEST_BYTES = 16
ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
_UNSIGNED: dict[int, np.dtype] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_COMPARE_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorBits:
    """One tensor: `dtype` as torch and safetensors name it, `shape`, `bits` flat u8/u16/u32[prod(shape)], C order.

    Whoever hands one over must not write to `bits` afterwards.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray

    def __post_init__(self) -> None:
        expected = unsigned(self.dtype)
        if self.bits.dtype != expected or self.bits.ndim != 1 or not self.bits.flags.c_contiguous:
            raise TemperError(
                f"bits of a {self.dtype} tensor are {self.bits.dtype}{list(self.bits.shape)}, expected contiguous flat"
                f" {expected}: use TensorBits.of"
            )
        if self.bits.size != prod(self.shape):
            raise TemperError(f"{self.bits.size} values for shape {list(self.shape)}")

    @classmethod
    def of(cls, array: np.ndarray, dtype: str | None = None) -> TensorBits:
        """The bits of any array of the right item size, uncopied where it is contiguous.

        numpy has no bfloat16 or float8: pass such tensors as u16/u8 views with their `dtype`
        (torch: ``t.detach().cpu().contiguous().view(torch.uint16).numpy()``).
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        name = dtype or array.dtype.name
        if flat.dtype.itemsize != ITEM_BYTES.get(name):
            raise TemperError(f"an array of {flat.dtype} cannot be the bits of {name}")
        return cls(name, tuple(int(n) for n in array.shape), flat.view(unsigned(name)))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.bits.nbytes)


Tensors = Mapping[str, TensorBits]


@dataclass(frozen=True, slots=True)
class Weights:
    """A sealed version: its tensors and the digest of each. `version.digest` is the root over them, hex."""

    version: Version
    tensors: Tensors
    digests: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Size of a full copy in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def unsigned(dtype: str) -> np.dtype:
    """The unsigned dtype of a tensor dtype's bits; TemperError for a dtype that the format does not know."""
    if dtype not in ITEM_BYTES:
        raise TemperError(f"weights of dtype {dtype!r} cannot be published, known are {', '.join(ITEM_BYTES)}")
    return _UNSIGNED[ITEM_BYTES[dtype]]


class Digest:
    """`digest_of` an array that comes in parts."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def update(self, bits: np.ndarray) -> None:
        """The next part: a flat array."""
        self._hash.update(bits.view(np.uint8).data)

    def value(self) -> bytes:
        """Of all parts so far."""
        return self._hash.digest()


def digest_of(bits: np.ndarray) -> bytes:
    """blake2b-16 of a flat array's bytes (0.9 GB/s a core; releases the GIL)."""
    digest = Digest()
    digest.update(bits)
    return digest.value()


def root_of(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> str:
    """The root digest, hex, over name -> (dtype, shape, digest)."""
    root = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(tensors):
        dtype, shape, digest = tensors[name]
        root.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode() + digest)
    return root.hexdigest()


def same_bits(a: TensorBits, b: TensorBits) -> bool:
    """Whether two tensors are equal bit for bit; one compare when they are, an early exit when they are not."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.bits is b.bits:
        return True
    for start in range(0, a.bits.size, _COMPARE_BLOCK):
        stop = start + _COMPARE_BLOCK
        if (a.bits[start:stop] != b.bits[start:stop]).any():
            return False
    return True


def seal(ordinal: int, lineage: int, tensors: Tensors, base: Weights | None = None) -> Weights:
    """`tensors` as the version `ordinal` of `lineage`. Only tensors that differ from `base` are hashed."""
    digests: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        known = base.tensors.get(name) if base is not None else None
        if base is not None and known is not None and same_bits(known, tensor):
            digests[name] = base.digests[name]
        else:
            digests[name] = digest_of(tensor.bits)
    root = root_of({name: (t.dtype, t.shape, digests[name]) for name, t in tensors.items()})
    return Weights(Version(ordinal, lineage, root), dict(tensors), digests)
