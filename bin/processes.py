"""One supervised process: how it is started, when it ended, what its log says. The supervisor's only way to processes.

A child gets a session of its own (a Ctrl-C of the terminal reaches only the supervisor, which drains in order), its
output goes to a log file, and ``TEMPER_PARENT_PID`` lets it arrange for its own death when the supervisor is killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from temper.cli.policy import Role
from temper.common.config import Recipe
from temper.common.errors import EnvironmentFault
from temper.common.reports import RECIPE_FILE

TAIL_LINES = 20
LINE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start: `module` is run as ``python -P -m module arguments``."""

    name: str
    role: Role
    module: str
    arguments: tuple[str, ...]


class LogTail:
    """Follows a growing file: the last lines, and whether a line says READY. Reads only what is new."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.lines: deque[str] = deque(maxlen=TAIL_LINES)
        self.ready = False
        self._pattern = re.compile(rf"(^|\s)READY {re.escape(name)}(\s|$)")
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def read(self) -> None:
        """Take in what was appended."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LINE_BYTES:]
        for line in lines:
            text = line[:LINE_BYTES].decode(errors="replace")
            self.lines.append(text)
            self.ready = self.ready or bool(self._pattern.search(text))

    def tail(self) -> list[str]:
        """The last lines, with an unfinished one."""
        self.read()
        return [*self.lines, *([self._rest.decode(errors="replace")] if self._rest else [])][-TAIL_LINES:]


class Process:
    """A running child. `poll` is cheap; nothing here blocks for longer than a fork."""

    def __init__(self, spec: ProcessSpec, log_path: Path, threads: int) -> None:
        self.spec = spec
        self.log = LogTail(log_path, spec.name)
        environment = dict(os.environ)
        environment["TEMPER_PARENT_PID"] = str(os.getpid())
        environment["TEMPER_LOG_DIR"] = str(log_path.parent)  # for the logs of what the child starts
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        command = [sys.executable, "-P", "-m", spec.module, *spec.arguments]
        try:
            with log_path.open("ab") as out:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=environment,
                )
        except OSError as error:
            raise EnvironmentFault(f"cannot start {spec.name}: {error.strerror}: {error.filename}") from error
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """The exit code (negative: signal), None while it runs."""
        return self._popen.poll()

    def peak_bytes(self) -> int:
        """The most memory that was resident so far; 0 when it has ended."""
        try:
            with open(f"/proc/{self.pid}/status", encoding="ascii", errors="replace") as file:
                return next((int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:")), 0)
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def pidfd(self) -> int:
        """A descriptor that becomes readable when the process ends; the caller closes it."""
        return os.pidfd_open(self.pid)

    def terminate(self) -> None:
        """Ask it to drain."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)


def commands(recipe: Recipe, run_dir: Path, address: str, *, resume: bool, host_file: str | None) -> list[ProcessSpec]:
    """The processes of a run on this machine: broker, learner, then as many of the others as ``[daemons]`` says."""
    run = str(run_dir)
    connect = ("--broker", address, "--connect-timeout", f"{recipe.run.connect_timeout_s:g}")
    host = ("--host", host_file) if host_file else ()
    specs = [
        ProcessSpec(
            "broker",
            "broker",
            "temper.broker",
            (str(run_dir / RECIPE_FILE), "--run", run, "--bind", address, *(("--resume",) if resume else ())),
        ),
        ProcessSpec(
            "learner",
            "learner",
            "temper.learner",
            (*connect, "--name", "learner", "--run", run, *(("--resume", run) if resume else ())),
        ),
    ]
    executes = any(domain.needs_sandbox for domain in recipe.domains)
    others: list[tuple[Role, int, str, tuple[str, ...]]] = [
        (
            "sandbox",
            recipe.daemons.sandboxes if executes else 0,
            "temper.sandbox",
            ("--slots", str(recipe.sandbox.slots)),
        ),
        ("eval", recipe.daemons.evaluators, "temper.actor", ("--lane", "eval")),
        ("actor", recipe.daemons.actors, "temper.actor", ()),
    ]
    for role, count, module, extra in others:
        for number in range(1, count + 1):
            name = f"{role}-{number}"
            specs.append(ProcessSpec(name, role, module, (*connect, "--name", name, *extra, *host)))
    return specs
