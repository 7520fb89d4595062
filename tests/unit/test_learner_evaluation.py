"""Evaluations: no accuracy before every task is answered, intervals over tasks, voids counted and left out."""

import dataclasses

import numpy as np
import pytest
from temper.common.estimators import wilson
from temper.common.reports import TaskResult
from temper.learner.evaluation import DomainResult, Evaluation, from_plain, mean_accuracy, score, to_plain
from temper.learner.inbox import GroupData, SampleData


def group(group_id: int, verdicts: list[bool | None], domain: str = "a", void: str | None = None) -> GroupData:
    empty = np.zeros(2, np.int32)
    samples = tuple(
        SampleData(i, empty, empty.astype(bool), empty.astype(np.float32), empty, None if v is None else float(v), v)
        for i, v in enumerate(verdicts)
    )
    return GroupData(group_id, "eval", domain, 0, group_id, samples, pinned_version=3, void=void)


def test_accuracy_is_the_mean_over_tasks_of_the_share_of_correct_samples():
    result = score([group(1, [True, False]), group(2, [True, True, True, True]), group(3, [False, None])])
    assert (result.tasks, result.samples) == (3, 7)
    assert result.accuracy == pytest.approx((0.5 + 1 + 0) / 3)
    assert result.solved == pytest.approx(2 / 3)


def test_a_void_task_is_left_out_and_counted():
    result = score([group(1, [True]), group(2, [], void="quarantined"), group(3, [None])])
    assert (result.tasks, result.void_tasks, result.accuracy) == (1, 2, 1.0)
    nothing = score([group(2, [], void="quarantined")])
    assert nothing.accuracy is None and nothing.reason == "no task was judged: quarantined"


def test_a_partial_evaluation_has_no_accuracy():
    evaluation = Evaluation(3, 0, "before", {"a": 2, "b": 1}, deadline_at=0.0)
    evaluation.add(group(1, [True]))
    evaluation.add(group(1, [True]))  # sent twice, counted once
    evaluation.add(group(5, [False], domain="b"))
    assert not evaluation.complete
    results = evaluation.results()
    assert results["a"].accuracy is None and results["a"].reason == "1 of 2 tasks were answered in time"
    assert results["b"].accuracy == 0.0 and mean_accuracy(results) is None
    evaluation.add(group(2, [False]))
    assert evaluation.complete and mean_accuracy(evaluation.results()) == 0.25
    assert from_plain(to_plain(evaluation.results())) == evaluation.results()


def test_the_interval_is_wilson_s():
    low, high = wilson(0.5, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 100)[0] == pytest.approx(0.9630, abs=1e-4) and wilson(1.0, 100)[1] == 1.0
    assert wilson(0.0, 0) == (0.0, 1.0)


def test_no_results_have_no_mean():
    assert mean_accuracy({}) is None
    assert (
        mean_accuracy({"a": DomainResult(accuracy=0.5), "b": dataclasses.replace(DomainResult(), accuracy=1.0)}) == 0.75
    )


def test_every_task_is_kept_in_numbers_void_ones_with_their_reason():
    evaluation = Evaluation(3, 0, "before", {"a": 3}, deadline_at=0.0)
    evaluation.add(group(7, [True, None, False]))
    evaluation.add(group(2, [], void="quarantined"))
    first, second = evaluation.tasks()["a"]
    assert first == TaskResult(2, void="quarantined")
    assert (second.task, second.samples, second.correct, second.unscored, second.truncated) == (7, 2, 1, 1, 0)
