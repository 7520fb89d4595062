"""Runs a recipe's processes until the run is over: starts them, watches them, shows the run, carries out `policy`.

One loop that wakes on a process's end, a signal or every `TICK_S`. What to do is `Policy`'s decision alone. A side task
asks the broker for its status once a second; it may fail, the run goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text
from temper.cli import view
from temper.cli.client import StatusClient
from temper.cli.policy import Action, Ending, Kill, Policy, Say, Start, Terminate
from temper.cli.processes import Process, ProcessSpec
from temper.common.config import Recipe
from temper.common.errors import TemperError
from temper.common.log import clean
from temper.common.reports import ProgressReader

TICK_S = 0.2
STATUS_S = 1.0
LINE_S = 5.0
REDRAW_S = 0.5
DRAIN_MARGIN_S = 5.0  # beyond run.drain_timeout_s, which the daemons keep themselves
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Display(Protocol):
    """Where a run is shown."""

    def draw(self, picture: view.Picture, now: float) -> None:
        """Show the picture, as often as suits the medium."""
        ...

    def say(self, text: str) -> None:
        """One line beside it."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class LiveDisplay:
    """A panel that is redrawn in place twice a second, on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()
        self._next = 0.0

    def draw(self, picture: view.Picture, now: float) -> None:
        if now < self._next and any(process.state != "stopped" for process in picture.processes):
            return
        self._next = now + REDRAW_S
        with contextlib.suppress(OSError):  # the terminal is gone: the run is not
            self._live.update(view.panel(picture, now), refresh=True)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(Text(clean(text)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()


class PlainDisplay:
    """A line every few seconds, for pipes and logs."""

    def __init__(self) -> None:
        self._next = 0.0

    def draw(self, picture: view.Picture, now: float) -> None:
        if now >= self._next:
            self._next = now + LINE_S
            self.say(view.line(picture, now))

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(clean(text), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Every line was flushed."""


def display() -> Display:
    """The display for this process's stderr (stdout is kept for results)."""
    console = Console(stderr=True)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay()


