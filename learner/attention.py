"""Attention along a micro-batch's prefix trees, as transformers' attention function.

Every bucket of the plan is one padded call of `scaled_dot_product_attention`. On CPU, where that function's backward in
bfloat16 takes five times as long as its matrix products, short bfloat16 buckets have a backward of their own: scores are
recomputed in fp32 and the keys of each path gathered again, so nothing of size [queries, keys] or [paths, keys] is kept from
forward. Called by `policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from temper.kernels.linear_logprob_torch import bf16_products
from temper.learner.batching import Bucket, Microbatch
from transformers import AttentionInterface

ATTENTION = "temper_tree"
CELLS = 1 << 24  # (query, key, head) cells that the bfloat16 backward computes at once: 64 MiB in fp32


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceBucket:
    queries: torch.Tensor | None  # i64[B*Q]; None: the range that begins at start
    keys: torch.Tensor | None  # i64[B*K]; None: the same range as the queries
    bias: torch.Tensor | None  # [B, 1, Q, K], 0 where a query sees a key, -inf elsewhere; None: causal
    start: int
    shape: tuple[int, int, int]  # B, Q, K


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A micro-batch's attention plan on the model's device."""

    buckets: tuple[_DeviceBucket, ...]
    restore: torch.Tensor | None


def _device_bucket(bucket: Bucket, device: torch.device, dtype: torch.dtype) -> _DeviceBucket:
    (size, width), length = bucket.queries.shape, bucket.keys.shape[1]
    queries = None if bucket.start is not None else torch.from_numpy(bucket.queries.reshape(-1)).to(device)
    if bucket.keys is bucket.queries:
        keys = queries
    else:
        keys = torch.from_numpy(bucket.keys.reshape(-1)).to(device)
    bias = None
    if bucket.mask is not None:
        seen = torch.from_numpy(bucket.mask)[:, None].to(device)
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return _DeviceBucket(queries, keys, bias, bucket.start or 0, (size, width, length))


def tree_of(batch: Microbatch, device: torch.device, dtype: torch.dtype) -> Tree:
    """The plan of `batch` as tensors on `device`; `dtype` is that of queries, keys and values."""
    restore = None if batch.restore is None else torch.from_numpy(batch.restore).to(device)
    return Tree(tuple(_device_bucket(bucket, device, dtype) for bucket in batch.buckets), restore)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp of each query)."""
    repeat = q.shape[1] // k.shape[1]
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if repeat == 1:
        out, lse = flash(q, k, v, 0.0, bias is None, attn_mask=bias, scale=scale)
    elif bias is None:  # causal: the kernel knows a query's place by its row, so every head needs its own
        many = [x.repeat_interleave(repeat, 1) for x in (k, v)]
        out, lse = flash(q, *many, 0.0, True, scale=scale)
    else:  # query heads that share a key head are more rows of queries
        rows = q.reshape(q.shape[0], k.shape[1], repeat * q.shape[2], q.shape[3])
        out, lse = flash(rows, k, v, 0.0, False, attn_mask=bias.repeat(1, 1, repeat, 1), scale=scale)
        out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3])
    return out, lse


class _Bf16OnCpu(torch.autograd.Function):
    """Attention of q [B, Hq, Q, D] over k, v [B, Hk, K, D], bfloat16; bias [B, 1, Q, K] of 0 and -inf, None: causal."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        out, lse = _forward(q, k, v, bias, scale)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, bias, out, lse = ctx.saved_tensors
        inner = (gradient.float() * out.float()).sum(-1)
        return *_in_parts(q, k, v, bias, inner, lse, gradient, ctx.scale), None, None


