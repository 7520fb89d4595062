"""Which domain gets which share of the groups, at which level, in the demo and train lanes.

Today the recipe's shares, steady; what a step observed is kept per domain (running accuracy and share of mixed groups),
so that a policy can act on it without another state in checkpoints. Pure and checkpointed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from temper.common.config import DomainConfig
from temper.common.errors import ConfigError
from temper.learner.inbox import GroupData

RATE = 0.05  # of the running means, per group


class Curriculum:
    """Shares per lane, and what each domain's groups looked like lately."""

    def __init__(self, domains: Sequence[DomainConfig]) -> None:
        self.domains = {domain.name: domain for domain in domains}
        self.accuracy: dict[str, float] = {}  # running mean of raw correctness
        self.mixed: dict[str, float] = {}  # running share of groups with both right and wrong samples
        self.groups: dict[str, int] = {}  # groups seen

    @property
    def floors(self) -> frozenset[str]:
        """Domains that are only measured, at the ends, and belong to no mean."""
        return frozenset(name for name, domain in self.domains.items() if domain.floor)

    def shares(self, lane: Literal["demo", "train"]) -> dict[str, tuple[int, float]]:
        """domain -> (level, share); ConfigError when no domain takes part."""
        key = "share" if lane == "train" else "warm_start_share"
        found = {
            name: (domain.level, domain.warm_start_share if lane == "demo" else domain.share)
            for name, domain in self.domains.items()
            if domain.train and (domain.warm_start_share if lane == "demo" else domain.share) > 0
        }
        if not found:
            raise ConfigError(f"no domain of the recipe has train = true and {key} above 0: there is nothing to learn")
        return found

    def portions(self) -> dict[str, float]:
        """domain -> its part of the train lane's groups, 1 in all; empty where nothing is trained."""
        shares = {name: domain.share for name, domain in self.domains.items() if domain.train and domain.share > 0}
        return {name: share / sum(shares.values()) for name, share in shares.items()}

    def observe(self, groups: Sequence[GroupData]) -> None:
        """Take note of a step's groups."""
        for group in groups:
            verdicts = [sample.correct for sample in group.samples if sample.correct is not None]
            if not verdicts:
                continue
            name = group.domain
            self.groups[name] = self.groups.get(name, 0) + 1
            _move(self.accuracy, name, sum(verdicts) / len(verdicts))
            _move(self.mixed, name, float(group.mixed))

    def state(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"accuracy": dict(self.accuracy), "mixed": dict(self.mixed), "groups": dict(self.groups)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.accuracy = dict(state["accuracy"])
        self.mixed = dict(state["mixed"])
        self.groups = dict(state["groups"])


def _move(means: dict[str, float], name: str, value: float) -> None:
    old = means.get(name)
    means[name] = value if old is None else old + RATE * (value - old)
