"""A slow engine start is no stall; a dead one is."""

from __future__ import annotations

from temper.common.metrics import ACTOR_STARTING
from temper.common.schema import Metrics
from temper.learner.patience import FRESH_S, LIMIT_S, Patience


def said(source: str, seconds: float) -> Metrics:
    return Metrics(source, {}, {ACTOR_STARTING: seconds})


def test_silence_is_a_stall_unless_engines_are_starting() -> None:
    patience = Patience()
    assert patience.starting(0.0) == []
    patience.heard(Metrics("sandbox-1", {}, {}), 0.0)
    patience.heard(said("actor-1", 290.0), 0.0)
    assert patience.starting(1.0) == ["actor-1"]
    assert patience.starting(FRESH_S + 1.0) == []  # it says nothing any more
    patience.heard(said("eval-1", 5.0), 2.0)
    assert patience.starting(2.0) == ["actor-1", "eval-1"]
    patience.heard(said("actor-1", 0.0), 3.0)
    assert patience.starting(3.0) == ["eval-1"]
    patience.heard(said("eval-1", LIMIT_S + 1.0), 4.0)
    assert patience.starting(4.0) == []
