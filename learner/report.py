"""The metrics of a step as (sum, count) by registered name: never means, so ranks and micro-batches merge.

Called by `step`; read by `boards` and the daemon.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from temper.common import metrics as names
from temper.learner.inbox import GroupData
from temper.learner.rows import StepRows

# name of a policy_loss metric -> registered name
LOSS_METRICS = {
    "entropy": names.LEARNER_ENTROPY,
    "kl_behaviour": names.LEARNER_KL_BEHAVIOUR,
    "kl_reference": names.LEARNER_KL_REFERENCE,
    "clip_fraction": names.LEARNER_CLIP,
    "clamped_fraction": names.LEARNER_CLAMP,
    "dropped_fraction": names.LEARNER_DROPPED,
    "ratio": names.LEARNER_RATIO,
    "weight": names.LEARNER_WEIGHT,
    "advantage_magnitude": names.LEARNER_ADVANTAGE,
    "loss": names.LEARNER_LOSS,
}
DEMO_METRICS = ("entropy", "loss")
ZERO_VARIANCE = 1e-6
LAGS_SHOWN = 16  # lags from here on share one series


def member(name: str, of: str) -> str:
    """One series of a starred metric: member("learner/reward/*", "code") is "learner/reward/code"."""
    return name[:-1] + of.replace("/", ".")


class Sums:
    """Accumulates (sum, count) pairs."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[float, float]] = {}
        self._weight = [0.0, 0.0, 0.0]  # sum w, sum w^2, tokens

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add to a metric."""
        old_total, old_count = self.values.get(name, (0.0, 0.0))
        self.values[name] = (old_total + total, old_count + count)

    def add_replay(self, replaced: int, recorded: int, size: int) -> None:
        """Add what `Replay.counts` said of one micro-batch."""
        self.add(names.LEARNER_REPLACED, replaced, recorded)
        self.add(names.LEARNER_RECORDED, recorded, size)

    def add_loss(self, found: Mapping[str, tuple[Any, Any]], *, demo: bool = False) -> None:
        """Add what `policy_loss` reported for one micro-batch; of demonstrations, which no policy sampled, little."""
        pairs = {name: (float(total), float(count)) for name, (total, count) in found.items()}
        for name, registered in LOSS_METRICS.items():
            if name in pairs and (not demo or name in DEMO_METRICS):
                self.add(registered, *pairs[name])
        if demo:
            return
        for i, value in enumerate((pairs["weight"][0], pairs["weight_squared"][0], pairs["weight"][1])):
            self._weight[i] += value
        total, squares, tokens = self._weight
        if squares > 0 and tokens:
            self.values[names.LEARNER_ESS] = (total * total / squares, tokens)


def describe(sums: Sums, data: StepRows, groups: Sequence[GroupData], void: Mapping[int, str]) -> None:
    """Everything about a step's groups that needs no forward pass."""
    _rewards(sums, data)
    _fates(sums, data, groups, void)
    _lags(sums, data)
    generated = data.generated
    sums.add(names.LEARNER_LENGTH, float(generated.sum()), float(len(generated)))
    truncated = sum(sample.finish_reason == "length" for sample in data.samples)
    sums.add(names.LEARNER_TRUNCATED, float(truncated), float(len(data.samples)))
    sums.add(names.LEARNER_STALE, float(data.stale_tokens), float(data.stale_tokens + len(data.lag)))


def _rewards(sums: Sums, data: StepRows) -> None:
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def take(name: str, value: float) -> None:
        pair = found[name]
        pair[0] += value
        pair[1] += 1.0

    row = 0
    for group in data.groups:
        reward, accuracy = member(names.LEARNER_REWARD, group.domain), member(names.LEARNER_ACCURACY, group.domain)
        for sample in group.samples:
            if data.scored[row]:
                take(reward, float(data.reward[row]))
                for component, value in sample.components.items():
                    take(member(names.LEARNER_COMPONENT, f"{group.domain}.{component}"), float(value))
            if sample.correct is not None:
                take(accuracy, float(sample.correct))
            row += 1
    for name, (total, count) in found.items():
        sums.add(name, total, count)


def _fates(sums: Sums, data: StepRows, groups: Sequence[GroupData], void: Mapping[int, str]) -> None:
    fates: Counter[str] = Counter({"trained": 0, "zero_variance": 0})
    spans: dict[int, list[float]] = defaultdict(list)
    for row in np.flatnonzero(data.scored):
        spans[int(data.group[row])].append(float(data.reward[row]))
    for number, group in enumerate(data.groups):
        fates["trained"] += 1
        rewards = spans[number]
        fates["zero_variance"] += max(rewards, default=0.0) - min(rewards, default=0.0) <= ZERO_VARIANCE
        sums.add(names.LEARNER_MIXED, float(group.mixed))
        sums.add(names.LEARNER_PASS, float(any(sample.correct for sample in group.samples)))
    for reason in void.values():
        fates[f"void {reason}".replace(" ", "_")] += 1
    for fate, count in fates.items():
        sums.add(member(names.LEARNER_GROUPS, fate), float(count))
    trained = int((data.trained > 0).sum())
    unscored = int((~data.scored).sum())
    sums.add(member(names.LEARNER_SAMPLES, "trained"), float(trained))
    sums.add(member(names.LEARNER_SAMPLES, "unscored"), float(unscored))
    sums.add(member(names.LEARNER_SAMPLES, "masked"), float(len(data.samples) - trained - unscored))
    lost = sum(len(group.samples) for group in groups if group.group_id in void)
    sums.add(member(names.LEARNER_SAMPLES, "void"), float(lost))


def _lags(sums: Sums, data: StepRows) -> None:
    if not len(data.lag):
        return
    sums.add(names.LEARNER_LAG_MEAN, float(data.lag.sum()), float(len(data.lag)))
    sums.add(names.LEARNER_LAG_P99, float(np.percentile(data.lag, 99)))
    sums.add(names.LEARNER_LAG_MAX, float(data.lag.max()))
    for lag, count in enumerate(np.bincount(np.minimum(data.lag, LAGS_SHOWN), minlength=1).tolist()):
        sums.add(member(names.LEARNER_LAG_SHARE, f"{lag:02}"), float(count), float(len(data.lag)))
    rows = np.flatnonzero(data.trained > 0)
    starts = data.cu_seqlens[:-1][rows]
    lag_sums = np.add.reduceat(data.lag, starts)
    order = np.argsort(data.generated[rows], kind="stable")
    for decile, chosen in enumerate(np.array_split(order, 10)):
        if len(chosen):
            tokens = float(data.trained[rows][chosen].sum())
            sums.add(member(names.LEARNER_LAG_LENGTH, str(decile)), float(lag_sums[chosen].sum()), tokens)
