"""The run's TensorBoard directory: what every daemon reports, and what each step and evaluation brought.

Tags are the names of the metric registry. Per-step metrics are drawn over RL steps (warm-start steps below ``warm``),
ticks of the daemons over the seconds since the learner's start, one sub-directory a daemon; counters are drawn as rates,
``<name>`` with ``_per_second`` appended. Nothing is written for a name that the registry does not know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from temper.common.errors import EnvironmentFault
from temper.common.metrics import kind_of
from temper.common.schema import Metrics
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

WINDOW_S = 5.0  # ticks of a daemon are merged over this time
SOURCES_LIMIT = 256  # sub-directories: peers choose their names


class _Window:
    def __init__(self, now: float) -> None:
        self.since = now
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}


class Board:
    """Writes below `folder`; `own` is the learner's name, whose relayed ticks are not written twice."""

    def __init__(self, folder: Path, own: str, started: float | None = None) -> None:
        self.folder = folder
        self.own = own
        self.started = time.time() if started is None else started
        self._writers: dict[str, EventFileWriter] = {}
        self._windows: dict[str, _Window] = {}

    def ticks(self, metrics: Metrics, now: float) -> None:
        """One relayed tick of a daemon, at `now` (seconds, Unix)."""
        if metrics.source == self.own or (metrics.source not in self._windows and len(self._windows) >= SOURCES_LIMIT):
            return
        window = self._windows.setdefault(metrics.source, _Window(now))
        for name, value in metrics.counters.items():
            if kind_of(name) == "counter":
                window.counters[name] = window.counters.get(name, 0.0) + value
        for name, value in metrics.gauges.items():
            if kind_of(name) == "gauge":
                window.gauges[name] = value
        if now - window.since >= WINDOW_S:
            self._close_window(metrics.source, window, now)

    def _close_window(self, source: str, window: _Window, now: float) -> None:
        passed = max(now - window.since, 1e-3)
        values = {f"{name}_per_second": value / passed for name, value in window.counters.items()} | window.gauges
        self._write(source, values, int(now - self.started), now)
        self._windows[source] = _Window(now)

    def step(self, metrics: Mapping[str, tuple[float, float]], step: int, *, warm: bool = False) -> None:
        """The (sum, count) metrics of one step: gauges as means, counters as sums."""
        values = {}
        for name, (total, count) in metrics.items():
            kind = kind_of(name)
            if kind == "counter":
                values[name] = total
            elif kind == "gauge" and count:
                values[name] = total / count
        self._write("warm" if warm else "", values, step, time.time())

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Values at an RL step (evaluations)."""
        self._write("", {name: value for name, value in values.items() if kind_of(name)}, step, time.time())

    def flush(self) -> None:
        """Bring everything to disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Write what is left and close the files."""
        now = time.time()
        for source, window in list(self._windows.items()):
            if window.counters or window.gauges:
                self._close_window(source, window, now)
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, source: str, values: Mapping[str, float], step: int, now: float) -> None:
        if not values:
            return
        try:
            if source not in self._writers:
                self._writers[source] = EventFileWriter(str(self.folder / _folder_name(source)))
            rows = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._writers[source].add_event(Event(wall_time=now, step=step, summary=Summary(value=rows)))
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write TensorBoard files below {self.folder}: {error}; free space there or give another --run folder"
            ) from error


def _folder_name(source: str) -> str:
    """A source as one folder's name, whatever a peer calls itself."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in source)[:64].lstrip(".")
    return safe or "."
