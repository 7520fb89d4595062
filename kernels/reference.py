"""The formulas, once. Everything that computes a ratio, a loss, a KL, an advantage or a log-probability follows these.

Plain torch in the dtype of its inputs: float64 for tests and for judging kernels, float32 when `policy_loss` runs them on
CPU. Values are packed ([N], sequence id per token), masked positions are selected away by the caller before anything is
computed. Sources are papers by arXiv number. Symbols as in `flags`; d = log pi - log mu; sg = stop-gradient = detach.
"""

from __future__ import annotations

import torch
from temper.kernels.flags import KL_LIMIT, LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT, PolicyFlags
from temper.kernels.segments import next_values, reverse_scan, segment_ids, segment_max, segment_sum
from torch import Tensor

# ---------------------------------------------------------------- ratios and weights


def ratio(log_ratio: Tensor, limit: float = LOG_RATIO_LIMIT) -> Tensor:
    """exp of a log-ratio clamped to +-limit: finite whatever the two policies say (no gradient beyond the limit)."""
    return log_ratio.clamp(-limit, limit).exp()


def loglinear_prox(pi: Tensor, mu: Tensor, lag: Tensor, ahead: float) -> Tensor:
    """log prox ~ log mu + a (sg log pi - log mu), a = (v_prox - v_mu)/(v_pi - v_mu), 0 when equal (2512.06547).

    `lag` = v_prox - v_mu per token, `ahead` = v_pi - v_prox in versions (a fraction inside a step of several updates).
    """
    apart = lag + ahead
    share = torch.where(apart > 0, lag / apart.clamp_min(1e-9), 0)
    return mu + share * (pi.detach() - mu)


