"""The flat arrays of one step: every sample of its groups as a row, every trained token as one entry.

Guarantees: groups and samples are laid out by id and index, whatever order they came in; a token is trained iff the
engine sampled it, its sample has a reward and is no infrastructure failure, and it is not older than `max_token_lag`
versions (a too old token loses its gradient, its sample's reward stays in the baseline). Pure numpy; called by `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from temper.learner.batching import Row
from temper.learner.inbox import GroupData, SampleData

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """S samples in `rows` (some without trained tokens), M trained tokens in flat arrays, G groups.

    `cu_seqlens` i64[S+1] divides the flat arrays; `behaviour_logprob`, `token_reward` f32[M], `lag` i64[M]; per sample
    `reward` f64[S] (0 where not `scored` bool[S]), `group` i64[S], `generated` i64[S] sampled tokens; `support` (ids i64,
    cu i64[M+1]) where the engine cut its distribution, else None. `stale_tokens` were masked for their age,
    `overlong_samples` for ending at the length limit.
    """

    groups: tuple[GroupData, ...]
    samples: tuple[SampleData, ...]
    rows: tuple[Row, ...]
    cu_seqlens: Array
    behaviour_logprob: Array
    token_reward: Array
    lag: Array
    reward: Array
    scored: Array
    group: Array
    generated: Array
    support: tuple[Array, Array] | None
    stale_tokens: int
    overlong_samples: int

    @property
    def trained(self) -> Array:
        """i64[S]: trained tokens of each sample."""
        return np.diff(self.cu_seqlens)


def usable(sample: SampleData) -> bool:
    """Whether a sample enters baseline and loss."""
    return sample.reward is not None and sample.outcome != "infra"


def collect(
    groups: Sequence[GroupData], version: int, max_token_lag: int, *, overlong_filter: bool = False, demo: bool = False
) -> StepRows:
    """Lay out `groups` for the step that starts at `version`. `demo`: demonstrations, trained without reward."""
    ordered = tuple(_by_index(group) for group in sorted(groups, key=lambda group: group.group_id))
    samples = tuple(sample for group in ordered for sample in group.samples)
    rows: list[Row] = []
    flat: dict[str, list[Array]] = {"mu": [], "lag": [], "token_reward": []}
    support_ids: list[Array] = []
    support_sizes: list[Array] = []
    any_support = any(sample.support_cu is not None for sample in samples)
    start = stale = overlong = 0
    for sample in samples:
        lag = sample.lag(version)
        mask = sample.mask if demo or usable(sample) else np.zeros_like(sample.mask)
        fresh = mask & (lag <= max_token_lag)
        stale += int(mask.sum() - fresh.sum())
        if overlong_filter and sample.finish_reason == "length" and not demo:
            overlong += 1
            fresh = np.zeros_like(fresh)
        trained = np.flatnonzero(fresh)
        rows.append(Row(sample.tokens, trained, start))
        start += len(trained)
        flat["mu"].append(sample.behaviour_logprob[trained])
        flat["lag"].append(lag[trained])
        flat["token_reward"].append(_token_rewards(sample, trained))
        if any_support:
            ids, sizes = _support(sample, trained)
            support_ids.append(ids)
            support_sizes.append(sizes)
    scored = np.asarray([usable(sample) for sample in samples], dtype=bool)
    return StepRows(
        groups=ordered,
        samples=samples,
        rows=tuple(rows),
        cu_seqlens=np.cumsum([0, *(len(row.trained) for row in rows)], dtype=np.int64),
        behaviour_logprob=_join(flat["mu"], np.float32),
        token_reward=_join(flat["token_reward"], np.float32),
        lag=_join(flat["lag"], np.int64),
        reward=np.asarray([sample.reward if usable(sample) else 0.0 for sample in samples], dtype=np.float64),
        scored=scored,
        group=np.repeat(np.arange(len(ordered)), [len(group.samples) for group in ordered]),
        generated=np.asarray([sample.generated for sample in samples], dtype=np.int64),
        support=(
            (_join(support_ids, np.int64), np.cumsum([0, *_join(support_sizes, np.int64)], dtype=np.int64))
            if any_support
            else None
        ),
        stale_tokens=stale,
        overlong_samples=overlong,
    )


def _by_index(group: GroupData) -> GroupData:
    return replace(group, samples=tuple(sorted(group.samples, key=lambda sample: sample.index)))


def _join(parts: list[Array], dtype: Any) -> Array:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)


def _token_rewards(sample: SampleData, trained: Array) -> Array:
    """f32[n]: step rewards at the trained tokens; one that fell on an untrained token goes to the last trained before."""
    values = np.zeros(len(trained), dtype=np.float32)
    if not sample.step_rewards or not len(trained):
        return values
    prompt = int(np.flatnonzero(sample.mask)[0])
    for token, value in sample.step_rewards:
        place = int(np.searchsorted(trained, prompt + token, side="right")) - 1
        values[max(place, 0)] += value
    return values


def _support(sample: SampleData, trained: Array) -> tuple[Array, Array]:
    """(ids, sizes) of the sampled distribution's support at each trained token; size 0 = the whole vocabulary."""
    if sample.support_cu is None or sample.support_ids is None:
        return np.zeros(0, dtype=np.int64), np.zeros(len(trained), dtype=np.int64)
    cu = sample.support_cu
    sizes = (cu[1:] - cu[:-1])[trained]
    return sample.support_ids[ragged(cu[trained], sizes)], sizes


def ragged(starts: Array, sizes: Array) -> Array:
    """Indices start..start+size-1 of every (start, size), one after another."""
    if not len(sizes):
        return np.zeros(0, dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    return np.repeat(starts - begins, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
