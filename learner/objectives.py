"""Algorithms as data: an objective is one frozen row of orthogonal choices, compiled to plain flags for `kernels`.

Adding an algorithm is adding a row to `TABLE`. `resolve` turns a recipe's ``[objective]`` into a row and refuses what makes
no sense, saying why: an override that the row would ignore, asynchronous sampling without a correction, a KL without a
coefficient. `advantages` turns the rewards of groups into advantages. Pure; torch and kernels are imported when used.
Called by the learner's batching and policy, and by ``temper inspect``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal, get_args

from temper.common import config
from temper.common.errors import ConfigError

if TYPE_CHECKING:
    from temper.kernels.flags import PolicyFlags
    from torch import Tensor

Advantage = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "batch_std",
    "opo",
    "passk",
    "ema",
    "per_component",
    "reinforce++",
    "reinforce++_baseline",
    "vtrace",
    "likelihood",
]
Correction = Literal["none", "ratio", "truncate", "mask", "clip", "vtrace", "supervised"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

PER_TOKEN = ("reinforce++", "vtrace")  # advantages that are computed on the packed batch (`token_advantages`)
CLIPPED = ("ppo", "cispo", "gmpo")  # losses that use clip_low and clip_high
RATIO_FREE = ("score", "topr")  # losses whose gradient is a score function: pi/mu enters as a weight


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective. Fields that `kernels.flags.PolicyFlags` has too mean what they mean there.

    `correction` says how tokens that other weights sampled are accounted for: none; ratio (rho is pi/mu); truncate, mask or
    clip (a weight beside rho = pi/prox); vtrace (inside the advantage); supervised (demonstrations: nothing to correct).
    """

    name: str
    source: str  # paper, or what the row is for
    advantage: Advantage = "grpo"
    std: Literal["sample", "population"] = "sample"  # of advantages that divide by one
    epsilon: float = 1e-6  # added to that std
    gamma: float = 1.0  # discount of token returns
    lam: float = 1.0  # lambda of vtrace
    rho_bar: float = 1.0  # vtrace
    c_bar: float = 1.0  # vtrace
    loss: str = "ppo"
    level: str = "token"
    correction: Correction = "none"
    weight_of: str = "prox"
    weight_level: str = "token"
    weight_low: float = 0.0
    weight_high: float = inf
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    loglinear_prox: bool = False
    geometric_low: float = 0.0
    geometric_high: float = inf
    veto: float = 0.0
    opsm_delta: float = inf
    tv_delta: float = inf
    m2_tau: float = inf
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    dro_beta: float = 0.0
    kl: str = "none"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    updates_per_step: int = 1
    component_weights: Mapping[str, float] = field(default_factory=dict)  # per_component; empty = 1 each

    @property
    def base(self) -> str:
        """The denominator of rho."""
        return "mu" if self.correction == "ratio" else "prox"

    @property
    def weight(self) -> str:
        """The kind of the correction weight."""
        return self.correction if self.correction in ("truncate", "mask", "clip") else "none"

    @property
    def needs_prox(self) -> bool:
        """The learner must compute log prox before the first of several updates of a step."""
        in_ratio = self.base == "prox" and self.loss not in RATIO_FREE
        in_weight = self.weight != "none" and self.weight_of == "prox"
        return (in_ratio or in_weight) and self.updates_per_step > 1 and not self.loglinear_prox

    @property
    def needs_entropy(self) -> bool:
        """The entropy of pi is needed with gradient."""
        return self.entropy_coefficient != 0

    @property
    def needs_reference(self) -> bool:
        """A reference policy's log-probabilities are needed."""
        return self.kl != "none" and self.kl_coefficient != 0


def _row(name: str, source: str, **choices: object) -> tuple[str, Objective]:
    return name, Objective(name=name, source=source, **choices)  # type: ignore[arg-type]


