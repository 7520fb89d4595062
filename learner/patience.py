"""How long the learner waits for groups: a stall ends the run, an engine that is still starting does not.

Actors and evaluators say with their metrics for how long their engine has not answered. While one of them is starting,
silence is no stall. Pure; called by `daemon`.
"""

from __future__ import annotations

from temper.common import metrics
from temper.common.schema import Metrics, Trouble

FRESH_S = 10.0  # what an actor said counts this long
LIMIT_S = 1200.0  # an engine that takes longer is not starting any more


class Patience:
    """What actors last said of their engines."""

    def __init__(self) -> None:
        self.trouble = ""  # what last went wrong with one
        self._said: dict[str, tuple[float, float]] = {}

    def heard(self, body: Metrics, now: float) -> None:
        """An actor's metrics came at `now`."""
        starting_s = body.gauges.get(metrics.ACTOR_STARTING)
        if starting_s is not None:
            self._said[body.source] = (starting_s, now)

    def troubled(self, body: Trouble) -> None:
        """Something went wrong with an actor or evaluator."""
        self.trouble = body.reason

    def starting(self, now: float) -> list[str]:
        """Who is starting; nobody means that silence is a stall."""
        return sorted(
            source
            for source, (starting_s, at) in self._said.items()
            if now - at <= FRESH_S and 0 < starting_s <= LIMIT_S
        )
