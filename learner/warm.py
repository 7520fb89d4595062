"""Which domains the supervised warm start still trains: those whose demonstrations are not likely enough yet.

A domain is judged by a running mean of the probability of a whole demonstration; one that reaches the mark waits for the
others. Pure; called by `step`, whose checkpoint holds the running means.
"""

from __future__ import annotations

import numpy as np
import torch
from temper.learner.rows import Array, StepRows

RATE = 0.5  # of the running means


def behind(data: StepRows, likelihood: dict[str, float], target: float) -> torch.Tensor:
    """f32[M]: 1 for the demonstrations of domains whose running likelihood is below `target`, else 0."""
    found = [float(likelihood.get(group.domain, 0.0) < target) for group in data.groups]
    return torch.from_numpy(np.repeat(np.array(found, np.float32)[data.group], np.diff(data.cu_seqlens)))


def see(data: StepRows, likelihood: dict[str, float], whole: Array) -> None:
    """Move each domain's running likelihood; `whole`: one probability per row with trained tokens."""
    domains = [data.groups[group].domain for group in data.group[data.trained > 0]]
    for domain in sorted(set(domains)):
        mean = float(np.mean([value for value, of in zip(whole, domains, strict=True) if of == domain]))
        old = likelihood.get(domain, mean)
        likelihood[domain] = old + RATE * (mean - old)