def sequence_ratio(log_ratio: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """gspo's token form sg[s] pi/sg[pi], s = exp(mean log-ratio), exponent clamped to +-10 (2507.18071)."""
    mean = segment_sum(log_ratio.detach(), ids, lengths.numel()) / lengths.clamp_min(1)
    return ratio(log_ratio - log_ratio.detach() + mean[ids], SEQUENCE_LOG_RATIO_LIMIT)


def correction_weight(flags: PolicyFlags, d: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """[N] w without gradient. tis, decoupled: min(x, C). mis, icepop: x inside [lo, hi], else 0. seq_is: exp(sum d)."""
    d = d.detach()
    if flags.weight == "none":
        return torch.ones_like(d)
    if flags.weight_level != "token":
        d = segment_sum(d, ids, lengths.numel())
        d = (d / lengths.clamp_min(1) if flags.weight_level == "geometric" else d)[ids]
    x = ratio(d)
    if flags.weight == "truncate":
        return x.clamp_max(flags.weight_high)
    if flags.weight == "clip":
        return x.clamp(flags.weight_low, flags.weight_high)
    return torch.where((x >= flags.weight_low) & (x <= flags.weight_high), x, 0)


# ---------------------------------------------------------------- filters: which tokens carry loss


def kept(
    flags: PolicyFlags,
    pi: Tensor,
    mu: Tensor,
    d: Tensor,
    advantage: Tensor,
    ids: Tensor,
    lengths: Tensor,
    m2_cutoff: float,
) -> Tensor:
    """bool[N] without gradient: geo_rs, veto, opsm, dppo_tv (2602.04879) and m2po, whichever the flags turn on."""
    pi, d = pi.detach(), d.detach()
    keep = torch.ones_like(d, dtype=torch.bool)
    if flags.geometric_low > 0 or flags.geometric_high < torch.inf or flags.opsm_delta < torch.inf:
        mean = segment_sum(d, ids, lengths.numel()) / lengths.clamp_min(1)
        geometric = ratio(mean)
        inside = (geometric >= flags.geometric_low) & (geometric <= flags.geometric_high)
        keep = keep & inside[ids] & ((advantage >= 0) | (-mean <= flags.opsm_delta)[ids])
    if flags.veto > 0:
        lowest = -segment_max(-d, ids, lengths.numel())
        keep = keep & (ratio(lowest) >= flags.veto)[ids]
    if flags.tv_delta < torch.inf:
        gap = pi.exp() - mu.exp()
        away = ((advantage > 0) & (gap > flags.tv_delta)) | ((advantage < 0) & (gap < -flags.tv_delta))
        keep = keep & ~away
    if flags.m2_tau < torch.inf:
        keep = keep & (d.abs() <= m2_cutoff)
    return keep


def m2_cutoff(d: Tensor, tau: float) -> float:
    """m2po: the largest |d| that may stay so that the mean of d^2 over what stays is <= tau; `d` of a whole batch."""
    sizes, _ = d.detach().abs().double().sort()
    means = sizes.square().cumsum(0) / torch.arange(1, sizes.numel() + 1, device=d.device)
    fitting = int((means <= tau).sum())  # means of a sorted list never decrease
    if fitting == sizes.numel():
        return torch.inf
    return float(sizes[fitting - 1]) if fitting else -1.0


# ---------------------------------------------------------------- losses, per token, minimised


def by_sign(advantage: Tensor, positive: float, other: float) -> Tensor:
    """[N] one of two constants by the sign of A, in A's own precision."""
    return torch.where(advantage > 0, torch.full_like(advantage, positive), other)


def clipped(flags: PolicyFlags, rho: Tensor, advantage: Tensor) -> Tensor:
    """bool[N]: ppo's minimum picks the bound instead of the ratio."""
    return ((advantage > 0) & (rho > 1 + flags.clip_high)) | ((advantage < 0) & (rho < 1 - flags.clip_low))


def ppo(flags: PolicyFlags, rho: Tensor, advantage: Tensor) -> Tensor:
    """-min(rho A, clip(rho, 1-el, 1+eh) A); dual clip c: for A < 0 at most -c A (1707.06347, 1912.09729)."""
    bound = by_sign(advantage, 1 + flags.clip_high, 1 - flags.clip_low)
    used = torch.where(clipped(flags, rho, advantage), bound, rho)
    if flags.dual_clip > 0:
        used = torch.where((advantage < 0) & (used > flags.dual_clip), flags.dual_clip, used)
    return -used * advantage


def sapo(flags: PolicyFlags, rho: Tensor, advantage: Tensor) -> Tensor:
    """-(4/tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (2511.20347)."""
    tau = by_sign(advantage, flags.tau_positive, flags.tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (rho - 1)) * advantage


def gmpo(flags: PolicyFlags, log_ratio: Tensor, advantage: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
    """-A exp(mean of log-ratios clamped at +clip_high for A > 0, at -clip_low for A < 0) (2507.20673)."""
    bounded = torch.where(advantage > 0, log_ratio.clamp_max(flags.clip_high), log_ratio.clamp_min(-flags.clip_low))
    mean = segment_sum(bounded, ids, lengths.numel()) / lengths.clamp_min(1)
    return -advantage * ratio(mean)[ids]


def token_loss(
    flags: PolicyFlags, pi: Tensor, base: Tensor, advantage: Tensor, ids: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss[N], rho[N] without gradient, clipped bool[N]) of the row's `loss`, before weights, filters and KL."""
    log_ratio = pi - base
    rho = ratio(log_ratio) if flags.level == "token" else sequence_ratio(log_ratio, ids, lengths)
    none = torch.zeros_like(rho, dtype=torch.bool)
    if flags.loss == "ppo":
        return ppo(flags, rho, advantage), rho.detach(), clipped(flags, rho, advantage)
    if flags.loss == "ratio":
        return -rho * advantage, rho.detach(), none
    if flags.loss == "score":
        return -advantage * pi, rho.detach(), none
    if flags.loss == "cispo":  # 2506.13585, 2510.13786
        bounded = rho.detach().clamp(1 - flags.clip_low, 1 + flags.clip_high)
        return -bounded * advantage * pi, rho.detach(), bounded != rho.detach()
    if flags.loss == "topr":  # 2503.14286
        tapered = torch.where(advantage < 0, rho.detach().clamp_max(1), 1)
        return -tapered * advantage * pi, rho.detach(), none
    if flags.loss == "sapo":
        return sapo(flags, rho, advantage), rho.detach(), none
    if flags.loss == "dro":  # 2405.19107
        return -(advantage * pi - flags.dro_beta * log_ratio.square() / 2), rho.detach(), none
    if flags.loss == "gmpo":
        beyond = ((advantage > 0) & (log_ratio > flags.clip_high)) | ((advantage < 0) & (log_ratio < -flags.clip_low))
        return gmpo(flags, log_ratio, advantage, ids, lengths), rho.detach(), beyond
    raise ValueError(f"flags.loss: found {flags.loss!r}, expected a value of kernels.flags.Loss")


# ---------------------------------------------------------------- KL to the reference policy


def kl(kind: str, pi: Tensor, ref: Tensor, pi_over_mu: Tensor) -> Tensor:
    """[N] estimates of KL(pi || ref) from samples; k = log ref - log pi: k1 -k, k2 k^2/2, k3 e^k - k - 1 (capped at 10).

    k3 in a loss has the wrong gradient: `k3_straight_through` has k3's value and k2's gradient, `k3_weighted` is
    sg[pi/mu] k3, which is unbiased for samples of mu.
    """
    k = (ref - pi).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -k
    if kind == "k2":
        return k.square() / 2
    k3 = (k.exp() - k - 1).clamp_max(KL_LIMIT)
    if kind == "k3":
        return k3
    if kind == "k3_straight_through":
        k2 = k.square() / 2
        return k3.detach() + k2 - k2.detach()
    if kind == "k3_weighted":
        return pi_over_mu.detach() * k3
    raise ValueError(f"flags.kl: found {kind!r}, expected a value of kernels.flags.Kl")


# ---------------------------------------------------------------- aggregation


def token_coefficients(
    aggregation: str, ids: Tensor, lengths: Tensor, tokens: float, sequences: float, max_length: float
) -> Tensor:
    """[N] factors c_t so that the batch's loss is sum c_t loss_t; the normalisers are global over ranks and splits."""
    if aggregation == "token_mean":
        return torch.full(ids.shape, 1.0, dtype=lengths.dtype, device=ids.device) / max(tokens, 1)
    if aggregation == "seq_mean_token_mean":
        return (1 / lengths.clamp_min(1))[ids] / max(sequences, 1)
    if aggregation == "seq_mean_token_sum":
        return torch.full(ids.shape, 1.0, dtype=lengths.dtype, device=ids.device) / max(sequences, 1)
    if aggregation == "seq_mean_token_sum_norm":
        return torch.full(ids.shape, 1.0, dtype=lengths.dtype, device=ids.device) / (
            max(sequences, 1) * max(max_length, 1)
        )
    raise ValueError(f"flags.aggregation: found {aggregation!r}, expected a value of kernels.flags.Aggregation")


# ---------------------------------------------------------------- advantages of groups

ZERO_VARIANCE = 1e-6  # max - min of a group at or below this is float noise: the advantages are exactly 0


def group_advantage(
    kind: str,
    reward: Tensor,
    scored: Tensor,
    group: Tensor,
    groups: int,
    *,
    length: Tensor | None = None,
    std: str = "sample",
    epsilon: float = 1e-6,
) -> Tensor:
    """f64[S] advantages of samples from their rewards; 0 where not `scored`, in groups of one and without variance.

    reward f64[S]; scored bool[S] (None, NaN and infrastructure failures are outside mean, std and loss); group i64[S]
    in 0..groups-1; length [S] generated tokens (opo). Kinds: grpo, dr_grpo, rloo, maxrl, batch_std, opo, passk.
    Sources: 2402.03300, 2503.20783, 2402.14740, 2602.02710, 2505.23585 (opo), 2503.19595 (passk).
    """
    ids = group[scored]
    r = reward[scored].double()
    ones = torch.ones_like(r)
    count = segment_sum(ones, ids, groups)
    mean = (segment_sum(r, ids, groups) / count.clamp_min(1))[ids]
    top, bottom = segment_max(r, ids, groups, 0.0), -segment_max(-r, ids, groups, 0.0)
    centred = r - mean
    ddof = {"sample": 1, "population": 0}[std]
    if kind == "grpo":
        variance = segment_sum(centred.square(), ids, groups) / (count - ddof).clamp_min(1)
        value = centred / (variance.sqrt()[ids] + epsilon)
    elif kind == "batch_std":
        spread = (r - r.mean()).square().sum() / max(r.numel() - ddof, 1)
        value = centred / (spread.sqrt() + epsilon)
    elif kind == "dr_grpo":
        value = centred
    elif kind == "rloo":
        value = centred * (count / (count - 1).clamp_min(1))[ids]
    elif kind == "maxrl":
        value = torch.where(mean > 0, centred / mean.clamp_min(1e-12), 0)
    elif kind == "opo":
        if length is None:
            raise ValueError("length: found None, expected the generated tokens of every sample (advantage opo)")
        l = length[scored].double()
        base = segment_sum(l * r, ids, groups) / segment_sum(l, ids, groups).clamp_min(1)
        value = r - base[ids]
    elif kind == "passk":
        winners = r == top[ids]
        several = segment_sum(winners.double(), ids, groups) > 1
        second = segment_max(torch.where(winners, -torch.inf, r), ids, groups, 0.0)
        value = torch.where(winners & ~several[ids], r - second[ids], 0)
    else:
        raise ValueError(f"advantage: found {kind!r}, expected grpo, dr_grpo, rloo, maxrl, batch_std, opo or passk")
    flat = (top - bottom <= ZERO_VARIANCE) | (count < 2)
    return torch.zeros_like(reward, dtype=torch.float64).masked_scatter(scored, torch.where(flat[ids], 0, value))


# ---------------------------------------------------------------- advantages of tokens


def masked_returns(reward: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float = 1.0) -> Tensor:
    """[N] discounted returns over unmasked tokens: gamma does not decay through masked ones (reinforce++, 2501.03262).

    A reward on a masked token counts, undecayed, to the unmasked ones before it. 0 at masked positions.
    """
    decay = torch.where(mask, torch.full_like(reward, gamma), 1.0)
    # the return *after* t decays once for leaving an unmasked token t
    returns = reverse_scan(decay, reward, cu_seqlens)
    return torch.where(mask, returns, 0)


def whiten(value: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """[N] (value - mean)/(std + epsilon) over the mask (population std), two passes; 0 elsewhere and without variance."""
    count = mask.sum().clamp_min(1)
    picked = torch.where(mask, value, 0)
    centred = torch.where(mask, value - picked.sum() / count, 0)
    if not bool(mask.any()) or float(centred.abs().max()) <= ZERO_VARIANCE / 2:
        return torch.zeros_like(value)
    return centred / ((centred.square().sum() / count).sqrt() + epsilon)


def gae(
    reward: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(advantage[N], return[N]): A_t = delta_t + g lambda A_{t+1}, delta_t = r_t + g V_{t+1} - V_t (1506.02438)."""
    delta = reward + gamma * next_values(value, cu_seqlens, bootstrap) - value
    advantage = reverse_scan(torch.full_like(delta, gamma * lam), delta, cu_seqlens)
    return advantage, advantage + value


def vtrace(
    d: Tensor,
    reward: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(advantage[N], v[N]) of 1802.01561; d = log pi - log mu at the start of the step.

    rho_t = min(rho_bar, pi/mu), c_t = lambda min(c_bar, pi/mu), delta_t = rho_t (r_t + g V_{t+1} - V_t),
    v_t = V_t + delta_t + g c_t (v_{t+1} - V_{t+1}), A_t = rho_t (r_t + g v_{t+1} - V_t).
    """
    pi_over_mu = ratio(d)
    rho, c = pi_over_mu.clamp_max(rho_bar), lam * pi_over_mu.clamp_max(c_bar)
    delta = rho * (reward + gamma * next_values(value, cu_seqlens, bootstrap) - value)
    v = value + reverse_scan(gamma * c, delta, cu_seqlens)
    return rho * (reward + gamma * next_values(v, cu_seqlens, bootstrap) - value), v


def value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """[N] squared error / 2 of a critic; with clip > 0 the worse of it and of the value kept within old +- clip."""
    error = (value - target).square() / 2
    if clip <= 0:
        return error
    held = old + (value - old).clamp(-clip, clip)
    return torch.maximum(error, (held - target).square() / 2)


# ---------------------------------------------------------------- log-probabilities


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | float, softcap: float | None
) -> Tensor:
    """[N, V] logits: softcap * tanh(x / softcap) of x = hidden weight^T + bias, then divided by the temperature."""
    x = hidden @ weight.T
    if bias is not None:
        x = x + bias
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    return x / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def logprob_of(
    logits: Tensor, target: Tensor, support: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob[N], entropy[N], lse[N]) of existing logits; with `support` (ids, cu) over each row's own ids only.

    A row with an empty support keeps the whole vocabulary. Targets must be valid ids.
    """
    if support is not None:
        ids, cu = support
        rows = segment_ids(cu, ids.numel())
        inside = torch.zeros_like(logits, dtype=torch.bool)
        inside[rows, ids.long()] = True
        inside |= (cu[1:] == cu[:-1])[:, None]
        logits = torch.where(inside, logits, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    logp = logits - lse[:, None]
    entropy = -torch.where(torch.isneginf(logp), 0, logp.exp() * torch.where(torch.isneginf(logp), 0, logp)).sum(-1)
    return logp.gather(1, target.long()[:, None])[:, 0], entropy, lse