def _in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    inner: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_backward` of at most CELLS cells at once."""
    at_once = max(1, CELLS // (q.shape[1] * q.shape[2] * k.shape[2]))
    if at_once >= q.shape[0]:
        return _backward(q, k, v, bias, inner, lse, gradient, scale)
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for first in range(0, q.shape[0], at_once):
        part = slice(first, first + at_once)
        seen = None if bias is None else bias[part]
        found = _backward(q[part], k[part], v[part], seen, inner[part], lse[part], gradient[part], scale)
        d_q[part], d_k[part], d_v[part] = found
    return d_q, d_k, d_v


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    inner: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv): query heads that share a key head are rows of one product. `inner`, `lse` f32[B, Hq, Q]: of each query
    the product of output and gradient, and the log-sum-exp of its scores."""
    (size, heads, width, depth), (groups, length) = q.shape, k.shape[1:3]

    def fold(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(size * groups, (heads // groups) * width, x.shape[-1])

    qs, ks, vs = fold(q), k.reshape(size * groups, length, depth), v.reshape(size * groups, length, depth)
    upstream = fold(gradient)
    with bf16_products(True):  # exact: the factors are bfloat16 values
        none = torch.empty((), dtype=torch.float32, device=q.device)
        p = torch.baddbmm(none, qs.float(), ks.float().transpose(1, 2), beta=0, alpha=scale)
    p.sub_(fold(lse[..., None])).exp_()
    if bias is None:
        hidden = torch.ones(width, length, dtype=torch.bool, device=q.device).triu(1)
    else:
        hidden = bias != 0
    p.view(size, heads, width, length).masked_fill_(hidden, 0.0)
    d_v = torch.bmm(p.to(q.dtype).transpose(1, 2), upstream)
    d_s = torch.bmm(upstream, vs.transpose(1, 2)).float().sub_(fold(inner[..., None])).mul_(p).mul_(scale).to(q.dtype)
    return torch.bmm(d_s, ks).view(q.shape), torch.bmm(d_s.transpose(1, 2), qs).view(k.shape), d_v.view(v.shape)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[B, Hq, Q, D]: attention of q [B, Hq, Q, D] over k, v [B, Hk, K, D]; bias [B, 1, Q, K] of 0 and -inf, None: causal."""
    cells = q.shape[1] * q.shape[2] * k.shape[2]
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and cells <= CELLS:
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = _Bf16OnCpu.apply(q, k, v, bias, scale)  # type: ignore[no-untyped-call]
            return result
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _take(x: torch.Tensor, index: torch.Tensor | None, start: int, rows: int, width: int) -> torch.Tensor:
    """[rows, heads, width, D] from x [T, heads, D]: gathered by `index`, or the range from `start`."""
    taken = x.narrow(0, start, rows * width) if index is None else x.index_select(0, index)
    return taken.view(rows, width, *x.shape[1:]).transpose(1, 2)


def _small(tree: Tree, heads: int) -> bool:
    return all(heads * width * length <= CELLS for _, width, length in (bucket.shape for bucket in tree.buckets))


class _TreeOnCpu(torch.autograd.Function):
    """All buckets of `tree` for q [T, Hq, D], k, v [T, Hk, D], bfloat16; [T, Hq, D]. Keeps these and the output, no gathered
    keys; the gradients of keys, which many paths share, are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, scale: float) -> torch.Tensor:
        outputs, sums = [], []
        for bucket in tree.buckets:
            out, lse = _forward(*_gathered(bucket, q, k, v), bucket.bias, scale)
            outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
            sums.append(lse)
        packed = _packed(outputs, tree)
        ctx.save_for_backward(q, k, v, packed, *sums)
        ctx.tree, ctx.scale = tree, scale
        return packed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, packed, *sums = ctx.saved_tensors
        tree: Tree = ctx.tree
        inner = (gradient.float() * packed.float()).sum(-1, keepdim=True)
        if tree.restore is not None:  # padding keeps a gradient of 0
            total = sum(size * width for size, width, _ in (bucket.shape for bucket in tree.buckets))
            gradient, inner = (
                x.new_zeros(total, *x.shape[1:]).index_copy_(0, tree.restore, x) for x in (gradient, inner)
            )
        d_q = torch.zeros_like(q)
        d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        at = 0
        for bucket, lse in zip(tree.buckets, sums, strict=True):
            size, width, _ = bucket.shape
            own, dot = (
                x[at : at + size * width].view(size, width, *x.shape[1:]).transpose(1, 2) for x in (gradient, inner)
            )
            at += size * width
            found = _in_parts(*_gathered(bucket, q, k, v), bucket.bias, dot[..., 0], lse, own, ctx.scale)
            _add(d_q, bucket.queries, bucket.start, found[0])
            _add(d_k, bucket.keys, bucket.start, found[1])
            _add(d_v, bucket.keys, bucket.start, found[2])
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _gathered(
    bucket: _DeviceBucket, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a bucket, [B, heads, Q or K, D]."""
    size, width, length = bucket.shape
    return (
        _take(q, bucket.queries, bucket.start, size, width),
        _take(k, bucket.keys, bucket.start, size, length),
        _take(v, bucket.keys, bucket.start, size, length),
    )


def _add(total: torch.Tensor, index: torch.Tensor | None, start: int, part: torch.Tensor) -> None:
    """The inverse of `_take`: add `part` [rows, heads, width, D] to `total` [T, heads, D]."""
    flat = part.transpose(1, 2).reshape(-1, *total.shape[1:])
    if index is None:
        total.narrow(0, start, len(flat)).add_(flat)
    else:
        total.index_add_(0, index, flat.to(total.dtype))


def _packed(outputs: list[torch.Tensor], tree: Tree) -> torch.Tensor:
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed if tree.restore is None else packed.index_select(0, tree.restore)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    tree: Tree,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and _small(tree, q.shape[1]):
        with torch.autocast("cpu", enabled=False):
            whole: torch.Tensor = _TreeOnCpu.apply(q, k, v, tree, scaling)  # type: ignore[no-untyped-call]
            return whole[None], None
    outputs = []
    for bucket in tree.buckets:
        out = attend(*_gathered(bucket, q, k, v), bucket.bias, scaling)
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return _packed(outputs, tree)[None], None


AttentionInterface.register(ATTENTION, tree_attention)
