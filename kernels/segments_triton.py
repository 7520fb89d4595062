# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Ragged sums and scans on GPU: one program per sequence, no atomics. Called by `segments` for fp32 on a GPU."""

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
def _sum(value_ptr, mask_ptr, cu_ptr, out_ptr, count_ptr, BLOCK: tl.constexpr):
    """Sum over the masked positions of one sequence, and how many they are."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    total = 0.0
    count = 0.0
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        on = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
        total += tl.sum(tl.load(value_ptr + at, mask=on, other=0.0))
        count += tl.sum(tl.where(on, 1.0, 0.0))
    tl.store(out_ptr + sequence, total)
    tl.store(count_ptr + sequence, count)


@triton.jit
def _compose(decay_a, addend_a, decay_b, addend_b):
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
        decay, addend = tl.associative_scan((decay, addend), 0, _compose)
        x = addend + decay * carry
        tl.store(out_ptr + at, x, mask=inside)
        carry = tl.sum(tl.where(step == BLOCK - 1, x, 0.0))


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, cu_seqlens: Tensor, mean: bool) -> Tensor:
        segments = cu_seqlens.numel() - 1
        total = torch.empty(segments, dtype=torch.float32, device=values.device)
        count = torch.empty_like(total)
        if segments:
            _sum[(segments,)](
                values.contiguous(),
                mask.to(torch.uint8).contiguous(),
                cu_seqlens.contiguous(),
                total,
                count,
                BLOCK=BLOCK,
            )
        ctx.save_for_backward(mask, cu_seqlens, count.clamp_min(1) if mean else None)
        return total / count.clamp_min(1) if mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        mask, cu_seqlens, count = ctx.saved_tensors
        each = upstream if count is None else upstream / count
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
        spread = torch.repeat_interleave(each, lengths, output_size=mask.shape[0])
        return torch.where(mask, spread, 0), None, None, None


def segment_sum_or_mean(values: Tensor, cu_seqlens: Tensor, mask: Tensor, mean: bool) -> Tensor:
    """[S] fp32, differentiable; values fp32[N], mask bool[N]."""
    result: Tensor = _SegmentSum.apply(values, mask, cu_seqlens, mean)
    return result


def reverse_scan(decay: Tensor, addend: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`segments.reverse_scan` without gradient, fp32."""
    out = torch.empty_like(addend, memory_format=torch.contiguous_format)
    if cu_seqlens.numel() > 1:
        _scan[(cu_seqlens.numel() - 1,)](
            decay.contiguous(), addend.contiguous(), cu_seqlens.contiguous(), out, BLOCK=BLOCK
        )
    return out
