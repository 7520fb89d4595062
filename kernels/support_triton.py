# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`linear_logprob` over each row's own ids (what top-p, top-k or min-p kept), on GPU.

Forward: one program per row gathers the weights of its ids and keeps an online log-sum-exp. Backward: the gradient of
every (row, id) pair once, in fp32; then one program per row and slice of channels sums d_hidden, and, the pairs sorted by
id, one per id and slice adds to d_weight: no atomics, so results are deterministic. Workspace: `PAIRS` pairs, about 60
bytes each with their sort. Offsets are 64-bit, only the grid's x dimension is used. Called by `linear_logprob` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from temper.kernels.linear_logprob_torch import FLOOR, Shard, Stats, Upstream
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
IDS = 8 if INTERPRETED else 16  # ids whose weights one program gathers at once
CHANNELS = 32 if INTERPRETED else 128  # channels of one slice
PAIRS = 1 << 20  # (row, id) pairs of one chunk of backward


@triton.jit
def _pair_ids(ids_ptr, at, end, first_id, V):
    """(local id, whether this shard has it) of places `at` of the list of ids."""
    ids = tl.load(ids_ptr + at, mask=at < end, other=0).to(tl.int64) - first_id
    known = (at < end) & (ids >= 0) & (ids < V)
    return tl.where(known, ids, 0), known


