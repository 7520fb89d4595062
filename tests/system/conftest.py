"""Daemons as a user starts them: real processes, each with its log, none left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from temper.common import reports

STEP_S = 0.05


class Daemon:
    """One process and its log."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEMPER_PARENT_PID": str(os.getpid())}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments], stdout=output, stderr=output, env=environment, cwd=log.parent
            )

    def text(self) -> str:
        """Everything it has logged."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """Its last lines, for a failing test's message."""
        return f"--- {self.name} ---\n" + "\n".join(self.text().splitlines()[-25:])

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Fleet:
    """The daemons of one test and the run directory that they share."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.address = f"ipc://{sockets}"
        self.daemons: dict[str, Daemon] = {}

    def start(self, name: str, *arguments: str) -> Daemon:
        """Start `python -P -m ARGUMENTS` under a name."""
        daemon = Daemon(name, list(arguments), self.folder / f"{name}.log")
        self.daemons[name] = daemon
        return daemon

    def broker(self, recipe: str, *overrides: str) -> Daemon:
        """The broker of this fleet's run."""
        return self.start(
            "broker", "temper.broker", recipe, "--run", str(self.run_dir), "--bind", self.address, *overrides
        )

    def peer(self, name: str, module: str, *arguments: str) -> Daemon:
        """A daemon that connects to this fleet's broker."""
        return self.start(name, module, "--broker", self.address, "--name", name, *arguments)

    def learner(self, *arguments: str) -> Daemon:
        """The learner, its files in the run directory."""
        return self.peer("learner", "temper.learner", "--run", str(self.run_dir), *arguments)

    def evaluator(self) -> Daemon:
        """The evaluator."""
        return self.peer("eval-1", "temper.actor", "--lane", "eval")

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(daemon.tail() for daemon in self.daemons.values())

    def wait_exit(self, name: str, timeout_s: float) -> int:
        """The exit code of a daemon; fails with all logs if it goes on for longer."""
        try:
            return self.daemons[name].process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} still runs after {timeout_s:.0f} s\n{self.logs()}")

    def wait_log(self, name: str, pattern: str, timeout_s: float) -> None:
        """Until a daemon's log matches; fails with all logs if it ends or takes longer."""
        self._wait(lambda: re.search(pattern, self.daemons[name].text()) is not None, f"{name}: {pattern}", timeout_s)

    def wait_step(self, step: int, timeout_s: float) -> None:
        """Until the learner has done `step` RL steps."""
        self._wait(lambda: self.steps() >= step, f"step {step}", timeout_s)

    def steps(self) -> int:
        """RL steps done, from progress.jsonl."""
        return max((line.step for line in self.progress() if line.kind == "step"), default=0)

    def progress(self) -> list[reports.Progress]:
        """The learner's progress lines so far."""
        path = self.run_dir / reports.PROGRESS_FILE
        if not path.exists():
            return []
        whole = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
        return [reports.decode(line, reports.Progress, str(path)) for line in whole]

    def summary(self) -> reports.Summary:
        """summary.json of the finished run."""
        summary = reports.read_summary(self.run_dir)
        assert summary is not None, f"no summary\n{self.logs()}"
        return summary

    def _wait(self, done: object, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():  # type: ignore[operator]
            dead = [d.name for d in self.daemons.values() if d.process.poll() not in (None, 0, -signal.SIGKILL)]
            if dead or time.monotonic() > deadline:
                pytest.fail(f"{what}: {'died: ' + ', '.join(dead) if dead else 'not within its time'}\n{self.logs()}")
            with contextlib.suppress(subprocess.TimeoutExpired):  # wakes at once when the newest daemon dies
                next(reversed(self.daemons.values())).process.wait(STEP_S)

    def close(self) -> None:
        """Kill what is left."""
        for daemon in self.daemons.values():
            with contextlib.suppress(ProcessLookupError):
                daemon.process.kill()
            daemon.process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet with a socket folder short enough for ipc."""
    with tempfile.TemporaryDirectory(prefix="temper-") as sockets:
        fleet = Fleet(tmp_path, Path(sockets) / "s")
        try:
            yield fleet
        finally:
            fleet.close()


def read_books(run_dir: Path) -> dict[str, int]:
    """Read the ledger of a finished run and check its books; groups of the train lane by state.

    Every lease has exactly one group, none is still open, no sample is there twice, and every step trained equally many.
    """
    (path,) = run_dir.rglob("ledger.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db:
        leases = {row[0] for row in db.execute("SELECT lease_id FROM leases")}
        groups = {row[0]: row[1:] for row in db.execute("SELECT group_id, lane, state, version, reason FROM groups")}
        doubled = db.execute(
            "SELECT lease_id, sample_index FROM samples GROUP BY lease_id, sample_index HAVING count(*) > 1"
        ).fetchall()
    assert not doubled
    assert leases <= set(groups), f"leases without a group: {sorted(leases - set(groups))[:5]}"
    states: dict[str, int] = {}
    sizes = Counter(version for lane, state, version, _ in groups.values() if (lane, state) == ("train", "trained"))
    assert len(set(sizes.values())) <= 1, f"steps trained different numbers of groups: {sizes}"
    for lane, state, _, reason in groups.values():
        assert state in ("trained", "void", "reported" if lane == "eval" else ""), (
            f"a group of lane {lane} ended as {state}"
        )
        assert state != "void" or reason, "a void group without a reason"
        if lane == "train":
            states[state] = states.get(state, 0) + 1
    return states


@pytest.fixture
def audit() -> Callable[[Path], dict[str, int]]:
    """`read_books`."""
    return read_books
