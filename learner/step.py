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
from temper.common.lora import lora_of
from temper.kernels.flags import PolicyFlags
from temper.kernels.policy_loss import policy_loss
from temper.learner import objectives, trainer_state, warm
from temper.learner.adapters import attach
from temper.learner.batching import plan
from temper.learner.critic import Critic
from temper.learner.inbox import GroupData, void_reason
from temper.learner.objective_rules import resolve
from temper.learner.optimizer import Optimizer, learning_rate
from temper.learner.policy import DTYPES, Entropy, Policy
from temper.learner.reference_policy import ReferencePolicy
from temper.learner.report import Sums, describe
from temper.learner.rows import Array, StepRows, collect
from temper.learner.signal import step_advantages
from temper.learner.step_tensors import Flat, Update, active, always_active, updates
from transformers import PreTrainedModel

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
        self.frozen: dict[str, dict[str, TensorBits]] = {}  # serving bits of each master that is not trained
        self.policy = Policy(
            model,
            compute_dtype=DTYPES[recipe.model.compute_dtype],
            checkpointing=recipe.optimizer.activation_checkpointing,
            check=self._check,
            routed_experts=recipe.engine.routed_experts,
        )
        if self.policy.routing is not None:
            self.policy.routing.check_length(recipe.model.max_length_tokens)
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
        count, length = self.recipe.objective.updates_per_step, self.recipe.sampling.max_new_tokens
        rate = learning_rate(self.recipe.optimizer, self.steps_done, self.total_steps)
        sums.add(names.LEARNER_RATE, rate)
        flags = replace(self.flags, kl_coefficient=self.reference.coefficient)
        sums.add(names.LEARNER_KL_COEFFICIENT, flags.kl_coefficient)
        with self._giving_up():
            flat = self._flat(data, temperature)
            for number, update in enumerate(updates(data, flat, self.flags, count, length)):
                self._update(data, flat, update, flags, sums, rate=rate, temperature=temperature, first=number == 0)
        self.steps_done += 1
        divergence, tokens = sums.values.get(names.LEARNER_KL_REFERENCE, (0.0, 0.0))
        self.reference.after_step(self.policy, self.steps_done, divergence / tokens if tokens else None)
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
            target = self.recipe.warm_start.until_likelihood
            flat.advantage = warm.behind(data, self.warm_likelihood, target).to(flat.advantage.device)
            for update in updates(data, flat, self.warm_flags, 1, self.recipe.sampling.max_new_tokens):
                logprob = self._update(data, flat, update, self.warm_flags, sums, rate=rate, temperature=1.0, demo=True)
                whole = np.add.reduceat(logprob, data.cu_seqlens[:-1][data.trained > 0])
                sums.add(names.LEARNER_LIKELIHOOD, float(np.exp(whole).sum()), len(whole))
                warm.see(data, self.warm_likelihood, np.exp(whole))
        self.warm_steps_done += 1
        return StepReport(sums.values, {}, [g.group_id for g in data.groups], time.perf_counter() - begun)

    def _flat(self, data: StepRows, temperature: float, demo: bool = False) -> Flat:
        """The step's flat tensors; the proximal and reference passes that the objective needs."""
        device = self.policy.device
        flat = Flat.of(data, device)
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

    def _update(
        self,
        data: StepRows,
        flat: Flat,
        update: Update,
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
        every = always_active(flags) or flat.target is not None or demo
        include = update.include if every else active(update.include, data, flat.advantage)
        self.optimizer.zero()
        for batch in plan(data.rows, self.recipe.optimizer.tokens_per_microbatch, include):
            packed = flat.packed(batch)
            chosen = self.policy.chosen(batch)
            out = self.policy.logprobs(
                batch,
                temperature=temperature,
                entropy=entropy,
                support=flat.support_of(batch),
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
            if self.policy.replay is not None:
                sums.add_replay(*self.policy.replay.counts())
            if first:
                gap = np.abs(logprob - data.behaviour_logprob[batch.flat])
                gap = gap[np.repeat(data.pure[batch.rows], np.diff(batch.cu_seqlens))]
                sums.add(names.LEARNER_GAP, float(gap.sum()), float(len(gap)))
        self._interruptible = False
        done = self.optimizer.update(rate)
        if flat.target is not None and self.critic is not None:
            self.critic.update(whole=bool(np.isfinite(done.gradient_norm)))
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

    @torch.no_grad()
    def _evaluate(self, policy: Policy, data: StepRows, flat: Flat, temperature: float) -> torch.Tensor:
        """f32[M] log-probabilities of every trained token under `policy`, without gradient; the critic's values too."""
        found = torch.zeros_like(flat.mu)
        for batch in plan(data.rows, self.recipe.optimizer.tokens_per_microbatch):
            index = torch.from_numpy(batch.flat).to(found.device)
            chosen = policy.chosen(batch)
            out = policy.logprobs(batch, temperature=temperature, support=flat.support_of(batch), chosen=chosen)
            found[index] = out.logprob.float()
            if self.critic is not None and policy is self.policy:
                flat.value = torch.zeros_like(flat.mu) if flat.value is None else flat.value
                flat.value[index] = self.critic.values(chosen)
        return found

    # ------------------------------------------------------------ weights and state

    def serving_tensors(self) -> dict[str, TensorBits]:
        """The weights in the serving dtype, see `trainer_state.serving_tensors`."""
        return trainer_state.serving_tensors(self)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, scalars) of a checkpoint; views, not copies."""
        return trainer_state.state(self)

    def load(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Restore what `state` gave; ConfigError when it belongs to another model."""
        trainer_state.load(self, tensors, scalars)
