# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Ragged reductions, broadcasts and scans on GPU: no atomics. Called by `segments` for fp32 on a GPU.

One program per sequence, for broadcasts one per block of positions. Offsets are 64-bit; the grid only uses x.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

INTERPRETED = bool(triton.knobs.runtime.interpret)
BLOCK = 32 if INTERPRETED else 1024


@triton.jit
def _reduce(value_ptr, mask_ptr, cu_ptr, out_ptr, count_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Sum, maximum or minimum over the masked positions of one sequence, and how many they are."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    step = tl.arange(0, BLOCK)
    empty = 0.0
    if OP == "max":
        empty = float("-inf")
    elif OP == "min":
        empty = float("inf")
    found = tl.zeros((BLOCK,), dtype=tl.float32) + empty
    count = 0.0
    for first in range(start, end, BLOCK):
        at = first + step
        on = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
        value = tl.where(on, tl.load(value_ptr + at, mask=on, other=0.0), empty)
        if OP == "max":
            found = tl.maximum(found, value)
        elif OP == "min":
            found = tl.minimum(found, value)
        else:
            found += value
        count += tl.sum(tl.where(on, 1.0, 0.0))
    if OP == "max":
        tl.store(out_ptr + sequence, tl.max(found, 0))
    elif OP == "min":
        tl.store(out_ptr + sequence, tl.min(found, 0))
    else:
        tl.store(out_ptr + sequence, tl.sum(found, 0))
    tl.store(count_ptr + sequence, count)


@triton.jit
def _broadcast(value_ptr, cu_ptr, out_ptr, N, S, halvings, BLOCK: tl.constexpr):
    """Every position's sequence by bisection of its offset, and that sequence's value."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), dtype=tl.int64)
    high = low + S
    for _ in range(halvings):  # cu[low] <= at < cu[high]
        middle = (low + high) // 2
        begun = tl.load(cu_ptr + middle) <= at
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    inside = at < N
    tl.store(out_ptr + at, tl.load(value_ptr + low, mask=inside, other=0.0), mask=inside)


@triton.jit
def compose(decay_a, addend_a, decay_b, addend_b):
    """First a, then b, of the maps x -> addend + decay x."""
    return decay_a * decay_b, addend_b + decay_b * addend_a


@triton.jit
def _scan(decay_ptr, addend_ptr, cu_ptr, out_ptr, BLOCK: tl.constexpr):
    """x_t = addend_t + decay_t x_{t+1} of one sequence, walked from its end."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    step = tl.arange(0, BLOCK)
    carry = 0.0
    for first in range(0, end - start, BLOCK):
        at = end - 1 - first - step
        inside = at >= start
        decay = tl.load(decay_ptr + at, mask=inside, other=1.0)
        addend = tl.load(addend_ptr + at, mask=inside, other=0.0)
        decay, addend = tl.associative_scan((decay, addend), 0, compose)
        x = addend + decay * carry
        tl.store(out_ptr + at, x, mask=inside)
        carry = tl.sum(tl.where(step == BLOCK - 1, x, 0.0))


def _reduced(values: Tensor, cu_seqlens: Tensor, mask: Tensor, op: str) -> tuple[Tensor, Tensor]:
    """(sum, max or min, masked-in positions) of every sequence, fp32[S]."""
    segments = cu_seqlens.numel() - 1
    found = torch.empty(segments, dtype=torch.float32, device=values.device)
    count = torch.empty_like(found)
    if segments:
        _reduce[(segments,)](
            values.contiguous(), mask.to(torch.uint8).contiguous(), cu_seqlens.contiguous(), found, count,
            OP="sum" if op == "mean" else op, BLOCK=BLOCK,
        )  # fmt: skip
    return found, count


def _spread(values: Tensor, cu_seqlens: Tensor, count: int) -> Tensor:
    segments = cu_seqlens.numel() - 1
    out = torch.empty(count, dtype=torch.float32, device=values.device)
    if count:
        _broadcast[(triton.cdiv(count, BLOCK),)](
            values.contiguous(), cu_seqlens.contiguous(), out, count, segments, segments.bit_length(), BLOCK=BLOCK
        )
    return out


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, cu_seqlens: Tensor, mean: bool) -> Tensor:
        total, count = _reduced(values, cu_seqlens, mask, "sum")
        ctx.save_for_backward(mask, cu_seqlens, count.clamp_min(1) if mean else None)
        return total / count.clamp_min(1) if mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        mask, cu_seqlens, count = ctx.saved_tensors
        each = upstream if count is None else upstream / count
        return torch.where(mask, _spread(each, cu_seqlens, mask.shape[0]), 0), None, None, None


class _SegmentBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        return _spread(values, cu_seqlens, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (cu_seqlens,) = ctx.saved_tensors
        every = torch.ones_like(upstream, dtype=torch.bool)
        return _reduced(upstream, cu_seqlens, every, "sum")[0], None, None


def segment_reduce(values: Tensor, cu_seqlens: Tensor, mask: Tensor, op: str) -> Tensor:
    """[S] fp32; values fp32[N], mask bool[N]; differentiable for sum and mean."""
    if op in ("max", "min"):
        return _reduced(values.detach(), cu_seqlens, mask, op)[0]
    result: Tensor = _SegmentSum.apply(values, mask, cu_seqlens, op == "mean")
    return result


def segment_broadcast(values: Tensor, cu_seqlens: Tensor, count: int) -> Tensor:
    """[count] fp32, differentiable; values fp32[S]."""
    result: Tensor = _SegmentBroadcast.apply(values, cu_seqlens, count)
    return result


def reverse_scan(decay: Tensor, addend: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`segments.reverse_scan` without gradient, fp32."""
    out = torch.empty_like(addend, memory_format=torch.contiguous_format)
    if cu_seqlens.numel() > 1:
        _scan[(cu_seqlens.numel() - 1,)](
            decay.contiguous(), addend.contiguous(), cu_seqlens.contiguous(), out, BLOCK=BLOCK
        )
    return out
