# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The policy loss in one kernel: loss, gradient and all metrics of a packed batch, one program per sequence.

A program walks its sequence twice: first for what whole sequences decide (mean ratio, drift, lowest ratio), then token by
token for the loss, its exact gradient and the metrics' sums. No atomics: partial sums per sequence are added up in fp64
in a fixed order. The formulas are `reference`'s, with their derivatives written out; the tests hold them together.
Called by `policy_loss` on GPU; fp32 only.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from temper.kernels.flags import KL_LIMIT, LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT, PolicyFlags
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from temper.kernels.policy_loss import Normalisers, PackedBatch

INTERPRETED = bool(triton.knobs.runtime.interpret)
COLUMNS = 16  # partial sums per sequence: the metrics in their order, then the loss
BLOCK = 64 if INTERPRETED else 512


@triton.jit
def _ratio(x, LIMIT: tl.constexpr):
    """(exp of the clamped x, 1 where the clamp lets a gradient through)."""
    inside = (x >= -LIMIT) & (x <= LIMIT)
    return tl.exp(tl.minimum(tl.maximum(x, -LIMIT), LIMIT)), tl.where(inside, 1.0, 0.0)


@triton.jit
def _read(
    pi_ptr, mu_ptr, prox_ptr, lag_ptr, advantage_ptr, mask_ptr, at, end, ahead,
    PROX: tl.constexpr, LOGLINEAR: tl.constexpr,
):  # fmt: skip
    """Values of a block of tokens, 0 where masked: (on, pi, mu, prox, lag, advantage)."""
    on = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
    pi = tl.load(pi_ptr + at, mask=on, other=0.0)
    mu = tl.load(mu_ptr + at, mask=on, other=0.0)
    lag = tl.load(lag_ptr + at, mask=on, other=0).to(tl.float32)
    advantage = tl.load(advantage_ptr + at, mask=on, other=0.0)
    prox = pi
    if PROX:
        prox = tl.load(prox_ptr + at, mask=on, other=0.0)
    if LOGLINEAR:
        apart = lag + ahead
        prox = mu + tl.where(apart > 0, lag / tl.maximum(apart, 1e-9), 0.0) * (pi - mu)
    return on, pi, mu, prox, lag, advantage


