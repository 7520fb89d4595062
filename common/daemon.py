"""What every daemon does: start, be ready, drain, stop; one exit code; nothing waits or fails unseen.

    class Broker(Daemon):
        async def setup(self): ...                 # everything that must succeed before READY
        async def main(self):                      # READY; returning ends the daemon with exit code 0
            self.spawn(self.reporter(), "reporter")        # an error in it ends the daemon within a second
            job = await self.wait_for("learner: groups", self.groups.get(), deadline_s=300)
        async def drain(self, reason): ...         # SIGTERM or SIGINT; main is cancelled when this returns
        async def close(self, exit_code, reason): ...      # always, last
    sys.exit(run_daemon(Broker("broker", "broker")))

``peer_daemon.PeerDaemon`` adds the connection to the broker. States STARTING -> READY -> DRAINING -> STOPPED | FAILED.
The first signal drains, a second one exits at once. Exit codes: 0 clean, 1 bug (with traceback), 2 configuration, 3 peer
lost, 4 environment; the cause is the last line on stderr. READY is one line on stdout: ``READY actor-1 pid=123``. Errors
of callbacks and forgotten tasks end the daemon too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import uvloop
from temper.common import waiting
from temper.common.errors import TemperError
from temper.common.log import log, name_process
from temper.common.process import (
    BlockedLoopWatch,
    expected,
    follow_parent,
    give_memory_back,
    leave_within,
    leaves,
    orphaned,
    report,
    settle_garbage,
)
from temper.common.schema import State, Version

T = TypeVar("T")

TICK_S = 1.0
CANCEL_S = 5.0
THREADS_S = 3.0
ORPHAN_DRAIN_S = 5.0


class Daemon:
    """Base of the broker; ``peer_daemon.PeerDaemon`` is the base of everybody else."""

    def __init__(self, role: str, name: str, *, drain_timeout_s: float = 20.0) -> None:
        self.role = role
        self.name = name
        self.state: State = "STARTING"
        self.version: Version | None = None
        self.drain_timeout_s = drain_timeout_s
        self.stall_timeout_s = float("inf")
        self.trim_every_s = float("inf")  # how often freed memory is returned to the system
        self._trim_at = 0.0
        self.many_messages = (
            False  # a daemon whose memory is messages, not tensors: its garbage needs little collecting
        )
        self.last_progress = ""
        self._progress_at = time.monotonic()
        self._waits: dict[int, tuple[str, float]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Future[str] | None = None
        self._failure: asyncio.Future[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._cause: BaseException | None = None
        self._ending = False
        self._watch: BlockedLoopWatch | None = None

    # ------------------------------------------------------------ for subclasses to override

    async def start(self) -> None:
        """Before `setup`: PeerDaemon connects here."""

    async def setup(self) -> None:
        """Everything that must succeed before the daemon is READY."""

    async def main(self) -> None:
        """The work; returning ends the daemon cleanly."""
        await asyncio.get_running_loop().create_future()

    async def drain(self, reason: str) -> None:
        """Finish or return what is held; has `drain_timeout_s`. `main` still runs meanwhile and is cancelled afterwards."""

    async def close(self, exit_code: int, reason: str) -> None:
        """Always called last, also after a failure."""

    def tick(self) -> None:
        """Called every second from READY on, in the loop."""

    def pulse(self) -> None:
        """Called every second from the very start, in the loop: heartbeats."""

    # ------------------------------------------------------------ for subclasses to call

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` beside `main`. Its error ends the daemon; it is cancelled when the daemon ends."""
        if self._group is None:
            raise AssertionError("spawn outside of run_daemon")
        task = self._group.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self, reason: str) -> None:
        """Begin to drain (once)."""
        if self._stopping is not None and not self._stopping.done():
            log(f"draining: {reason}")
            self._stopping.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End the daemon with `error`."""
        self._cause = self._cause or error
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    @property
    def stopping(self) -> bool:
        """True once the daemon drains or fails."""
        return self.state in ("DRAINING", "STOPPED", "FAILED")

    def progress(self, text: str) -> None:
        """The work went on: shown in heartbeats with its age. From the first call on, `stall_timeout_s` without another
        one, without a `wait_for` and not `idle`, ends the daemon."""
        self.last_progress = text
        self._progress_at = time.monotonic()

    def idle(self) -> bool:
        """Whether there is nothing to make progress with: an idle daemon is not a stalled one."""
        return False

    @property
    def waiting_for(self) -> str:
        """What this daemon waits for now, longest first."""
        now = time.monotonic()
        return "; ".join(f"{what} ({now - since:.0f} s)" for what, since in self._waits.values() if now - since >= 1.0)

    async def wait_for(self, what: str, awaitable: Awaitable[T], deadline_s: float) -> T:
        """`waiting.wait_for`, shown in heartbeats too: `what` names whom one waits for and for what."""
        key = id(awaitable)
        self._waits[key] = (what, time.monotonic())
        try:
            return await waiting.wait_for(what, awaitable, deadline_s)
        finally:
            del self._waits[key]
            self._progress_at = time.monotonic()

    # ------------------------------------------------------------ the life of a daemon

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stopping, self._failure = loop.create_future(), loop.create_future()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._watch = BlockedLoopWatch()
        self._tick()
        code, reason = 0, "done"
        try:
            async with asyncio.TaskGroup() as self._group:
                self.spawn(self._sentinel(), "sentinel")
                reason = await self._live()
                self._end_tasks()
        except BaseExceptionGroup as errors:
            cause = self._cause or errors
            self.state = "FAILED"
            code, reason = report(self.role, cause), str((leaves(cause) or [cause])[0])
        finally:
            self._watch.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self.close(code, reason)
        if code == 0:
            self.state = "STOPPED"
            log(f"stopped: {reason}")
        return code

    async def _live(self) -> str:
        assert self._stopping is not None
        begun = self.spawn(self._begin(), "start")
        await waiting.first(begun, self._stopping)
        if not begun.done():
            begun.cancel()
            return self._stopping.result()
        begun.result()
        if self.many_messages:
            settle_garbage()
        self.state = "READY"
        self.pulse()
        self._announce()
        work = self.spawn(self.main(), "main")
        await waiting.first(work, self._stopping)
        if work.done():
            work.result()
            return "done"
        reason = self._stopping.result()
        self.state = "DRAINING"
        self.pulse()
        budget_s = min(self.drain_timeout_s, ORPHAN_DRAIN_S) if orphaned() else self.drain_timeout_s
        try:
            async with asyncio.timeout(budget_s):
                await self.drain(reason)
        except TimeoutError:
            log(f"draining took longer than {budget_s:.0f} s; stopping with work left: {self.waiting_for or 'unknown'}")
        work.cancel()
        return reason

    async def _begin(self) -> None:
        await self.start()
        await self.setup()

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except Exception as error:
            self._cause = self._cause or error
            self._end_tasks()
            raise

    async def _sentinel(self) -> None:
        assert self._failure is not None
        await self._failure

    def _end_tasks(self) -> None:
        """Cancel what still runs, and don't wait for ever for what resists."""
        for task in self._tasks:
            task.cancel()
        if not self._ending:
            self._ending = True
            asyncio.get_running_loop().call_later(CANCEL_S, self._give_up)

    def _give_up(self) -> None:
        left = sorted(task.get_name() for task in self._tasks if not task.done())
        if left:
            log(f"{', '.join(left)} did not end within {CANCEL_S:.0f} s of being cancelled; exiting without")
            os._exit(report(self.role, self._cause) if self._cause is not None else 1)

    def _announce(self) -> None:
        log(f"ready (pid {os.getpid()})")
        with contextlib.suppress(OSError, ValueError):
            print(f"READY {self.name} pid={os.getpid()}", flush=True)

    def _tick(self) -> None:
        if self.state in ("STOPPED", "FAILED"):
            return
        waiting.on_the_beat(asyncio.get_running_loop(), TICK_S, self._tick)
        if self._watch is not None:
            self._watch.beat()
        self.pulse()
        if self.state in ("READY", "DRAINING"):
            self.tick()
        now = time.monotonic()
        if now >= self._trim_at + self.trim_every_s:
            self._trim_at = now
            asyncio.get_running_loop().run_in_executor(None, give_memory_back)
        age_s = now - self._progress_at
        busy = self.state == "READY" and not self._waits and not self.idle()
        if self.last_progress and busy and age_s > self.stall_timeout_s:
            self.fail(TemperError(f"no progress for {age_s:.0f} s; the last was: {self.last_progress}"))

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stopping is None or self._stopping.done():
            log(f"second signal ({name}): exiting at once")
            os._exit(128 + number)
        self.stop("the process that started this one is gone" if orphaned() else name)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self.fail(error)
        else:
            log(f"event loop: {context.get('message')}")


def run_daemon(daemon: Daemon) -> int:
    """Run `daemon` to its end; the exit code for ``sys.exit``."""
    name_process(daemon.name)
    try:
        follow_parent()
        code = _run_loop(daemon)
    except (TemperError, OSError) as error:
        if expected(error) is None:
            raise
        code = report(daemon.role, error)
    leave_within(THREADS_S, code)
    return code


def _run_loop(daemon: Daemon) -> int:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        code = loop.run_until_complete(daemon._run())
        loop.run_until_complete(loop.shutdown_asyncgens())
        return code
    finally:
        asyncio.set_event_loop(None)
        loop.close()
