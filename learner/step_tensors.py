"""The flat tensors of a step, one entry per trained token, and what an update and a micro-batch take of them.

Guarantees: an update's normalisers are sums over all of its samples, so how it is divided into micro-batches changes
nothing but rounding. No state; called by `step`.

Legend: M trained tokens and S samples of a step, see `rows.StepRows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from temper.kernels.flags import PolicyFlags
from temper.kernels.policy_loss import Normalisers, PackedBatch
from temper.kernels.reference import m2_cutoff
from temper.learner.batching import Microbatch, ragged
from temper.learner.policy import Support
from temper.learner.rows import Array, StepRows


@dataclass(slots=True)
class Update:
    """What the micro-batches of one optimiser step share: samples `include` i64, `ahead` = v_pi - v_prox in versions."""

    include: Array
    normalisers: Normalisers
    ahead: float


@dataclass(slots=True)
class Flat:
    """[M] f32 unless said: log-probabilities mu, prox, reference; lag i64[M]; `group` i64[S]; `support` (ids, cu)."""

    mu: torch.Tensor
    lag: torch.Tensor
    advantage: torch.Tensor
    group: torch.Tensor
    prox: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    support: tuple[Array, Array] | None = None
    value: torch.Tensor | None = None  # the critic's, at the start of the step
    target: torch.Tensor | None = None  # what it should have been

    @classmethod
    def of(cls, data: StepRows, device: torch.device) -> Flat:
        """What the samples say; advantages are 1 until somebody knows better."""
        return cls(
            mu=torch.from_numpy(data.behaviour_logprob).to(device),
            lag=torch.from_numpy(data.lag).to(device),
            advantage=torch.ones(len(data.lag), device=device),
            group=torch.from_numpy(data.group).to(device),
            support=data.support,
        )

    def packed(self, batch: Microbatch) -> PackedBatch:
        """A micro-batch's entries, as `policy_loss` takes them."""
        device = self.mu.device
        index = torch.from_numpy(batch.flat).to(device)
        return PackedBatch(
            tokens=torch.from_numpy(batch.target).to(device),
            cu_seqlens=torch.from_numpy(batch.cu_seqlens).to(device),
            mask=torch.ones(len(batch.flat), dtype=torch.bool, device=device),
            mu=self.mu[index],
            prox=None if self.prox is None else self.prox[index],
            ref=None if self.reference is None else self.reference[index],
            advantage=self.advantage[index],
            group_id=self.group[torch.from_numpy(batch.rows).to(device)],
            lag=self.lag[index],
        )

    def support_of(self, batch: Microbatch) -> Support | None:
        """The supports (ids, cu) of a micro-batch's tokens."""
        if self.support is None:
            return None
        ids, cu = self.support
        sizes = (cu[1:] - cu[:-1])[batch.flat]
        picked = ids[ragged(cu[batch.flat], sizes)]
        return torch.from_numpy(picked), torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int64))


def updates(data: StepRows, flat: Flat, flags: PolicyFlags, count: int, max_length: int) -> Iterator[Update]:
    """Divide the step's groups, in order, among `count` optimiser steps; `max_length`: L of seq_mean_token_sum_norm."""
    for number, chosen in enumerate(np.array_split(np.arange(len(data.groups)), count)):
        include = np.flatnonzero(np.isin(data.group, chosen) & (data.trained > 0))
        if not len(include):
            continue
        cutoff = inf
        if flags.m2_tau < inf and flat.prox is not None:
            index = torch.from_numpy(ragged(data.cu_seqlens[include], data.trained[include]))
            cutoff = m2_cutoff((flat.prox - flat.mu)[index], flags.m2_tau)
        yield Update(
            include=include,
            normalisers=Normalisers(
                tokens=float(data.trained[include].sum()),
                sequences=float(len(include)),
                max_length=float(max_length),
                m2_cutoff=cutoff,
            ),
            ahead=number / count,
        )


def always_active(flags: PolicyFlags) -> bool:
    """Whether a row with advantage 0 has a gradient all the same."""
    return bool(
        flags.loss == "dro" or flags.entropy_coefficient != 0 or (flags.kl != "none" and flags.kl_coefficient != 0)
    )


def active(include: Array, data: StepRows, advantage: torch.Tensor) -> Array:
    """The rows of `include` with an advantage other than 0 somewhere: the others have no gradient and cost nothing."""
    nonzero = np.concatenate([[0], np.cumsum(advantage.cpu().numpy() != 0)])
    counts = nonzero[data.cu_seqlens[1:]] - nonzero[data.cu_seqlens[:-1]]
    return include[counts[include] > 0]
