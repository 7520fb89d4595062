"""Held-out evaluations of a run: asked for at a version, fed with answered groups, recorded when complete or too late.

Guarantees: training never waits for an evaluation; each is recorded once, with null accuracies and the reason where its
deadline passed first. Called by the daemon, on its loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from temper.common import metrics as names
from temper.common.config import Recipe
from temper.common.log import log
from temper.common.recipe_derived import domain_sampling
from temper.common.schema import Evaluate
from temper.learner.boards import Board
from temper.learner.evaluation import Evaluation, When
from temper.learner.inbox import GroupData
from temper.learner.records import Records
from temper.learner.report import member
from temper.learner.session import Session


class Examiner:
    """`pending`: evaluations under way. `post` sends a message to the broker."""

    def __init__(
        self, session: Session, recipe: Recipe, records: Records, board: Board, post: Callable[[Evaluate], object]
    ) -> None:
        self.session = session
        self.recipe = recipe
        self.records = records
        self.board = board
        self.pending: list[Evaluation] = []
        self._post = post
        self._requests = 0  # evaluations asked for

    def ask(self, when: When) -> None:
        """Ask for an evaluation of the present version; training goes on."""
        session, recipe = self.session, self.recipe
        expected: dict[str, int] = {}
        by_samples: dict[int, list[tuple[str, int, int]]] = {}
        for name, domain in session.curriculum.domains.items():
            if domain.floor and when == "step":
                continue
            own = domain_sampling(recipe, domain)
            expected[name] = own.eval_tasks
            by_samples.setdefault(own.eval_samples, []).append((name, domain.level, own.eval_tasks))
        if not expected:
            return
        deadline = time.monotonic() + recipe.eval.timeout_s
        self.pending.append(Evaluation(session.ordinal, session.steps_done, when, expected, deadline))
        for samples, tasks in by_samples.items():
            self._requests += 1
            self._post(Evaluate(session.ordinal, tasks, samples, self._requests))

    def add(self, group: GroupData) -> None:
        """Take one answered (or void) held-out task."""
        for evaluation in self.pending:
            if evaluation.version == group.pinned_version:
                evaluation.add(group)

    def holding(self) -> list[int]:
        """Ids of the groups that are here."""
        return [group_id for evaluation in self.pending for taken in evaluation.groups.values() for group_id in taken]

    def examined(self) -> int:
        """Every evaluation of a version below this one is over."""
        return min((evaluation.version for evaluation in self.pending), default=self.session.ordinal)

    def left_s(self) -> float:
        """Seconds until the last deadline of those under way."""
        return max(evaluation.deadline_at for evaluation in self.pending) - time.monotonic()

    def reap(self) -> None:
        """Record evaluations that are complete or out of time."""
        for evaluation in list(self.pending):
            if evaluation.complete or time.monotonic() >= evaluation.deadline_at:
                self.pending.remove(evaluation)
                self._record(evaluation)

    def _record(self, evaluation: Evaluation) -> None:
        results = evaluation.results()
        self.session.evaluated(evaluation, results)
        floors = self.session.curriculum.floors
        self.records.evaluation(evaluation, results, floors)
        values: dict[str, float] = {}
        for domain, result in results.items():
            if result.accuracy is not None and result.solved is not None:
                watched = names.LEARNER_FLOOR if domain in floors else names.LEARNER_EVAL
                values[member(watched, domain)] = result.accuracy
                values[member(names.LEARNER_EVAL_PASS, domain)] = result.solved
        self.board.scalars(values, evaluation.step)
        shown = ", ".join(
            f"{domain} {result.accuracy:.3f}" if result.accuracy is not None else f"{domain} unknown ({result.reason})"
            for domain, result in results.items()
        )
        log(f"evaluation of version {evaluation.version} ({evaluation.when}, step {evaluation.step}): {shown}")
        trained = {domain: result.accuracy for domain, result in results.items() if domain not in floors}
        for alarm in self.session.oversight.evaluation(trained):
            log(f"ALARM {alarm}")