TABLE: dict[str, Objective] = dict(
    (
        _row("ppo", "1707.06347, rho against the behaviour policy", correction="ratio"),
        _row("grpo", "2402.03300; synchronous", aggregation="seq_mean_token_mean"),
        _row("dr_grpo", "2503.20783; synchronous", advantage="dr_grpo", aggregation="seq_mean_token_sum_norm"),
        _row("dapo", "2503.14476", clip_high=0.28, correction="ratio"),
        _row(
            "gspo",
            "2507.18071",
            level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            dual_clip=0.0,
            correction="ratio",
            aggregation="seq_mean_token_mean",
        ),
        _row(
            "gmpo",
            "2507.20673",
            loss="gmpo",
            clip_low=0.4,
            clip_high=0.4,
            correction="ratio",
            aggregation="seq_mean_token_mean",
        ),
        _row("cispo", "2506.13585, 2510.13786", loss="cispo", clip_low=1.0, clip_high=0.28, correction="ratio"),
        _row("sapo", "2511.20347", loss="sapo", correction="ratio", aggregation="seq_mean_token_mean"),
        _row(
            "decoupled_ppo",
            "2110.00641, 2505.24298",
            advantage="dr_grpo",
            correction="truncate",
            weight_high=5.0,
            clip_high=0.28,
        ),
        _row(
            "decoupled_ppo_loglinear",
            "2512.06547: no extra forward for the proximal policy",
            advantage="dr_grpo",
            correction="truncate",
            weight_high=5.0,
            clip_high=0.28,
            loglinear_prox=True,
        ),
        _row(
            "tis", "truncated importance sampling", loss="score", correction="truncate", weight_of="pi", weight_high=2.0
        ),
        _row(
            "seq_is",
            "one truncated weight per sequence",
            correction="truncate",
            weight_level="sequence",
            weight_high=2.0,
        ),
        _row("icepop", "tokens outside a band weigh 0", correction="mask", weight_low=0.5, weight_high=5.0),
        _row(
            "mis",
            "masked importance sampling",
            loss="score",
            correction="mask",
            weight_of="pi",
            weight_low=0.5,
            weight_high=1.5,
        ),
        _row(
            "geo_rs",
            "sequences outside a band of the geometric mean ratio are dropped, with veto",
            correction="truncate",
            weight_high=2.0,
            geometric_low=0.99,
            geometric_high=1.01,
            veto=1e-4,
        ),
        _row(
            "dppo_tv",
            "2602.04879",
            loss="ratio",
            correction="ratio",
            tv_delta=0.2,
        ),
        _row("topr", "2503.14286", loss="topr", correction="ratio", advantage="dr_grpo"),
        _row("aipo", "2505.24034", loss="score", correction="truncate", weight_of="pi", weight_high=5.0),
        _row("opsm", "off-policy sequence masking", correction="ratio", opsm_delta=0.05),
        _row("m2po", "2510.01161", correction="ratio", m2_tau=0.04),
        _row("dro", "2405.19107", loss="dro", correction="ratio", dro_beta=0.1, advantage="dr_grpo"),
        _row("vtrace", "1802.01561, V = the group's mean", advantage="vtrace", loss="score", correction="vtrace"),
        _row("rloo", "2402.14740; synchronous", advantage="rloo", loss="score", aggregation="seq_mean_token_sum"),
        _row("maxrl", "2602.02710", advantage="maxrl", correction="ratio"),
        _row("opo", "2505.23585", advantage="opo", correction="ratio"),
        _row("passk", "2503.19595", advantage="passk", correction="ratio"),
        _row("reinforce++", "2501.03262", advantage="reinforce++", correction="ratio"),
        _row("reinforce++_baseline", "2501.03262", advantage="reinforce++_baseline", correction="ratio"),
        _row(
            "sft", "maximum likelihood of demonstrations", advantage="likelihood", loss="score", correction="supervised"
        ),
    )
)
"""Every named objective."""


def compile(objective: Objective) -> PolicyFlags:
    """The kernel's flags of an objective."""
    from temper.kernels.flags import PolicyFlags

    return PolicyFlags(**{flag.name: getattr(objective, flag.name) for flag in fields(PolicyFlags)})


