# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The Triton path of `selective_logprob`: one program per row, one read of its logits forward, one read and write backward.

Row offsets are 64-bit; the grid only uses x. Called by `selective_logprob` only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from temper.kernels.linear_logprob_torch import FLOOR, Stats, Upstream
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
BLOCK = 64 if INTERPRETED else 4096
WARPS = 8


@triton.jit
def _forward(
    z_ptr, t_ptr, row_ptr, m_ptr, s_ptr, e_ptr, stride, inner, V, FLOOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Online m, s, e of one listed row of logits; at [i] for the i-th listed row."""
    pid = tl.program_id(0)
    row = tl.load(row_ptr + pid)
    scale = 1.0 / tl.load(t_ptr + row)
    column = tl.arange(0, BLOCK)
    m = tl.full((1,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((1,), dtype=tl.float32)
    e = tl.zeros((1,), dtype=tl.float32)
    base = z_ptr + row * stride
    for first in range(0, V, BLOCK):
        at = first + column
        z = tl.load(base + at.to(tl.int64) * inner, mask=at < V, other=float("-inf")).to(tl.float32) * scale
        top = tl.maximum(m, tl.max(z, 0))
        centre = tl.where(top == float("-inf"), 0.0, top)
        shift = tl.where(m == float("-inf"), FLOOR, m - centre)
        factor = tl.exp(shift)
        centred = z - centre
        p = tl.exp(centred)
        e = (e + s * shift) * factor + tl.sum(p * tl.maximum(centred, FLOOR), 0)
        s = s * factor + tl.sum(p, 0)
        m = top
    one = tl.arange(0, 1)
    tl.store(m_ptr + pid + one, m)
    tl.store(s_ptr + pid + one, s)
    tl.store(e_ptr + pid + one, e)


@triton.jit
def _backward(
    z_ptr, index_ptr, t_ptr, row_ptr, lse_ptr, mean_ptr, g_logprob_ptr, g_entropy_ptr, g_lse_ptr, grad_ptr,
    stride, inner, grad_stride, V, FLOOR: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one listed row."""
    row = tl.load(row_ptr + tl.program_id(0))
    scale = 1.0 / tl.load(t_ptr + row)
    target = tl.load(index_ptr + row)
    lse = tl.load(lse_ptr + row)
    g_logprob = tl.load(g_logprob_ptr + row)
    outer = tl.load(g_lse_ptr + row) - g_logprob
    column = tl.arange(0, BLOCK)
    base, out = z_ptr + row * stride, grad_ptr + row * grad_stride
    for first in range(0, V, BLOCK):
        at = first + column
        inside = at < V
        z = tl.load(base + at.to(tl.int64) * inner, mask=inside, other=float("-inf")).to(tl.float32) * scale
        p = tl.exp(z - lse)
        d = p * outer
        if ENTROPY:
            d -= p * tl.load(g_entropy_ptr + row) * tl.maximum(z - tl.load(mean_ptr + row), FLOOR)
        d += tl.where(at == target, g_logprob, 0.0)
        tl.store(out + at, (d * scale).to(grad_ptr.dtype.element_ty), mask=inside)


def dense_stats(logits: Tensor, index: Tensor, temperature: Tensor, rows: Tensor, stats: Stats) -> None:
    """Fill `stats` at `rows`; logits [N, valid ids], any strides."""
    count = rows.numel()
    if count == 0:
        return
    rows, t = rows.contiguous(), temperature.contiguous()
    m, s, e = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(3))
    _forward[(count,)](
        logits,
        t,
        rows,
        m,
        s,
        e,
        logits.stride(0),
        logits.stride(1),
        logits.shape[1],
        FLOOR=FLOOR,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    goal = logits[rows, index[rows]].float() / t[rows]
    stats.put(rows, Stats(m, s, e, goal))


def dense_backward(
    logits: Tensor, index: Tensor, temperature: Tensor, rows: Tensor, up: Upstream, grad: Tensor
) -> None:
    """Set `grad` (contiguous) at `rows`."""
    if rows.numel() == 0:
        return
    entropy = up.logprob if up.entropy is None else up.entropy
    _backward[(rows.numel(),)](
        logits, index.contiguous(), temperature.contiguous(), rows.contiguous(), up.row_lse.contiguous(),
        up.row_mean.contiguous(), up.logprob.contiguous(), entropy.contiguous(), up.lse.contiguous(), grad,
        logits.stride(0), logits.stride(1), grad.stride(0), logits.shape[1],
        FLOOR=FLOOR, ENTROPY=up.entropy is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
