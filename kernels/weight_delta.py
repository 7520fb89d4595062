"""What changed between two versions of a tensor, bit by bit, on the device that holds them.

``delta_encode`` lists the changed values, ``delta_apply`` overwrites them (so a retry is harmless), ``fingerprint`` tells
whether two tensors hold the same bits without bringing them to the host. All bits are compared: -0.0 differs from 0.0 and
NaNs by their payload. Offsets are 64-bit. fp32, bf16, fp16 and fp8 (any dtype of 1, 2 or 4 bytes). Called where weights
live on a GPU; `common/delta.py` codes what these functions list.
"""

from __future__ import annotations

from typing import Literal

import torch
from temper.kernels.backends import use_triton
from torch import Tensor

BLOCK = 1 << 20  # values of one block on the torch path
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment and multipliers
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
WIDTHS = tuple(BITS.values())
Backend = Literal["auto", "torch", "triton"]


def bits_of(name: str, tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as a flat signed-integer view of the same width, no copy."""
    width = tensor.element_size()
    if width not in BITS:
        raise ValueError(f"{name}: found {tensor.dtype}, expected a dtype of 1, 2 or 4 bytes")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: found strides {list(tensor.stride())}, expected a contiguous tensor")
    return tensor.detach().reshape(-1).view(BITS[width])


def delta_encode(base: Tensor, new: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """(indices i64[K] ascending, values [K] in new's dtype) of the elements whose bits differ, flat in C order."""
    if base.shape != new.shape or base.dtype != new.dtype or base.device != new.device:
        raise ValueError(
            f"base: found {base.dtype}{list(base.shape)} on {base.device}, expected {new.dtype}{list(new.shape)} "
            f"on {new.device} as new is"
        )
    a, b = bits_of("base", base), bits_of("new", new)
    if use_triton(backend, (b,), WIDTHS):
        from temper.kernels import weight_delta_triton

        indices, values = weight_delta_triton.delta_encode(a, b)
        return indices, values.view(new.dtype)
    parts = [
        (a[first : first + BLOCK] != b[first : first + BLOCK]).nonzero()[:, 0] + first
        for first in range(0, b.numel(), BLOCK)
    ]
    indices = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=b.device)
    return indices, b[indices].view(new.dtype)


def delta_apply(target: Tensor, indices: Tensor, values: Tensor, *, backend: Backend = "auto") -> None:
    """Overwrite `target`'s elements at flat `indices` (i64[K], distinct) with `values` [K], bit by bit, in place."""
    if not target.device == indices.device == values.device:
        raise ValueError(
            f"indices, values: found on {indices.device} and {values.device}, expected {target.device} as target is"
        )
    if values.dtype != target.dtype or values.shape != indices.shape or indices.dtype != torch.int64:
        raise ValueError(
            f"values: found {values.dtype}{list(values.shape)} for indices {indices.dtype}{list(indices.shape)}, "
            f"expected {target.dtype} of the indices' shape, and i64 indices"
        )
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < target.numel():
        raise ValueError(f"indices: found {int(indices.min())}..{int(indices.max())}, expected 0..{target.numel() - 1}")
    bits, new = bits_of("target", target), bits_of("values", values)
    if use_triton(backend, (bits,), WIDTHS):
        from temper.kernels import weight_delta_triton

        weight_delta_triton.delta_apply(bits, indices, new)
    else:
        bits.index_copy_(0, indices, new)


def fingerprint(tensor: Tensor, *, backend: Backend = "auto") -> int:
    """A 64-bit number of a tensor's bits and their places: sum over i of splitmix64(bits_i + (i + 1) golden), mod 2^64.

    Equal bits give equal numbers on every device; different ones different numbers but for chance (2^-64). It guards
    against faults, not against forgery: digests travel with weights.
    """
    bits = bits_of("tensor", tensor)
    if use_triton(backend, (bits,), WIDTHS):
        from temper.kernels import weight_delta_triton

        return weight_delta_triton.fingerprint(bits) % 2**64
    total = 0
    width = 2 ** (8 * bits.element_size()) - 1
    for first in range(0, bits.numel(), BLOCK):
        block = bits[first : first + BLOCK].to(torch.int64) & width
        place = torch.arange(first + 1, first + 1 + block.numel(), device=bits.device)
        total += int(_mix(block + place * _signed(GOLDEN)).sum())
    return total % 2**64


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 bit patterns (products wrap; right shifts are made logical)."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & (2**33 - 1))
