"""One training step: groups in, updated masters and metrics out. The same functions serve the daemon and the
in-process loop.

Guarantees: the result depends on the groups and the trainer's state alone, not on arrival order or clocks; sums are
normalised globally over an update, so splits into micro-batches change nothing but rounding; a gradient that is not
finite changes nothing; `state`/`load` continue exactly where they left off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from temper.common import metrics as names
from temper.common.bits import TensorBits
from temper.common.config import Recipe
from temper.common.errors import ConfigError
from temper.common.lora import lora_of
from temper.kernels.flags import PolicyFlags
from temper.kernels.policy_loss import Normalisers, PackedBatch, policy_loss
from temper.kernels.reference import m2_cutoff
from temper.learner import objectives
from temper.learner.adapters import attach
from temper.learner.batching import Microbatch, plan, ragged
from temper.learner.checkpoint import TENSORS
from temper.learner.critic import Critic
from temper.learner.gather import serving
from temper.learner.inbox import GroupData, void_reason
from temper.learner.objective_rules import resolve
from temper.learner.optimizer import Optimizer, learning_rate
from temper.learner.policy import Entropy, Policy, Support, bit_view
from temper.learner.reference_policy import ReferencePolicy
from temper.learner.report import Sums, describe
from temper.learner.rows import Array, StepRows, collect
from temper.learner.signal import step_advantages
from transformers import PreTrainedModel

WARM_RATE = 0.5  # of the domains' running likelihoods in the warm start
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ENTROPY_VOCABULARY = 8192  # up to this vocabulary the entropy is computed in every step; beyond it only where needed


@dataclass(slots=True)
class StepReport:
    """`metrics`: {registered name: (sum, count)}; `void`: {group id: reason} of groups that were not trained;
    `trained`: ids of those that were. `seconds`: wall time of the step."""

    metrics: dict[str, tuple[float, float]]
    void: dict[int, str]
    trained: list[int]
    seconds: float = 0.0

    def mean(self, name: str) -> float | None:
        """sum / count of a metric, None where it has no count."""
        total, count = self.metrics.get(name, (0.0, 0.0))
        return total / count if count else None


@dataclass(slots=True)
class _Update:
    """What the micro-batches of one update share."""

    include: Array
    normalisers: Normalisers
    ahead: float


@dataclass(slots=True)
class _Flat:
    """Flat per-token arrays of a step (M) and per-sample ones (S), see `StepRows`."""

    mu: torch.Tensor
    lag: torch.Tensor
    advantage: torch.Tensor
    group: torch.Tensor
    prox: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    support: tuple[Array, Array] | None = None
    value: torch.Tensor | None = None  # the critic's, at the start of the step
    target: torch.Tensor | None = None  # what it should have been


class Interrupted(Exception):
    """A step was given up before its first update: masters, optimiser and counters are as they were."""


class Trainer:
    """Owns the masters, the optimiser and the counters of a run; one object per learner.

    `interrupt` may be set from another thread: a step that has not updated anything yet ends with `Interrupted`.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe, total_rl_steps: int) -> None:
        self.interrupt = threading.Event()
        self._interruptible = False
        self.recipe = recipe
        self.total_steps = total_rl_steps
        self.objective = resolve(recipe.objective, recipe.pacing)
        self.flags = objectives.compile(self.objective)
        self.warm_flags = objectives.compile(objectives.TABLE["sft"])
        self.lora = lora_of(recipe.model)
        if self.lora is not None:
            attach(model, self.lora, recipe.run.seed)
        self._frozen: dict[str, TensorBits] = {}  # serving bits of what is not trained
        self.policy = Policy(
            model,
            compute_dtype=DTYPES[recipe.model.compute_dtype],
            checkpointing=recipe.optimizer.activation_checkpointing,
            check=self._check,
        )
        self.optimizer = Optimizer(self.policy.trained_masters(), recipe.optimizer)
        self.steps_done = 0
        self.warm_steps_done = 0
        self.baselines: dict[str, float] = {}
        self.warm_likelihood: dict[str, float] = {}  # domain -> running mean probability of a whole demonstration
        self.reference = ReferencePolicy(recipe.reference, recipe.objective.kl_coefficient)
        self.critic: Critic | None = None
        if self.objective.needs_critic:
            size = self.policy.head.shape[1]
            self.critic = Critic(size, recipe.critic, recipe.optimizer, self.policy.device)

    # ------------------------------------------------------------ steps

    def train_step(self, groups: Sequence[GroupData], version: int) -> StepReport:
        """One RL step on `groups`, whose tokens' lag is measured against `version`, the ordinal at its start."""
        begun = time.perf_counter()
        pacing = self.recipe.pacing
        reasons = {
            group.group_id: void_reason(group, pacing.samples_per_group, pacing.dynamic_sampling) for group in groups
        }
        void = {group_id: reason for group_id, reason in reasons.items() if reason is not None}
        data = collect(
            [group for group in groups if group.group_id not in void],
            version,
            pacing.max_token_lag,
            overlong_filter=self.recipe.objective.overlong == "mask",
        )
        sums = Sums()
        describe(sums, data, groups, void)
        temperature = self.recipe.sampling.temperature
        updates = self.recipe.objective.updates_per_step
        rate = learning_rate(self.recipe.optimizer, self.steps_done, self.total_steps)
        sums.add(names.LEARNER_RATE, rate)
        flags = replace(self.flags, kl_coefficient=self.reference.coefficient)
        sums.add(names.LEARNER_KL_COEFFICIENT, flags.kl_coefficient)
        with self._giving_up():
            flat = self._flat(data, temperature)
            for number, update in enumerate(self._updates(data, flat, updates)):
                self._update(data, flat, update, flags, sums, rate=rate, temperature=temperature, first=number == 0)
        self.steps_done += 1
        total, count = sums.values.get(names.LEARNER_KL_REFERENCE, (0.0, 0.0))
        self.reference.after_step(self.policy, self.steps_done, total / count if count else None)
        sums.add(names.LEARNER_STEPS, 1)
        return StepReport(sums.values, void, [g.group_id for g in data.groups], time.perf_counter() - begun)

    def warm_step(self, groups: Sequence[GroupData]) -> StepReport:
        """One supervised step on demonstrations. `learner/warm/likelihood_share` is the mean over demonstrations of the
        probability of a whole one, exp(sum log p) at temperature 1, before the update.

        A domain whose own mean has reached ``warm_start.until_likelihood`` has no gradient until it falls below it again,
        so that domains of different difficulty start RL even."""
        begun = time.perf_counter()
        data = collect(groups, 0, 1 << 62, demo=True)
        sums = Sums()
        rate = self.recipe.warm_start.learning_rate
        sums.add(names.LEARNER_RATE, rate)
        with self._giving_up():
            flat = self._flat(data, 1.0, demo=True)
            flat.advantage = self._behind(data).to(flat.advantage.device)
            for update in self._updates(data, flat, 1):
                logprob = self._update(data, flat, update, self.warm_flags, sums, rate=rate, temperature=1.0, demo=True)
                whole = np.add.reduceat(logprob, data.cu_seqlens[:-1][data.trained > 0])
                sums.add(names.LEARNER_LIKELIHOOD, float(np.exp(whole).sum()), len(whole))
                self._see(data, np.exp(whole))
        self.warm_steps_done += 1
        return StepReport(sums.values, {}, [g.group_id for g in data.groups], time.perf_counter() - begun)

    def _behind(self, data: StepRows) -> torch.Tensor:
        """f32[M]: 1 for the demonstrations of domains that are still below the likelihood asked for, else 0."""
        target = self.recipe.warm_start.until_likelihood
        behind = [float(self.warm_likelihood.get(group.domain, 0.0) < target) for group in data.groups]
        return torch.from_numpy(np.repeat(np.array(behind, np.float32)[data.group], np.diff(data.cu_seqlens)))

    def _see(self, data: StepRows, whole: Array) -> None:
        """Move each domain's running likelihood; `whole`: one probability per row with trained tokens."""
        domains = [data.groups[group].domain for group in data.group[data.trained > 0]]
        for domain in sorted(set(domains)):
            mean = float(np.mean([value for value, of in zip(whole, domains, strict=True) if of == domain]))
            old = self.warm_likelihood.get(domain, mean)
            self.warm_likelihood[domain] = old + WARM_RATE * (mean - old)

    def _flat(self, data: StepRows, temperature: float, demo: bool = False) -> _Flat:
        """The step's flat arrays; the proximal and reference passes that the objective needs."""
        device = self.policy.device
        flat = _Flat(
            mu=torch.from_numpy(data.behaviour_logprob).to(device),
            lag=torch.from_numpy(data.lag).to(device),
            advantage=torch.ones(len(data.lag), device=device),
            group=torch.from_numpy(data.group).to(device),
            support=data.support,
        )
        if demo:
            return flat
        objective = self.objective
        if (
            objective.needs_prox
            or objective.m2_tau < inf
            or objective.correction == "vtrace"
            or objective.kl_reward
            or self.critic is not None
        ):
            flat.prox = self._evaluate(self.policy, data, flat, temperature)
        if objective.needs_reference:
            flat.reference = self._evaluate(self.reference.policy(self.policy), data, flat, temperature)
        found = step_advantages(
            objective,
            self.recipe,
            data,
            self.baselines,
            mu=flat.mu,
            prox=flat.prox,
            reference=flat.reference,
            value=flat.value,
            kl_coefficient=self.reference.coefficient,
        )
        flat.advantage = found.advantage.to(device)
        flat.target = None if found.target is None else found.target.to(device)
        return flat

    def _updates(self, data: StepRows, flat: _Flat, count: int) -> Iterator[_Update]:
        """Divide the step's groups, in order, among `count` optimiser steps."""
        for number, chosen in enumerate(np.array_split(np.arange(len(data.groups)), count)):
            include = np.flatnonzero(np.isin(data.group, chosen) & (data.trained > 0))
            if not len(include):
                continue
            cutoff = inf
            if self.flags.m2_tau < inf and flat.prox is not None:
                index = torch.from_numpy(ragged(data.cu_seqlens[include], data.trained[include]))
                cutoff = m2_cutoff((flat.prox - flat.mu)[index], self.flags.m2_tau)
            yield _Update(
                include=include,
                normalisers=Normalisers(
                    tokens=float(data.trained[include].sum()),
                    sequences=float(len(include)),
                    max_length=float(self.recipe.sampling.max_new_tokens),
                    m2_cutoff=cutoff,
                ),
                ahead=number / count,
            )

    def _update(
        self,
        data: StepRows,
        flat: _Flat,
        update: _Update,
        flags: PolicyFlags,
        sums: Sums,
        *,
        rate: float,
        temperature: float,
        first: bool = False,
        demo: bool = False,
    ) -> Array:
        """Forward, backward and optimiser step; the log-probabilities f32[M] that the rows had (0 elsewhere).

        `first`: of the step, so that policy and engine had the same weights. `demo`: demonstrations.
        """
        seen = np.zeros(len(data.lag), dtype=np.float32)
        entropy: Entropy = "value" if self.policy.head.shape[0] <= ENTROPY_VOCABULARY else "none"
        if flags.entropy_coefficient != 0:
            entropy = "grad"
        every = _always_active(flags) or flat.target is not None or demo
        include = update.include if every else _active(update.include, data, flat.advantage)
        self.optimizer.zero()
        for batch in plan(data.rows, self.recipe.optimizer.tokens_per_microbatch, include):
            packed = self._packed(batch, flat)
            chosen = self.policy.chosen(batch)
            out = self.policy.logprobs(
                batch,
                temperature=temperature,
                entropy=entropy,
                support=_support_of(batch, flat.support),
                chosen=chosen,
            )
            loss, metrics = policy_loss(
                packed, out.logprob, flags, update.normalisers, entropy=out.entropy, ahead=update.ahead
            )
            if self.critic is not None and flat.value is not None and flat.target is not None:
                index = torch.from_numpy(batch.flat).to(chosen.device)
                values = self.critic.values(chosen)
                extra, errors = self.critic.loss(
                    values, flat.value[index], flat.target[index], update.normalisers.tokens
                )
                loss = loss + extra
                sums.add(names.LEARNER_VALUE_LOSS, errors, float(len(batch.flat)))
            loss.backward()  # type: ignore[no-untyped-call]
            logprob = out.logprob.detach().float().cpu().numpy()
            seen[batch.flat] = logprob
            sums.add_loss(metrics, demo=demo)
            sums.add(names.LEARNER_PACKED, float(batch.packed_tokens))
            sums.add(names.LEARNER_ROW_TOKENS, float(batch.row_tokens))
            sums.add(names.LEARNER_TOKENS, float(len(batch.flat)))
            if first:
                gap = np.abs(logprob - data.behaviour_logprob[batch.flat])
                gap = gap[np.repeat(data.pure[batch.rows], np.diff(batch.cu_seqlens))]
                sums.add(names.LEARNER_GAP, float(gap.sum()), float(len(gap)))
        self._interruptible = False
        if flat.target is not None and self.critic is not None:
            self.critic.update()
        done = self.optimizer.update(rate)
        sums.add(names.LEARNER_SKIPPED, 0.0 if np.isfinite(done.gradient_norm) else 1.0)
        if np.isfinite(done.gradient_norm):
            sums.add(names.LEARNER_GRADIENT, done.gradient_norm)
        return seen

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Until the first update `interrupt` ends what runs inside, and leaves everything as it was."""
        baselines, self._interruptible = dict(self.baselines), True
        try:
            yield
        except Interrupted:
            self.baselines = baselines
            self.optimizer.zero()
            if self.critic is not None:
                self.critic.zero()
            raise
        finally:
            self._interruptible = False

    def _check(self) -> None:
        if self._interruptible and self.interrupt.is_set():
            raise Interrupted

    def _packed(self, batch: Microbatch, flat: _Flat) -> PackedBatch:
        device = self.policy.device
        index = torch.from_numpy(batch.flat).to(device)
        return PackedBatch(
            tokens=torch.from_numpy(batch.target).to(device),
            cu_seqlens=torch.from_numpy(batch.cu_seqlens).to(device),
            mask=torch.ones(len(batch.flat), dtype=torch.bool, device=device),
            mu=flat.mu[index],
            prox=None if flat.prox is None else flat.prox[index],
            ref=None if flat.reference is None else flat.reference[index],
            advantage=flat.advantage[index],
            group_id=flat.group[torch.from_numpy(batch.rows).to(device)],
            lag=flat.lag[index],
        )

    @torch.no_grad()
    def _evaluate(self, policy: Policy, data: StepRows, flat: _Flat, temperature: float) -> torch.Tensor:
        """f32[M] log-probabilities of every trained token under `policy`, without gradient; the critic's values too."""
        found = torch.zeros_like(flat.mu)
        for batch in plan(data.rows, self.recipe.optimizer.tokens_per_microbatch):
            index = torch.from_numpy(batch.flat).to(found.device)
            chosen = policy.chosen(batch)
            support = _support_of(batch, flat.support)
            out = policy.logprobs(batch, temperature=temperature, support=support, chosen=chosen)
            found[index] = out.logprob.float()
            if self.critic is not None and policy is self.policy:
                flat.value = torch.zeros_like(flat.mu) if flat.value is None else flat.value
                flat.value[index] = self.critic.values(chosen)
        return found

    # ------------------------------------------------------------ weights and state

    def serving_tensors(self) -> dict[str, TensorBits]:
        """The weights in the serving dtype, cast once, as bits by canonical name, tied ones once; copies that the next
        step does not touch. What is not trained is cast when first asked for and is the same object ever after."""
        dtype = self.recipe.model.serving_dtype
        named, trained = self.policy.named_masters(), self.policy.trained_masters()
        wanted = {name: p for name, p in named.items() if name in trained or name not in self._frozen}
        fresh = {name: TensorBits.of(bit_view(t), dtype) for name, t in serving(wanted, DTYPES[dtype])}
        self._frozen |= {name: tensor for name, tensor in fresh.items() if name not in trained}
        return {name: fresh.get(name) or self._frozen[name] for name in named}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, scalars): masters, optimiser, reference and RNG; counters and baselines. Views, not copies."""
        tensors = {f"model.{name}": p.detach() for name, p in self.policy.named_masters().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        reference, coefficient = self.reference.state()
        tensors |= {f"reference.{name}": value for name, value in reference.items()}
        if self.critic is not None:
            tensors |= {f"critic.{name}": value for name, value in self.critic.state().items()}
        tensors["rng.torch"] = torch.get_rng_state()
        scalars = {
            "steps_done": self.steps_done,
            "warm_steps_done": self.warm_steps_done,
            "baselines": dict(self.baselines),
            "warm_likelihood": dict(self.warm_likelihood),
            "kl_coefficient": coefficient,
            "lora_scale": self.lora.scale if self.lora is not None else 0.0,
        }
        return tensors, scalars

    def load(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Restore what `state` gave; ConfigError when it belongs to another model."""
        parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in TENSORS}
        for name, value in tensors.items():
            head, rest = name.split(".", 1)
            parts[head][rest] = value
        _copy_into(self.policy.named_masters(), parts["model"])
        self._frozen.clear()
        self.optimizer.load(parts["optimizer"])
        coefficient = float(scalars.get("kl_coefficient", self.recipe.objective.kl_coefficient))
        _copy_into(self.reference.load(parts["reference"], coefficient, self.policy), parts["reference"])
        if self.critic is not None:
            self.critic.load(parts["critic"])
        torch.set_rng_state(parts["rng"]["torch"])
        self.steps_done = int(scalars["steps_done"])
        self.warm_steps_done = int(scalars["warm_steps_done"])
        self.baselines = {str(k): float(v) for k, v in scalars["baselines"].items()}
        self.warm_likelihood = {str(k): float(v) for k, v in scalars.get("warm_likelihood", {}).items()}


