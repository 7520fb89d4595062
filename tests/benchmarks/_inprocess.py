"""The whole method in one process: the same episodes, engine, batches and updates, without broker, leases or deltas on disk.

It is the reference that a deterministic run equals bit for bit, and the yardstick for what the daemons cost. Strictly
synchronous: sample a step's groups under the newest weights, train on them, go on.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from temper.actor.engines.embedded import EmbeddedEngine
from temper.actor.episodes import run_lease
from temper.actor.packing import pack_samples
from temper.actor.text import Text
from temper.common import delta
from temper.common.arrays import join, packed_bytes
from temper.common.bits import Weights, seal
from temper.common.config import Recipe
from temper.common.domains import Domain, Grader
from temper.common.lora import lora_of
from temper.common.schedule import Assignment, Schedule
from temper.common.schema import Group, Lane, Lease
from temper.learner import models
from temper.learner.inbox import GroupData, parse_group
from temper.learner.session import warm_start_over
from temper.learner.step import StepReport, Trainer

LINEAGE = 1


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Held-out accuracy of one domain: `correct` of `samples`."""

    correct: int
    samples: int

    @property
    def share(self) -> float:
        return self.correct / max(self.samples, 1)


class Loop:
    """One run of a recipe. `async with Loop(recipe, grader, cache) as loop: await loop.warm(); await loop.train(100)`."""

    def __init__(self, recipe: Recipe, grader: Grader, cache_dir: Path) -> None:
        torch.set_num_threads(recipe.daemons.threads_per_process)
        self.recipe = recipe
        self.grader = grader
        loaded = models.load(recipe.model, recipe.run.seed, cache_dir)
        self.trainer = Trainer(loaded.model, recipe, recipe.run.max_steps)
        self.text = Text(loaded.bundle_files)
        self.domains: dict[str, Domain] = {
            domain.name: importlib.import_module(domain.module).make(domain.options) for domain in recipe.domains
        }
        self.engine = EmbeddedEngine(
            json.loads(loaded.bundle_files["config.json"]),
            dtype=recipe.model.serving_dtype,
            max_rows=recipe.engine.max_rows,
            max_length_tokens=recipe.model.max_length_tokens,
            on_swap=recipe.engine.on_swap,
            kv_on_swap=recipe.engine.kv_on_swap,
            deterministic=recipe.run.deterministic,
            threads=recipe.daemons.threads_per_process,
            lora=lora_of(recipe.model),
        )
        self.schedule = Schedule(recipe.run.seed)
        self.weights: Weights | None = None
        self.reports: list[StepReport] = []

    async def __aenter__(self) -> Loop:
        await self.publish()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    @property
    def version(self) -> int:
        """The ordinal of the trainer's weights: steps done, warm-start steps included."""
        return self.trainer.steps_done + self.trainer.warm_steps_done

    def serving_weights(self) -> Weights:
        """The trainer's weights as they would be published."""
        return seal(self.version, LINEAGE, self.trainer.serving_tensors(), self.weights)

    async def publish(self) -> None:
        """Move the engine to the trainer's weights by the exact delta that would travel."""
        new = self.serving_weights()
        if self.weights is None or self.weights.version.digest != new.version.digest:
            update = delta.stage(delta.encode(self.weights, new), self.weights)
            assert await self.engine.apply(update) == new.version.digest
        self.weights = new

    async def groups(self, lane: Lane, assigned: Sequence[Assignment], samples: int) -> list[GroupData]:
        """Run the leases side by side; their groups in lease order."""
        return list(await asyncio.gather(*(self._group(lane, one, samples) for one in assigned)))

    async def _group(self, lane: Lane, assigned: Assignment, samples: int) -> GroupData:
        lease = Lease(
            lease_id=assigned.lease_id,
            attempt=1,
            lineage=LINEAGE,
            lane=lane,
            domain=assigned.domain,
            level=assigned.level,
            task_seed=assigned.task_seed,
            indices=list(range(samples)),
            min_version=0 if lane == "demo" else self.version,
            pinned_version=self.version if lane == "eval" else None,
            deadline_s=self.recipe.pacing.lease_timeout_s,
        )
        result = await run_lease(lease, self.domains[lease.domain], self.engine, self.text, self.grader, self.recipe)
        if result.cause is not None:
            raise RuntimeError(f"lease {lease.lease_id} of {lease.domain}: {result.cause}: {result.error}")
        messages = pack_samples(lease, result.samples)
        body = Group(
            group_id=lease.lease_id,
            lane=lane,
            domain=lease.domain,
            level=lease.level,
            task_seed=lease.task_seed,
            lineage=LINEAGE,
            parts=[message for message, _ in messages],
            pinned_version=lease.pinned_version,
        )
        return parse_group(body, join([(packed_bytes(message.arrays) > 0, frames) for message, frames in messages]))

    def _shares(self, lane: Lane) -> Mapping[str, tuple[int, float]]:
        return {
            domain.name: (domain.level, domain.warm_start_share if lane == "demo" else domain.share)
            for domain in self.recipe.domains
            if domain.train
        }

    async def warm(self) -> float:
        """Supervised steps on demonstrations until the recipe's likelihood; returns the last likelihood."""
        warm = self.recipe.warm_start
        likelihood = 0.0
        while not warm_start_over(self.recipe, self.trainer.warm_steps_done, self.trainer.warm_likelihood):
            assigned = [self.schedule.next("demo", self._shares("demo")) for _ in range(warm.groups_per_step)]
            report = self.trainer.warm_step(await self.groups("demo", assigned, warm.samples_per_group))
            likelihood = report.mean("learner/warm/likelihood_share") or 0.0
        await self.publish()
        return likelihood

    async def step(self) -> StepReport:
        """One synchronous RL step."""
        pacing = self.recipe.pacing
        assigned = [self.schedule.next("train", self._shares("train")) for _ in range(pacing.groups_per_step)]
        report = self.trainer.train_step(await self.groups("train", assigned, pacing.samples_per_group), self.version)
        await self.publish()
        self.reports.append(report)
        return report

    async def evaluate(self) -> dict[str, Accuracy]:
        """Held-out accuracy under the current weights."""
        found: dict[str, Accuracy] = {}
        for domain in self.recipe.domains:
            count = self.recipe.eval.tasks_per_domain
            assigned = [self.schedule.held_out(domain.name, domain.level, number) for number in range(count)]
            groups = await self.groups("eval", assigned, self.recipe.eval.samples_per_task)
            verdicts = [bool(sample.correct) for group in groups for sample in group.samples]
            found[domain.name] = Accuracy(sum(verdicts), len(verdicts))
        return found

    async def measure(self, steps: int) -> float:
        """Samples per second over `steps` steps."""
        begun = time.perf_counter()
        for _ in range(steps):
            await self.step()
        samples = steps * self.recipe.pacing.groups_per_step * self.recipe.pacing.samples_per_group
        return samples / (time.perf_counter() - begun)
