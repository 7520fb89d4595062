"""A running jail: start it, run programs in it one after the other, end it.

Guarantees: no wait without a deadline; output beyond the limit is never held; when `stop` has returned, no process, file
descriptor or cgroup of the jail is left. The worker owns its cells; nobody else talks to an init.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from temper.common.schema import Limits
from temper.sandbox import init as protocol
from temper.sandbox.cgroups import Hierarchy, Leaf
from temper.sandbox.spawner import Spawner
from temper.sandbox.verdicts import Facts, Killed

START_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 3.0
CHECK_S = 0.1
HEADROOM_BYTES = 512 * 1024 * 1024  # address space beyond the memory limit where a cgroup decides
BASE_BYTES = 96 * 1024 * 1024  # address space of an idle interpreter, where nothing but the rlimit decides
FILE_BYTES = 64 * 1024 * 1024
DESCRIPTORS = 256
READ_BYTES = 64 * 1024
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_CREDENTIALS = struct.Struct("3i")
_ANCILLARY = socket.CMSG_SPACE(_CREDENTIALS.size)


class JailFailed(Exception):
    """The jail did not start or died on its own; the text says what was found."""


@dataclass(frozen=True, slots=True)
class Request:
    """One program run: `kind` and `flags` of the init's protocol, `bundle` a sealed memfd, `stdin` its input.

    `unbounded_address_space`: the runtime reserves far more than it uses (node), so RLIMIT_AS would be meaningless.
    """

    kind: int
    bundle: int
    stdin: bytes
    flags: int = 0
    unbounded_address_space: bool = False


def sealed(name: str, data: bytes) -> int:
    """A memfd holding `data` that nobody can change any more; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def pack_bundle(arguments: Sequence[str], files: dict[str, bytes]) -> bytes:
    """The init's bundle format."""
    items = [str(len(arguments)).encode(), *(os.fsencode(a) for a in arguments)]
    for name, content in files.items():
        items += [os.fsencode(name), content]
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


class _Stream:
    """A bounded reader of one pipe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int, on_flood: Callable[[], None]) -> None:
        self.fd, self.far = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.data = bytearray()
        self.cut = False
        self._limit = limit
        self._on_flood = on_flood
        self._loop = loop
        loop.add_reader(self.fd, self.read)

    def read(self) -> bool:
        """Take what is there; True at end of file."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self.fd)
            return True
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        if len(chunk) > room and not self.cut:
            self.cut = True
            self._on_flood()
        return False

    def drain(self) -> None:
        """After every writer is dead: take the rest."""
        while True:
            before = len(self.data)
            if self.read():
                return
            if len(self.data) == before and (self.cut or self._empty()):
                return

    def _empty(self) -> bool:
        waiting = array.array("i", [0])
        fcntl.ioctl(self.fd, 0x541B, waiting)  # FIONREAD
        return waiting[0] == 0

    def close_far(self) -> None:
        """Close our copy of the writing end, so that end of file is seen. Idempotent."""
        far, self.far = self.far, -1
        if far >= 0:
            os.close(far)

    def close(self) -> None:
        self.close_far()
        self._loop.remove_reader(self.fd)
        os.close(self.fd)


