"""How `temper evaluate` shows itself while it goes: a bar over tasks with the time left, or plain lines in a pipe."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from temper.cli.supervisor import LINE_S, Display
from temper.cli.view import Picture, duration
from temper.common.log import clean


@dataclass(slots=True)
class Pace:
    """Tasks done over time, and what that leaves. The pace counts from the first answer: starting is not part of it."""

    total: int
    done: int = 0
    first: tuple[float, int] | None = None

    def take(self, done: int, now: float) -> None:
        """`done` tasks at `now` (seconds, monotonic)."""
        self.done = min(max(self.done, done), self.total)
        if self.first is None and self.done:
            self.first = (now, self.done)

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last task; None before there is a pace."""
        if self.first is None or self.done <= self.first[1]:
            return None
        return (self.total - self.done) * (now - self.first[0]) / (self.done - self.first[1])

    def text(self, now: float) -> str:
        """What the bar says beside its numbers."""
        eta = self.eta_s(now)
        if self.done >= self.total:
            return "last answers"
        return "starting" if not self.done else "" if eta is None else f"ETA {duration(eta)}"


def answered(picture: Picture) -> int:
    """Tasks that the evaluator has finished, from the broker's status."""
    return picture.status.groups.get("evaluated", 0) if picture.status else 0


class BarDisplay:
    """One bar on a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._pace = Pace(total)
        self._bar = Progress(
            TextColumn("evaluating"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("evaluating", total=total, note="starting")
        self._bar.start()

    def draw(self, picture: Picture, now: float) -> None:
        """Move the bar."""
        self._pace.take(answered(picture), now)
        with contextlib.suppress(OSError):  # the terminal is gone: the evaluation is not
            self._bar.update(self._task, completed=self._pace.done, note=self._pace.text(now), refresh=True)

    def say(self, text: str) -> None:
        """One line above the bar."""
        with contextlib.suppress(OSError):
            self._console.print(clean(text), markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        with contextlib.suppress(OSError):
            self._bar.stop()


class LineDisplay:
    """A line every few seconds, for pipes and logs."""

    def __init__(self, total: int) -> None:
        self._pace = Pace(total)
        self._next = 0.0

    def draw(self, picture: Picture, now: float) -> None:
        """Say how far it is, every `LINE_S`."""
        self._pace.take(answered(picture), now)
        if now >= self._next:
            self._next = now + LINE_S
            note = self._pace.text(now)
            self.say(f"[{duration(now - picture.started)}] {self._pace.done}/{self._pace.total} tasks {note}".rstrip())

    def say(self, text: str) -> None:
        """One line."""
        with contextlib.suppress(OSError):
            print(clean(text), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Every line was flushed."""


def display(total: int) -> Display:
    """The display for this process's stderr (stdout is kept for results)."""
    console = Console(stderr=True)
    return BarDisplay(console, total) if console.is_terminal else LineDisplay(total)
