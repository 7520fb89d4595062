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
from temper.learner.batching import Rows, ragged
from temper.learner.inbox import GroupData, SampleData

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """S samples as `rows` (some without trained tokens), M trained tokens in flat arrays, G groups.

    `behaviour_logprob`, `token_reward` f32[M], `lag` i64[M]; per sample `reward` f64[S] (0 where not `scored` bool[S]),
    `group` i64[S], `generated` i64[S] sampled tokens; `support` (ids i64, cu i64[M+1]) where the engine cut its
    distribution, else None; `pure` bool[S]: sampled from the first token to the last by the version that the step starts
    from. `stale_tokens` were masked for their age, `overlong_samples` for ending at the length limit.
    """

    groups: tuple[GroupData, ...]
    samples: tuple[SampleData, ...]
    rows: Rows
    behaviour_logprob: Array
    token_reward: Array
    lag: Array
    reward: Array
    scored: Array
    group: Array
    generated: Array
    support: tuple[Array, Array] | None
    pure: Array
    stale_tokens: int
    overlong_samples: int

    @property
    def cu_seqlens(self) -> Array:
        """i64[S+1]: divides the trained tokens among the samples."""
        return self.rows.cu_seqlens

    @property
    def trained(self) -> Array:
        """i64[S]: trained tokens of each sample."""
        return np.diff(self.rows.cu_seqlens)


def usable(sample: SampleData) -> bool:
    """Whether a sample enters baseline and loss."""
    return sample.reward is not None and sample.outcome != "infra"


def collect(
    groups: Sequence[GroupData], version: int, max_token_lag: int, *, overlong_filter: bool = False, demo: bool = False
) -> StepRows:
    """Lay out `groups` for the step that starts at `version`. `demo`: demonstrations, trained without reward."""
    ordered = tuple(_by_index(group) for group in sorted(groups, key=lambda group: group.group_id))
    samples = tuple(sample for group in ordered for sample in group.samples)
    lengths = np.asarray([len(sample.tokens) for sample in samples], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    scored = np.asarray([usable(sample) for sample in samples], dtype=bool)
    overlong = np.asarray(
        [overlong_filter and not demo and sample.finish_reason == "length" for sample in samples], bool
    )
    sampled = _join([sample.mask for sample in samples], bool)
    lag = np.maximum(version - _join([sample.ordinal for sample in samples], np.int64), 0)
    mask = sampled & np.repeat(scored | demo, lengths)
    fresh = mask & (lag <= max_token_lag)
    places = np.flatnonzero(fresh & np.repeat(~overlong, lengths))
    cu_seqlens = np.searchsorted(places, offsets)
    trained = places - np.repeat(offsets[:-1], np.diff(cu_seqlens))
    tokens = _join([sample.tokens for sample in samples], np.int32)
    rows = Rows(tokens, offsets, trained, cu_seqlens, _experts(samples))
    totals = np.concatenate([[0], np.cumsum(sampled)])
    return StepRows(
        groups=ordered,
        samples=samples,
        rows=rows,
        behaviour_logprob=_join([sample.behaviour_logprob for sample in samples], np.float32)[places],
        token_reward=_token_rewards(samples, rows),
        lag=lag[places],
        reward=np.asarray([sample.reward if usable(sample) else 0.0 for sample in samples], dtype=np.float64),
        scored=scored,
        group=np.repeat(np.arange(len(ordered)), [len(group.samples) for group in ordered]),
        generated=totals[offsets[1:]] - totals[offsets[:-1]],
        support=_supports(samples, rows) if any(sample.support_cu is not None for sample in samples) else None,
        pure=np.asarray([bool((sample.ordinal == version).all()) for sample in samples], dtype=bool),
        stale_tokens=int(mask.sum() - fresh.sum()),
        overlong_samples=int(overlong.sum()),
    )


def _by_index(group: GroupData) -> GroupData:
    indices = [sample.index for sample in group.samples]
    if indices == sorted(indices):
        return group
    return replace(group, samples=tuple(sorted(group.samples, key=lambda sample: sample.index)))


def _join(parts: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)


def _experts(samples: Sequence[SampleData]) -> Array | None:
    """i16[N, layers, experts per token] on record, -1 in samples without; None if no sample has any."""
    shape = next((sample.experts.shape[1:] for sample in samples if sample.experts is not None), None)
    if shape is None:
        return None
    parts = [sample.experts for sample in samples]
    return np.concatenate(
        [
            np.full((len(sample.tokens), *shape), -1, np.int16) if part is None else part
            for sample, part in zip(samples, parts, strict=True)
        ]
    )


def _token_rewards(samples: Sequence[SampleData], rows: Rows) -> Array:
    """f32[M]: step rewards at the trained tokens; one that fell on an untrained token goes to the last trained before."""
    values = np.zeros(len(rows.trained), dtype=np.float32)
    for row, sample in enumerate(samples):
        start, stop = int(rows.cu_seqlens[row]), int(rows.cu_seqlens[row + 1])
        if not sample.step_rewards or start == stop:
            continue
        prompt = int(np.flatnonzero(sample.mask)[0])
        for token, value in sample.step_rewards:
            place = int(np.searchsorted(rows.trained[start:stop], prompt + token, side="right")) - 1
            values[start + max(place, 0)] += value
    return values


def _supports(samples: Sequence[SampleData], rows: Rows) -> tuple[Array, Array]:
    """(ids i64, cu i64[M+1]) of the sampled distributions' supports; an empty one means the whole vocabulary."""
    ids, sizes = [], []
    for row, sample in enumerate(samples):
        trained = rows.trained[rows.cu_seqlens[row] : rows.cu_seqlens[row + 1]]
        if sample.support_cu is None or sample.support_ids is None:
            sizes.append(np.zeros(len(trained), dtype=np.int64))
            continue
        size = np.diff(sample.support_cu)[trained]
        ids.append(sample.support_ids[ragged(sample.support_cu[trained], size)])
        sizes.append(size)
    return _join(ids, np.int64), np.concatenate([[0], np.cumsum(_join(sizes, np.int64))])
