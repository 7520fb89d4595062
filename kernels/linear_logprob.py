"""Log-probabilities of a linear head without ever holding [tokens, vocabulary].

``linear_logprob(hidden, weight, target)`` is ``log_softmax(hidden @ weight.T)[range, target]`` with fp32 accumulation, a
bounded workspace in forward and backward, and gradients to hidden, weight and bias. Guarantees: a log-probability is
never positive and the entropy stays in [0, ln V] (rounding is cut); rows whose upstream gradient is zero (prompt, masked,
clipped) cost nothing in backward; the weight's gradient is summed in fp32 and cast once. Called by the learner's policy.
Formulas: `reference.logits_of`, `reference.logprob_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, log
from typing import Any, Literal

import torch
import torch.distributed as dist
from temper.kernels import linear_logprob_torch as chunked
from temper.kernels.backends import HALF_TO_SINGLE, use_triton
from temper.kernels.flags import SUPPORT_LIMIT
from temper.kernels.segments import check_cu_seqlens
from torch import Tensor
from torch.autograd.function import once_differentiable

Support = tuple[Tensor, Tensor]
Entropy = Literal["none", "value", "grad"]


@dataclass(frozen=True, slots=True)
class LogprobOut:
    """logprob f32[N] in nats (0 at ignored rows); entropy f32[N] or None; lse f32[N] of the scaled logits or None.

    Accumulation and outputs are float64 when hidden and weight are float64.
    """

    logprob: Tensor
    entropy: Tensor | None = None
    lse: Tensor | None = None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    entropy: Entropy = "none",
    support: Support | None = None,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
    rounded: Tensor | None = None,
    weight_gradient: Tensor | None = None,
) -> LogprobOut:
    """log-probability of `target` under softmax(softcap(hidden weight^T + bias) / temperature).

    hidden [N, H] float; weight [V, H] float (any strides, may be tied to an embedding). fp32 masters beside 16-bit hidden
    states are rounded to their dtype, as autocast does, and get an fp32 gradient that was never rounded.
    target i64/i32[N], `ignore_index` marks rows that are skipped (logprob 0, no gradient); bias [V].
    temperature > 0, scalar or f32[N], no gradient. softcap c: c tanh(x / c) before the temperature.
    valid_vocab: ids from there on are padding and have probability 0. entropy: none, value (no gradient), grad.
    support = (ids i32[M], cu i64[N+1]): the ids that top-p/top-k/min-p kept for each row, so that truncated sampling is
    normalised over the same set; an empty row keeps the whole vocabulary; distinct ids, at most SUPPORT_LIMIT a row.
    group: vocabulary-parallel ranks, each with an equal shard of weight (and bias) in rank order and the same hidden and
    target; hidden's gradient is summed over them. backend: auto takes Triton on a GPU (float64 aside), else chunked torch.
    rounded [V, H]: fp32 masters in hidden's dtype, from a caller that has them. weight_gradient f32[V, H]: weight's gradient
    is added to it by backward, and autograd gets none: no second tensor of that size.
    ValueError names the argument, what was found and what was expected.
    """
    blocks = _implementation(backend, hidden)
    shards, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    _check_shapes(hidden, weight, target, bias, group)
    vocabulary = weight.shape[0] * shards
    valid = vocabulary if valid_vocab is None else valid_vocab
    if not 0 < valid <= vocabulary:
        raise ValueError(f"valid_vocab: found {valid}, expected 1..{vocabulary}, the rows of weight")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: found {softcap}, expected > 0 or None")
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy: found {entropy!r}, expected none, value or grad")
    if rounded is not None and (rounded.dtype, rounded.shape) != (hidden.dtype, weight.shape):
        raise ValueError(
            f"rounded: found {rounded.dtype}{list(rounded.shape)}, expected {hidden.dtype}{list(weight.shape)}: weight in "
            "hidden's dtype"
        )
    sums = torch.float64 if hidden.dtype == weight.dtype == torch.float64 else torch.float32
    if weight_gradient is not None and (weight_gradient.dtype, weight_gradient.shape) != (sums, weight.shape):
        raise ValueError(
            f"weight_gradient: found {weight_gradient.dtype}{list(weight_gradient.shape)}, expected {sums}{list(weight.shape)}"
        )
    scale = check_temperature(temperature, hidden)
    ignored = check_target("target", target, ignore_index, valid)
    if support is not None:
        check_support(support, target, ignored, valid)
    logprob, ent, lse = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        target.long(),
        scale,
        ignored,
        softcap,
        valid,
        entropy,
        support,
        group,
        rank,
        blocks,
        isinstance(temperature, Tensor) or temperature != 1,
        rounded,
        weight_gradient,
    )
    return LogprobOut(logprob, None if entropy == "none" else ent, lse if return_lse else None)


def _implementation(backend: str, hidden: Tensor) -> Any:
    """The module with `dense_stats`, `dense_backward`, `support_stats` and `support_backward`."""
    if not use_triton(backend, (hidden,), HALF_TO_SINGLE):
        return chunked
    from temper.kernels import linear_logprob_triton

    return linear_logprob_triton


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, group: Any) -> None:
    if weight.dim() != 2 or not weight.is_floating_point() or weight.shape[0] == 0:
        raise ValueError(f"weight: found {weight.dtype}{list(weight.shape)}, expected a float [vocabulary, hidden]")
    if hidden.dim() != 2 or not hidden.is_floating_point() or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden: found {hidden.dtype}{list(hidden.shape)}, expected hidden states [tokens, {weight.shape[1]}] "
            f"as weight {list(weight.shape)} needs (not logits)"
        )
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: found on {tensor.device}, expected {hidden.device} as hidden is")
    if target.shape != hidden.shape[:1] or target.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"target: found {target.dtype}{list(target.shape)}, expected i64[{hidden.shape[0]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: found {list(bias.shape)}, expected [{weight.shape[0]}]")
    if group is not None:
        size = torch.tensor([weight.shape[0], -weight.shape[0]], device=hidden.device)
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
        if int(size[0]) != -int(size[1]):
            raise ValueError(
                f"weight: found shards of {-int(size[1])} to {int(size[0])} rows, expected equal ones (pad the vocabulary)"
            )


def check_target(name: str, target: Tensor, ignore_index: int, valid: int) -> Tensor:
    """bool[N]: ignored rows; ValueError for an id outside the vocabulary."""
    ignored = target == ignore_index
    outside = ~ignored & ((target < 0) | (target >= valid))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"{name}: found {int(target[row])} in row {row}, expected 0..{valid - 1} or ignore_index {ignore_index}"
        )
    return ignored


def check_temperature(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """f32[N] (expanded, no copy for a scalar)."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if isinstance(temperature, (int, float)):  # known on the host: nothing to wait for
        if not (isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature: found {temperature:g}, expected finite and > 0")
        return torch.full((), temperature, dtype=dtype, device=hidden.device).expand(hidden.shape[0])
    value = torch.as_tensor(temperature, dtype=dtype, device=hidden.device).detach()
    if value.dim() > 1 or (value.dim() == 1 and value.shape != hidden.shape[:1]):
        raise ValueError(f"temperature: found shape {list(value.shape)}, expected a number or [{hidden.shape[0]}]")
    if not bool(((value > 0) & value.isfinite()).all()):
        raise ValueError(f"temperature: found {float(value.min()):g}, expected finite and > 0")
    return value.expand(hidden.shape[0])


def check_support(support: Support, target: Tensor, ignored: Tensor, valid: int) -> None:
    ids, cu = support
    if ids.dim() != 1 or cu.shape != (target.shape[0] + 1,):
        raise ValueError(
            f"support: found ids {list(ids.shape)} and cu {list(cu.shape)}, expected (i32[ids], i64[{target.shape[0] + 1}])"
        )
    check_cu_seqlens(cu, ids.numel())
    sizes = cu[1:] - cu[:-1]
    if sizes.numel() and int(sizes.max()) > SUPPORT_LIMIT:
        raise ValueError(
            f"support: found a row with {int(sizes.max())} ids, expected at most {SUPPORT_LIMIT}: lower top_k or top_p"
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < valid:
        raise ValueError(f"support: found ids {int(ids.min())}..{int(ids.max())}, expected 0..{valid - 1}")
    rows = torch.repeat_interleave(sizes.long(), output_size=ids.numel())
    found = torch.zeros_like(ignored).index_put(
        (rows[ids == target[rows]],), torch.ones((), dtype=torch.bool, device=ids.device)
    )
    missing = ~found & ~ignored & (sizes > 0)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        raise ValueError(
            f"target: found {int(target[row])} in row {row}, expected one of the ids of that row's support"
        )


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor,
        ignored: Tensor, softcap: float | None, valid: int, entropy: Entropy, support: Support | None,
        group: dist.ProcessGroup | None, rank: int, blocks: Any, hot: bool, rounded: Tensor | None,
        weight_gradient: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dtype = torch.float64 if hidden.dtype == weight.dtype == torch.float64 else torch.float32
        start = rank * weight.shape[0]
        own = max(0, min(weight.shape[0], valid - start))
        head = _head_of(weight, hidden) if rounded is None else rounded
        shard = chunked.Shard(head[:own], None if bias is None else bias.detach()[:own], softcap, start, dtype, hot)
        local = target - start
        rows = (~ignored).nonzero()[:, 0]
        stats = chunked.Stats.empty(hidden.shape[0], dtype, hidden.device)
        h, t, workspace = hidden.detach(), temperature.to(dtype), chunked.WORKSPACE_ELEMENTS
        dense, sparse = split_rows(rows, support)
        if own:
            blocks.dense_stats(shard, h, local, t, dense, stats, entropy != "none", workspace)
            if support is not None:
                blocks.support_stats(shard, h, local, t, sparse, support, stats, workspace)
        if group is not None:
            _merge(stats, group)
        lse = stats.m + stats.s.log()
        if not bool(torch.isfinite(lse[rows]).all()):
            row = int(rows[~torch.isfinite(lse[rows])][0])
            raise ValueError(
                f"hidden, weight or bias: found a log-sum-exp of {float(lse[row])} in row {row}, expected finite logits"
            )
        mean = stats.m + stats.e / stats.s
        logprob = torch.where(ignored, 0, (stats.target - lse).clamp_max(0))
        ent = torch.where(ignored, 0, (lse - mean).clamp(0, log(valid)))
        lse = torch.where(ignored, 0, lse)
        ctx.save_for_backward(hidden, head, bias, local, t, lse, mean, ignored, *(support or ()))
        ctx.head = (shard.softcap, start, own, dtype, weight.dtype, group, entropy, blocks, hot, weight_gradient)
        if entropy != "grad":
            ctx.mark_non_differentiable(ent)
        ctx.set_materialize_grads(False)
        return logprob, ent, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None) -> Any:
        hidden, head, bias, local, t, lse, mean, ignored, *support = ctx.saved_tensors
        softcap, start, own, dtype, weight_dtype, group, entropy, blocks, hot, d_weight = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        up = chunked.upstream_of(g_logprob, g_entropy if entropy == "grad" else None, g_lse, lse, mean)
        summed = hidden.dtype if group is None else dtype
        d_hidden = torch.zeros(hidden.shape, dtype=summed, device=hidden.device) if needs_hidden else None
        given = d_weight is not None
        if needs_weight and not given:
            d_weight = torch.zeros(head.shape, dtype=dtype, device=head.device)
        d_bias = torch.zeros(head.shape[0], dtype=dtype, device=head.device) if needs_bias else None
        shard = chunked.Shard(head[:own], None if bias is None else bias[:own], softcap, start, dtype, hot)
        pair = (support[0], support[1]) if support else None
        dense, sparse = split_rows((up.needed() & ~ignored).nonzero()[:, 0], pair)
        if own:
            outs = (d_hidden, None if d_weight is None else d_weight[:own], None if d_bias is None else d_bias[:own])
            blocks.dense_backward(shard, hidden, local, t, dense, up, *outs, chunked.WORKSPACE_ELEMENTS)
            if pair is not None:
                blocks.support_backward(shard, hidden, local, t, sparse, pair, up, *outs, chunked.WORKSPACE_ELEMENTS)
        if group is not None and d_hidden is not None:
            dist.all_reduce(d_hidden, group=group)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if given or d_weight is None else d_weight.to(weight_dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 13,
        )


def _head_of(weight: Tensor, hidden: Tensor) -> Tensor:
    """The weight that multiplies `hidden`: fp32 masters are rounded to the dtype of 16-bit hidden states."""
    masters = weight.dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16)
    return weight.detach().to(hidden.dtype) if masters else weight.detach()


def split_rows(rows: Tensor, support: Support | None) -> tuple[Tensor, Tensor]:
    """(rows over the whole vocabulary, rows with a support of their own)."""
    if support is None:
        return rows, rows[:0]
    own = (support[1][1:] > support[1][:-1])[rows]
    return rows[~own], rows[own]


def _merge(stats: chunked.Stats, group: dist.ProcessGroup) -> None:
    """Merge the ranks' statistics of the same rows, in place."""
    top = stats.m.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shift = torch.where(torch.isneginf(stats.m), chunked.FLOOR, stats.m - top)
    factor = shift.exp()
    sums = torch.stack([stats.s * factor, (stats.e + stats.s * shift) * factor])
    dist.all_reduce(sums, group=group)
    dist.all_reduce(stats.target, op=dist.ReduceOp.MAX, group=group)
    stats.m, stats.s, stats.e = top, sums[0], sums[1]
