"""Log-probabilities of chosen ids from logits that exist already, without a second [tokens, vocabulary] in forward.

The same semantics as `linear_logprob` for callers that hold logits (an engine's prefill, a reward model, a test): fp32
accumulation, entropy, temperature, support, ignored rows. Backward writes one gradient of the logits' size and nothing
beside it. Formulas: `reference.logprob_of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any, Literal

import torch
from temper.kernels import linear_logprob_torch as chunked
from temper.kernels.backends import HALF_TO_SINGLE, use_triton
from temper.kernels.linear_logprob import (
    Entropy,
    LogprobOut,
    Support,
    check_support,
    check_target,
    check_temperature,
    split_rows,
)
from temper.kernels.segments import segment_max, segment_sum
from torch import Tensor
from torch.autograd.function import once_differentiable

WORKSPACE_ELEMENTS = 1 << 21  # fp32 values of one block of rows on the torch path


def selective_logprob(
    logits: Tensor,
    index: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    entropy: Entropy = "none",
    support: Support | None = None,
    return_lse: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> LogprobOut:
    """log_softmax(logits / temperature)[row, index[row]] of logits [N, V], any strides; the rest as `linear_logprob`.

    logprob, entropy, lse f32[N] (f64 for float64 logits). ValueError names the argument, what was found and expected.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ValueError(f"logits: found {logits.dtype}{list(logits.shape)}, expected a float [tokens, vocabulary]")
    if index.shape != logits.shape[:1] or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index: found {index.dtype}{list(index.shape)}, expected i64[{logits.shape[0]}]")
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy: found {entropy!r}, expected none, value or grad")
    valid = logits.shape[1] if valid_vocab is None else valid_vocab
    if not 0 < valid <= logits.shape[1]:
        raise ValueError(f"valid_vocab: found {valid}, expected 1..{logits.shape[1]}")
    blocks = _implementation(backend, logits)
    scale = check_temperature(temperature, logits)
    ignored = check_target("index", index, ignore_index, valid)
    if support is not None:
        check_support(support, index, ignored, valid)
    logprob, ent, lse = _SelectiveLogprob.apply(  # type: ignore[no-untyped-call]
        logits, index.long(), scale, ignored, valid, entropy, support, blocks
    )
    return LogprobOut(logprob, None if entropy == "none" else ent, lse if return_lse else None)


def _implementation(backend: str, logits: Tensor) -> Any:
    if not use_triton(backend, (logits,), HALF_TO_SINGLE):
        return _Torch
    from temper.kernels import selective_logprob_triton

    return selective_logprob_triton


class _Torch:
    """Blocks of rows."""

    @staticmethod
    def dense_stats(logits: Tensor, index: Tensor, temperature: Tensor, rows: Tensor, stats: chunked.Stats) -> None:
        """Fill `stats` at `rows`; logits [N, valid ids]."""
        for block in _blocks(rows, logits.shape[1]):
            z = logits[block].to(stats.m.dtype) / temperature[block][:, None]
            part = chunked.Stats.empty(block.numel(), z.dtype, z.device)
            part.target = z.gather(1, index[block][:, None])[:, 0]
            part.m = z.amax(1)
            z.sub_(torch.where(torch.isneginf(part.m), 0, part.m)[:, None])
            p = z.exp()
            part.s, part.e = p.sum(1), p.mul_(z.clamp_min_(chunked.FLOOR)).sum(1)
            stats.put(block, part)

    @staticmethod
    def dense_backward(
        logits: Tensor, index: Tensor, temperature: Tensor, rows: Tensor, up: chunked.Upstream, grad: Tensor
    ) -> None:
        """Set `grad` [N, V] at `rows`; it is 0 elsewhere, at padded ids too."""
        for block in _blocks(rows, logits.shape[1]):
            t, part = temperature[block][:, None], up.at(block)
            d = part.of_logits(logits[block].to(temperature.dtype) / t)
            d.scatter_add_(1, index[block][:, None], part.logprob[:, None])
            grad[block, : d.shape[1]] = (d / t).to(grad.dtype)


def _blocks(rows: Tensor, vocabulary: int) -> Iterator[Tensor]:
    size = max(1, WORKSPACE_ELEMENTS // vocabulary)
    for first in range(0, rows.numel(), size):
        yield rows[first : first + size]


def _pairs(support: Support, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(position in `rows`, id) of every pair of those rows' supports."""
    ids, cu = support
    sizes = (cu[1:] - cu[:-1])[rows]
    where = torch.repeat_interleave(sizes)
    within = torch.arange(where.numel(), device=ids.device) - (sizes.cumsum(0) - sizes)[where]
    return where, ids[cu[rows][where] + within].long()


class _SelectiveLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, temperature: Tensor, ignored: Tensor, valid: int, entropy: Entropy,
        support: Support | None, blocks: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        values, t = logits.detach()[:, :valid], temperature.to(dtype)
        stats = chunked.Stats.empty(logits.shape[0], dtype, logits.device)
        rows = (~ignored).nonzero()[:, 0]
        dense, sparse = split_rows(rows, support)
        blocks.dense_stats(values, index, t, dense, stats)
        if support is not None and sparse.numel():
            where, ids = _pairs(support, sparse)
            z = values[sparse[where], ids].to(dtype) / t[sparse][where]
            m = segment_max(z, where, sparse.numel())
            shifted = (z - m[where]).clamp_min(chunked.FLOOR)
            p = shifted.exp()
            goal = values[sparse, index[sparse]].to(dtype) / t[sparse]
            s, e = segment_sum(p, where, sparse.numel()), segment_sum(p * shifted, where, sparse.numel())
            stats.put(sparse, chunked.Stats(m, s, e, goal))
        lse = stats.m + stats.s.log()
        if not bool(torch.isfinite(lse[rows]).all()):
            row = int(rows[~torch.isfinite(lse[rows])][0])
            raise ValueError(f"logits: found a log-sum-exp of {float(lse[row])} in row {row}, expected finite logits")
        mean = stats.m + stats.e / stats.s
        logprob = torch.where(ignored, 0, (stats.target - lse).clamp_max(0))
        ent = torch.where(ignored, 0, (lse - mean).clamp(0, log(valid)))
        lse = torch.where(ignored, 0, lse)
        ctx.save_for_backward(logits, index, t, ignored, lse, mean, *(support or ()))
        ctx.head = (valid, entropy, blocks)
        if entropy != "grad":
            ctx.mark_non_differentiable(ent)
        ctx.set_materialize_grads(False)
        return logprob, ent, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None) -> Any:
        logits, index, t, ignored, lse, mean, *support = ctx.saved_tensors
        valid, entropy, blocks = ctx.head
        up = chunked.upstream_of(g_logprob, g_entropy if entropy == "grad" else None, g_lse, lse, mean)
        pair = (support[0], support[1]) if support else None
        dense, sparse = split_rows((up.needed() & ~ignored).nonzero()[:, 0], pair)
        grad = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        blocks.dense_backward(logits[:, :valid], index, t, dense, up, grad)
        if pair is not None and sparse.numel():
            where, ids = _pairs(pair, sparse)
            at = sparse[where]
            d = up.at(at).of_logits(logits[at, ids].to(t.dtype) / t[at])
            d = d + torch.where(index[at] == ids, up.logprob[at], 0)
            grad[at, ids] = (d / t[at]).to(grad.dtype)
        return (grad, *(None,) * 7)
