# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The Triton path of `linear_logprob`: the same two operations as `linear_logprob_torch`, on GPU.

Forward: every program walks a share of the vocabulary for a block of rows, tile by tile, keeping an online log-sum-exp; no
atomics, so results are deterministic. Backward: one kernel recomputes a chunk of logits and writes the softmax gradient in
the inputs' dtype, then two GEMMs of the vendor's library accumulate both results in fp32: three GEMMs in all.

Tiles come from a table by kernel, card and dtype (nothing is tuned at run time). Where the card has a tensor memory
accelerator and the inputs are aligned, tiles are read through tensor descriptors, which frees the registers that addresses
would take: 128 x 256 tiles, worked up in two halves. Programs that run side by side share rows and ids in L2.
Workspace: `CHUNK_ELEMENTS` gradients, one fp32 block of d_hidden, a block of listed rows, statistics of a few
shares per row. Row offsets are 64-bit, only the grid's x dimension is used. Called by `linear_logprob` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, isfinite
from typing import Any

import torch
import triton
import triton.language as tl
from temper.kernels.linear_logprob_torch import FLOOR, Shard, Stats, Upstream
from temper.kernels.support_triton import support_backward, support_stats
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["dense_backward", "dense_stats", "support_backward", "support_stats"]
INTERPRETED = bool(triton.knobs.runtime.interpret)
CHUNK_ROWS = 8192  # most rows of one chunk of gradients in backward
CHUNK_ELEMENTS = CHUNK_ROWS * 16384  # most gradients of one chunk
FEW_ROWS = 1024  # a chunk holds no more gradients than this many rows have, so that memory is the same from there on
LISTED_BYTES = 16 << 20  # hidden states of listed rows that forward brings together for its descriptors at once
SPLITS = 8  # shares of the vocabulary in forward: their statistics are its memory
PROGRAMS = 512  # with few rows there are more shares, so that a card has this many programs
GROUP = 16  # row blocks that run side by side
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters of one GEMM tile. `described`: read through tensor descriptors; `halves`: what follows the products
    is done for the left and the right half of the columns in turn."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    described: bool = False
    halves: bool = False


# (kernel, architecture) -> tile of 16-bit inputs read through descriptors. Chosen by compiling: no spills, shared memory
# within the card's; not yet measured on a GPU.
DESCRIBED = {
    ("forward", "sm_90"): Tile(128, 256, 64, 8, 4, True, True),
    ("gradient", "sm_90"): Tile(128, 256, 64, 8, 3, True, True),
    ("forward", "sm_100"): Tile(128, 256, 64, 8, 4, True, True),
    ("gradient", "sm_100"): Tile(128, 128, 64, 8, 3, True, False),
}
# architecture -> tile of 16-bit inputs read through pointers: any strides, any card
POINTED = {
    "gfx": Tile(128, 128, 32, 8, 2),
    "sm_10": Tile(128, 64, 32, 4, 3),
    "sm_12": Tile(128, 64, 32, 4, 3),
    "": Tile(128, 128, 64, 8, 3),
}


def tile_of(kernel: str, dtype: torch.dtype, target: str, aligned: bool) -> Tile:
    """The tile of a kernel (forward, gradient) for an input dtype on a target ("sm_80", "sm_90", "sm_100", "gfx942", ...).

    `aligned`: the inputs may be read through descriptors (`describable`).
    """
    if INTERPRETED:
        return Tile(32, 32, 32, 1, 1)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2)
    if aligned and (kernel, target) in DESCRIBED:
        return DESCRIBED[kernel, target]
    return next(tile for prefix, tile in POINTED.items() if target.startswith(prefix))


