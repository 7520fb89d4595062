"""What daemons report in their metrics and `temper status` shows: the learner's lag and publishing, the actors' swaps.

Bounded whatever peers send: only known names and finite values are kept. Used by ``control``.
"""

from __future__ import annotations

import math
from collections import Counter

from temper.broker.events import PeerKey
from temper.common import metrics
from temper.common.schema import Metrics, Role

LEARNER_GROUPS = tuple(
    name.rsplit("/", 1)[0] + "/"
    for name in (metrics.LEARNER_LAG_MEAN, metrics.LEARNER_LAG_SHARE, metrics.LEARNER_LAG_LENGTH)
)
LEARNER_GAUGES = (metrics.LEARNER_ENCODE_TIME, metrics.LEARNER_PUBLISH_TIME)
ACTOR_GAUGES = (metrics.ACTOR_PAUSE, metrics.ACTOR_FETCH_TIME, metrics.ACTOR_STAGE_TIME)
RESEEDS = metrics.ACTOR_RESEED_REASONS.removesuffix("*")
KEPT = 256  # names, where a peer chooses part of them


class Reported:
    """The last gauges of learner and actors, and counters over all actors since this process began."""

    def __init__(self) -> None:
        self.sampled_tokens = 0.0
        self.learner: dict[str, float] = {}
        self.swaps: dict[PeerKey, dict[str, float]] = {}
        self.reseeds: Counter[str] = Counter()

    def take(self, key: PeerKey, role: Role, body: Metrics) -> None:
        """One tick of a peer."""
        counters = {name: value for name, value in body.counters.items() if math.isfinite(value)}
        gauges = {name: value for name, value in body.gauges.items() if math.isfinite(value)}
        if role == "learner":
            for name, value in gauges.items():
                wanted = name in LEARNER_GAUGES or name.startswith(LEARNER_GROUPS)
                if wanted and (name in self.learner or len(self.learner) < KEPT):
                    self.learner[name] = value
        elif role in ("actor", "eval"):
            self.sampled_tokens += counters.get(metrics.ACTOR_TOKENS, 0.0)
            self.swaps[key] = {name: gauges[name] for name in ACTOR_GAUGES if name in gauges}
            for name, value in counters.items():
                reason = name.removeprefix(RESEEDS)
                if reason != name and (reason in self.reseeds or len(self.reseeds) < KEPT):
                    self.reseeds[reason] += int(value)

    def left(self, key: PeerKey) -> None:
        """The peer is gone; its counts stay."""
        self.swaps.pop(key, None)

    def longest(self, name: str) -> float:
        """The largest last value over the actors that are there."""
        return max((gauges.get(name, 0.0) for gauges in self.swaps.values()), default=0.0)
