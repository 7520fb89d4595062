"""The policy loss of a packed batch: every objective of the table in one pass, with its metrics as sums and counts.

Guarantees: the loss and its gradient are finite whatever behaviour and current policy say about a token; what a masked
position holds (NaN too) never matters; the result does not depend on how a batch is split into micro-batches, ordered
or spread over ranks, because the normalisers are global and passed in; equal policies give a ratio of exactly 1.
Order of arithmetic: select by mask -> log-ratio -> clamp -> exp -> objective -> select -> sum over explicit normalisers.
Called by the learner once per micro-batch; the formulas are in `reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from temper.kernels import reference
from temper.kernels.backends import use_triton
from temper.kernels.flags import LOG_RATIO_LIMIT, PolicyFlags
from temper.kernels.segments import check_cu_seqlens, segment_ids, segment_sum
from torch import Tensor

METRICS = (
    "logprob",  # log pi of sampled tokens
    "entropy",  # of pi, where given
    "advantage",
    "advantage_magnitude",
    "ratio",  # rho = pi/base
    "clip_fraction",  # tokens whose ratio was clipped (no gradient or a bounded one)
    "clamped_fraction",  # tokens whose |log pi - log mu| hit the clamp
    "dropped_fraction",  # tokens whose loss a filter or a zero weight removed
    "weight",  # correction weight w
    "weight_squared",  # with `weight`: effective sample size = sum(w)^2 / sum(w^2)
    "kl_behaviour",  # k3 estimate of KL(mu || pi)
    "log_ratio_magnitude",  # |log pi - log mu|
    "kl_reference",  # k3 estimate of KL(pi || ref), where a reference is given
    "lag",  # versions between sampling and the step
    "loss",  # per token, before aggregation, KL and entropy terms aside
)
"""Names of the metrics: each is (sum over this call's masked-in tokens, number of tokens). Always all of them."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Packed sequences, all [N] unless said; position i holds token i and what is said *about* token i.

    tokens i32/i64; cu_seqlens i64[S+1]; mask bool (or u8): 1 where the policy sampled the token (a sequence's first token
    has no prediction: mask it); mu, prox, ref: log-probabilities (nats) f32 of behaviour, proximal and reference policy.
    prox None: the current policy without gradient (the first update of a step), so that rho is exactly 1.
    ref None: no reference. advantage f32; group_id i64[S]; lag i32: versions between sampling and the step.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    mask: Tensor
    mu: Tensor
    prox: Tensor | None
    ref: Tensor | None
    advantage: Tensor
    group_id: Tensor
    lag: Tensor


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Global quantities of one optimiser step, over all ranks and micro-batches.

    tokens: masked-in tokens; sequences: sequences with at least one of them; max_length: L of seq_mean_token_sum_norm.
    m2_cutoff: largest |log pi - log mu| that m2po keeps, see `reference.m2_cutoff` (inf: all).
    """

    tokens: float
    sequences: float
    max_length: float
    m2_cutoff: float = inf


def count_normalisers(mask: Tensor, cu_seqlens: Tensor, max_length: float) -> Normalisers:
    """The normalisers of one packed batch on one rank; add `tokens` and `sequences` over ranks and micro-batches."""
    lengths = segment_sum(mask.double(), segment_ids(cu_seqlens, mask.shape[0]), cu_seqlens.numel() - 1)
    return Normalisers(float(lengths.sum()), float((lengths > 0).sum()), float(max_length))


def _check(batch: PackedBatch, pi: Tensor, flags: PolicyFlags, entropy: Tensor | None) -> None:
    if pi.dim() != 1 or not pi.is_floating_point():
        raise ValueError(f"pi: found {pi.dtype}{list(pi.shape)}, expected log-probabilities f32[tokens]")
    for name in ("tokens", "mask", "mu", "prox", "ref", "advantage", "lag"):
        value = getattr(batch, name)
        if value is not None and value.shape != pi.shape:
            raise ValueError(f"batch.{name}: found {list(value.shape)}, expected {list(pi.shape)} as pi has")
    check_cu_seqlens(batch.cu_seqlens, pi.shape[0])
    if batch.group_id.shape != (batch.cu_seqlens.numel() - 1,):
        raise ValueError(
            f"batch.group_id: found {list(batch.group_id.shape)}, expected one per sequence [{batch.cu_seqlens.numel() - 1}]"
        )
    if flags.kl != "none" and flags.kl_coefficient != 0 and batch.ref is None:
        raise ValueError(f"batch.ref: found None, expected log-probabilities of the reference policy (kl = {flags.kl})")
    if entropy is not None and entropy.shape != pi.shape:
        raise ValueError(f"entropy: found {list(entropy.shape)}, expected {list(pi.shape)} as pi has")
    if entropy is None and flags.entropy_coefficient != 0:
        raise ValueError("entropy: found None, expected f32[tokens] with gradient (entropy_coefficient is not 0)")


def policy_loss(
    batch: PackedBatch,
    pi: Tensor,
    flags: PolicyFlags,
    normalisers: Normalisers,
    *,
    entropy: Tensor | None = None,
    ahead: float = 0.0,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """(scalar loss with gradient to `pi` and `entropy`, {metric: (sum, count)} as 0-dimensional f64 tensors).

    pi f32[N] (f64 works): log-probabilities of the current policy, with gradient. `entropy` f32[N] of pi, for the bonus
    and the metric. `ahead`: v_pi - v_prox in versions, for `loglinear_prox` (update j of n in a step: j / n).
    backend: auto takes Triton for fp32 on a GPU and torch elsewhere.
    ValueError names the argument that has a wrong shape. The sum of losses over micro-batches is the step's loss.
    """
    _check(batch, pi, flags, entropy)
    if use_triton(backend, (pi,), (torch.float32,)):
        from temper.kernels import policy_loss_triton

        loss, sums = policy_loss_triton.policy_loss(batch, pi, flags, normalisers, entropy, ahead)
    else:
        loss, sums = _torch(batch, pi, flags, normalisers, entropy, ahead)
    count = batch.mask.sum(dtype=torch.float64)
    absent = {"entropy": entropy is None, "kl_reference": batch.ref is None}
    none = torch.zeros_like(count)
    metrics = {name: (none, none) if absent.get(name, False) else (sums[i], count) for i, name in enumerate(METRICS)}
    return loss, metrics


def _torch(
    batch: PackedBatch, pi: Tensor, flags: PolicyFlags, normalisers: Normalisers, entropy: Tensor | None, ahead: float
) -> tuple[Tensor, Tensor]:
    """(loss, the metrics' sums f64 in the order of METRICS) by the reference's formulas and autograd."""
    mask = batch.mask.to(torch.bool)
    ids = segment_ids(batch.cu_seqlens, pi.shape[0])
    segments = batch.cu_seqlens.numel() - 1
    lengths = segment_sum(mask.to(pi.dtype), ids, segments)

    def select(value: Tensor) -> Tensor:
        return torch.where(mask, value.to(pi.dtype), 0)

    pi, mu, advantage, lag = select(pi), select(batch.mu), select(batch.advantage), select(batch.lag)
    ref = None if batch.ref is None else select(batch.ref)
    if flags.loglinear_prox:
        prox = reference.loglinear_prox(pi, mu, lag, ahead)
    else:
        prox = pi.detach() if batch.prox is None else select(batch.prox)
    d = pi.detach() - mu
    loss, rho, clipped = reference.token_loss(flags, pi, mu if flags.base == "mu" else prox, advantage, ids, lengths)
    weight = reference.correction_weight(flags, d if flags.weight_of == "pi" else prox - mu, ids, lengths)
    keep = mask & reference.kept(flags, pi, mu, d, advantage, ids, lengths, normalisers.m2_cutoff) & (weight != 0)
    loss = torch.where(keep, weight * loss, 0)
    total = loss
    if ref is not None and flags.kl != "none" and flags.kl_coefficient != 0:
        divergence = reference.kl(flags.kl, pi, ref, reference.ratio(d))
        total = total + torch.where(mask, flags.kl_coefficient * divergence, 0)
    if entropy is not None and flags.entropy_coefficient != 0:
        total = total - torch.where(mask, flags.entropy_coefficient * entropy.to(pi.dtype), 0)
    each = reference.token_coefficients(
        flags.aggregation, ids, lengths, normalisers.tokens, normalisers.sequences, normalisers.max_length
    )
    result = torch.where(mask, each * total, 0).sum()
    with torch.no_grad():
        values: dict[str, Tensor] = {
            "logprob": pi,
            "entropy": torch.zeros_like(pi) if entropy is None else entropy.to(pi.dtype),
            "advantage": advantage,
            "advantage_magnitude": advantage.abs(),
            "ratio": rho,
            "clip_fraction": clipped.to(pi.dtype),
            "clamped_fraction": (d.abs() >= LOG_RATIO_LIMIT).to(pi.dtype),
            "dropped_fraction": (~keep).to(pi.dtype),
            "weight": weight,
            "weight_squared": weight.square(),
            "kl_behaviour": reference.ratio(d) - 1 - d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
            "log_ratio_magnitude": d.abs(),
            "kl_reference": torch.zeros_like(pi) if ref is None else reference.kl("k3", pi, ref, rho),
            "lag": lag,
            "loss": loss,
        }
        sums = torch.where(mask, torch.stack([values[name].detach() for name in METRICS]), 0).sum(
            1, dtype=torch.float64
        )
    return result, sums
