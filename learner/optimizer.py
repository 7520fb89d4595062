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
    """AdamW of `named` parameters (every tied parameter once, by canonical name).

    torch's fused kernel is called as it is: `torch.optim` would import the compiler, 100 MB that nothing here uses.
    """

    def __init__(self, named: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> None:
        self.named = dict(named)
        self.config = config
        self._moments: dict[str, dict[str, torch.Tensor]] = {}

    def zero(self) -> None:
        """Forget gradients."""
        for parameter in self.named.values():
            parameter.grad = None

    @torch.no_grad()
    def update(self, rate: float) -> Update:
        """Clip and apply the accumulated gradients at learning rate `rate`."""
        present = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        if not present:
            return Update(0.0, False)
        gradients = list(present.values())
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if not math.isfinite(norm):
            self.zero()
            return Update(norm, False)
        if norm > self.config.max_gradient_norm > 0:
            torch._foreach_mul_(gradients, self.config.max_gradient_norm / norm)
        moments = [self._moments_of(name) for name in present]
        steps = [own["step"] for own in moments]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [self.named[name] for name in present],
            gradients,
            [own["exp_avg"] for own in moments],
            [own["exp_avg_sq"] for own in moments],
            [],
            steps,
            lr=rate,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=self.config.weight_decay,
            eps=self.config.epsilon,
            amsgrad=False,
            maximize=False,
        )
        torch.autograd.graph.increment_version([self.named[name] for name in present])  # which the kernel does not
        self.zero()
        return Update(norm, True)

    def state(self) -> dict[str, torch.Tensor]:
        """Moments and step counts by ``<parameter>.exp_avg`` etc.; empty before the first update."""
        found = {name: self._moments[name] for name in self.named if name in self._moments}
        return {f"{name}.{key}": value for name, own in found.items() for key, value in own.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` gave; ConfigError when it belongs to another model."""
        restored: dict[str, dict[str, torch.Tensor]] = {}
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
                restored[name] = {key: value.to(parameter.device, copy=True) for key, value in mine.items()}
        if left:
            raise ConfigError(f"optimiser state for unknown parameters: {', '.join(sorted(left)[:3])}")
        self._moments = restored

    def _moments_of(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._moments:
            parameter = self.named[name]
            self._moments[name] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self._moments[name]
