"""The one registry of metrics: name, unit, kind, definition. It yields TensorBoard tags and the README's table.

A metric is named ``<daemon>/<group>/<name>_<unit>``. A daemon holds a `Meter`, counts into it, and reports the full
key set of its role every tick (`Meter.tick`): counters since the last tick, gauges as last seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from temper.common.errors import ConfigError

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` may end in ``/*``: one series per domain, outcome or reason, whose name replaces the star."""

    name: str
    unit: str
    kind: Kind
    definition: str


REGISTRY: dict[str, Metric] = {}


def declare(name: str, unit: str, kind: Kind, definition: str) -> str:
    """Register a metric once, at import; returns its name so that modules hold constants."""
    if name in REGISTRY:
        raise ConfigError(f"metric {name} is declared twice")
    REGISTRY[name] = Metric(name, unit, kind, definition)
    return name


class Meter:
    """Counts of one daemon. Unknown names raise: the registry is the whole list."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.counters = {m.name: 0.0 for m in REGISTRY.values() if self._mine(m) and m.kind == "counter"}
        self.gauges = {m.name: 0.0 for m in REGISTRY.values() if self._mine(m) and m.kind == "gauge"}

    def _mine(self, metric: Metric) -> bool:
        return metric.name.split("/", 1)[0] == self.role and not metric.name.endswith("/*")

    @staticmethod
    def _check(name: str, kind: Kind) -> None:
        metric = REGISTRY.get(name) or REGISTRY.get(name.rsplit("/", 1)[0] + "/*")
        if metric is None or metric.kind != kind:
            raise KeyError(f"{name} is not a declared {kind}: declare it in common/metrics.py")

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to a counter."""
        if name not in self.counters:
            self._check(name, "counter")
            self.counters[name] = 0.0
        self.counters[name] += value

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name not in self.gauges:
            self._check(name, "gauge")
        self.gauges[name] = value

    def tick(self) -> tuple[dict[str, float], dict[str, float]]:
        """(counters since the last tick, gauges); counters restart at 0, the key set stays."""
        counters, gauges = dict(self.counters), dict(self.gauges)
        self.counters = dict.fromkeys(counters, 0.0)
        return counters, gauges


# ---------------------------------------------------------------- actor
ACTOR_TOKENS = declare("actor/engine/sampled_tokens", "tokens", "counter", "Tokens sampled by the engine.")
ACTOR_ROWS = declare("actor/engine/rows_count", "rows", "gauge", "Rows being decoded.")
ACTOR_WAIT = declare("actor/wait/seconds", "s", "counter", "Time without anything to decode.")
ACTOR_PAUSE = declare("actor/weights/pause_seconds", "s", "gauge", "Pause of the last weight commit.")
ACTOR_SWAPS = declare("actor/weights/swaps_count", "swaps", "counter", "Weight versions committed.")
ACTOR_RESEEDS = declare(
    "actor/weights/reseeds_count", "reseeds", "counter", "Times a full copy was taken instead of a delta."
)
ACTOR_SAMPLES = declare("actor/samples/finished_count", "samples", "counter", "Samples finished and scored.")
ACTOR_CACHE_HITS = declare(
    "actor/sandbox/shared_verdicts_count", "jobs", "counter", "Jobs answered by an identical job's verdict."
)
ACTOR_JOBS = declare("actor/sandbox/jobs_count", "jobs", "counter", "Jobs sent to sandbox workers.")
ACTOR_TASK_ERRORS = declare(
    "actor/domain/errors_count", "errors", "counter", "Domain or task failures (raised, hung, NaN)."
)


# ---------------------------------------------------------------- sandbox


# ---------------------------------------------------------------- broker


# ---------------------------------------------------------------- learner