def _nearest(found: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(found, valid, 1, 0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; valid are {', '.join(valid)}"


def resolve(recipe: config.Objective, pacing: config.Pacing) -> Objective:
    """The objective that a recipe's ``[objective]`` describes. ConfigError names the key, the reason and what to do."""
    if recipe.name not in TABLE:
        raise ConfigError(f"objective.name = {recipe.name!r} is not an objective{_nearest(recipe.name, list(TABLE))}")
    row = TABLE[recipe.name]
    changes: dict[str, object] = {}
    for key, valid in (("advantage", get_args(Advantage)), ("aggregation", get_args(Aggregation))):
        value = getattr(recipe, key)
        if value and value not in valid:
            raise ConfigError(f"objective.{key} = {value!r} is not one{_nearest(value, valid)}")
        if value:
            changes[key] = value
    for key in ("clip_low", "clip_high"):
        value = getattr(recipe, key)
        if value is None:
            continue
        if row.loss not in CLIPPED:
            raise ConfigError(
                f"objective.{key} has no effect: {row.name} does not clip a ratio (loss {row.loss}); remove it"
            )
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"objective.{key} = {value}: expected a finite number >= 0")
        changes[key] = value
    if recipe.weight_cap is not None:
        if row.weight == "none":
            raise ConfigError(
                f"objective.weight_cap has no effect: {row.name} has no correction weight (correction {row.correction}); "
                f"remove it or use decoupled_ppo, tis or icepop"
            )
        if not recipe.weight_cap > row.weight_low:
            raise ConfigError(f"objective.weight_cap = {recipe.weight_cap}: expected a number > {row.weight_low}")
        changes["weight_high"] = recipe.weight_cap
    for key in ("kl_coefficient", "entropy_coefficient"):
        value = getattr(recipe, key)
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"objective.{key} = {value}: expected a finite number >= 0")
    changes["kl_coefficient"], changes["entropy_coefficient"] = recipe.kl_coefficient, recipe.entropy_coefficient
    if recipe.kl_coefficient > 0 and row.kl == "none":
        changes["kl"] = "k2"
    if recipe.updates_per_step < 1:
        raise ConfigError(f"objective.updates_per_step = {recipe.updates_per_step}: expected at least 1")
    changes["updates_per_step"] = recipe.updates_per_step
    objective = replace(row, **changes)  # type: ignore[arg-type]
    check(objective, asynchronous=pacing.max_staleness > 0, allow_uncorrected=recipe.allow_uncorrected)
    return objective


def check(objective: Objective, *, asynchronous: bool, allow_uncorrected: bool = False) -> None:
    """ConfigError for a composition that makes no sense, saying why."""
    o = objective
    if o.correction == "none" and asynchronous and not allow_uncorrected:
        raise ConfigError(
            f"objective.name = {o.name!r} does not correct for stale samples, but pacing.max_staleness > 0 makes sampling "
            "asynchronous: use an objective with a correction (decoupled_ppo, dapo, tis, icepop), set "
            "pacing.max_staleness = 0, or objective.allow_uncorrected = true"
        )
    supervised = o.correction == "supervised"
    if supervised != (o.advantage == "likelihood"):
        raise ConfigError(
            f"objective.advantage = {o.advantage!r} does not fit {o.name}: only sft has the advantage 'likelihood' (1 "
            "everywhere), because demonstrations have neither rewards nor a behaviour policy"
        )
    if (o.correction == "vtrace") != (o.advantage == "vtrace"):
        raise ConfigError(
            f"objective.advantage = {o.advantage!r} does not fit {o.name}: V-trace corrects inside the advantage; use it "
            "with the row vtrace, and no other advantage there, or the weights would count twice or not at all"
        )
    if o.loss in RATIO_FREE and o.updates_per_step > 1 and o.correction not in ("truncate", "mask", "clip", "ratio"):
        raise ConfigError(
            f"objective.updates_per_step = {o.updates_per_step}: {o.name} is a score function without a ratio, so a second "
            "update on the same batch is uncorrected; set it to 1 or use an objective with a ratio or a weight on pi"
        )
    if o.loss in CLIPPED and o.clip_low > 1 and o.loss != "gmpo":
        raise ConfigError(f"objective.clip_low = {o.clip_low}: expected at most 1, a ratio is never below 0")
    if o.kl_coefficient > 0 and supervised:
        raise ConfigError("objective.kl_coefficient: sft has no policy gradient to restrain; remove it")
    if o.kl in ("k1", "k3") and o.kl_coefficient > 0:
        raise ConfigError(
            f"kl = {o.kl!r} in the loss has the wrong gradient (k1: zero on average, k3: not that of the KL); use k2, "
            "k3_straight_through or k3_weighted"
        )


