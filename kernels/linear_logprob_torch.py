"""The chunked torch path of `linear_logprob`: blocks of rows by blocks of vocabulary, bounded workspace, any device.

Per row it keeps four numbers over the vocabulary seen so far: m = max z, s = sum exp(z - m), e = sum exp(z - m)(z - m)
and the target's z (z = scaled logits). They merge over blocks and over ranks, so lse = m + ln s and entropy =
ln s - e/s need no second pass. Backward recomputes each block. Called by `linear_logprob` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from temper.kernels.segments import segment_ids, segment_max, segment_sum
from torch import Tensor

WORKSPACE_ELEMENTS = 1 << 21  # values of one block of logits: 8 MiB in fp32
COLUMNS = 2048  # ids of a block: the workspace decides its rows
ROWS = 4096  # of a block at most
SMALL = 1 << 16  # values of a product that some BLAS add row by row to what is there: the error grows with the rows
FLOOR = -1e3  # (z - m) is cut here where it only weighs exp(z - m), which is 0 there: no 0 * inf


@dataclass(frozen=True, slots=True)
class Shard:
    """The head of one rank: weight [V, H] holds ids start..start+V-1; support (ids, cu) uses global ids."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    start: int
    dtype: torch.dtype  # accumulation: float32, or float64 for float64 inputs
    hot: bool = True  # False: every temperature is 1

    def exact_in_bf16(self, hidden: Tensor) -> bool:
        """Products of bf16 inputs lose nothing in bf16 units that accumulate in fp32 (CPU only; GPUs have kernels)."""
        return hidden.dtype == self.weight.dtype == torch.bfloat16 and hidden.device.type == "cpu"

    def block(
        self, hidden: Tensor, first: int, last: int, temperature: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(z[R, C] in `out`, slope or None) for ids first..last-1; slope = dz/dx times T where softcap bends it."""
        x = torch.mm(hidden, self.weight[first:last].to(self.dtype).T, out=out)
        if self.bias is not None:
            x += self.bias[first:last].to(self.dtype)
        return self._scale(x, temperature[:, None])

    def gathered(self, hidden: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        """(z[M], slope or None) of single pairs: hidden [M, H] with local ids [M]."""
        x = (hidden * self.weight[ids].to(self.dtype)).sum(-1)
        if self.bias is not None:
            x += self.bias[ids].to(self.dtype)
        return self._scale(x, temperature)

    def _scale(self, x: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.softcap is None:
            return (x.div_(temperature) if self.hot else x), None
        t = x.div_(self.softcap).tanh_()
        slope = 1 - t * t
        return t.mul_(self.softcap / temperature), slope


@dataclass(slots=True)
class Stats:
    """Per row, in the accumulation dtype: what the vocabulary seen so far says about it."""

    m: Tensor
    s: Tensor
    e: Tensor
    target: Tensor

    @classmethod
    def empty(cls, rows: int, dtype: torch.dtype, device: torch.device) -> Stats:
        low = torch.full((rows,), -torch.inf, dtype=dtype, device=device)
        return cls(low, torch.zeros_like(low), torch.zeros_like(low), low.clone())

    def merge(self, m: Tensor, s: Tensor, e: Tensor) -> None:
        """Take in the statistics of more vocabulary for the same rows."""
        top = torch.maximum(self.m, m)
        sums = []
        for part_m, part_s, part_e in ((self.m, self.s, self.e), (m, s, e)):
            shift = torch.where(torch.isneginf(part_m), FLOOR, part_m - top)
            factor = shift.exp()
            sums.append((part_s * factor, (part_e + part_s * shift) * factor))
        self.m, self.s, self.e = top, sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]

    def put(self, rows: Tensor | slice, part: Stats) -> None:
        """Store the finished statistics of `rows`."""
        self.m[rows], self.s[rows], self.e[rows], self.target[rows] = part.m, part.s, part.e, part.target


@dataclass(frozen=True, slots=True)
class Upstream:
    """Gradients that reach one row's outputs, [N] each: of logprob, entropy and lse; with the row's lse and E[z]."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor
    row_lse: Tensor
    row_mean: Tensor

    def needed(self) -> Tensor:
        """bool[N]: rows with any upstream gradient."""
        found = (self.logprob != 0) | (self.lse != 0)
        return found if self.entropy is None else found | (self.entropy != 0)

    def at(self, rows: Tensor | slice) -> Upstream:
        entropy = None if self.entropy is None else self.entropy[rows]
        return Upstream(self.logprob[rows], entropy, self.lse[rows], self.row_lse[rows], self.row_mean[rows])

    def of_logits(self, z: Tensor, spare: Tensor | None = None) -> Tensor:
        """d loss/d z without the target's own term, in place of z [R, C] (or [M]); values broadcast over its last
        dimension. `spare`: memory of z's shape, used where the entropy has a gradient."""
        shape = (-1, 1) if z.dim() == 2 else (-1,)
        outer = (self.lse - self.logprob).view(shape)
        if self.entropy is not None:
            spare = torch.sub(z, self.row_mean.view(shape), out=torch.empty_like(z) if spare is None else spare)
            outer = spare.clamp_min_(FLOOR).mul_(-self.entropy.view(shape)).add_(outer)
        return z.sub_(self.row_lse.view(shape)).exp_().mul_(outer)


def upstream_of(
    logprob: Tensor | None, entropy: Tensor | None, lse: Tensor | None, row_lse: Tensor, row_mean: Tensor
) -> Upstream:
    """What autograd hands to backward, None meaning no gradient."""
    zero = torch.zeros_like(row_lse)
    return Upstream(
        zero if logprob is None else logprob.to(zero.dtype),
        None if entropy is None else entropy.to(zero.dtype),
        zero if lse is None else lse.to(zero.dtype),
        row_lse,
        row_mean,
    )


def _buffers(count: int, rows: Tensor, vocabulary: int, workspace: int, like: Tensor) -> list[Tensor]:
    """Flat memory for `count` blocks, taken once: fresh memory for every block would cost more than its products."""
    height = min(rows.numel(), _height(vocabulary, workspace))
    size = min(max(workspace, height), height * vocabulary)
    return [torch.empty(size, dtype=like.dtype, device=like.device) for _ in range(count)]


def _height(vocabulary: int, workspace: int) -> int:
    return min(ROWS, max(1, workspace // max(1, min(vocabulary, COLUMNS))))


def _row_blocks(rows: Tensor, count: int, vocabulary: int, workspace: int) -> Iterator[tuple[Tensor | slice, int]]:
    """(the rows of a block, how many) of `rows` among `count`; slices, which copy nothing, where they are all of them."""
    size = _height(vocabulary, workspace)
    for first in range(0, rows.numel(), size):
        last = min(first + size, rows.numel())
        yield (slice(first, last) if rows.numel() == count else rows[first:last]), last - first


def _columns(rows: int, vocabulary: int, workspace: int) -> Iterator[tuple[int, int]]:
    size = max(1, workspace // max(rows, 1))
    for first in range(0, vocabulary, size):
        yield first, min(first + size, vocabulary)


@contextmanager
def bf16_products(allowed: bool) -> Iterator[None]:
    """fp32 GEMMs of this process round their inputs to bf16 inside (CPU, oneDNN): exact for values that are bf16 already.

    Products and sums stay fp32; four times the speed where the processor has bf16 units, no effect elsewhere.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if allowed:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def dense_stats(
    shard: Shard,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor,
    rows: Tensor,
    stats: Stats,
    entropy: bool,
    workspace: int,
) -> None:
    """Fill `stats` at `rows` over the whole local vocabulary. target: local ids i64[N], outside 0..V-1 if elsewhere."""
    vocabulary = shard.weight.shape[0]
    memory = _buffers(2 if entropy else 1, rows, vocabulary, workspace, stats.m)
    for block, height in _row_blocks(rows, hidden.shape[0], vocabulary, workspace):
        h, t, goal = hidden[block].to(shard.dtype), temperature[block], target[block]
        part = Stats.empty(height, shard.dtype, h.device)
        for first, last in _columns(height, vocabulary, workspace):
            out = [flat[: height * (last - first)].view(-1, last - first) for flat in memory]
            with bf16_products(shard.exact_in_bf16(hidden)):
                z, _ = shard.block(h, first, last, t, out[0])
            picked = z.gather(1, (goal - first).clamp_(0, last - first - 1)[:, None])[:, 0]
            part.target = torch.where((goal >= first) & (goal < last), picked, part.target)
            m = z.amax(1)
            z.sub_(torch.where(torch.isneginf(m), 0, m)[:, None])
            if entropy:
                p = torch.exp(z, out=out[1])
                part.merge(m, p.sum(1), p.mul_(z.clamp_min_(FLOOR)).sum(1))
            else:
                s = z.exp_().sum(1)
                part.merge(m, s, torch.zeros_like(s))
        stats.put(block, part)


def dense_backward(
    shard: Shard,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor,
    rows: Tensor,
    upstream: Upstream,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    workspace: int,
) -> None:
    """Set d_hidden at `rows`, add to d_weight and d_bias (accumulation dtype), recomputing each block of logits.

    Where the products run in bf16, the rounded softmax gradient no longer sums to 0 over the vocabulary, which adds
    the mean of weight's rows to d_hidden; that much is taken out again.
    """
    vocabulary = shard.weight.shape[0]
    low = shard.exact_in_bf16(hidden)
    memory = _buffers(1 if upstream.entropy is None else 2, rows, vocabulary, workspace, upstream.lse)
    for block, height in _row_blocks(rows, hidden.shape[0], vocabulary, workspace):
        h, t, goal, up = hidden[block].to(shard.dtype), temperature[block], target[block], upstream.at(block)
        d_h = torch.zeros_like(h)
        for first, last in _columns(height, vocabulary, workspace):
            out = [flat[: height * (last - first)].view(-1, last - first) for flat in memory]
            with bf16_products(low):
                z, slope = shard.block(h, first, last, t, out[0])
                d = up.of_logits(z, out[1] if len(out) > 1 else None)
                mine = ((goal >= first) & (goal < last)).nonzero()[:, 0]
                d[mine, goal[mine] - first] += up.logprob[mine]
                if slope is not None:
                    d *= slope
                if shard.hot:
                    d /= t[:, None]
                weight = shard.weight[first:last].to(shard.dtype)
                if d_bias is not None:
                    d_bias[first:last] += d.sum(0)
                if low:
                    total = d.sum(1)
                    d.copy_(d.bfloat16())
                    d_h += (total - d.sum(1))[:, None] * weight.mean(0)
                if d_hidden is not None:
                    d_h.addmm_(d, weight)
                if d_weight is not None:
                    _add_product(d_weight[first:last], d.T, h)
        if d_hidden is not None:
            d_hidden[block] = d_h.to(d_hidden.dtype)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `out`: a small one is summed up by itself first."""
    if out.numel() <= SMALL:
        out += left @ right
    else:
        out.addmm_(left, right)


@dataclass(frozen=True, slots=True)
class Pairs:
    """One chunk of (row, id) pairs of a support: rows [R], the pairs' index into them [M], local ids [M]."""

    rows: Tensor
    index: Tensor
    ids: Tensor


def support_pairs(shard: Shard, rows: Tensor, support: tuple[Tensor, Tensor], workspace: int) -> Iterator[Pairs]:
    """The pairs of `rows` that lie in this shard, in chunks whose gathered weights stay within the workspace."""
    ids, cu = support
    counts = (cu[1:] - cu[:-1])[rows]
    limit = max(1, workspace // max(1, shard.weight.shape[1]))
    edges = counts.cumsum(0)
    start, total = 0, rows.numel()
    while start < total:
        before = int(edges[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(edges, before + limit, right=True)))
        chunk, size = rows[start:stop], counts[start:stop]
        offsets = torch.cat([size.new_zeros(1), size.cumsum(0)])
        index = segment_ids(offsets, int(offsets[-1]))
        within = torch.arange(index.numel(), device=ids.device) - offsets[index]
        local = ids[cu[chunk][index] + within].long() - shard.start
        mine = (local >= 0) & (local < shard.weight.shape[0])
        yield Pairs(chunk, index[mine], local[mine])
        start = stop


def support_stats(
    shard: Shard, hidden: Tensor, target: Tensor, temperature: Tensor, rows: Tensor, support: tuple[Tensor, Tensor],
    stats: Stats, workspace: int,
) -> None:  # fmt: skip
    """`dense_stats` over each row's own ids only."""
    for pairs in support_pairs(shard, rows, support, workspace):
        count, where = pairs.rows.numel(), pairs.rows[pairs.index]
        z, _ = shard.gathered(hidden[where].to(shard.dtype), pairs.ids, temperature[where])
        part = Stats.empty(count, shard.dtype, z.device)
        hit = target[where] == pairs.ids
        part.target[pairs.index[hit]] = z[hit]
        part.m = m = segment_max(z, pairs.index, count)
        shifted = (z - torch.where(torch.isneginf(m), 0, m)[pairs.index]).clamp_min(FLOOR)
        p = shifted.exp()
        part.s, part.e = segment_sum(p, pairs.index, count), segment_sum(p * shifted, pairs.index, count)
        stats.put(pairs.rows, part)


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
    """`dense_backward` over each row's own ids only."""
    for pairs in support_pairs(shard, rows, support, workspace):
        where = pairs.rows[pairs.index]
        h, t, up = hidden[where].to(shard.dtype), temperature[where], upstream.at(where)
        z, slope = shard.gathered(h, pairs.ids, t)
        d = up.of_logits(z) + torch.where(target[where] == pairs.ids, up.logprob, 0)
        if slope is not None:
            d = d * slope
        if shard.hot:
            d = d / t
        if d_hidden is not None:
            gathered = torch.zeros(pairs.rows.numel(), h.shape[1], dtype=shard.dtype, device=h.device)
            gathered.index_add_(0, pairs.index, d[:, None] * shard.weight[pairs.ids].to(shard.dtype))
            d_hidden[pairs.rows] = gathered.to(d_hidden.dtype)
        if d_weight is not None:
            d_weight.index_add_(0, pairs.ids, d[:, None] * h)
        if d_bias is not None:
            d_bias.index_add_(0, pairs.ids, d)