@triton.jit
def _weight(x, low, high, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """The correction weight of a log-ratio x."""
    w, _free = _ratio(x, LIMIT)
    if KIND == "truncate":
        w = tl.minimum(w, high)
    elif KIND == "clip":
        w = tl.minimum(tl.maximum(w, low), high)
    elif KIND == "mask":
        w = tl.where((w >= low) & (w <= high), w, 0.0)
    else:
        w = tl.full(w.shape, 1.0, dtype=tl.float32)
    return w


@triton.jit
def _loss(
    pi_ptr, mu_ptr, prox_ptr, ref_ptr, entropy_ptr, advantage_ptr, mask_ptr, lag_ptr, cu_ptr,
    grad_ptr, entropy_grad_ptr, part_ptr,
    ahead, norm, clip_low, clip_high, dual_clip, weight_low, weight_high, geometric_low, geometric_high, veto, opsm_delta,
    tv_delta, m2_cutoff, tau_positive, tau_negative, dro_beta, kl_coefficient, entropy_coefficient,
    LOSS: tl.constexpr, SEQUENCE: tl.constexpr, BASE_MU: tl.constexpr, LOGLINEAR: tl.constexpr, PROX: tl.constexpr,
    DUAL: tl.constexpr, WEIGHT: tl.constexpr, WEIGHT_PI: tl.constexpr, WEIGHT_LEVEL: tl.constexpr, GEOMETRIC: tl.constexpr,
    VETO: tl.constexpr, TV: tl.constexpr, M2: tl.constexpr, KL: tl.constexpr, REF: tl.constexpr, ENTROPY: tl.constexpr,
    TOKEN_MEAN: tl.constexpr, LIMIT: tl.constexpr, SEQUENCE_LIMIT: tl.constexpr, KL_LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: its gradient at [start, end), its partial sums at part[sequence]."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    step = tl.arange(0, BLOCK)
    none = tl.zeros((BLOCK,), dtype=tl.float32)

    count = 0.0
    sum_ratio = 0.0
    sum_d = 0.0
    sum_weight = 0.0
    sum_bounded = 0.0
    lowest = float("inf")
    for first in range(start, end, BLOCK):
        on, pi, mu, prox, lag, advantage = _read(
            pi_ptr, mu_ptr, prox_ptr, lag_ptr, advantage_ptr, mask_ptr, first + step, end, ahead, PROX, LOGLINEAR
        )
        log_ratio = pi - (mu if BASE_MU else prox)
        count += tl.sum(tl.where(on, 1.0, 0.0))
        sum_ratio += tl.sum(log_ratio)
        sum_d += tl.sum(pi - mu)
        sum_weight += tl.sum((pi if WEIGHT_PI else prox) - mu)
        lowest = tl.minimum(lowest, tl.min(tl.where(on, pi - mu, float("inf"))))
        if LOSS == "gmpo":
            sum_bounded += tl.sum(
                tl.where(advantage > 0, tl.minimum(log_ratio, clip_high), tl.maximum(log_ratio, -clip_low))
            )
    length = tl.maximum(count, 1.0)
    each = norm
    if TOKEN_MEAN:
        each = norm / length
    mean_d = sum_d / length
    sequence_keep = 1.0  # 0 where the whole sequence is dropped
    if GEOMETRIC:
        geometric, _free_mean = _ratio(mean_d, LIMIT)
        sequence_keep = tl.where((geometric >= geometric_low) & (geometric <= geometric_high), 1.0, 0.0)
    if VETO:
        lowest_ratio, _free_lowest = _ratio(lowest, LIMIT)
        sequence_keep = tl.where(lowest_ratio >= veto, sequence_keep, 0.0)
    sequence_weight = sum_weight
    if WEIGHT_LEVEL == "geometric":
        sequence_weight = sum_weight / length
    geometric_mean, mean_inside = _ratio(sum_bounded / length, LIMIT)

    whole = 0.0  # gmpo: sum of c w A over the kept tokens, which every token's gradient shares
    if LOSS == "gmpo":
        for first in range(start, end, BLOCK):
            on, pi, mu, prox, lag, advantage = _read(
                pi_ptr, mu_ptr, prox_ptr, lag_ptr, advantage_ptr, mask_ptr, first + step, end, ahead, PROX, LOGLINEAR
            )
            x = (pi if WEIGHT_PI else prox) - mu
            if WEIGHT_LEVEL != "token":
                x = tl.zeros((BLOCK,), dtype=tl.float32) + sequence_weight
            w = _weight(x, weight_low, weight_high, WEIGHT, LIMIT)
            keep = on & (w != 0.0) & (none + sequence_keep > 0.5) & ((advantage >= 0) | (none - mean_d <= opsm_delta))
            if TV:
                gap = tl.exp(pi) - tl.exp(mu)
                keep = keep & ~(((advantage > 0) & (gap > tv_delta)) | ((advantage < 0) & (gap < -tv_delta)))
            if M2:
                keep = keep & (tl.abs(pi - mu) <= m2_cutoff)
            whole += tl.sum(tl.where(keep, w * advantage, 0.0))

    column = tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(start, end, BLOCK):
        at = first + step
        on, pi, mu, prox, lag, advantage = _read(
            pi_ptr, mu_ptr, prox_ptr, lag_ptr, advantage_ptr, mask_ptr, at, end, ahead, PROX, LOGLINEAR
        )
        d = pi - mu
        log_ratio = pi - (mu if BASE_MU else prox)
        if SEQUENCE:
            rho, inside = _ratio(none + sum_ratio / length, SEQUENCE_LIMIT)
        else:
            rho, inside = _ratio(log_ratio, LIMIT)
        loss = -advantage * pi
        slope = -advantage
        clipped = on & False
        if LOSS == "ppo":
            clipped = ((advantage > 0) & (rho > 1 + clip_high)) | ((advantage < 0) & (rho < 1 - clip_low))
            bound = tl.where(advantage > 0, 1 + clip_high, 1 - clip_low)
            used = tl.where(clipped, bound, rho)
            flat = clipped
            if DUAL:
                over = (advantage < 0) & (used > dual_clip)
                used = tl.where(over, dual_clip, used)
                flat = flat | over
            loss = -used * advantage
            slope = tl.where(flat, 0.0, -advantage * rho * inside)
        elif LOSS == "ratio":
            loss = -rho * advantage
            slope = loss * inside
        elif LOSS == "cispo":
            used = tl.minimum(tl.maximum(rho, 1 - clip_low), 1 + clip_high)
            clipped = used != rho
            slope = -used * advantage
            loss = slope * pi
        elif LOSS == "topr":
            slope = -tl.where(advantage < 0, tl.minimum(rho, 1.0), 1.0) * advantage
            loss = slope * pi
        elif LOSS == "sapo":
            tau = tl.where(advantage > 0, tau_positive, tau_negative)
            gate = tl.sigmoid(tau * (rho - 1))
            loss = -(4 / tau) * gate * advantage
            slope = -4 * gate * (1 - gate) * advantage * rho * inside
        elif LOSS == "dro":
            loss = -(advantage * pi - dro_beta * log_ratio * log_ratio / 2)
            slope = -(advantage - dro_beta * log_ratio)
        elif LOSS == "gmpo":
            clipped = ((advantage > 0) & (log_ratio > clip_high)) | ((advantage < 0) & (log_ratio < -clip_low))
            stopped = ((advantage > 0) & (log_ratio > clip_high)) | ((advantage <= 0) & (log_ratio < -clip_low))
            loss = -advantage * geometric_mean

        x = (pi if WEIGHT_PI else prox) - mu
        if WEIGHT_LEVEL != "token":
            x = tl.zeros((BLOCK,), dtype=tl.float32) + sequence_weight
        w = _weight(x, weight_low, weight_high, WEIGHT, LIMIT)
        keep = on & (w != 0.0) & (none + sequence_keep > 0.5) & ((advantage >= 0) | (none - mean_d <= opsm_delta))
        if TV:
            gap = tl.exp(pi) - tl.exp(mu)
            keep = keep & ~(((advantage > 0) & (gap > tv_delta)) | ((advantage < 0) & (gap < -tv_delta)))
        if M2:
            keep = keep & (tl.abs(d) <= m2_cutoff)
        loss = tl.where(keep, w * loss, 0.0)
        slope = tl.where(keep, w * slope, 0.0)
        if LOSS == "gmpo":
            slope = tl.where(on & ~stopped, -whole * geometric_mean * mean_inside / length, 0.0)
        total = loss

        pi_over_mu, _free_d = _ratio(d, LIMIT)
        kl_reference = none
        if REF:
            ref = tl.load(ref_ptr + at, mask=on, other=0.0)
            raw = ref - pi
            k = tl.minimum(tl.maximum(raw, -LIMIT), LIMIT)
            free = tl.where((raw >= -LIMIT) & (raw <= LIMIT), 1.0, 0.0)
            k3 = tl.exp(k) - k - 1
            k3_slope = tl.where(k3 > KL_LIMIT, 0.0, (1 - tl.exp(k)) * free)
            k3 = tl.minimum(k3, KL_LIMIT)
            kl_reference = k3
            if KL == "k1":
                total += tl.where(on, -kl_coefficient * k, 0.0)
                slope += tl.where(on, kl_coefficient * free, 0.0)
            elif KL == "k2":
                total += tl.where(on, kl_coefficient * k * k / 2, 0.0)
                slope += tl.where(on, -kl_coefficient * k * free, 0.0)
            elif KL == "k3":
                total += tl.where(on, kl_coefficient * k3, 0.0)
                slope += tl.where(on, kl_coefficient * k3_slope, 0.0)
            elif KL == "k3_straight_through":
                total += tl.where(on, kl_coefficient * k3, 0.0)
                slope += tl.where(on, -kl_coefficient * k * free, 0.0)
            elif KL == "k3_weighted":
                total += tl.where(on, kl_coefficient * pi_over_mu * k3, 0.0)
                slope += tl.where(on, kl_coefficient * pi_over_mu * k3_slope, 0.0)
        entropy = none
        if ENTROPY:
            entropy = tl.load(entropy_ptr + at, mask=on, other=0.0)
            total -= entropy_coefficient * entropy
            tl.store(entropy_grad_ptr + at, tl.where(on, -entropy_coefficient * each, 0.0), mask=at < end)
        tl.store(grad_ptr + at, tl.where(on, slope * each, 0.0), mask=at < end)

        bounded_d = tl.minimum(tl.maximum(d, -LIMIT), LIMIT)
        sums += tl.where(column == 0, tl.sum(pi), 0.0)
        sums += tl.where(column == 1, tl.sum(entropy), 0.0)
        sums += tl.where(column == 2, tl.sum(advantage), 0.0)
        sums += tl.where(column == 3, tl.sum(tl.abs(advantage)), 0.0)
        sums += tl.where(column == 4, tl.sum(tl.where(on, rho, 0.0)), 0.0)
        sums += tl.where(column == 5, tl.sum(tl.where(on & clipped, 1.0, 0.0)), 0.0)
        sums += tl.where(column == 6, tl.sum(tl.where(on & (tl.abs(d) >= LIMIT), 1.0, 0.0)), 0.0)
        sums += tl.where(column == 7, tl.sum(tl.where(on & ~keep, 1.0, 0.0)), 0.0)
        sums += tl.where(column == 8, tl.sum(tl.where(on, w, 0.0)), 0.0)
        sums += tl.where(column == 9, tl.sum(tl.where(on, w * w, 0.0)), 0.0)
        sums += tl.where(column == 10, tl.sum(tl.where(on, pi_over_mu - 1 - bounded_d, 0.0)), 0.0)
        sums += tl.where(column == 11, tl.sum(tl.abs(d)), 0.0)
        sums += tl.where(column == 12, tl.sum(tl.where(on, kl_reference, 0.0)), 0.0)
        sums += tl.where(column == 13, tl.sum(lag), 0.0)
        sums += tl.where(column == 14, tl.sum(loss), 0.0)
        sums += tl.where(column == 15, tl.sum(tl.where(on, total * each, 0.0)), 0.0)
    tl.store(part_ptr + sequence * COLUMNS + column, sums)


def _norm(flags: PolicyFlags, normalisers: Normalisers) -> float:
    if flags.aggregation == "token_mean":
        return 1 / max(normalisers.tokens, 1)
    length = max(normalisers.max_length, 1) if flags.aggregation == "seq_mean_token_sum_norm" else 1
    return 1 / (max(normalisers.sequences, 1) * length)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pi: Tensor, entropy: Tensor | None, batch: PackedBatch, flags: PolicyFlags, normalisers: Normalisers,
        ahead: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        sequences = batch.cu_seqlens.numel() - 1
        prox = None if flags.loglinear_prox else batch.prox
        pi, grad = pi.contiguous(), torch.empty_like(pi, memory_format=torch.contiguous_format)
        entropy_grad = torch.empty_like(grad) if entropy is not None else None
        parts = torch.zeros(sequences, COLUMNS, dtype=torch.float32, device=pi.device)

        def flat(value: Tensor | None) -> Tensor:
            return pi if value is None else value.float().contiguous()

        if sequences:
            _loss[(sequences,)](
                pi, flat(batch.mu), flat(prox), flat(batch.ref), flat(entropy), flat(batch.advantage),
                batch.mask.to(torch.uint8).contiguous(), batch.lag.to(torch.int32).contiguous(), batch.cu_seqlens.contiguous(),
                grad, grad if entropy_grad is None else entropy_grad, parts,
                float(ahead), _norm(flags, normalisers), flags.clip_low, flags.clip_high, flags.dual_clip, flags.weight_low,
                flags.weight_high, flags.geometric_low, flags.geometric_high, flags.veto, flags.opsm_delta, flags.tv_delta,
                normalisers.m2_cutoff, flags.tau_positive, flags.tau_negative, flags.dro_beta, flags.kl_coefficient,
                flags.entropy_coefficient,
                LOSS=flags.loss, SEQUENCE=flags.level == "sequence", BASE_MU=flags.base == "mu",
                LOGLINEAR=flags.loglinear_prox, PROX=prox is not None, DUAL=flags.dual_clip > 0, WEIGHT=flags.weight,
                WEIGHT_PI=flags.weight_of == "pi", WEIGHT_LEVEL=flags.weight_level,
                GEOMETRIC=flags.geometric_low > 0 or flags.geometric_high < inf, VETO=flags.veto > 0,
                TV=flags.tv_delta < inf, M2=flags.m2_tau < inf,
                KL=flags.kl if flags.kl_coefficient != 0 else "none", REF=batch.ref is not None,
                ENTROPY=entropy is not None, TOKEN_MEAN=flags.aggregation == "seq_mean_token_mean",
                LIMIT=LOG_RATIO_LIMIT, SEQUENCE_LIMIT=SEQUENCE_LOG_RATIO_LIMIT, KL_LIMIT=KL_LIMIT,
                COLUMNS=COLUMNS, BLOCK=BLOCK,
            )  # fmt: skip
        sums = parts.sum(0, dtype=torch.float64)
        ctx.save_for_backward(grad, entropy_grad)
        ctx.mark_non_differentiable(sums)
        return sums[COLUMNS - 1].to(pi.dtype), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> Any:
        grad, entropy_grad = ctx.saved_tensors
        return upstream * grad, None if entropy_grad is None else upstream * entropy_grad, None, None, None, None


def policy_loss(
    batch: PackedBatch, pi: Tensor, flags: PolicyFlags, normalisers: Normalisers, entropy: Tensor | None, ahead: float
) -> tuple[Tensor, Tensor]:
    """(loss, f64[16]: the metrics' sums in the order of `policy_loss.METRICS`, then the loss). Shapes are checked already."""
    loss, sums = _PolicyLoss.apply(pi, entropy, batch, flags, normalisers, ahead)
    return loss, sums