class Supervisor:
    """Runs `specs` until the policy is over. `run` may be called once."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        policy: Policy,
        picture: view.Picture,
        shown: Display,
        *,
        run_dir: Path,
        address: str,
        threads: int,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.policy = policy
        self.picture = picture
        self.shown = shown
        self.run_dir = run_dir
        self.address = address
        self.threads = threads
        self.processes: dict[str, Process] = {}
        self.peak_bytes: dict[str, int] = {}
        self._progress = ProgressReader(run_dir)
        self._wake = asyncio.Event()
        self._broker_ready = asyncio.Event()

    async def run(self) -> Ending:
        """The run's ending; every child has ended when this returns or raises."""
        loop = asyncio.get_running_loop()
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays nohup
        for number in heard:
            loop.add_signal_handler(number, self._interrupt)
        watcher = asyncio.create_task(self._watch_status())
        watcher.add_done_callback(self._watch_ended)
        try:
            self._carry_out(self.policy.start(time.monotonic()))
            while self.policy.mode != "over":
                await self._turn()
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
            self._kill_all()
            self.picture.take_progress(self._progress.read())
            for number in heard:
                loop.remove_signal_handler(number)
        if self.policy.ending is None:
            raise AssertionError("the policy is over without an ending")
        return self.policy.ending

    def tail(self, name: str) -> list[str]:
        """The last log lines of a process."""
        return [clean(line) for line in self.processes[name].log.tail()] if name in self.processes else []

    # ---------------------------------------------------------------- one turn

    async def _turn(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), TICK_S)
        self._wake.clear()
        now = time.monotonic()
        for name, process in list(self.processes.items()):
            process.log.read()
            self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), process.peak_bytes())
            if process.log.ready:
                self._carry_out(self.policy.ready(name, now))
                if process.spec.role == "broker":
                    self._broker_ready.set()
            code = process.poll()
            if code is not None and self.policy.children[name].alive:
                self._carry_out(self.policy.exited(name, code, now))
        if self.picture.status is not None and self.picture.status.phase == "over":
            self.policy.over()
        self._carry_out(self.policy.tick(now))
        self.picture.take_progress(self._progress.read())
        self.picture.processes = self._states(now)
        self.shown.draw(self.picture, now)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(name):
                    self._start(name)
                case Terminate(name):
                    self.processes[name].terminate()
                case Kill(name):
                    self.processes[name].kill()
                case Say(text, name, tail):
                    self.shown.say(text)
                    for line in self.tail(name)[-5:] if tail else ():
                        self.shown.say(f"  {name}: {line}")

    def _start(self, name: str) -> None:
        spec = self.specs[name]
        if name in self.processes and spec.role == "broker" and "--resume" not in spec.arguments:
            spec = replace(spec, arguments=(*spec.arguments, "--resume"))  # it has a ledger now
        process = Process(spec, self.run_dir / "logs" / f"{name}.log", self.threads)
        self.processes[name] = process
        descriptor = process.pidfd()
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._wake.set()

        loop.add_reader(descriptor, ended)

    def _interrupt(self) -> None:
        self._carry_out(self.policy.interrupt(time.monotonic()))
        self._wake.set()

    def _kill_all(self) -> None:
        """Whatever raised, nothing survives; a no-op after a normal end."""
        for process in self.processes.values():
            process.kill()

    def _states(self, now: float) -> list[view.ProcessState]:
        states = []
        for child in self.policy.children.values():
            if child.given_up:
                state, note = "given up", ""
            elif child.restart_at is not None:
                state, note = "restarting", f"restarts in {max(0.0, child.restart_at - now):.0f} s"
            elif not child.alive:
                state, note = "stopped", ""
            else:
                state, note = ("ready", "") if child.ready else ("starting", "")
            states.append(view.ProcessState(child.name, state, note and f"{child.name} {note}"))
        return states

    # ---------------------------------------------------------------- the broker's status

    def _watch_ended(self, watcher: asyncio.Task[None]) -> None:
        """A bug in the side task is shown; it is no reason to end a run."""
        error = None if watcher.cancelled() else watcher.exception()
        if error is not None:
            self.shown.say(f"the status of the broker is not shown any more: {type(error).__name__}: {error}")

    async def _watch_status(self) -> None:
        """Keep `picture.status` fresh while the run goes; a failure is shown as a stale picture, not as an error."""
        await self._broker_ready.wait()
        while self.policy.mode == "running":
            client = StatusClient(self.address)
            try:
                await client.open(10.0)
                while self.policy.mode == "running":
                    self.picture.take_status(await client.fetch(), time.monotonic())
                    await asyncio.sleep(STATUS_S)
                self.picture.take_status(await client.fetch(1.0), time.monotonic())
            except TemperError:
                self.picture.take_status(None, time.monotonic())
                await asyncio.sleep(STATUS_S)
            finally:
                await client.close(goodbye=self.policy.mode == "running" and not self.picture.stale)


def supervise(
    specs: Sequence[ProcessSpec],
    recipe: Recipe,
    picture: view.Picture,
    shown: Display,
    *,
    run_dir: Path,
    address: str,
) -> tuple[Ending, Supervisor]:
    """Run `specs` to their end, with the recipe's limits. The ending names the last words of the process to blame."""
    policy = Policy([(spec.name, spec.role) for spec in specs], recipe.run.drain_timeout_s + DRAIN_MARGIN_S)
    threads = recipe.daemons.threads_per_process
    supervisor = Supervisor(specs, policy, picture, shown, run_dir=run_dir, address=address, threads=threads)
    try:
        ending = asyncio.run(supervisor.run())
    finally:
        shown.close()
    if ending.blamed:
        last = supervisor.tail(ending.blamed)[-1:] or ["its log is empty"]
        ending = replace(ending, reason=f"{ending.reason}: {last[0].strip()}")
    return ending, supervisor
