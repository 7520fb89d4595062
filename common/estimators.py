"""Estimates from held-out tasks, with 95 % intervals. Pure; used by the learner's evaluations and `temper evaluate`.

Tasks are the independent units: samples of one task are not. A task is (n, c): n judged samples, c of them right.
- one verdict a task: the Wilson interval of a proportion;
- several: percentile bootstrap over tasks; where all tasks agree, which leaves a bootstrap nothing to resample, Wilson.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Z95 = 1.959963984540054
RESAMPLES = 10_000
CHUNK = 1 << 22  # resampled values held at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95 % interval, over `tasks` tasks."""

    value: float
    low: float
    high: float
    interval: Literal["wilson", "bootstrap"]
    tasks: int


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share of `count` independent tasks."""
    if count == 0:
        return 0.0, 1.0
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate, from c right ones of n samples, of the chance that at least one of k is right:
    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374). ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} right ones of {n}: expected 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 1.0


def mean_at_k(tasks: Sequence[tuple[int, int]], seed: int = 0) -> Estimate | None:
    """Mean over tasks of the share of right samples; None when no task has a judged sample."""
    judged = [(n, c) for n, c in tasks if n > 0]
    return _estimate([c / n for n, c in judged], max((n for n, _ in judged), default=0), seed)


def pass_at(tasks: Sequence[tuple[int, int]], k: int, seed: int = 0) -> Estimate | None:
    """Mean over tasks of `pass_at_k`; tasks with fewer than k judged samples are left out. None when none is left."""
    judged = [(n, c) for n, c in tasks if n >= k]
    return _estimate([pass_at_k(n, c, k) for n, c in judged], max((n for n, _ in judged), default=0), seed)


def _estimate(values: Sequence[float], samples: int, seed: int) -> Estimate | None:
    if not values:
        return None
    value = math.fsum(values) / len(values)
    if samples == 1 or max(values) - min(values) < 1e-12:
        return Estimate(value, *wilson(value, len(values)), "wilson", len(values))
    return Estimate(value, *bootstrap(values, seed), "bootstrap", len(values))


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of `values` under resampling; the same for the same values and seed."""
    import numpy as np

    data = np.asarray(values, np.float64)
    source = np.random.default_rng(seed)
    means: list[float] = []
    while len(means) < RESAMPLES:
        rows = min(RESAMPLES - len(means), max(1, CHUNK // len(data)))
        means += data[source.integers(0, len(data), (rows, len(data)))].mean(1).tolist()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
