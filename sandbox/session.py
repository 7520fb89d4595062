"""A jail that lives across the turns of an episode: a Python or a shell with its workspace.

Each step has the job's limits, the session a deadline of its own. A step that overruns is interrupted (SIGINT), which keeps
the session; one that does not heed this ends it. Whatever ends a session, nothing of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Callable

from temper.common.grading import KILL_TIMEOUT_S, MOST_SLACK
from temper.common.log import log
from temper.common.schema import Limits, SandboxJob, TestCase, Verdict
from temper.sandbox import tree, verdicts
from temper.sandbox.admission import refuse_names
from temper.sandbox.cell import Cell
from temper.sandbox.inside import protocol
from temper.sandbox.jail import INSIDE_IN_JAIL
from temper.sandbox.jobs import run_files
from temper.sandbox.run import CHECK_S, JailFailed, Request, header_of
from temper.sandbox.streams import Stream, pack_bundle, sealed, streams
from temper.sandbox.verdicts import Facts, Killed

INTERRUPT_S = 1.0
IDLE_CHECK_S = 1.0
SNAPSHOT_LIMIT_BYTES = 8 * 1024 * 1024
SNAPSHOT_LIMITS = Limits(wall_s=10.0, cpu_s=5.0)
LANGUAGES = ("python", "bash")


class Session:
    """Make it with `open`; `run` a job's steps; `close` it."""

    def __init__(self, cell: Cell, job: SandboxJob) -> None:
        self._loop = asyncio.get_running_loop()
        self._cell = cell
        self._language = job.language
        self._limits = job.limits
        self._commands = self._done = -1
        self._streams: list[Stream] = []
        self._step: asyncio.Future[bytes] = self._loop.create_future()
        self._ended: asyncio.Future[bytes] = self._loop.create_future()
        self._flooded = False
        self._idle_cpu_s: float | None = None  # the tree's cpu time when the last step ended; None while one runs
        self._watch: asyncio.TimerHandle | None = None
        self.over = ""

    @classmethod
    async def open(cls, cell: Cell, job: SandboxJob) -> Session:
        """Start the session's interpreter in `cell`, with the job's files in its workspace."""
        session = cls(cell, job)
        try:
            await session._open(job)
        except BaseException:
            await session.close()
            raise
        return session

    async def _open(self, job: SandboxJob) -> None:
        cell = self._cell
        await cell.ready()
        if cell.leaf is not None:
            cell.leaf.arm(job.limits.memory_bytes, job.limits.pids + 1)
        python = job.language == "python"
        served = f"{INSIDE_IN_JAIL}/{'repl.py' if python else 'shell.sh'}"
        arguments = (served,) if python else ("/bin/bash", "--norc", "--noprofile", served)
        kind = protocol.PYTHON if python else protocol.COMMAND
        with contextlib.ExitStack() as stack:
            bundle = sealed("session", pack_bundle(arguments, job.files, job.seed))
            stack.callback(os.close, bundle)
            nothing = sealed("stdin", b"")
            stack.callback(os.close, nothing)
            commands, self._commands = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, commands)
            self._done, done = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, done)
            os.set_blocking(self._done, False)
            os.set_blocking(self._commands, False)
            self._streams = streams(self._loop, (job.limits.output_bytes,) * 2, self._flood)
            # The cpu limit of the process is the session's: steps are measured and interrupted by this side.
            limits = Limits(cpu_s=3600.0, memory_bytes=job.limits.memory_bytes, pids=job.limits.pids)
            header = header_of(cell, Request(kind, bundle, flags=protocol.KEEP), limits)
            self._ended = cell.begin()
            out, err = self._streams
            cell.send(header, (bundle, nothing, out.far, err.far, done, commands))
            out.close_far()
            err.close_far()
        self._loop.add_reader(self._done, self._on_done)
        self._watch_idle()

    def _watch_idle(self) -> None:
        """Once a second: what is left running between steps has a step's cpu time, then the session ends."""
        self._watch = self._loop.call_later(IDLE_CHECK_S, self._watch_idle)
        idle = self._idle_cpu_s
        if idle is not None and not self.over and self._cpu_s() - idle > self._limits.cpu_s:
            self.over = f"the session has ended: it used more than {self._limits.cpu_s:g} s of cpu time between steps"
            with contextlib.suppress(JailFailed):
                self._cell.send(b"K")

    def _on_done(self) -> None:
        try:
            data = os.read(self._done, 1)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._done)
        if not self._step.done():
            self._step.set_result(data)

    def _flood(self) -> None:
        self._flooded = True
        self._interrupt()

    def _interrupt(self) -> None:
        with contextlib.suppress(JailFailed):
            self._cell.send(b"I")

    async def run(self, job: SandboxJob) -> Verdict:
        """The job's tests, one step each: `stdin` is the code; the output is compared where an answer is expected."""
        runs, judged = [], []
        for test in job.tests:
            facts = (
                await self._run_step(test, job.limits) if not self.over else Facts(1 << 8, stderr=self.over.encode())
            )
            runs.append(facts)
            judged.append(verdicts.judge(facts, test, job.limits))
        return verdicts.verdict_of(runs, judged) if runs else Verdict(outcome="ok")

    async def _run_step(self, test: TestCase, limits: Limits) -> Facts:
        self._step = self._loop.create_future()
        self._flooded = False
        leaf = self._cell.leaf
        cpu_before, oom_before = self._cpu_s(), leaf.oom_kills() if leaf is not None else 0
        waited_before = tree.usage(self._cell.init_pid).waited_s
        started = time.monotonic()
        self._idle_cpu_s = None
        await self._send(test.stdin)
        killed = await self._until_done(lambda: self._exceeded(limits, started, cpu_before, waited_before))
        self._idle_cpu_s = self._cpu_s()
        for stream in self._streams:
            stream.drain()
        (out, out_cut), (err, err_cut) = (stream.take() for stream in self._streams)
        status = await self._status()
        return Facts(
            status=status,
            stdout=out,
            stderr=err,
            stdout_cut=out_cut,
            stderr_cut=err_cut,
            wall_s=time.monotonic() - started,
            cpu_s=max(0.0, self._cpu_s() - cpu_before),
            peak_bytes=leaf.peak_bytes() if leaf is not None else None,
            oom_kills=leaf.oom_kills() - oom_before if leaf is not None else 0,
            killed="output" if self._flooded else killed,
        )

    async def _send(self, code: bytes) -> None:
        data = struct.pack("<Q", len(code)) + code if self._language == "python" else code.replace(b"\0", b"") + b"\0"
        view = memoryview(data)
        deadline = time.monotonic() + self._limits.wall_s
        while view and not self._ended.done() and time.monotonic() < deadline:
            try:
                view = view[os.write(self._commands, view) :]
            except BlockingIOError:
                await asyncio.wait([self._ended], timeout=0.01)
            except OSError:
                return  # it is gone, as `_until_done` will see

    async def _until_done(self, exceeded: Callable[[], Killed | None]) -> Killed | None:
        """Wait for the step's end; interrupt it when it is over its limits, then end the session, then its jail."""
        killed: Killed | None = None
        patience = float("inf")
        while not self._step.done() and not self._ended.done():
            await asyncio.wait([self._step, self._ended], timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.monotonic()
            if killed is None and not self._step.done():
                killed = "output" if self._flooded else exceeded()
                if killed:
                    patience = now + (0.0 if killed == "memory" else INTERRUPT_S)
                    self._interrupt()
            if now > patience and not self.over:
                self.over = "the session has ended: a step did not stop"
                with contextlib.suppress(JailFailed):
                    self._cell.send(b"K")
            if now > patience + KILL_TIMEOUT_S:
                self._cell.kill()
        return killed

    def _exceeded(self, limits: Limits, started: float, cpu_before: float, waited_before: float) -> Killed | None:
        """The limit that a step has passed. As for programs: a step that was ready to run but got no cpu is not late."""
        if self._cpu_s() - cpu_before > limits.cpu_s:
            return "cpu"
        late_s = time.monotonic() - started - limits.wall_s
        if self._cell.leaf is None or late_s > 0:
            used = tree.usage(self._cell.init_pid, limits.memory_bytes)
            if self._cell.leaf is None and used.memory_bytes > limits.memory_bytes:
                return "memory"
            if late_s > min(max(0.0, used.waited_s - waited_before), MOST_SLACK * limits.wall_s):
                return "wall"
        return None

    async def _status(self) -> int | None:
        """Wait status of the step: 0 or an exit code 1 by what was told; the process's own when it is gone."""
        if self._step.done() and self._step.result():
            return 0 if self._step.result() == b"0" else 1 << 8
        try:
            async with asyncio.timeout(INTERRUPT_S * 3):
                status: int | None = int(protocol.unpack(await asyncio.shield(self._ended))[0])
        except (JailFailed, TimeoutError):
            status = None
        self.over = self.over or "the session has ended"
        return status

    def _cpu_s(self) -> float:
        leaf = self._cell.leaf
        measured = leaf.cpu_s() if leaf is not None else None
        return tree.usage(self._cell.init_pid).cpu_s if measured is None else measured

    async def close(self, snapshot: bool = False) -> dict[str, bytes]:
        """End the session; the files of its workspace if wanted (regular ones, up to 8 MiB together)."""
        files: dict[str, bytes] = {}
        self.over = self.over or "the session is closed"
        try:
            if snapshot and self._cell.alive:
                files = await self._snapshot()
        except (JailFailed, TimeoutError, struct.error) as error:
            log(f"a session's workspace could not be read: {error}")
        finally:
            if self._watch is not None:
                self._watch.cancel()
            for stream in self._streams:
                stream.close()
            if self._done >= 0:
                self._loop.remove_reader(self._done)
            for fd in (self._done, self._commands):
                if fd >= 0:
                    os.close(fd)
            self._streams, self._done, self._commands = [], -1, -1
        return files

    async def _snapshot(self) -> dict[str, bytes]:
        self._cell.send(b"K")
        async with asyncio.timeout(INTERRUPT_S * 3):
            await asyncio.shield(self._ended)
        facts = await run_files(
            self._cell,
            protocol.PYTHON,
            (f"{INSIDE_IN_JAIL}/snapshot.py", str(SNAPSHOT_LIMIT_BYTES)),
            {},
            SNAPSHOT_LIMITS,
            flags=protocol.KEEP,
            stdout_limit=2 * SNAPSHOT_LIMIT_BYTES,
        )
        return unpack_files(facts.stdout)


def unpack_files(data: bytes) -> dict[str, bytes]:
    """What inside/snapshot.py wrote. Names that would leave a workspace are left out."""
    parts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    files = {}
    for name, content in zip(parts[::2], parts[1::2], strict=False):
        text = name.decode(errors="backslashreplace")
        if not refuse_names([text]):
            files[text] = content
    return files
