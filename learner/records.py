"""The files of a run that people and tools read: progress.jsonl, line by line, and summary.json at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from io import FileIO
from pathlib import Path

from msgspec import Struct
from temper.common import metrics as names
from temper.common.errors import EnvironmentFault
from temper.common.reports import (
    EVALUATIONS_FILE,
    PROGRESS_FILE,
    DomainSummary,
    Evaluated,
    Progress,
    Summary,
    encode,
    write_summary,
)
from temper.learner.evaluation import DomainResult, Evaluation, mean_accuracy
from temper.learner.session import Session
from temper.learner.step import StepReport


class Records:
    """Appends progress lines; `started` is the learner's start (monotonic seconds)."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.started = time.monotonic()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / PROGRESS_FILE).open("ab", buffering=0)
            self._evaluations = (run_dir / EVALUATIONS_FILE).open("ab", buffering=0)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write in the run directory {run_dir}: {error.strerror or error}; choose another with --run DIR"
            ) from error

    def warm(self, session: Session, report: StepReport, wait_s: float) -> None:
        """A supervised step."""
        self._append(
            Progress(
                kind="warm",
                time_s=self._now(),
                version=session.ordinal,
                likelihood=session.likelihood,
                tokens=int(report.metrics.get(names.LEARNER_TOKENS, (0.0, 0.0))[0]),
                samples=int(report.metrics.get(names.LEARNER_LIKELIHOOD, (0.0, 0.0))[1]),
                step_s=round(report.seconds, 4),
                wait_s=round(wait_s, 4),
            )
        )

    def step(self, session: Session, report: StepReport, wait_s: float) -> None:
        """An RL step."""
        self._append(
            Progress(
                kind="step",
                time_s=self._now(),
                step=session.steps_done,
                version=session.ordinal,
                reward=_by_domain(report, "learner/reward/"),
                accuracy=dict(_by_domain(report, "learner/accuracy/")),
                loss=report.mean(names.LEARNER_LOSS),
                entropy=report.mean(names.LEARNER_ENTROPY),
                lag_mean=round(report.mean(names.LEARNER_LAG_MEAN) or 0.0, 4),
                lag_max=report.mean(names.LEARNER_LAG_MAX) or 0.0,
                tokens=int(report.metrics.get(names.LEARNER_LAG_MEAN, (0.0, 0.0))[1]),
                samples=int(report.metrics["learner/samples/trained"][0]),
                step_s=round(report.seconds, 4),
                wait_s=round(wait_s, 4),
            )
        )

    def evaluation(
        self, evaluation: Evaluation, results: Mapping[str, DomainResult], floors: Collection[str] = ()
    ) -> None:
        """A finished (or given up) evaluation: its means as progress, every task in a file of its own."""
        tasks = Evaluated(
            evaluation.version, evaluation.step, evaluation.when, dict(evaluation.expected), evaluation.tasks()
        )
        self._append(tasks, self._evaluations)
        self._append(
            Progress(
                kind="eval",
                time_s=self._now(),
                step=evaluation.step,
                version=evaluation.version,
                accuracy={domain: result.accuracy for domain, result in results.items()},
                when=evaluation.when,
                floors=sorted(domain for domain in results if domain in floors),
                reason="; ".join(f"{domain}: {result.reason}" for domain, result in results.items() if result.reason),
            )
        )

    def summary(self, session: Session, exit_code: int, exit_reason: str, checkpoint: str, tensorboard: str) -> None:
        """Write summary.json."""
        write_summary(
            self.run_dir, summarise(session, self.run_dir, self._now(), exit_code, exit_reason, checkpoint, tensorboard)
        )

    def close(self) -> None:
        """Sync and close."""
        for file in (self._file, self._evaluations):
            if not file.closed:
                os.fsync(file.fileno())
                file.close()

    def _now(self) -> float:
        return round(time.monotonic() - self.started, 3)

    def _append(self, line: Struct, file: FileIO | None = None) -> None:
        file = file or self._file
        try:
            file.write(encode(line) + b"\n")
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write {file.name!s}: {error.strerror or error}; free space there"
            ) from error


def _by_domain(report: StepReport, prefix: str) -> dict[str, float]:
    found = {name.removeprefix(prefix): report.mean(name) for name in report.metrics if name.startswith(prefix)}
    return {domain: round(value, 4) for domain, value in found.items() if value is not None}


def _domain(session: Session, name: str, exit_reason: str) -> DomainSummary:
    config = session.curriculum.domains[name]
    before, after = (session.evaluations.get(when, {}).get(name) for when in ("before", "after"))
    reasons = [
        f"{when}: {result.reason if result is not None else missing}"
        for when, result, missing in (
            ("accuracy before", before, "not evaluated"),
            ("accuracy after", after, f"not evaluated ({exit_reason})"),
        )
        if result is None or result.reason
    ]
    none = DomainResult()
    last = after or before or none
    return DomainSummary(
        status="trained" if config.train else "floor" if config.floor else "evaluated",
        accuracy_before=(before or none).accuracy,
        accuracy_after=(after or none).accuracy,
        tasks=last.tasks,
        samples=session.totals.trained_samples[name],
        reason="; ".join(reasons),
        interval_before=(before or none).interval,
        interval_after=(after or none).interval,
        solved_before=(before or none).solved,
        solved_after=(after or none).solved,
        eval_samples=last.samples,
    )


def summarise(
    session: Session,
    run_dir: Path,
    wall_s: float,
    exit_code: int,
    exit_reason: str,
    checkpoint: str,
    tensorboard: str,
) -> Summary:
    """How the run ended, from the learner's own counts."""
    totals = session.totals
    trained = totals.samples["trained"]
    floors = session.curriculum.floors
    before, after = (
        mean_accuracy({k: v for k, v in session.evaluations.get(when, {}).items() if k not in floors})
        for when in ("before", "after")
    )
    return Summary(
        name=session.recipe.run.name,
        run_dir=str(run_dir),
        exit_code=exit_code,
        exit_reason=exit_reason,
        steps=session.steps_done,
        warm_start_steps=session.trainer.warm_steps_done,
        accuracy_before=before,
        accuracy_after=after,
        domains={name: _domain(session, name, exit_reason) for name in session.curriculum.domains},
        wall_s=round(wall_s, 1),
        tokens_sampled=totals.tokens_sampled,
        tokens_trained=totals.tokens_trained,
        samples=dict(totals.samples),
        samples_per_s=round(trained / totals.train_s, 1) if trained and totals.train_s > 0 else None,
        lag_mean=round(totals.lag_sum / totals.lag_tokens, 4) if totals.lag_tokens else None,
        checkpoint=checkpoint,
        tensorboard=tensorboard,
        groups=dict(totals.groups),
        lag_max=totals.lag_max if totals.lag_tokens else None,
        warm_start_likelihood=session.likelihood,
    )
