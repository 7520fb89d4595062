"""Alarms: raised once, cleared, raised again; the curriculum's shares and running means survive a checkpoint."""

import json

import pytest
from temper.common import metrics as names
from temper.common.config import DomainConfig
from temper.common.errors import ConfigError
from temper.learner.curriculum import Curriculum
from temper.learner.oversight import Oversight
from temper.learner.step import StepReport


def report(**metrics: tuple[float, float]) -> StepReport:
    groups = {"learner/groups/trained": (4.0, 1.0), "learner/groups/zero_variance": (0.0, 1.0)}
    return StepReport(groups | {getattr(names, key): value for key, value in metrics.items()}, {}, [])


def test_an_alarm_stands_until_it_clears():
    watch = Oversight()
    bad, good = report(LEARNER_SKIPPED=(1.0, 1.0)), report(LEARNER_SKIPPED=(0.0, 1.0))
    assert watch.step(bad) == ["an update was skipped: its gradient was not finite"]
    assert watch.step(bad) == [] and watch.step(good) == []
    assert len(watch.step(bad)) == 1


def test_groups_without_contrast_and_a_dead_policy_are_seen():
    watch = Oversight()
    flat = report(LEARNER_ENTROPY=(0.0, 10.0))
    flat.metrics["learner/groups/zero_variance"] = (4.0, 1.0)
    found = watch.step(flat)
    assert any("no contrast" in text for text in found) and any("no longer explores" in text for text in found)


def test_reward_up_and_accuracy_down_is_called_gaming():
    watch = Oversight()

    def rewarded(value: float) -> StepReport:
        made = report()
        made.metrics["learner/reward/a"] = (value * 8, 8.0)
        return made

    watch.step(rewarded(0.2))
    assert watch.evaluation({"a": 0.6, "b": None}) == []
    for _ in range(60):
        watch.step(rewarded(0.9))
    restored = Oversight()
    restored.load(json.loads(json.dumps(watch.state())))
    for one in (watch, restored):
        (alarm,) = one.evaluation({"a": 0.4})
        assert alarm.startswith(
            "domain a: train reward rose from 0.20 to 0.87 while held-out accuracy fell from 0.60 to 0.40"
        )


def test_shares_come_from_the_recipe():
    domains = (
        DomainConfig("a", "m", share=2.0, level=3),
        DomainConfig("b", "m", warm_start_share=0.0),
        DomainConfig("held out", "m", train=False),
    )
    curriculum = Curriculum(domains)
    assert curriculum.shares("train") == {"a": (3, 2.0), "b": (0, 1.0)}
    assert curriculum.shares("demo") == {"a": (3, 1.0)}
    assert sum(curriculum.portions().values()) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="warm_start_share"):
        Curriculum(domains[1:]).shares("demo")
