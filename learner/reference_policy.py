"""The policy that the KL is measured against: frozen, a moving average, or reset every n steps or when held-out accuracy
rises; and the KL's coefficient.

Guarantees: the reference is the policy as it was when first asked for and then only moves as its kind says; its weights
and the coefficient are part of the checkpoint, so a resumed run measures the same KL. Called by `step`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import exp
from typing import Any

import torch
from temper.common import config
from temper.learner.policy import Policy


def steer(coefficient: float, kl_nats: float, target_nats: float, horizon_steps: int) -> float:
    """The next coefficient: up while the KL is above its target, down while below, by at most e over `horizon_steps`."""
    error = min(1.0, max(-1.0, kl_nats / target_nats - 1.0))
    return coefficient * exp(error / horizon_steps)


class ReferencePolicy:
    """`coefficient` is what the next step's loss or reward uses; `best` the held-out accuracy that reset_on_gain has to
    beat."""

    def __init__(self, settings: config.Reference, coefficient: float) -> None:
        self.settings = settings
        self.coefficient = coefficient
        self.best: float | None = None
        self._gained = False  # accuracy rose since the last step; set by the daemon's loop, read by the training thread
        self._policy: Policy | None = None

    def policy(self, current: Policy) -> Policy:
        """The reference; a frozen copy of `current` if there is none yet."""
        if self._policy is None:
            self._policy = frozen_copy(current)
        return self._policy

    def evaluated(self, accuracy: float) -> None:
        """A held-out accuracy of some version is known. The first one is the mark; after a rise above the best by
        `reset_gain` the end of the step under way resets the reference."""
        if self.best is not None and accuracy > self.best + self.settings.reset_gain:
            self._gained = True
        if self.best is None or self._gained:
            self.best = accuracy if self.best is None else max(self.best, accuracy)

    @torch.no_grad()
    def after_step(self, current: Policy, steps_done: int, kl_nats: float | None) -> None:
        """Move the reference and steer the coefficient after RL step number `steps_done` with this mean KL per token."""
        settings = self.settings
        if settings.kl_target_nats > 0 and kl_nats is not None:
            self.coefficient = steer(self.coefficient, kl_nats, settings.kl_target_nats, settings.kl_horizon_steps)
        if self._policy is None or settings.kind == "frozen":
            return
        if settings.kind == "reset" and steps_done % settings.reset_every_steps:
            return
        if settings.kind == "reset_on_gain" and not self._gained:
            return
        self._gained = False
        share = 1.0 - settings.ema_decay if settings.kind == "ema" else 1.0
        new = current.named_masters()
        for name, old in self._policy.named_masters().items():
            old.lerp_(new[name], share)

    def state(self) -> tuple[dict[str, torch.Tensor], float]:
        """(the reference's weights by name, empty before it is first used; the coefficient)."""
        if self._policy is None:
            return {}, self.coefficient
        return {name: p.detach() for name, p in self._policy.named_masters().items()}, self.coefficient

    def load(self, weights: Mapping[str, torch.Tensor], coefficient: float, current: Policy) -> dict[str, Any]:
        """Restore what `state` gave; returns the masters into which the caller copies `weights`."""
        self.coefficient = coefficient
        if not weights:
            self._policy = None
            return {}
        return dict(self.policy(current).named_masters())


def frozen_copy(policy: Policy) -> Policy:
    """The same weights, without gradient."""
    model = copy.deepcopy(policy.model).requires_grad_(False)
    return Policy(model, compute_dtype=policy.compute_dtype)