@triton.jit
def _scaled(
    h_ptr, w_ptr, b_ptr, row, ids, known, inv_t, softcap, h_stride, h_inner, w_stride, w_inner, H,
    BS: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """(z[BS], t[BS]) of one row and these ids; t = tanh(x / softcap) where CAP."""
    x = tl.zeros((BS,), dtype=tl.float32)
    for start in range(0, H, BK):
        k = start + tl.arange(0, BK).to(tl.int64)
        a = tl.load(h_ptr + row * h_stride + k * h_inner, mask=k < H, other=0.0).to(tl.float32)
        at = w_ptr + ids[:, None] * w_stride + k[None, :] * w_inner
        b = tl.load(at, mask=known[:, None] & (k < H)[None, :], other=0.0).to(tl.float32)
        x += tl.sum(a[None, :] * b, 1)
    if BIAS:
        x += tl.load(b_ptr + ids, mask=known, other=0.0).to(tl.float32)
    t = x
    if CAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = softcap * t
    return x * inv_t, t


@triton.jit
def _stats(
    h_ptr, w_ptr, b_ptr, t_ptr, target_ptr, row_ptr, ids_ptr, cu_ptr, m_ptr, s_ptr, e_ptr, z_ptr,
    first_id, softcap, h_stride, h_inner, w_stride, w_inner, V, H,
    FLOOR: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """m, s, e and the target's z of one listed row over its ids; at [i] for the i-th listed row."""
    pid = tl.program_id(0)
    row = tl.load(row_ptr + pid)
    begin = tl.load(cu_ptr + row)
    end = tl.load(cu_ptr + row + 1)
    target = tl.load(target_ptr + row)
    inv_t = 1.0 / tl.load(t_ptr + row)
    one = tl.arange(0, 1)
    m = tl.full((1,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((1,), dtype=tl.float32)
    e = tl.zeros((1,), dtype=tl.float32)
    found = tl.full((1,), float("-inf"), dtype=tl.float32)
    for first in range(begin, end, BS):
        ids, known = _pair_ids(ids_ptr, first + tl.arange(0, BS), end, first_id, V)
        z, _t = _scaled(
            h_ptr, w_ptr, b_ptr, row, ids, known, inv_t, softcap, h_stride, h_inner, w_stride, w_inner, H, BS, BK, BIAS, CAP
        )  # fmt: skip
        z = tl.where(known, z, float("-inf"))
        top = tl.maximum(m, tl.max(z, 0))
        centre = tl.where(top == float("-inf"), 0.0, top)
        shift = tl.where(m == float("-inf"), FLOOR, m - centre)
        factor = tl.exp(shift)
        centred = z - centre
        p = tl.exp(centred)
        e = (e + s * shift) * factor + tl.sum(p * tl.maximum(centred, FLOOR), 0)
        s = s * factor + tl.sum(p, 0)
        m = top
        found = tl.maximum(found, tl.max(tl.where(known & (ids == target), z, float("-inf")), 0))
    tl.store(m_ptr + pid + one, m)
    tl.store(s_ptr + pid + one, s)
    tl.store(e_ptr + pid + one, e)
    tl.store(z_ptr + pid + one, found)


@triton.jit
def _gradient(
    h_ptr, w_ptr, b_ptr, t_ptr, target_ptr, row_ptr, ids_ptr, cu_ptr, offset_ptr, lse_ptr, mean_ptr,
    g_logprob_ptr, g_entropy_ptr, g_lse_ptr, d_ptr, pair_id_ptr, pair_row_ptr,
    first_id, softcap, h_stride, h_inner, w_stride, w_inner, V, H,
    FLOOR: tl.constexpr, ENTROPY: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """d loss / d (hidden weight^T) of one listed row's pairs, from offset[i] on; an id that is not here is V."""
    pid = tl.program_id(0)
    row = tl.load(row_ptr + pid)
    begin = tl.load(cu_ptr + row)
    end = tl.load(cu_ptr + row + 1)
    out = tl.load(offset_ptr + pid) - begin
    target = tl.load(target_ptr + row)
    inv_t = 1.0 / tl.load(t_ptr + row)
    lse = tl.load(lse_ptr + row)
    g_logprob = tl.load(g_logprob_ptr + row)
    outer = tl.load(g_lse_ptr + row) - g_logprob
    for first in range(begin, end, BS):
        at = first + tl.arange(0, BS)
        ids, known = _pair_ids(ids_ptr, at, end, first_id, V)
        z, t = _scaled(
            h_ptr, w_ptr, b_ptr, row, ids, known, inv_t, softcap, h_stride, h_inner, w_stride, w_inner, H, BS, BK, BIAS, CAP
        )  # fmt: skip
        d = tl.exp(z - lse)
        if ENTROPY:
            d *= outer - tl.load(g_entropy_ptr + row) * tl.maximum(z - tl.load(mean_ptr + row), FLOOR)
        else:
            d *= outer
        d += tl.where(ids == target, g_logprob, 0.0)
        if CAP:
            d *= 1.0 - t * t
        tl.store(d_ptr + out + at, tl.where(known, d * inv_t, 0.0), mask=at < end)
        tl.store(pair_id_ptr + out + at, tl.where(known, ids, V), mask=at < end)
        tl.store(pair_row_ptr + out + at, tl.zeros((BS,), dtype=tl.int64) + row, mask=at < end)


@triton.jit
def _d_hidden(
    w_ptr, d_ptr, pair_id_ptr, offset_ptr, row_ptr, out_ptr, w_stride, w_inner, out_stride, V, H, slices,
    BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One slice of channels of one listed row's d_hidden: sum of d times weight over its pairs."""
    pid = tl.program_id(0)
    place = pid // slices
    k = (pid % slices) * BK + tl.arange(0, BK).to(tl.int64)
    begin = tl.load(offset_ptr + place)
    end = tl.load(offset_ptr + place + 1)
    total = tl.zeros((BK,), dtype=tl.float32)
    for first in range(begin, end, BS):
        at = first + tl.arange(0, BS)
        ids = tl.load(pair_id_ptr + at, mask=at < end, other=0)
        d = tl.load(d_ptr + at, mask=at < end, other=0.0)
        known = (at < end) & (ids < V)
        w = tl.load(
            w_ptr + ids[:, None] * w_stride + k[None, :] * w_inner, mask=known[:, None] & (k < H)[None, :], other=0.0
        ).to(tl.float32)
        total += tl.sum(d[:, None] * w, 0)
    row = tl.load(row_ptr + place)
    tl.store(out_ptr + row * out_stride + k, total.to(out_ptr.dtype.element_ty), mask=k < H)


@triton.jit
def _d_weight(
    h_ptr, d_ptr, order_ptr, pair_row_ptr, unique_ptr, edge_ptr, out_ptr, bias_ptr, h_stride, h_inner, out_stride,
    V, H, slices, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add one id's pairs, in order, to one slice of channels of its row of d_weight (and to d_bias)."""
    pid = tl.program_id(0)
    place = pid // slices
    part = pid % slices
    k = part * BK + tl.arange(0, BK).to(tl.int64)
    begin = tl.load(edge_ptr + place)
    end = tl.load(edge_ptr + place + 1)
    own = tl.load(unique_ptr + place)
    total = tl.zeros((BK,), dtype=tl.float32)
    plain = tl.zeros((BS,), dtype=tl.float32)
    for first in range(begin, end, BS):
        at = first + tl.arange(0, BS)
        pair = tl.load(order_ptr + at, mask=at < end, other=0)
        d = tl.load(d_ptr + pair, mask=at < end, other=0.0)
        plain += d
        if WEIGHT:
            rows = tl.load(pair_row_ptr + pair, mask=at < end, other=0)
            h = tl.load(
                h_ptr + rows[:, None] * h_stride + k[None, :] * h_inner,
                mask=(at < end)[:, None] & (k < H)[None, :],
                other=0.0,
            ).to(tl.float32)
            total += tl.sum(d[:, None] * h, 0)
    if WEIGHT:
        here = out_ptr + own * out_stride + k
        mine = k < tl.where(own < V, H, 0)
        tl.store(here, tl.load(here, mask=mine, other=0.0) + total, mask=mine)
    if BIAS:
        one = tl.arange(0, 1)
        mine = one + part < tl.where(own < V, 1, 0)
        tl.store(
            bias_ptr + own + one, tl.load(bias_ptr + own + one, mask=mine, other=0.0) + tl.sum(plain, 0), mask=mine
        )


def _common(shard: Shard, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(strides and sizes, constexpr arguments) of the kernels that recompute logits."""
    strides = (hidden.stride(0), hidden.stride(1), shard.weight.stride(0), shard.weight.stride(1))
    switches = {"BIAS": shard.bias is not None, "CAP": shard.softcap is not None, "BS": IDS, "BK": CHANNELS}
    return (shard.start, shard.softcap or 1.0, *strides, shard.weight.shape[0], hidden.shape[1]), switches


def support_stats(
    shard: Shard, hidden: Tensor, target: Tensor, temperature: Tensor, rows: Tensor, support: tuple[Tensor, Tensor],
    stats: Stats, workspace: int,
) -> None:  # fmt: skip
    """`linear_logprob_torch.support_stats` on GPU; `workspace` does not apply."""
    if rows.numel() == 0:
        return
    ids, cu = support
    sizes, switches = _common(shard, hidden)
    m = torch.empty(rows.numel(), dtype=torch.float32, device=hidden.device)
    s, e, z = torch.empty_like(m), torch.empty_like(m), torch.empty_like(m)
    bias = shard.weight if shard.bias is None else shard.bias.contiguous()
    _stats[(rows.numel(),)](
        hidden, shard.weight, bias, temperature.contiguous(), target.contiguous(), rows.contiguous(), ids.contiguous(),
        cu.contiguous(), m, s, e, z, *sizes, FLOOR=FLOOR, **switches,
    )  # fmt: skip
    stats.put(rows, Stats(m, s, e, z))


def _chunks(rows: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, their ids' counts) in chunks of at most PAIRS pairs, a single row aside."""
    edges = counts.cumsum(0).cpu()
    start, total = 0, rows.numel()
    while start < total:
        before = int(edges[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(edges, before + PAIRS, right=True)))
        yield rows[start:stop], counts[start:stop]
        start = stop


def support_backward(
    shard: Shard,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor,
    rows: Tensor,
    support: tuple[Tensor, Tensor],
    upstream: Upstream,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    workspace: int,
) -> None:
    """`linear_logprob_torch.support_backward` on GPU; `workspace` does not apply."""
    ids, cu = support
    sizes, switches = _common(shard, hidden)
    vocabulary, width = shard.weight.shape[0], hidden.shape[1]
    bias = shard.weight if shard.bias is None else shard.bias.contiguous()
    slices, device = triton.cdiv(width, CHANNELS), hidden.device
    entropy = upstream.logprob if upstream.entropy is None else upstream.entropy
    signals = [x.contiguous() for x in (upstream.row_lse, upstream.row_mean, upstream.logprob, entropy, upstream.lse)]
    t, goal, ids, cu = temperature.contiguous(), target.contiguous(), ids.contiguous(), cu.contiguous()
    for chunk, counts in _chunks(rows.contiguous(), (cu[1:] - cu[:-1])[rows]):
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).long()
        pairs = int(offsets[-1])
        d = torch.empty(pairs, dtype=torch.float32, device=device)
        pair_id, pair_row = (torch.empty(pairs, dtype=torch.int64, device=device) for _ in range(2))
        _gradient[(chunk.numel(),)](
            hidden, shard.weight, bias, t, goal, chunk, ids, cu, offsets, *signals, d, pair_id, pair_row, *sizes,
            FLOOR=FLOOR, ENTROPY=upstream.entropy is not None, **switches,
        )  # fmt: skip
        if d_hidden is not None:
            assert d_hidden.stride(1) == 1
            _d_hidden[(chunk.numel() * slices,)](
                shard.weight, d, pair_id, offsets, chunk, d_hidden, shard.weight.stride(0), shard.weight.stride(1),
                d_hidden.stride(0), vocabulary, width, slices, BS=IDS, BK=CHANNELS,
            )  # fmt: skip
        if d_weight is None and d_bias is None:
            continue
        sorted_ids, order = pair_id.sort(stable=True)
        unique, each = torch.unique_consecutive(sorted_ids, return_counts=True)
        edges = torch.cat([each.new_zeros(1), each.cumsum(0)])
        parts = slices if d_weight is not None else 1
        spare = d
        _d_weight[(unique.numel() * parts,)](
            hidden, d, order, pair_row, unique, edges, spare if d_weight is None else d_weight,
            spare if d_bias is None else d_bias, hidden.stride(0), hidden.stride(1),
            0 if d_weight is None else d_weight.stride(0), vocabulary, width, parts,
            WEIGHT=d_weight is not None, BIAS=d_bias is not None, BS=IDS, BK=CHANNELS,
        )  # fmt: skip
