# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The Triton path of `linear_logprob`: the same two operations as `linear_logprob_torch`, on GPU.

Forward: every program walks a share of the vocabulary for a block of rows, tile by tile, keeping an online log-sum-exp; no
atomics, so results are deterministic. Backward: one kernel recomputes a chunk of logits and writes the softmax gradient in
the inputs' dtype, then two GEMMs of the vendor's library accumulate both results in fp32: three GEMMs in all. Workspace:
`CHUNK_ROWS` x `CHUNK_COLUMNS` gradients, one fp32 block of d_hidden, statistics of `SPLITS` per row. Row offsets are
64-bit, only the grid's x dimension is used. Called by `linear_logprob` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, isfinite
from typing import Any

import torch
import triton
import triton.language as tl
from temper.kernels.linear_logprob_torch import FLOOR, Shard, Stats, Upstream
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
CHUNK_ROWS = 8192  # rows of one chunk of gradients in backward
CHUNK_COLUMNS = 16384  # ids of one chunk of gradients in backward
SPLITS = 8  # most shares of the vocabulary in forward: bounds the statistics' memory


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters of one GEMM tile."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, target: str) -> Tile:
    """The default tile for an input dtype on a target ("sm_80", "sm_90", "sm_100", "gfx942", ...)."""
    if INTERPRETED:
        return Tile(16, 16, 16, 1, 1)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 2)
    if target.startswith("gfx"):
        return Tile(128, 128, 32, 8, 2)
    if target.startswith("sm_10") or target.startswith("sm_12"):
        return Tile(128, 64, 32, 4, 3)
    return Tile(128, 128, 64, 8, 3)


def target_of(device: torch.device) -> str:
    """The compilation target of a device."""
    if INTERPRETED:
        return "interpreter"
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":", maxsplit=1)[0]
    return f"sm_{properties.major}{properties.minor}"


