"""What a run shows while it goes: one `Picture`, drawn as a live panel on a terminal or as plain lines elsewhere.

The picture is a value made from the broker's status, the learner's progress lines and the supervisor's processes; drawing
is pure. Rates come from differences between two pictures, never from a clock of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from temper.common.log import clean
from temper.common.reports import Progress, RunStatus

WINDOW_S = 10.0
RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One supervised process as shown: `state` is starting, ready, restarting, stopped or given up."""

    name: str
    state: str
    note: str = ""


@dataclass(slots=True)
class Rates:
    """Rates per second over the last `WINDOW_S` of samples (time, counters)."""

    samples: deque[tuple[float, Mapping[str, float]]] = field(default_factory=deque)

    def add(self, now: float, counters: Mapping[str, float]) -> None:
        """Take a sample of cumulative counters."""
        self.samples.append((now, counters))
        while len(self.samples) > 2 and now - self.samples[0][0] > WINDOW_S:
            self.samples.popleft()

    def of(self, name: str) -> float | None:
        """Increase per second of one counter, None before there are two samples."""
        if len(self.samples) < 2:
            return None
        (t0, first), (t1, last) = self.samples[0], self.samples[-1]
        return max(0.0, last.get(name, 0.0) - first.get(name, 0.0)) / (t1 - t0) if t1 > t0 else None


class Picture:
    """Everything that is shown. Fed by `status`, `progress` and `processes`; read by `panel` and `line`."""

    def __init__(self, name: str, max_steps: int, run_dir: str) -> None:
        self.name = name
        self.max_steps = max_steps
        self.run_dir = run_dir
        self.processes: Sequence[ProcessState] = ()
        self.status: RunStatus | None = None
        self.stale = True
        self.steps: deque[Progress] = deque(maxlen=RECENT_STEPS)
        self.warm: Progress | None = None
        self.evals: dict[str, Progress] = {}
        self.tokens_trained = 0
        self.rates = Rates()
        self.started = time.monotonic()

    def take_status(self, status: RunStatus | None, now: float) -> None:
        """A fresh answer of the broker, or None when it did not answer."""
        self.stale = status is None
        if status is None:
            return
        self.status = status
        counters = {"sampled": float(status.sampled_tokens), "trained": float(self.tokens_trained)}
        counters["jobs"] = float(sum(status.jobs.values()))
        counters["steps"] = float(self.step)
        self.rates.add(now, counters)

    def take_progress(self, lines: Iterable[Progress]) -> None:
        """New lines of progress.jsonl."""
        for line in lines:
            if line.kind == "step":
                self.steps.append(line)
                self.tokens_trained += line.tokens
            elif line.kind == "warm":
                self.warm = line
                self.tokens_trained += line.tokens
            else:
                self.evals[line.when if line.when != "step" else f"step {line.step}"] = line

    # ---------------------------------------------------------------- derived

    @property
    def step(self) -> int:
        """RL steps done, from whoever knows more."""
        return max(self.steps[-1].step if self.steps else 0, self.status.steps_done if self.status else 0)

    @property
    def phase(self) -> str:
        """One word: starting, warm, train, eval, over."""
        return self.status.phase if self.status and self.status.phase else "starting"

    def eta_s(self) -> float | None:
        """Seconds to max_steps at the pace of the recent steps; None before two steps."""
        if len(self.steps) < 2:
            return None
        span = self.steps[-1].time_s - self.steps[0].time_s
        done = self.steps[-1].step - self.steps[0].step
        return (self.max_steps - self.step) * span / done if done > 0 else None

    def mean(self, values: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
        """Mean by domain over recent steps."""
        sums: dict[str, list[float]] = {}
        for row in values:
            for domain, value in row.items():
                if value is not None:
                    sums.setdefault(domain, []).append(value)
        return {domain: sum(found) / len(found) for domain, found in sums.items()}


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``; with hours from 1:00:00 on."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def rate(value: float | None) -> str:
    """A rate for people."""
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _by_domain(values: Mapping[str, float | None]) -> str:
    return "  ".join(f"{domain} {'-' if value is None else f'{value:.2f}'}" for domain, value in values.items()) or "-"


def facts(picture: Picture) -> list[tuple[str, str]]:
    """The rows that both forms show, in order."""
    status = picture.status
    rows: list[tuple[str, str]] = []
    if picture.warm and not picture.steps:
        likelihood = "" if picture.warm.likelihood is None else f", likelihood {picture.warm.likelihood:.2f}"
        rows.append(("warm start", f"version {picture.warm.version}{likelihood}"))
    rows.append(("reward", _by_domain(picture.mean(step.reward for step in picture.steps))))
    for when, line in list(picture.evals.items())[-3:]:
        rows.append((f"eval {when}", _by_domain({k: v for k, v in line.accuracy.items() if k not in line.floors})))
        if line.floors:
            rows.append((f"floor {when}", _by_domain({name: line.accuracy.get(name) for name in line.floors})))
    rows.append(
        ("tokens/s", f"sampled {rate(picture.rates.of('sampled'))}, trained {rate(picture.rates.of('trained'))}")
    )
    if picture.steps:
        last = picture.steps[-1]
        rows.append(("lag", f"mean {last.lag_mean:.1f}, max {last.lag_max:.0f} versions"))
    if status:
        queue = (
            f"{status.queued_groups} groups ({status.queued_bytes / 1e6:.1f} MB), {status.leases_in_flight} in flight"
        )
        rows.append(("queue", queue))
        jobs = f"{rate(picture.rates.of('jobs'))} jobs/s, {status.jobs_running} running, {status.jobs_queued} waiting"
        rows.append(("sandbox", jobs))
        rows += [
            (f"{peer.name} waits for", clean(peer.waiting_for))
            for peer in status.peers
            if peer.role == "learner" and peer.waiting_for
        ]
    return rows


def line(picture: Picture, now: float) -> str:
    """One plain line: for logs and pipes."""
    eta = picture.eta_s()
    head = f"[{duration(now - picture.started)}] {picture.phase} step {picture.step}/{picture.max_steps}"
    if eta is not None and picture.phase == "train":
        head += f" eta {duration(eta)}"
    rest = [f"{name} {value}" for name, value in facts(picture) if value != "-"]
    waiting = [
        f"{process.name} {process.state}" for process in picture.processes if process.state not in ("ready", "stopped")
    ]
    return " | ".join([head, *rest, *waiting])


def panel(picture: Picture, now: float) -> RenderableType:
    """The live view."""
    eta = picture.eta_s()
    head = Text.assemble(
        (picture.phase, "bold"),
        f"  step {picture.step}/{picture.max_steps}",
        f"  elapsed {duration(now - picture.started)}",
        "" if eta is None else f"  ETA {duration(eta)}",
        ("  (the broker does not answer)" if picture.stale and picture.status else "", "yellow"),
    )
    table = Table.grid(padding=(0, 2))
    for name, value in facts(picture):
        table.add_row(Text(name, style="dim"), Text(value))  # not markup: some of it comes from peers
    colours = {"ready": "green", "starting": "yellow", "restarting": "red", "given up": "red"}
    processes = Text("  ").join(
        Text(f"{process.name} {process.note or process.state}", style=colours.get(process.state, "dim"))
        for process in picture.processes
    )
    bar = Table.grid(expand=True)  # a bare bar ends without a new line
    bar.add_row(ProgressBar(total=max(1, picture.max_steps), completed=picture.step))
    return Panel(
        Group(head, bar, table, processes),
        title=f"temper {picture.name}",
        subtitle=Text(picture.run_dir),
        title_align="left",
    )
