"""AdamW over fp32 masters with the recipe's schedule, a global norm clip, and a guard against gradients that are not finite.

Guarantees: an update with a non-finite gradient changes nothing and is reported; `state`/`load` restore the moments
bit for bit. Called by `step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from temper.common.config import Optimizer as OptimizerConfig
from temper.common.errors import ConfigError


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of RL step `step` (from 0): linear warm-up from 0, then linear decay to `final_share` at `total_steps`."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps > 0 else 1.0
    decay = 1.0 - (1.0 - config.final_share) * min(1.0, step / max(1, total_steps))
    return config.learning_rate * warm * decay


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimiser step did: the gradient's global norm before clipping, and whether it was applied."""

    gradient_norm: float
    applied: bool


class Optimizer:
    """AdamW of `named` parameters (every tied parameter once, by canonical name)."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> None:
        self.named = dict(named)
        self.config = config
        self._adamw = torch.optim.AdamW(
            list(self.named.values()),
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def zero(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def update(self, rate: float) -> Update:
        """Clip and apply the accumulated gradients at learning rate `rate`."""
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        if not gradients:
            return Update(0.0, False)
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if not math.isfinite(norm):
            self.zero()
            return Update(norm, False)
        if norm > self.config.max_gradient_norm > 0:
            torch._foreach_mul_(gradients, self.config.max_gradient_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.zero()
        return Update(norm, True)

    def state(self) -> dict[str, torch.Tensor]:
        """Moments and step counts by ``<parameter>.exp_avg`` etc.; empty before the first update."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.named.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value
        return found

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` gave; ConfigError when it belongs to another model."""
        restored: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        left = dict(state)
        for name, parameter in self.named.items():
            mine = {
                key: left.pop(f"{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in left
            }
            if mine and (len(mine) != 3 or mine["exp_avg"].shape != parameter.shape):
                raise ConfigError(
                    f"optimiser state of {name} does not fit this model: take the checkpoint's own recipe"
                )
            if mine:
                restored[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device).clone()
                    for key, value in mine.items()
                }
        if left:
            raise ConfigError(f"optimiser state for unknown parameters: {', '.join(sorted(left)[:3])}")
        self._adamw.state.clear()
        self._adamw.state.update(restored)
