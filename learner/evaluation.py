"""Held-out evaluations under way and their results. Pure; the daemon sends `Evaluate` and feeds the groups back.

An accuracy is null, with the reason, unless every task of its domain was answered or given up in time: a partial
evaluation would favour short answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from temper.common.estimators import wilson
from temper.common.reports import TaskResult
from temper.learner.inbox import GroupData

When = Literal["before", "step", "after"]


@dataclass(frozen=True, slots=True)
class DomainResult:
    """`accuracy`: mean over tasks of the share of correct samples (mean@k); `solved`: share of tasks with at least one
    (pass@k); `interval`: 95 % of the accuracy, tasks as the independent units; all None with the `reason`."""

    tasks: int = 0
    samples: int = 0
    accuracy: float | None = None
    solved: float | None = None
    interval: tuple[float, float] | None = None
    void_tasks: int = 0
    reason: str = ""


@dataclass(slots=True)
class Evaluation:
    """One `Evaluate`: `expected` tasks per domain, answered by groups pinned to `version`."""

    version: int
    step: int
    when: When
    expected: dict[str, int]
    deadline_at: float
    groups: dict[str, dict[int, GroupData]] = field(default_factory=dict)

    def add(self, group: GroupData) -> None:
        """Take one answered (or void) task."""
        self.groups.setdefault(group.domain, {})[group.group_id] = group

    @property
    def complete(self) -> bool:
        """Every task is answered or given up."""
        return all(len(self.groups.get(domain, {})) >= count for domain, count in self.expected.items())

    def results(self) -> dict[str, DomainResult]:
        """Per domain; a domain whose tasks are not all there has no accuracy."""
        return {domain: self._result(domain, count) for domain, count in self.expected.items()}

    def tasks(self) -> dict[str, list[TaskResult]]:
        """Per domain what became of each answered task, in order."""
        return {
            domain: sorted((task_result(g) for g in self.groups.get(domain, {}).values()), key=lambda row: row.task)
            for domain in self.expected
        }

    def _result(self, domain: str, count: int) -> DomainResult:
        found = list(self.groups.get(domain, {}).values())
        if len(found) < count:
            return DomainResult(tasks=len(found), reason=f"{len(found)} of {count} tasks were answered in time")
        return score(found)


def task_result(group: GroupData) -> TaskResult:
    """One answered task in numbers."""
    verdicts = [sample.correct for sample in group.samples if sample.correct is not None]
    return TaskResult(
        task=group.task_seed,
        samples=len(verdicts),
        correct=sum(verdicts),
        tokens=sum(sample.generated for sample in group.samples),
        truncated=sum(sample.finish_reason == "length" for sample in group.samples),
        unscored=len(group.samples) - len(verdicts),
        void=group.void or "",
    )


def score(groups: Sequence[GroupData]) -> DomainResult:
    """The result of one domain's answered tasks; void ones and samples without a verdict are left out and counted."""
    verdicts = [[s.correct for s in group.samples if s.correct is not None] for group in groups]
    judged = [row for row in verdicts if row]
    void = len(groups) - len(judged)
    samples = sum(len(row) for row in judged)
    if not judged:
        reasons = sorted({group.void for group in groups if group.void})
        return DomainResult(
            tasks=0, void_tasks=void, reason=f"no task was judged{': ' + ', '.join(reasons) if reasons else ''}"
        )
    accuracy = sum(sum(row) / len(row) for row in judged) / len(judged)
    solved = sum(any(row) for row in judged) / len(judged)
    return DomainResult(len(judged), samples, accuracy, solved, wilson(accuracy, len(judged)), void)


def mean_accuracy(results: Mapping[str, DomainResult]) -> float | None:
    """Mean of the domains' accuracies; None if any is missing or there is none."""
    values = [result.accuracy for result in results.values()]
    if not values or any(value is None for value in values):
        return None
    return sum(value for value in values if value is not None) / len(values)


def to_plain(results: Mapping[str, DomainResult]) -> dict[str, Any]:
    """As JSON values, for checkpoints."""
    return {
        domain: {
            "tasks": r.tasks,
            "samples": r.samples,
            "accuracy": r.accuracy,
            "solved": r.solved,
            "interval": r.interval,
            "void_tasks": r.void_tasks,
            "reason": r.reason,
        }
        for domain, r in results.items()
    }


def from_plain(plain: Mapping[str, Any]) -> dict[str, DomainResult]:
    """The inverse of `to_plain`."""
    return {
        domain: DomainResult(**{**row, "interval": tuple(row["interval"]) if row["interval"] else None})
        for domain, row in plain.items()
    }