@triton.jit
def _scaled_tile(
    h_ptr, h_rows, h_stride, h_inner, w_ptr, w_rows, w_stride, w_inner, b_ptr, inv_t, softcap, H,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """(z[BM, BN], t[BM, BN]): scaled logits of these rows and ids, t = tanh(x / softcap) where CAP. Rows must exist."""
    k = tl.arange(0, BK)
    h_at = h_ptr + h_rows.to(tl.int64)[:, None] * h_stride + k.to(tl.int64)[None, :] * h_inner
    w_at = w_ptr + w_rows.to(tl.int64)[None, :] * w_stride + k.to(tl.int64)[:, None] * w_inner
    x = tl.zeros((BM, BN), dtype=tl.float32)
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
    if BIAS:
        x += tl.load(b_ptr + w_rows).to(tl.float32)[None, :]
    t = x
    if CAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = softcap * t
    return x * inv_t[:, None], t


@triton.jit
def _forward(
    h_ptr, w_ptr, b_ptr, t_ptr, target_ptr, row_ptr, m_ptr, s_ptr, e_ptr, z_ptr,
    h_stride, h_inner, w_stride, w_inner, softcap, N, V, H, row_blocks, tiles, tiles_per_split, splits,
    FLOOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, UPCAST: tl.constexpr, ENTROPY: tl.constexpr, GROUP: tl.constexpr,
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
        z, _ = _scaled_tile(
            h_ptr, rows, h_stride, h_inner, w_ptr, tl.minimum(ids, V - 1), w_stride, w_inner, b_ptr, inv_t, softcap, H,
            BM, BN, BK, EVEN, BIAS, CAP, UPCAST,
        )  # fmt: skip
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
        m = top
        hit = ids[None, :] == target[:, None]
        found = tl.maximum(found, tl.max(tl.where(hit, z, float("-inf")), 1))
    at = split.to(tl.int64) * N + index
    tl.store(m_ptr + at, m, mask=real)
    tl.store(s_ptr + at, s, mask=real)
    if ENTROPY:
        tl.store(e_ptr + at, e, mask=real)
    tl.store(z_ptr + index, found, mask=real & (found > float("-inf")))


@triton.jit
def _gradient(
    h_ptr, w_ptr, b_ptr, t_ptr, target_ptr, lse_ptr, mean_ptr, g_logprob_ptr, g_entropy_ptr, g_lse_ptr, d_ptr, residual_ptr,
    h_stride, h_inner, w_stride, w_inner, d_stride, softcap, scale, N, first, V, H, row_blocks, column_blocks,
    FLOOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, UPCAST: tl.constexpr, ENTROPY: tl.constexpr, ROUNDED: tl.constexpr,
    GROUP: tl.constexpr,
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
    real = index < N
    rows = tl.minimum(index, N - 1)
    ids = column * BN + tl.arange(0, BN)
    known = ids < V
    inv_t = 1.0 / tl.load(t_ptr + rows)
    z, t = _scaled_tile(
        h_ptr, rows, h_stride, h_inner, w_ptr, first + tl.minimum(ids, V - 1), w_stride, w_inner, b_ptr, inv_t, softcap, H,
        BM, BN, BK, EVEN, BIAS, CAP, UPCAST,
    )  # fmt: skip
    g_logprob = tl.load(g_logprob_ptr + rows)
    outer = tl.load(g_lse_ptr + rows) - g_logprob
    p = tl.exp(z - tl.load(lse_ptr + rows)[:, None])
    if ENTROPY:
        centred = tl.maximum(z - tl.load(mean_ptr + rows)[:, None], FLOOR)
        d = p * (outer[:, None] - tl.load(g_entropy_ptr + rows)[:, None] * centred)
    else:
        d = p * outer[:, None]
    hit = (first + ids)[None, :] == tl.load(target_ptr + rows)[:, None]
    d += tl.where(hit, g_logprob[:, None], 0.0)
    if CAP:
        d *= 1.0 - t * t
    d = tl.where(known[None, :], d * inv_t[:, None] * scale, 0.0)
    low = d.to(d_ptr.dtype.element_ty)
    at = d_ptr + index.to(tl.int64)[:, None] * d_stride + ids[None, :]
    tl.store(at, low, mask=real[:, None] & known[None, :])
    if ROUNDED:
        lost = tl.sum(d - low.to(tl.float32), 1)
        tl.store(residual_ptr + column.to(tl.int64) * N + index, lost, mask=real)


def _options(shard: Shard, hidden: Tensor) -> tuple[Tile, dict[str, Any], Tensor]:
    """(tile, constexpr arguments, the bias or a stand-in pointer) that both kernels share."""
    if hidden.device != shard.weight.device:
        raise ValueError(f"weight: found on {shard.weight.device}, expected {hidden.device} as hidden is")
    mixed = hidden.dtype != shard.weight.dtype
    upcast = mixed or (INTERPRETED and hidden.dtype == torch.bfloat16)
    tile = tile_of(torch.float32 if mixed else hidden.dtype, target_of(hidden.device))
    inner = min(tile.inner, max(16, triton.next_power_of_2(hidden.shape[1])))
    return (
        tile,
        {
            "FLOOR": FLOOR,
            "BM": tile.rows,
            "BN": tile.columns,
            "BK": inner,
            "EVEN": hidden.shape[1] % inner == 0,
            "BIAS": shard.bias is not None,
            "CAP": shard.softcap is not None,
            "UPCAST": upcast,
            "GROUP": 16,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        },
        shard.weight if shard.bias is None else shard.bias.contiguous(),
    )


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
    count, vocabulary = rows.numel(), shard.weight.shape[0]
    if count == 0:
        return
    rows = rows.contiguous()
    tile, options, bias = _options(shard, hidden)
    row_blocks, tiles = triton.cdiv(count, tile.rows), triton.cdiv(vocabulary, tile.columns)
    per_split = triton.cdiv(tiles, min(SPLITS, tiles))
    splits = triton.cdiv(tiles, per_split)
    m = torch.empty(splits, count, dtype=torch.float32, device=hidden.device)
    s, e = torch.empty_like(m), torch.empty_like(m) if entropy else None
    found = torch.full((count,), -torch.inf, dtype=torch.float32, device=hidden.device)
    _forward[(row_blocks * splits,)](
        hidden, shard.weight, bias, temperature.contiguous(), target, rows, m, s, m if e is None else e, found,
        hidden.stride(0), hidden.stride(1), shard.weight.stride(0), shard.weight.stride(1),
        shard.softcap or 1.0, count, vocabulary, hidden.shape[1], row_blocks, tiles, per_split, splits,
        ENTROPY=entropy, **options,
    )  # fmt: skip
    part = Stats(m[0], s[0], torch.zeros_like(m[0]) if e is None else e[0], found)
    for split in range(1, splits):
        part.merge(m[split], s[split], part.e.new_zeros(count) if e is None else e[split])
    stats.put(rows, part)


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
    tile, options, bias = _options(shard, hidden)
    weight, vocabulary, width = shard.weight, shard.weight.shape[0], hidden.shape[1]
    inputs = torch.float32 if options["UPCAST"] else hidden.dtype
    rounded = inputs != torch.float32
    mean_row = weight.mean(0, dtype=torch.float32) if rounded and d_hidden is not None else None
    scale = _power_of_two_scale(upstream.at(rows)) if inputs == torch.float16 else 1.0
    chunk = torch.empty(
        min(CHUNK_ROWS, rows.numel()) * min(CHUNK_COLUMNS, vocabulary), dtype=inputs, device=hidden.device
    )
    for start in range(0, rows.numel(), CHUNK_ROWS):
        block = rows[start : start + CHUNK_ROWS]
        count, row_blocks = block.numel(), triton.cdiv(block.numel(), tile.rows)
        h, up, goal, t = hidden[block], upstream.at(block), target[block], temperature[block].contiguous()
        d_h = torch.zeros(count, width, dtype=torch.float32, device=hidden.device) if d_hidden is not None else None
        for first in range(0, vocabulary, CHUNK_COLUMNS):
            ids = min(CHUNK_COLUMNS, vocabulary - first)
            blocks = triton.cdiv(ids, tile.columns)
            d = chunk[: count * ids].view(count, ids)
            residual = torch.empty(blocks if rounded else 1, count, dtype=torch.float32, device=hidden.device)
            _gradient[(row_blocks * blocks,)](
                h, weight, bias, t, goal, up.row_lse, up.row_mean, up.logprob,
                up.logprob if up.entropy is None else up.entropy, up.lse, d, residual,
                h.stride(0), h.stride(1), weight.stride(0), weight.stride(1), d.stride(0),
                shard.softcap or 1.0, scale, count, first, ids, width, row_blocks, blocks,
                ENTROPY=up.entropy is not None, ROUNDED=rounded, **options,
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