# ---------------------------------------------------------------- advantages


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """One group: a reward per sample (None = not scored: outside baseline and loss) and what some advantages need.

    lengths: generated tokens per sample (opo); components: reward components per sample (per_component); baseline: the
    domain's running mean reward (ema).
    """

    rewards: Sequence[float | None]
    lengths: Sequence[int] = ()
    components: Sequence[Mapping[str, float]] = ()
    baseline: float = 0.0


def _scored(reward: float | None) -> bool:
    return reward is not None and isfinite(reward)


def advantages(objective: Objective, groups: Sequence[GroupRewards]) -> list[list[float | None]]:
    """Advantage of every sample of every group of a batch; None for samples outside the loss (not scored).

    For the kinds in `PER_TOKEN` this is what `token_advantages` starts from: the raw reward (reinforce++) or reward minus
    group mean (vtrace takes the rewards itself). Whitening kinds use the whole batch, so pass all groups of a step.
    """
    kind = objective.advantage
    if kind == "likelihood":
        return [[1.0] * len(group.rewards) for group in groups]
    if kind in PER_TOKEN:
        return [[float(r) if r is not None and isfinite(r) else None for r in group.rewards] for group in groups]
    if kind == "ema":
        return [
            [r - group.baseline if r is not None and isfinite(r) else None for r in group.rewards] for group in groups
        ]
    if kind == "per_component":
        return _per_component(objective, groups)
    inner = "dr_grpo" if kind == "reinforce++_baseline" else kind
    found = _grouped(objective, inner, groups, [group.rewards for group in groups])
    return _whitened(found, groups) if kind == "reinforce++_baseline" else found


def _grouped(
    objective: Objective, kind: str, groups: Sequence[GroupRewards], rewards: Sequence[Sequence[float | None]]
) -> list[list[float | None]]:
    import torch
    from temper.kernels.reference import group_advantage

    flat = [r for group in rewards for r in group]
    scored = [_scored(r) for r in flat]
    lengths = [n for group in groups for n in group.lengths]
    if kind == "opo" and len(lengths) != len(flat):
        raise ValueError(
            f"lengths: found {len(lengths)} for {len(flat)} samples, expected the generated tokens of each"
        )
    value = group_advantage(
        kind,
        torch.tensor([r if ok else 0.0 for r, ok in zip(flat, scored, strict=True)], dtype=torch.float64),
        torch.tensor(scored, dtype=torch.bool),
        torch.tensor([i for i, group in enumerate(rewards) for _ in group], dtype=torch.int64),
        len(rewards),
        length=torch.tensor(lengths, dtype=torch.float64) if lengths else None,
        std=objective.std,
        epsilon=objective.epsilon,
    ).tolist()
    each = iter(zip(value, scored, strict=True))
    return [[a if ok else None for a, ok in (next(each) for _ in group)] for group in rewards]


def _per_component(objective: Objective, groups: Sequence[GroupRewards]) -> list[list[float | None]]:
    """Each component normalised in its group (as grpo), then weighted and summed. A missing component counts as 0."""
    names = sorted({name for group in groups for sample in group.components for name in sample})
    total: list[list[float | None]] = [[0.0 if _scored(r) else None for r in group.rewards] for group in groups]
    for name in names:
        share = objective.component_weights.get(name, 1.0 if not objective.component_weights else 0.0)
        rewards = [
            [c.get(name, 0.0) if _scored(r) else None for r, c in zip(group.rewards, group.components, strict=True)]
            for group in groups
        ]
        for row, part in zip(total, _grouped(objective, "grpo", groups, rewards), strict=True):
            for i, a in enumerate(part):
                if a is not None:
                    row[i] = (row[i] or 0.0) + share * a
    return total


