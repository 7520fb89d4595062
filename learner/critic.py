"""The optional critic: a value head on the policy's hidden states, with its own loss, clip and optimiser.

Used by the advantages gae and vtrace_critic. The head starts at 0, so the first step's baseline is 0; its loss also
reaches the model's body, weighted by ``critic.coefficient``. The value of a token is read where it is predicted, before
it is known. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from temper.common import config
from temper.kernels.reference import value_loss
from temper.learner.optimizer import Optimizer
from torch import Tensor


class Critic:
    """`hidden_size` channels to one value per token, fp32."""

    def __init__(
        self, hidden_size: int, settings: config.Critic, optimizer: config.Optimizer, device: torch.device
    ) -> None:
        self.settings = settings
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros((), device=device))
        self.optimizer = Optimizer({"weight": self.weight, "bias": self.bias}, replace(optimizer, weight_decay=0.0))

    def values(self, hidden: Tensor) -> Tensor:
        """f32[M] from hidden states [M, H] at the predicting positions."""
        return hidden.float() @ self.weight + self.bias

    def loss(self, value: Tensor, old: Tensor, target: Tensor, tokens: float) -> tuple[Tensor, float]:
        """(weighted loss to add to the policy's, sum of the unweighted token losses)."""
        each = value_loss(value, old, target, self.settings.clip)
        return self.settings.coefficient * each.sum() / max(tokens, 1), float(each.detach().sum())

    def zero(self) -> None:
        """Forget gradients."""
        self.optimizer.zero()

    def update(self, whole: bool) -> None:
        """Apply the accumulated gradients if they are finite and `whole`: the policy's were applied too."""
        if whole:
            self.optimizer.update(self.settings.learning_rate)
        else:
            self.zero()

    def state(self) -> dict[str, Tensor]:
        """Head and moments."""
        moments = {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        return {"weight": self.weight.detach(), "bias": self.bias.detach(), **moments}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave; an empty one (a checkpoint without a critic) starts anew."""
        if not state:
            return
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            self.bias.copy_(state["bias"])
        head = "optimizer."
        self.optimizer.load({name.removeprefix(head): v for name, v in state.items() if name.startswith(head)})
