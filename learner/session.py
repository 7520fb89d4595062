"""Everything of a learner that a checkpoint holds, and the steps that change it: no sockets, no clocks beyond durations.

Guarantees: `checkpoint` after a step and `restore` in another process continue with the same bits. The daemon runs these
methods in its training thread, one at a time; tests and the in-process loop call them directly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from temper.common import metrics as names
from temper.common.bits import TensorBits
from temper.common.config import Recipe
from temper.common.errors import ConfigError
from temper.common.schema import Metrics
from temper.learner.checkpoint import Checkpoint
from temper.learner.curriculum import Curriculum
from temper.learner.evaluation import DomainResult, Evaluation, from_plain, mean_accuracy, to_plain
from temper.learner.inbox import GroupData
from temper.learner.oversight import Oversight
from temper.learner.report import member
from temper.learner.step import StepReport, Trainer
from transformers import PreTrainedModel

VOID_PREFIX = names.BROKER_VOID[:-1]
LATE_STEPS = 8  # beyond pacing.max_staleness: what may be trained while the broker's disk stands still


def warm_start_over(recipe: Recipe, steps: int, likelihood: Mapping[str, float]) -> bool:
    """Whether the warm start ends after `steps` of it: every domain that takes part has the likelihood asked for."""
    if steps >= recipe.warm_start.max_steps:
        return True
    taking_part = [domain.name for domain in recipe.domains if domain.train and domain.warm_start_share > 0]
    return all(likelihood.get(name, 0.0) >= recipe.warm_start.until_likelihood for name in taking_part)


class Totals:
    """Counts over the whole run, for the summary."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.trained_samples: Counter[str] = Counter()  # by domain
        self.tokens_trained = 0
        self.tokens_sampled = 0
        self.lag_sum = 0.0
        self.lag_tokens = 0.0
        self.lag_max = 0.0
        self.train_s = 0.0  # from the first RL step's batch to the last step's end

    def take(self, report: StepReport, groups: Sequence[GroupData]) -> None:
        """Add an RL step."""
        for name, (total, _) in report.metrics.items():
            group, _, fate = name.rpartition("/")
            if group == "learner/samples":
                self.samples[fate] += int(total)
            elif group == "learner/groups" and not fate.startswith("void"):  # the broker counts those
                self.groups[fate] += int(total)
        for group_data in groups:
            if group_data.group_id not in report.void:
                self.trained_samples[group_data.domain] += group_data.scored
        lag, tokens = report.metrics.get(names.LEARNER_LAG_MEAN, (0.0, 0.0))
        self.lag_sum += lag
        self.lag_tokens += tokens
        self.tokens_trained += int(tokens)
        self.lag_max = max(self.lag_max, report.mean(names.LEARNER_LAG_MAX) or 0.0)

    def relayed(self, metrics: Metrics) -> None:
        """Take what only other daemons know: tokens sampled, groups that the broker gave up (totals by reason)."""
        self.tokens_sampled += int(metrics.counters.get(names.ACTOR_TOKENS, 0.0))
        for name, value in metrics.gauges.items():
            if name.startswith(VOID_PREFIX):
                self.groups[f"void_{name.removeprefix(VOID_PREFIX)}".replace(" ", "_")] = int(value)

    def state(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {
            **self.__dict__,
            "samples": dict(self.samples),
            "groups": dict(self.groups),
            "trained_samples": dict(self.trained_samples),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.__dict__.update(state)
        for key in ("samples", "groups", "trained_samples"):
            setattr(self, key, Counter(state[key]))


class Session:
    """A run's learning state. `ordinal`: the version of the present weights, warm-start steps included. `trained`: (version,
    group ids) of the last steps, as many as may be done before the broker has one of them on disk."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.recipe = recipe
        self.trainer = Trainer(model, recipe, recipe.run.max_steps)
        self.curriculum = Curriculum(recipe.domains)
        self.oversight = Oversight()
        self.totals = Totals()
        self.evaluations: dict[str, dict[str, DomainResult]] = {}  # before, after
        self.ordinal = 0
        self.trained: deque[tuple[int, list[int]]] = deque(maxlen=recipe.pacing.max_staleness + LATE_STEPS)
        self.warm = recipe.warm_start.max_steps > 0  # the warm start is not over
        self.likelihood: float | None = None

    @property
    def steps_done(self) -> int:
        """RL steps done."""
        return self.trainer.steps_done

    def warm_step(self, groups: Sequence[GroupData]) -> StepReport:
        """One supervised step; `warm` tells whether another one follows."""
        report = self.trainer.warm_step(groups)
        self.trained.append((self.ordinal, list(report.trained)))
        self.ordinal += 1
        self.likelihood = report.mean(names.LEARNER_LIKELIHOOD)
        self.warm = not warm_start_over(self.recipe, self.trainer.warm_steps_done, self.trainer.warm_likelihood)
        return report

    def train_step(self, groups: Sequence[GroupData]) -> tuple[StepReport, list[str]]:
        """One RL step; (its report, new alarms)."""
        report = self.trainer.train_step(groups, self.ordinal)
        self.trained.append((self.ordinal, list(report.trained)))
        self.ordinal += 1
        self.curriculum.observe(groups)
        self.totals.take(report, groups)
        for domain, portion in self.curriculum.portions().items():
            report.metrics[member(names.LEARNER_SHARE, domain)] = (portion, 1.0)
        return report, self.oversight.step(report)

    def evaluated(self, evaluation: Evaluation, results: dict[str, DomainResult]) -> None:
        """An evaluation is complete or out of time."""
        floors = self.curriculum.floors
        accuracy = mean_accuracy({domain: result for domain, result in results.items() if domain not in floors})
        if accuracy is not None:
            self.trainer.reference.evaluated(accuracy)
        if evaluation.when != "step":
            self.evaluations[evaluation.when] = results

    def serving_tensors(self) -> dict[str, TensorBits]:
        """The present weights, see `Trainer.serving_tensors`."""
        return self.trainer.serving_tensors()

    def checkpoint(self, run_id: str, lineage: int) -> Checkpoint:
        """The whole state. Its tensors are views: write them before the next step."""
        tensors, trainer = self.trainer.state()
        state = {
            "run_id": run_id,
            "lineage": lineage,
            "trainer": trainer,
            "trained": list(self.trained),
            "warm": self.warm,
            "likelihood": self.likelihood,
            "curriculum": self.curriculum.state(),
            "oversight": self.oversight.state(),
            "totals": self.totals.state(),
            "evaluations": {when: to_plain(results) for when, results in self.evaluations.items()},
        }
        return Checkpoint(self.ordinal, tensors, state)

    def restore(self, checkpoint: Checkpoint, run_id: str | None = None) -> None:
        """Continue from a checkpoint; ConfigError when it is of another run or model."""
        state = checkpoint.state
        if run_id is not None and state["run_id"] != run_id:
            raise ConfigError(
                f"the checkpoint is of run {state['run_id']}, this broker's run is {run_id}: resume with the run "
                "directory that the broker uses"
            )
        self.trainer.load(checkpoint.tensors, state["trainer"])
        self.ordinal = checkpoint.version
        self.trained.extend((version, list(ids)) for version, ids in state.get("trained", ()))
        self.warm = bool(state["warm"])
        self.likelihood = state["likelihood"]
        self.curriculum.load(state["curriculum"])
        self.oversight.load(state["oversight"])
        self.totals.load(state["totals"])
        self.evaluations = {when: from_plain(results) for when, results in state["evaluations"].items()}
