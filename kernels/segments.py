"""Operations on packed ragged sequences: ``[sum of lengths]`` values with ``cu_seqlens``, no padding, no Python loop.

`cu_seqlens` is i64[S+1], starts at 0, never decreases and ends at N; sequence s is ``values[cu[s]:cu[s+1]]`` and may be
empty. Every function is differentiable in its float values and runs in the dtype it is given. Called by `policy_loss`,
by the advantage formulas and by the learner's batching.
"""

from __future__ import annotations

import torch
from temper.kernels.backends import use_triton
from torch import Tensor


def check_cu_seqlens(cu_seqlens: Tensor, count: int) -> None:
    """ValueError unless `cu_seqlens` describes `count` packed values."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens: found {cu_seqlens.dtype}{list(cu_seqlens.shape)}, expected a one-dimensional i64[sequences + 1]"
        )
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != count or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError(
            f"cu_seqlens: found a range {first}..{last}, expected offsets that start at 0, never decrease and end at {count}"
        )


def segment_ids(cu_seqlens: Tensor, count: int) -> Tensor:
    """i64[count]: the sequence that each packed value belongs to."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
    return torch.repeat_interleave(lengths, output_size=count)


def segment_sum(values: Tensor, ids: Tensor, segments: int) -> Tensor:
    """[segments]: sums of `values` [N] by segment id."""
    return values.new_zeros(segments).index_add(0, ids, values)


def segment_max(values: Tensor, ids: Tensor, segments: int, empty: float = -torch.inf) -> Tensor:
    """[segments]: maxima of `values` [N]; `empty` for a segment without values."""
    found = values.new_full((segments,), -torch.inf)
    found = found.scatter_reduce(0, ids, values, "amax", include_self=True)
    return found if empty == -torch.inf else torch.where(torch.isneginf(found), empty, found)


def segment_reduce(
    values: Tensor, cu_seqlens: Tensor, op: str, mask: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """[S]: ``sum``, ``mean``, ``max`` or ``min`` of each sequence over its positions where `mask` (bool[N]) is set.

    What the mask leaves out is selected away, so NaN there does no harm. The mean of nothing is 0; the max (min) of
    nothing is -inf (+inf). Differentiable; max and min on the torch path alone.
    """
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"op: found {op!r}, expected sum, mean, max or min")
    check_cu_seqlens(cu_seqlens, values.shape[0])
    if mask is not None and mask.shape != values.shape:
        raise ValueError(f"mask: found {list(mask.shape)}, expected {list(values.shape)} as values has")
    mask = None if mask is None else mask.to(torch.bool)
    if (op in ("sum", "mean") or not values.requires_grad) and use_triton(backend, (values,), (torch.float32,)):
        from temper.kernels import segments_triton

        on = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        return segments_triton.segment_reduce(values, cu_seqlens, on, op)
    segments, ids = cu_seqlens.numel() - 1, segment_ids(cu_seqlens, values.shape[0])
    if op in ("max", "min"):
        sign = 1.0 if op == "max" else -1.0
        signed = values * sign
        if mask is not None:
            signed = torch.where(mask, signed, -torch.inf)
        return segment_max(signed, ids, segments) * sign
    if mask is not None:
        values = torch.where(mask, values, 0)
    total = segment_sum(values, ids, segments)
    if op == "sum":
        return total
    ones = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    return total / segment_sum(ones, ids, segments).clamp_min(1)


def segment_broadcast(values: Tensor, cu_seqlens: Tensor, count: int | None = None, *, backend: str = "auto") -> Tensor:
    """[N]: each sequence's value ([S], any dtype) at every one of its positions."""
    count = int(cu_seqlens[-1]) if count is None else count
    check_cu_seqlens(cu_seqlens, count)
    if values.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(f"values: found {list(values.shape)}, expected [{cu_seqlens.numel() - 1}], one per sequence")
    if use_triton(backend, (values,), (torch.float32,)):
        from temper.kernels import segments_triton

        return segments_triton.segment_broadcast(values, cu_seqlens, count)
    return values[segment_ids(cu_seqlens, count)]


def reverse_scan(decay: Tensor, addend: Tensor, cu_seqlens: Tensor, *, backend: str = "auto") -> Tensor:
    """[N]: x_t = addend_t + decay_t * x_{t+1} inside each sequence, x after its end 0.

    An associative scan: by doubling, log2(longest sequence) passes over the packed values; on a GPU one program per
    sequence (without gradient).
    """
    check_cu_seqlens(cu_seqlens, addend.shape[0])
    if not (decay.requires_grad or addend.requires_grad) and use_triton(backend, (decay, addend), (torch.float32,)):
        from temper.kernels import segments_triton

        return segments_triton.reverse_scan(decay, addend, cu_seqlens)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    last = (cu_seqlens[1:] - 1)[lengths > 0]
    decay = decay.index_fill(0, last, 0)
    longest, step = int(lengths.max()) if lengths.numel() else 0, 1
    while step < longest:
        addend = torch.cat([addend[:-step] + decay[:-step] * addend[step:], addend[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], torch.zeros_like(decay[-step:])])
        step *= 2
    return addend


def next_values(values: Tensor, cu_seqlens: Tensor, bootstrap: Tensor | float = 0.0) -> Tensor:
    """[N]: the value at the next position of the same sequence; `bootstrap` (scalar or [S]) after its last one."""
    shifted = torch.cat([values[1:], values[:1]]) if values.numel() else values
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    full = lengths > 0
    tail = torch.as_tensor(bootstrap, dtype=values.dtype, device=values.device).expand(lengths.numel())
    return shifted.index_copy(0, (cu_seqlens[1:] - 1)[full], tail[full])