def describable(matrix: Tensor) -> bool:
    """Whether a tensor descriptor can describe it: rows without gaps between channels, none twice, all at 16 bytes."""
    size, (rows, inner) = matrix.element_size(), matrix.stride()
    return inner == 1 and rows >= matrix.shape[1] and rows * size % 16 == 0 and matrix.data_ptr() % 16 == 0


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor that reads or writes [rows, columns] of a matrix at a time."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def target_of(device: torch.device) -> str:
    """The compilation target of a device."""
    if INTERPRETED:
        return "interpreter"
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":", maxsplit=1)[0]
    return f"sm_{properties.major}{properties.minor}"


@triton.jit
def _products(
    h_ptr, h_rows, h_first, h_stride, h_inner, w_ptr, w_rows, w_first, w_stride, w_inner, H,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """x[BM, BN]: products of these rows of hidden and weight.

    DESCRIBED: h_ptr and w_ptr are tensor descriptors, read from rows h_first and w_first on (0 behind the end); else they
    are pointers, read at h_rows and w_rows, which must exist.
    """
    x = tl.zeros((BM, BN), dtype=tl.float32)
    if DESCRIBED:
        for start in range(0, H, BK):
            a = h_ptr.load([h_first, start])
            b = w_ptr.load([w_first, start])
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            x = tl.dot(a, b.T, x, input_precision="ieee")
    else:
        k = tl.arange(0, BK)
        h_at = h_ptr + h_rows.to(tl.int64)[:, None] * h_stride + k.to(tl.int64)[None, :] * h_inner
        w_at = w_ptr + w_rows.to(tl.int64)[None, :] * w_stride + k.to(tl.int64)[:, None] * w_inner
        for start in range(0, H, BK):
            if EVEN:
                a = tl.load(h_at)
                b = tl.load(w_at)
            else:
                inside = k < H - start
                a = tl.load(h_at, mask=inside[None, :], other=0.0)
                b = tl.load(w_at, mask=inside[:, None], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            x = tl.dot(a, b, x, input_precision="ieee")
            h_at += BK * h_inner
            w_at += BK * w_inner
    return x


@triton.jit
def _scaled(x, b_ptr, w_rows, inv_t, softcap, BIAS: tl.constexpr, CAP: tl.constexpr):
    """(z, t) of products x[BM, BN]: scaled logits, t = tanh(x / softcap) where CAP. w_rows[BN] must exist."""
    if BIAS:
        x += tl.load(b_ptr + w_rows).to(tl.float32)[None, :]
    t = x
    if CAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = softcap * t
    return x * inv_t[:, None], t


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of x[BM, BN]."""
    return x.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def _absorb(z, ids, target, V, m, s, e, found, FLOOR: tl.constexpr, ENTROPY: tl.constexpr):
    """The rows' statistics m, s, e and the target's z after taking in the logits z of more ids."""
    z = tl.where(ids[None, :] < V, z, float("-inf"))
    top = tl.maximum(m, tl.max(z, 1))
    centre = tl.where(top == float("-inf"), 0.0, top)
    shift = tl.where(m == float("-inf"), FLOOR, m - centre)
    factor = tl.exp(shift)
    centred = z - centre[:, None]
    p = tl.exp(centred)
    if ENTROPY:
        e = (e + s * shift) * factor + tl.sum(p * tl.maximum(centred, FLOOR), 1)
    s = s * factor + tl.sum(p, 1)
    hit = ids[None, :] == target[:, None]
    found = tl.maximum(found, tl.max(tl.where(hit, z, float("-inf")), 1))
    return top, s, e, found


@triton.jit
def _forward(
    h_ptr, w_ptr, b_ptr, t_ptr, target_ptr, row_ptr, m_ptr, s_ptr, e_ptr, z_ptr,
    h_stride, h_inner, w_stride, w_inner, softcap, N, V, H, row_blocks, tiles, tiles_per_split, splits,
    FLOOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, UPCAST: tl.constexpr, ENTROPY: tl.constexpr,
    GROUP: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Statistics of N listed rows over one share of the vocabulary: m, s, e at [split, i]; the target's z at [i].

    GROUP row blocks times all splits run side by side, so that their hidden states and weights stay in L2.
    """
    pid = tl.program_id(0)
    band = GROUP * splits
    first_block = (pid // band) * GROUP
    height = tl.minimum(row_blocks - first_block, GROUP)
    block = first_block + (pid % band) % height
    split = (pid % band) // height
    index = block * BM + tl.arange(0, BM)
    real = index < N
    rows = tl.load(row_ptr + index, mask=real, other=0)
    target = tl.load(target_ptr + rows, mask=real, other=-1)
    inv_t = 1.0 / tl.load(t_ptr + rows, mask=real, other=1.0)
    m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BM,), dtype=tl.float32)
    e = tl.zeros((BM,), dtype=tl.float32)
    found = tl.full((BM,), float("-inf"), dtype=tl.float32)
    for tile in range(split * tiles_per_split, tl.minimum((split + 1) * tiles_per_split, tiles)):
        ids = tile * BN + tl.arange(0, BN)
        x = _products(
            h_ptr, rows, block * BM, h_stride, h_inner, w_ptr, tl.minimum(ids, V - 1), tile * BN, w_stride, w_inner, H,
            BM, BN, BK, DESCRIBED, EVEN, UPCAST,
        )  # fmt: skip
        if HALVES:
            left, right = _halves(x, BM, BN)
            ids = tile * BN + tl.arange(0, BN // 2)
            z, _t = _scaled(left, b_ptr, tl.minimum(ids, V - 1), inv_t, softcap, BIAS, CAP)
            m, s, e, found = _absorb(z, ids, target, V, m, s, e, found, FLOOR, ENTROPY)
            ids += BN // 2
            z, _t = _scaled(right, b_ptr, tl.minimum(ids, V - 1), inv_t, softcap, BIAS, CAP)
            m, s, e, found = _absorb(z, ids, target, V, m, s, e, found, FLOOR, ENTROPY)
        else:
            z, _t = _scaled(x, b_ptr, tl.minimum(ids, V - 1), inv_t, softcap, BIAS, CAP)
            m, s, e, found = _absorb(z, ids, target, V, m, s, e, found, FLOOR, ENTROPY)
    at = split.to(tl.int64) * N + index
    tl.store(m_ptr + at, m, mask=real)
    tl.store(s_ptr + at, s, mask=real)
    if ENTROPY:
        tl.store(e_ptr + at, e, mask=real)
    tl.store(z_ptr + index, found, mask=real & (found > float("-inf")))


@triton.jit
def _give(
    x, ids, first, b_ptr, inv_t, softcap, scale, g_logprob, outer, g_entropy, lse, mean, target, V,
    FLOOR: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient of products x[BM, BN] of ids first + ids; 0 where ids >= V."""
    z, t = _scaled(x, b_ptr, first + tl.minimum(ids, V - 1), inv_t, softcap, BIAS, CAP)
    p = tl.exp(z - lse[:, None])
    if ENTROPY:
        d = p * (outer[:, None] - g_entropy[:, None] * tl.maximum(z - mean[:, None], FLOOR))
    else:
        d = p * outer[:, None]
    d += tl.where((first + ids)[None, :] == target[:, None], g_logprob[:, None], 0.0)
    if CAP:
        d *= 1.0 - t * t
    return tl.where((ids < V)[None, :], d * inv_t[:, None] * scale, 0.0)


@triton.jit
def _put(d, d_ptr, index, row, ids, column, d_stride, N, V, DESCRIBED: tl.constexpr, TYPE: tl.constexpr):
    """Store d[BM, BN] in its dtype at rows index = row, row + 1, ... and ids = column, ...; what rounding took from each
    row's sum [BM]."""
    low = d.to(TYPE)
    if DESCRIBED:
        d_ptr.store([row, column], low)
    else:
        at = d_ptr + index.to(tl.int64)[:, None] * d_stride + ids[None, :]
        tl.store(at, low, mask=(index < N)[:, None] & (ids < V)[None, :])
    return tl.sum(d - low.to(tl.float32), 1)


@triton.jit
def _gradient(
    h_ptr, w_ptr, b_ptr, t_ptr, target_ptr, lse_ptr, mean_ptr, g_logprob_ptr, g_entropy_ptr, g_lse_ptr, d_ptr, residual_ptr,
    h_stride, h_inner, w_stride, w_inner, d_stride, softcap, scale, N, first, V, H, row_blocks, column_blocks,
    FLOOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, UPCAST: tl.constexpr, ENTROPY: tl.constexpr,
    ROUNDED: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """d loss / d (hidden weight^T) of N rows and V ids from `first` on, times `scale`, in d's dtype.

    All row arguments are compact [N]. Where ROUNDED, what rounding took from each row's sum goes to residual
    [column block, row].
    """
    pid = tl.program_id(0)
    band = GROUP * column_blocks
    first_block = (pid // band) * GROUP
    height = tl.minimum(row_blocks - first_block, GROUP)
    block = first_block + (pid % band) % height
    column = (pid % band) // height
    index = block * BM + tl.arange(0, BM)
    rows = tl.minimum(index, N - 1)
    ids = column * BN + tl.arange(0, BN)
    x = _products(
        h_ptr, rows, block * BM, h_stride, h_inner, w_ptr, first + tl.minimum(ids, V - 1), first + column * BN, w_stride,
        w_inner, H, BM, BN, BK, DESCRIBED, EVEN, UPCAST,
    )  # fmt: skip
    inv_t = 1.0 / tl.load(t_ptr + rows)
    lse = tl.load(lse_ptr + rows)
    mean = lse
    g_entropy = lse
    if ENTROPY:
        mean = tl.load(mean_ptr + rows)
        g_entropy = tl.load(g_entropy_ptr + rows)
    g_logprob = tl.load(g_logprob_ptr + rows)
    outer = tl.load(g_lse_ptr + rows) - g_logprob
    target = tl.load(target_ptr + rows)
    if HALVES:
        left, right = _halves(x, BM, BN)
        ids = column * BN + tl.arange(0, BN // 2)
        d = _give(
            left, ids, first, b_ptr, inv_t, softcap, scale, g_logprob, outer, g_entropy, lse, mean, target, V,
            FLOOR, BIAS, CAP, ENTROPY,
        )  # fmt: skip
        lost = _put(d, d_ptr, index, block * BM, ids, column * BN, d_stride, N, V, DESCRIBED, TYPE)
        ids += BN // 2
        d = _give(
            right, ids, first, b_ptr, inv_t, softcap, scale, g_logprob, outer, g_entropy, lse, mean, target, V,
            FLOOR, BIAS, CAP, ENTROPY,
        )  # fmt: skip
        lost += _put(d, d_ptr, index, block * BM, ids, column * BN + BN // 2, d_stride, N, V, DESCRIBED, TYPE)
    else:
        d = _give(
            x, ids, first, b_ptr, inv_t, softcap, scale, g_logprob, outer, g_entropy, lse, mean, target, V,
            FLOOR, BIAS, CAP, ENTROPY,
        )  # fmt: skip
        lost = _put(d, d_ptr, index, block * BM, ids, column * BN, d_stride, N, V, DESCRIBED, TYPE)
    if ROUNDED:
        tl.store(residual_ptr + column.to(tl.int64) * N + index, lost, mask=index < N)


def _tile(kernel: str, shard: Shard, hidden: Tensor, gathered: bool) -> Tile:
    """The tile of a kernel for these inputs; `gathered`: rows are copied together before, so hidden's strides are free."""
    aligned = describable(shard.weight) and (gathered or describable(hidden))
    aligned = aligned and hidden.shape[1] * hidden.element_size() % 16 == 0
    dtype = torch.float32 if hidden.dtype != shard.weight.dtype else hidden.dtype
    return tile_of(kernel, dtype, target_of(hidden.device), aligned)


def _upcast(shard: Shard, hidden: Tensor) -> bool:
    """Whether inputs are widened to fp32 before they are multiplied (the interpreter cannot multiply bf16)."""
    return hidden.dtype != shard.weight.dtype or (INTERPRETED and hidden.dtype == torch.bfloat16)


def _options(tile: Tile, shard: Shard, hidden: Tensor) -> dict[str, Any]:
    """The constexpr arguments that both kernels share."""
    inner = min(tile.inner, max(16, triton.next_power_of_2(hidden.shape[1])))
    return {
        "FLOOR": FLOOR,
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": inner,
        "DESCRIBED": tile.described,
        "EVEN": hidden.shape[1] % inner == 0,
        "BIAS": shard.bias is not None,
        "CAP": shard.softcap is not None,
        "UPCAST": _upcast(shard, hidden),
        "GROUP": GROUP,
        "HALVES": tile.halves,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _inputs(tile: Tile, inner: int, shard: Shard, hidden: Tensor) -> tuple[Any, Any, Tensor]:
    """(hidden, weight, bias or a stand-in) as the kernels take them: tensors or their descriptors."""
    bias = shard.weight if shard.bias is None else shard.bias.contiguous()
    if not tile.described:
        return hidden, shard.weight, bias
    return described(hidden, tile.rows, inner), described(shard.weight, tile.columns, inner), bias


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
    """`linear_logprob_torch.dense_stats` on GPU; `workspace` does not apply."""
    count = rows.numel()
    if count == 0:
        return
    some = count < hidden.shape[0]
    tile = _tile("forward", shard, hidden, gathered=some)
    size = count
    if tile.described and some:  # a descriptor reads neighbouring rows: bring the listed ones together, some at a time
        size = max(tile.rows, LISTED_BYTES // (hidden.shape[1] * hidden.element_size()) // tile.rows * tile.rows)
    for start in range(0, count, size):
        block = rows[start : start + size]
        h = hidden[block] if tile.described and some else hidden
        stats.put(block, _stats(tile, shard, h, target, temperature, block, entropy))


def _stats(
    tile: Tile, shard: Shard, hidden: Tensor, target: Tensor, temperature: Tensor, rows: Tensor, entropy: bool
) -> Stats:
    """The statistics of listed rows; a described `hidden` holds just these, another one is read at `rows`."""
    count, vocabulary = rows.numel(), shard.weight.shape[0]
    row_blocks, tiles = triton.cdiv(count, tile.rows), triton.cdiv(vocabulary, tile.columns)
    per_split = triton.cdiv(tiles, min(max(SPLITS, triton.cdiv(PROGRAMS, row_blocks)), tiles))
    splits = triton.cdiv(tiles, per_split)
    m = torch.empty(splits, count, dtype=torch.float32, device=hidden.device)
    s, e = torch.empty_like(m), torch.empty_like(m) if entropy else m
    found = torch.full((count,), -torch.inf, dtype=torch.float32, device=hidden.device)
    options = _options(tile, shard, hidden)
    h, w, bias = _inputs(tile, options["BK"], shard, hidden)
    _forward[(row_blocks * splits,)](
        h, w, bias, temperature.contiguous(), target.contiguous(), rows.contiguous(), m, s, e, found,
        hidden.stride(0), hidden.stride(1), shard.weight.stride(0), shard.weight.stride(1),
        shard.softcap or 1.0, count, vocabulary, hidden.shape[1], row_blocks, tiles, per_split, splits,
        ENTROPY=entropy, **options,
    )  # fmt: skip
    top = m.amax(0)
    shift = torch.where(torch.isneginf(m), FLOOR, m - top)
    factor = shift.exp()
    total = ((e + s * shift) * factor).sum(0) if entropy else torch.zeros_like(top)
    return Stats(top, (s * factor).sum(0), total, found)


def _add_product(out: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """out (fp32) += alpha left right, accumulated in fp32."""
    if left.dtype == torch.float32 or not left.is_cuda:
        out.addmm_(left.float(), right.float(), alpha=alpha)
    else:
        torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, alpha=alpha, out=out)


def _power_of_two_scale(upstream: Upstream) -> float:
    """fp16 gradients of a mean over many tokens would underflow: bring the largest upstream value near 1."""
    parts = [upstream.logprob, upstream.lse] + ([] if upstream.entropy is None else [upstream.entropy])
    largest = max(float(part.abs().max()) for part in parts)
    return 2.0 ** -frexp(largest)[1] if isfinite(largest) else 1.0


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
    """`linear_logprob_torch.dense_backward` on GPU; `workspace` does not apply."""
    if rows.numel() == 0:
        return
    weight, vocabulary, width = shard.weight, shard.weight.shape[0], hidden.shape[1]
    whole = rows.numel() == hidden.shape[0] and hidden.is_contiguous()
    tile = _tile("gradient", shard, hidden, gathered=not whole)
    options = _options(tile, shard, hidden)
    inputs = torch.float32 if options["UPCAST"] else hidden.dtype
    rounded = inputs != torch.float32
    mean_row = weight.mean(0, dtype=torch.float32) if rounded and d_hidden is not None else None
    scale = _power_of_two_scale(upstream.at(rows)) if inputs == torch.float16 else 1.0
    height = min(CHUNK_ROWS, rows.numel())
    columns = min(CHUNK_ELEMENTS, FEW_ROWS * vocabulary) // height // tile.columns * tile.columns
    columns = min(max(columns, tile.columns), vocabulary)
    stride = triton.cdiv(columns, 8) * 8  # a descriptor's rows begin at 16 bytes
    chunk = torch.empty(height, stride, dtype=inputs, device=hidden.device)
    for start in range(0, rows.numel(), CHUNK_ROWS):
        block = rows[start : start + CHUNK_ROWS]
        count, row_blocks = block.numel(), triton.cdiv(block.numel(), tile.rows)
        h = hidden[start : start + count] if whole else hidden[block]
        up, goal, t = upstream.at(block), target[block], temperature[block].contiguous()
        d_h = torch.zeros(count, width, dtype=torch.float32, device=hidden.device) if d_hidden is not None else None
        for first in range(0, vocabulary, columns):
            ids = min(columns, vocabulary - first)
            blocks = triton.cdiv(ids, tile.columns)
            d = chunk[:count, :ids]
            residual = torch.empty(blocks if rounded else 1, count, dtype=torch.float32, device=hidden.device)
            h_in, w_in, bias = _inputs(tile, options["BK"], shard, h)
            out = described(d, tile.rows, tile.columns // (1 + tile.halves)) if tile.described else d
            _gradient[(row_blocks * blocks,)](
                h_in, w_in, bias, t, goal, up.row_lse, up.row_mean, up.logprob,
                up.logprob if up.entropy is None else up.entropy, up.lse, out, residual,
                h.stride(0), h.stride(1), weight.stride(0), weight.stride(1), d.stride(0),
                shard.softcap or 1.0, scale, count, first, ids, width, row_blocks, blocks,
                ENTROPY=up.entropy is not None, ROUNDED=rounded, TYPE=TYPES[inputs], **options,
            )  # fmt: skip
            used = weight[first : first + ids]
            if d_h is not None:
                _add_product(d_h, d, used.to(inputs), 1 / scale)
                if mean_row is not None:
                    d_h.addr_(residual.sum(0), mean_row, alpha=1 / scale)
            if d_weight is not None:
                _add_product(d_weight[first : first + ids], d.T, h.to(inputs), 1 / scale)
            if d_bias is not None:
                d_bias[first : first + ids] += d.sum(0, dtype=torch.float32) / scale
        if d_hidden is not None and d_h is not None:
            d_hidden[block] = d_h.to(d_hidden.dtype)