def _copy_into(named: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]) -> None:
    if named.keys() != values.keys():
        different = sorted(named.keys() ^ values.keys())
        raise ConfigError(f"the checkpoint is of another model: parameters differ ({', '.join(different[:3])})")
    with torch.no_grad():
        for name, parameter in named.items():
            if parameter.shape != values[name].shape:
                raise ConfigError(
                    f"the checkpoint is of another model: {name} is {tuple(values[name].shape)}, "
                    f"expected {tuple(parameter.shape)}"
                )
            parameter.copy_(values[name])


def _always_active(flags: PolicyFlags) -> bool:
    """Whether a row with advantage 0 has a gradient all the same."""
    return bool(
        flags.loss == "dro" or flags.entropy_coefficient != 0 or (flags.kl != "none" and flags.kl_coefficient != 0)
    )


def _active(include: Array, data: StepRows, advantage: torch.Tensor) -> Array:
    """The rows of `include` with an advantage other than 0 somewhere: the others have no gradient and cost nothing."""
    nonzero = np.concatenate([[0], np.cumsum(advantage.cpu().numpy() != 0)])
    counts = nonzero[data.cu_seqlens[1:]] - nonzero[data.cu_seqlens[:-1]]
    return include[counts[include] > 0]


def _support_of(batch: Microbatch, support: tuple[Array, Array] | None) -> Support | None:
    """The supports (ids, cu) of a micro-batch's tokens, from the step's."""
    if support is None:
        return None
    ids, cu = support
    sizes = (cu[1:] - cu[:-1])[batch.flat]
    picked = ids[ragged(cu[batch.flat], sizes)]
    return torch.from_numpy(picked), torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int64))
