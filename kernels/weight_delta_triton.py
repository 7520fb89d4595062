# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The Triton path of `weight_delta`: ordered and deterministic, 64-bit offsets, only the grid's x. Called by `weight_delta`
only. Listing changes takes two passes over the bits: count, then write from where the blocks before end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
BLOCK = 64 if INTERPRETED else 4096


@triton.jit
def _count(base_ptr, new_ptr, count_ptr, N, BLOCK: tl.constexpr):
    """How many values of one block differ."""
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(base_ptr + at, mask=at < N, other=0)
    b = tl.load(new_ptr + at, mask=at < N, other=0)
    tl.store(count_ptr + pid, tl.sum(tl.where(a != b, 1, 0)))


@triton.jit
def _gather(base_ptr, new_ptr, start_ptr, index_ptr, value_ptr, N, BLOCK: tl.constexpr):
    """Write the changed places and values of one block from where the blocks before it end."""
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(base_ptr + at, mask=at < N, other=0)
    b = tl.load(new_ptr + at, mask=at < N, other=0)
    changed = tl.where(a != b, 1, 0)
    to = tl.load(start_ptr + pid) + tl.cumsum(changed, 0) - changed
    tl.store(index_ptr + to, at, mask=changed != 0)
    tl.store(value_ptr + to, b, mask=changed != 0)


@triton.jit
def _overwrite(target_ptr, index_ptr, value_ptr, N, BLOCK: tl.constexpr):
    """Put a block of values at their places."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index_ptr + at, mask=at < N, other=0)
    tl.store(target_ptr + place, tl.load(value_ptr + at, mask=at < N, other=0), mask=at < N)


@triton.jit
def _fingerprint(bits_ptr, part_ptr, N, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """splitmix64 of every value and its place, summed over one block, modulo 2^64."""
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < N, other=0).to(tl.int64) & WIDTH
    x = bits.to(tl.uint64) + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    x = tl.where(at < N, x, 0)
    tl.store(part_ptr + pid, tl.sum(x.to(tl.int64, bitcast=True)))


def delta_encode(base: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """(indices i64[K], values [K]) of flat integer views that differ."""
    blocks = triton.cdiv(new.numel(), BLOCK)
    counts = torch.zeros(blocks, dtype=torch.int64, device=new.device)
    if blocks:
        _count[(blocks,)](base, new, counts, new.numel(), BLOCK=BLOCK)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if blocks else 0
    indices = torch.empty(total, dtype=torch.int64, device=new.device)
    values = torch.empty(total, dtype=new.dtype, device=new.device)
    if total:
        _gather[(blocks,)](base, new, ends - counts, indices, values, new.numel(), BLOCK=BLOCK)
    return indices, values


def delta_apply(target: Tensor, indices: Tensor, values: Tensor) -> None:
    """Overwrite a flat integer view at `indices` i64[K] within its bounds."""
    if indices.numel():
        blocks = triton.cdiv(indices.numel(), BLOCK)
        _overwrite[(blocks,)](target, indices.contiguous(), values, indices.numel(), BLOCK=BLOCK)


def fingerprint(bits: Tensor) -> int:
    """The sum as a signed number modulo 2^64."""
    blocks = triton.cdiv(bits.numel(), BLOCK)
    parts = torch.zeros(blocks, dtype=torch.int64, device=bits.device)
    if blocks:
        _fingerprint[(blocks,)](bits, parts, bits.numel(), WIDTH=2 ** (8 * bits.element_size()) - 1, BLOCK=BLOCK)
    return int(parts.sum())
