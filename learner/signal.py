"""What a step learns from: the advantage of every trained token, from rewards, penalties, baselines and values.

Rewards are shaped here and nowhere else (length penalty, KL taken off the reward); what was sampled, scored and measured
comes in as arrays. Moves the domains' running mean rewards and nothing else. Called by `step`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from temper.common.config import Recipe
from temper.kernels.segments import segment_reduce
from temper.learner import advantages
from temper.learner.objectives import PER_TOKEN, Objective
from temper.learner.rows import Array, StepRows
from torch import Tensor

BASELINE_RATE = 0.1  # of the domains' running mean rewards (advantage ema)


@dataclass(frozen=True, slots=True)
class Signal:
    """advantage f32[M]; target f32[M]: what the critic's values should have been, where there is a critic. On CPU."""

    advantage: Tensor
    target: Tensor | None = None


def step_advantages(
    objective: Objective,
    recipe: Recipe,
    data: StepRows,
    baselines: dict[str, float],
    *,
    mu: Tensor,
    prox: Tensor | None,
    reference: Tensor | None,
    value: Tensor | None,
    kl_coefficient: float,
) -> Signal:
    """The signal of a step's M trained tokens. mu, prox, reference f32[M]: log-probabilities; value f32[M]: the critic's.

    `baselines`: running mean reward by domain, moved by this step's.
    """
    reward = data.reward - _overlong(recipe, data)
    cu = torch.from_numpy(data.cu_seqlens)
    d = None if prox is None else (prox - mu).cpu()
    token_reward = torch.from_numpy(data.token_reward).double()
    if objective.kl_reward and prox is not None and reference is not None:
        penalty = kl_coefficient * (prox - reference).cpu().double()  # k1
        if objective.advantage in PER_TOKEN:
            token_reward = token_reward - penalty
        else:
            reward = reward - segment_reduce(penalty, cu, "sum").numpy()
    groups = _groups(data, reward, baselines)
    each = [value for row in advantages.advantages(objective, groups) for value in row]
    sample = torch.tensor([0.0 if a is None else a for a in each], dtype=torch.float64)
    for group, rewards in zip(data.groups, groups, strict=True):
        mean = float(np.mean([r for r in rewards.rewards if r is not None]))
        old = baselines.get(group.domain, mean)
        baselines[group.domain] = old + BASELINE_RATE * (mean - old)
    if value is not None and d is not None:
        return Signal(*advantages.critic_advantages(objective, sample, cu, value.cpu(), d=d, step_rewards=token_reward))
    means = torch.tensor([v for row in advantages.group_means(groups) for v in row], dtype=torch.float64)
    steps = token_reward if bool(token_reward.any()) else None
    every = torch.ones(len(data.lag), dtype=torch.bool)
    return Signal(advantages.token_advantages(objective, sample, every, cu, value=means, d=d, step_rewards=steps))


def _overlong(recipe: Recipe, data: StepRows) -> Array:
    """f64[S]: what each sample loses for its length."""
    if recipe.objective.overlong != "penalise":
        return np.zeros(len(data.samples))
    limit, buffer = recipe.sampling.max_new_tokens, recipe.objective.overlong_buffer_tokens
    return np.asarray([advantages.overlong_penalty(int(length), limit, buffer) for length in data.generated])


def _groups(data: StepRows, reward: Array, baselines: dict[str, float]) -> list[advantages.GroupRewards]:
    """The step's groups with their shaped rewards, None where a sample was not scored."""
    found, row = [], 0
    for group in data.groups:
        rows = range(row, row + len(group.samples))
        row += len(group.samples)
        found.append(
            advantages.GroupRewards(
                rewards=[float(reward[i]) if data.scored[i] else None for i in rows],
                lengths=[sample.generated for sample in group.samples],
                components=[sample.components for sample in group.samples],
                baseline=baselines.get(group.domain, 0.0),
            )
        )
    return found
