"""The plain flags of `policy_loss`: what an objective is compiled to. No torch here, so that configuration stays light.

Symbols: mu = behaviour policy (what the engine sampled with), prox = proximal policy (the learner's weights at the start
of the step), pi = current policy, ref = reference policy, A = advantage, rho = pi/base, w = correction weight.
`learner/objectives.py` holds the table of named rows; `kernels/reference.py` the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

Loss = Literal["ppo", "ratio", "score", "cispo", "topr", "sapo", "dro", "gmpo"]
Level = Literal["token", "sequence"]
Base = Literal["prox", "mu"]
Weight = Literal["none", "truncate", "mask", "clip"]
WeightLevel = Literal["token", "sequence", "geometric"]
Kl = Literal["none", "k1", "k2", "k3", "k3_straight_through", "k3_weighted"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

LOG_RATIO_LIMIT = 20.0  # |log ratio| is clamped here before exp
SEQUENCE_LOG_RATIO_LIMIT = 10.0  # the same for sequence-level ratios (gspo)
KL_LIMIT = 10.0  # cap of the k3 estimate
SUPPORT_LIMIT = 4096  # most ids that top-p/top-k/min-p may keep for one token


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """One objective, as orthogonal choices. Defaults: PPO against the proximal policy without correction."""

    loss: Loss = "ppo"
    # ppo: -min(rho A, clip(rho) A)   ratio: -rho A   score: -A log pi   cispo: -sg[clip(rho)] A log pi
    # topr: -A log pi, negatives weighted sg[clip(rho, 0, 1)]   sapo: -(4/tau) sigmoid(tau (rho - 1)) A
    # dro: -(A log pi - beta d^2/2)   gmpo: -A times the geometric mean of sign-aware clamped ratios
    level: Level = "token"  # sequence: rho is exp(mean d) in token form (gspo)
    base: Base = "prox"  # the denominator of rho
    loglinear_prox: bool = False  # log prox ~ log mu + a (sg log pi - log mu) instead of a recomputed one
    clip_low: float = 0.2  # lower bound of rho is 1 - clip_low (gmpo: bound of the log-ratio)
    clip_high: float = 0.2  # upper bound of rho is 1 + clip_high
    dual_clip: float = 0.0  # for A < 0 the loss is at most -dual_clip A; 0 = off
    weight: Weight = (
        "none"  # w, a factor without gradient: min(x, high); x inside [low, high] else 0; clip(x, low, high)
    )
    weight_of: Base | Literal["pi"] = "prox"  # x = prox/mu or pi/mu
    weight_level: WeightLevel = "token"  # token: x_t; sequence: exp(sum d); geometric: exp(mean d)
    weight_low: float = 0.0
    weight_high: float = inf
    geometric_low: float = 0.0  # keep a sequence iff exp(mean d) is inside [low, high]
    geometric_high: float = inf
    veto: float = 0.0  # drop a sequence with any token ratio below this; 0 = off
    opsm_delta: float = inf  # keep a token iff A >= 0 or the sequence's mean(log mu - log pi) <= delta
    tv_delta: float = inf  # drop a token iff A > 0 and pi - mu > delta, or A < 0 and pi - mu < -delta (probabilities)
    m2_tau: float = inf  # mask the largest |d| until mean d^2 <= tau; the cut-off is in Normalisers
    tau_positive: float = 1.0  # sapo
    tau_negative: float = 1.05  # sapo
    dro_beta: float = 0.0  # dro
    kl: Kl = "none"  # to the reference policy
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0  # bonus; needs the entropy of pi
    aggregation: Aggregation = "token_mean"