def _whitened(found: list[list[float | None]], groups: Sequence[GroupRewards]) -> list[list[float | None]]:
    """Global masked whitening: every sample counts with its generated tokens (1 each where lengths are not given)."""
    pairs = [
        (a, float(group.lengths[i]) if group.lengths else 1.0)
        for row, group in zip(found, groups, strict=True)
        for i, a in enumerate(row)
        if a is not None
    ]
    count = sum(n for _, n in pairs)
    if count == 0:
        return found
    mean = sum(a * n for a, n in pairs) / count
    spread = (sum(n * (a - mean) ** 2 for a, n in pairs) / count) ** 0.5
    if max(abs(a - mean) for a, _ in pairs) <= 5e-7:
        return [[None if a is None else 0.0 for a in row] for row in found]
    return [[None if a is None else (a - mean) / (spread + 1e-8) for a in row] for row in found]


def group_means(groups: Sequence[GroupRewards]) -> list[list[float]]:
    """The mean reward of its group's scored samples, for every sample: the constant value function of vtrace."""
    found = []
    for group in groups:
        scored = [r for r in group.rewards if r is not None and isfinite(r)]
        found.append([sum(scored) / len(scored) if scored else 0.0] * len(group.rewards))
    return found


def token_advantages(
    objective: Objective,
    sample: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    value: Tensor | None = None,
    d: Tensor | None = None,
    step_rewards: Tensor | None = None,
) -> Tensor:
    """f32[N] advantages of packed tokens from per-sample ones, 0 where masked.

    sample f64[S]: `advantages` of the packed sequences (for `PER_TOKEN` kinds that is their reward, which counts at the last
    unmasked token); mask bool[N]; value f64[S]: `group_means` of them, and d f32[N] = log prox - log mu (vtrace only).
    step_rewards f32[N]: per-turn or per-span rewards; their discounted returns are added. Whitening (reinforce++) is over
    what is passed: pass a whole step.
    """
    import torch
    from temper.kernels import reference
    from temper.kernels.segments import segment_broadcast, segment_ids, segment_sum

    mask = mask.to(torch.bool)
    count = mask.shape[0]
    if objective.advantage not in PER_TOKEN:
        found = segment_broadcast(sample.double(), cu_seqlens, count)
        if step_rewards is not None:
            found = found + reference.masked_returns(step_rewards.double(), mask, cu_seqlens, objective.gamma)
        return torch.where(mask, found, 0).float()
    ids, picked = segment_ids(cu_seqlens, count), mask.nonzero()[:, 0]
    lengths = segment_sum(mask.long(), ids, cu_seqlens.numel() - 1)
    inner = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    rewards = torch.zeros(count, dtype=torch.float64, device=mask.device)
    if step_rewards is not None:
        rewards += step_rewards.double()
    filled = lengths > 0
    rewards[picked[(inner[1:] - 1)[filled]]] += sample.double()[filled]
    if objective.advantage == "reinforce++":
        returns = reference.masked_returns(rewards, mask, cu_seqlens, objective.gamma)
        return reference.whiten(returns, mask).float()
    if value is None or d is None:
        raise ValueError(
            "value, d: found None, expected group_means f64[S] and log prox - log mu f32[N] (advantage vtrace)"
        )
    found, _ = reference.vtrace(
        d[picked].double(),
        rewards[picked],
        value.double()[ids[picked]],
        inner,
        gamma=objective.gamma,
        lam=objective.lam,
        rho_bar=objective.rho_bar,
        c_bar=objective.c_bar,
    )
    return torch.zeros(count, dtype=torch.float64, device=mask.device).index_copy(0, picked, found).float()
