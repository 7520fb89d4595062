"""From the rewards of groups to advantages, per sample or per token, as an objective's `advantage` says.

Samples without a score (None, NaN, infrastructure) are outside baseline and loss. Groups come as plain values and
advantages go back as plain values, so that batching and whitening see a whole step; formulas are in
`kernels/reference.py`, kernels in `kernels/advantages.py`. Called by the learner's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING

from temper.learner.objectives import PER_TOKEN, Objective

if TYPE_CHECKING:
    from torch import Tensor


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
    from temper.kernels.advantages import group_advantage

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
        torch.tensor([0, *accumulate(len(group) for group in rewards)], dtype=torch.int64),
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
    from temper.kernels.advantages import vtrace
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
    if objective.advantage != "vtrace":
        raise ValueError(f"advantage: found {objective.advantage!r}, expected `critic_advantages` for it")
    if value is None or d is None:
        raise ValueError(
            "value, d: found None, expected group_means f64[S] and log prox - log mu f32[N] (advantage vtrace)"
        )
    found, _ = vtrace(
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


def critic_advantages(
    objective: Objective,
    sample: Tensor,
    cu_seqlens: Tensor,
    value: Tensor,
    *,
    d: Tensor,
    step_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantage f32[N], the values' targets f32[N]) of packed trained tokens, for gae and vtrace_critic.

    sample f64[S]: rewards, which count at each sequence's last token; value f32[N]: the critic's, at the start of the
    step; d f32[N] = log prox - log mu. The value after a sequence's end is 0.
    """
    import torch
    from temper.kernels.advantages import gae, vtrace

    count, lengths = value.shape[0], cu_seqlens[1:] - cu_seqlens[:-1]
    rewards = torch.zeros(count, dtype=torch.float64) if step_rewards is None else step_rewards.double().clone()
    filled = lengths > 0
    rewards[(cu_seqlens[1:] - 1)[filled]] += sample.double()[filled]
    if objective.advantage == "gae":
        found, target = gae(rewards, value.double(), cu_seqlens, gamma=objective.gamma, lam=objective.lam)
    else:
        found, target = vtrace(
            d.double(),
            rewards,
            value.double(),
            cu_seqlens,
            gamma=objective.gamma,
            lam=objective.lam,
            rho_bar=objective.rho_bar,
            c_bar=objective.c_bar,
        )
    return found.float(), target.float()


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """What a completion of `length` generated tokens loses (2503.14476): 0 up to limit - buffer, 1 from limit on."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))