class Cell:
    """One jail. Make it with `start`; `run` one program at a time; `stop` it in any state."""

    def __init__(self, spawner: Spawner) -> None:
        self._loop = asyncio.get_running_loop()
        self._spawner = spawner
        self._process: subprocess.Popen[bytes] | None = None
        self._log_fd = -1
        self._pidfd = -1
        self.init_pid = 0
        self.leaf: Leaf | None = None
        self.runs = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._report: asyncio.Future[bytes] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._control, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @classmethod
    async def start(cls, spawner: Spawner, hierarchy: Hierarchy, name: str, warm: bool = False) -> Cell:
        """A jail whose init is ready, in a cgroup leaf of its own where the host has one. JailFailed with the reason."""
        cell = cls(spawner)
        try:
            await cell._start(hierarchy, name, warm)
        except BaseException:
            await asyncio.shield(cell.stop())
            raise
        return cell

    async def _start(self, hierarchy: Hierarchy, name: str, warm: bool) -> None:
        self._log_fd, log_far = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._log_fd, False)
        started = self._spawner.call(lambda: self._spawner.start(self._far.fileno(), log_far, warm))
        try:
            self._process = await asyncio.shield(asyncio.ensure_future(started))
        finally:
            os.close(log_far)
            self._far.close()
        self._loop.add_reader(self._control.fileno(), self._on_control)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise JailFailed(f"no sign of life within {START_TIMEOUT_S:g} s: {self.log()}") from None
        if hierarchy.roots:
            self.leaf = hierarchy.leaf(name)
            self.leaf.add(self.init_pid)

    def _on_control(self) -> None:
        try:
            data, ancillary, _, _ = self._control.recvmsg(64, _ANCILLARY)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if data == b"R":
            if not self.init_pid:
                self.init_pid = next(_CREDENTIALS.unpack(raw)[0] for _, kind, raw in ancillary if kind == 2)
                self._pidfd = os.pidfd_open(self.init_pid)
            if not self._ready.done():
                self._ready.set_result(None)
        elif len(data) == protocol.REPORT.size:
            if self._report is not None and not self._report.done():
                self._report.set_result(data)
        else:
            self._lost()

    def _lost(self) -> None:
        self._loop.remove_reader(self._control.fileno())
        if not self._ended.done():
            self._ended.set_result(None)
        for waiting in (self._ready, self._report):
            if waiting is not None and not waiting.done():
                waiting.set_exception(JailFailed(f"the jail ended: {self.log() or 'its init is gone'}"))
                waiting.exception()  # may have no waiter

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    def log(self) -> str:
        """What nsjail logged so far."""
        try:
            return os.read(self._log_fd, 16 * 1024).decode(errors="replace")
        except (BlockingIOError, OSError):
            return ""

    async def run(self, request: Request, limits: Limits) -> Facts:
        """Run one program to its end and report. Raises JailFailed only if the jail was dead before it began."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise JailFailed("the jail did not become ready for its next program") from None
        run = _Run(self, limits)
        try:
            return await run.to_end(request)
        finally:
            run.close()

    def begin(self) -> asyncio.Future[bytes]:
        """Expect a report and then a new ready."""
        self.runs += 1
        self._ready = self._loop.create_future()
        self._report = self._loop.create_future()
        return self._report

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """A message to the init; JailFailed if it is gone."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._control.sendmsg([message], ancillary)
        except OSError as error:
            raise JailFailed(f"the init does not take messages: {error}") from error

    def kill(self) -> None:
        """SIGKILL to the init: the kernel then kills everything in its pid namespace."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif self._process is not None and self._process.poll() is None:
            self._process.terminate()  # still starting: SIGKILL would orphan the half-made jail

    async def stop(self) -> None:
        """End the jail and leave nothing. Idempotent."""
        self.kill()
        if self._process is not None and self._process.returncode is None:
            await self._reap()
        if self.leaf is not None:
            leaf, self.leaf = self.leaf, None
            await self._spawner.call(leaf.remove)
        if self._control.fileno() >= 0:
            self._lost()
            self._control.close()
            self._far.close()
        for name in ("_log_fd", "_pidfd"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    async def _reap(self) -> None:
        assert self._process is not None
        exited = self._loop.create_future()
        pidfd = os.pidfd_open(self._process.pid)

        def on_exit() -> None:
            if not exited.done():
                exited.set_result(None)

        self._loop.add_reader(pidfd, on_exit)
        try:
            for harder in (self._process.terminate, self._process.kill):
                try:
                    async with asyncio.timeout(KILL_TIMEOUT_S):
                        await asyncio.shield(exited)
                    break
                except TimeoutError:
                    self.kill()
                    if self.leaf is not None:
                        self.leaf.kill()
                    harder()
            self._process.wait(timeout=KILL_TIMEOUT_S)
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)


class _Run:
    """One program in a cell: its pipes, its deadline, its end."""

    def __init__(self, cell: Cell, limits: Limits) -> None:
        self._cell = cell
        self._limits = limits
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._killed: Killed | None = None
        self._out = _Stream(loop, limits.output_bytes, self._flood)
        self._err = _Stream(loop, limits.output_bytes, self._flood)
        self._timer: asyncio.TimerHandle | None = None
        self._started = 0.0
        self._deadline = 0.0

    def _flood(self) -> None:
        self._end("output")

    async def to_end(self, request: Request) -> Facts:
        cell, limits = self._cell, self._limits
        if cell.leaf is not None:
            cell.leaf.arm(limits.memory_bytes, limits.pids + 1)
        address = limits.memory_bytes + (BASE_BYTES if cell.leaf is None else HEADROOM_BYTES)
        if request.unbounded_address_space:
            address = 0
        header = protocol.REQUEST.pack(
            request.kind, request.flags, limits.cpu_s, address, FILE_BYTES, limits.pids + 1, DESCRIPTORS
        )
        stdin = sealed("stdin", request.stdin)
        report = cell.begin()
        self._started = time.monotonic()
        self._deadline = self._started + limits.wall_s
        try:
            cell.send(header, (request.bundle, stdin, self._out.far, self._err.far))
        finally:
            os.close(stdin)
            self._out.close_far()
            self._err.close_far()
        self._timer = self._loop.call_later(min(CHECK_S, limits.wall_s), self._check)
        try:
            data = await report
        except JailFailed as failed:
            return self._died(str(failed))
        self._out.drain()
        self._err.drain()
        status, cpu_s, wall_s, peak_kib, _, over = protocol.REPORT.unpack(data)
        peak = peak_kib * 1024
        oom_kills = 0
        if cell.leaf is not None:
            cpu_s = max(cpu_s, cell.leaf.cpu_s() or 0.0)
            peak = max(peak, cell.leaf.peak_bytes() or 0)
            oom_kills = cell.leaf.oom_kills()
        killed = self._killed or ("cpu" if over else None)
        return self._facts(status, wall_s=wall_s, cpu_s=cpu_s, peak_bytes=peak, oom_kills=oom_kills, killed=killed)

    def _died(self, why: str) -> Facts:
        """The init is gone: for memory if the kernel says so, else the jail failed."""
        oom_kills = self._cell.leaf.oom_kills() if self._cell.leaf is not None else 0
        wall_s = time.monotonic() - self._started
        if oom_kills or self._killed:
            peak = self._limits.memory_bytes if oom_kills else None
            return self._facts(None, wall_s=wall_s, peak_bytes=peak, oom_kills=oom_kills)
        return Facts(status=None, failure=why, wall_s=wall_s)

    def _facts(self, status: int | None, **measured: Any) -> Facts:
        return Facts(
            status=status,
            stdout=bytes(self._out.data),
            stderr=bytes(self._err.data),
            stdout_cut=self._out.cut,
            stderr_cut=self._err.cut,
            **{"killed": self._killed, **measured},
        )

    def _check(self) -> None:
        """Every tenth of a second: the cpu of the whole tree, then the wall clock."""
        self._timer = self._loop.call_later(CHECK_S, self._check)
        if self._killed:
            if time.monotonic() > self._deadline + KILL_TIMEOUT_S:
                self._cell.kill()
            return
        leaf = self._cell.leaf
        if leaf is not None and (leaf.cpu_s() or 0.0) > self._limits.cpu_s:
            self._end("cpu")
        elif time.monotonic() > self._deadline:
            self._end("wall")

    def _end(self, why: Killed) -> None:
        if self._killed is None:
            self._killed = why
            self._deadline = time.monotonic()
            with contextlib.suppress(JailFailed):
                self._cell.send(b"K")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._out.close()
        self._err.close()
