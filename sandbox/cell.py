"""A running nsjail and its current jail: start it, run programs one after the other, renew the jail, end it.

One nsjail process makes one jail after the other (its mode RERUN), each with namespaces, mounts and an init of its own: that
saves starting nsjail for each.

Guarantees: no wait without a deadline; when `stop` has returned, no process, file descriptor or cgroup of the jail is
left. The worker owns its cells; nobody else talks to an init.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Sequence

from temper.common.grading import KILL_TIMEOUT_S, START_TIMEOUT_S
from temper.common.log import log
from temper.common.schema import Limits
from temper.sandbox import tree
from temper.sandbox.cgroups import Hierarchy, Leaf
from temper.sandbox.inside import protocol
from temper.sandbox.jail import Profile
from temper.sandbox.outlast import outlast
from temper.sandbox.run import JailFailed, Request, Run
from temper.sandbox.spawner import Spawner
from temper.sandbox.verdicts import Facts

_CREDENTIALS = struct.Struct("3i")
_ANCILLARY = socket.CMSG_SPACE(_CREDENTIALS.size)


class Cell:
    """One jail. Make it with `start`; `run` one program at a time; `stop` it in any state."""

    def __init__(self, spawner: Spawner) -> None:
        self._loop = asyncio.get_running_loop()
        self._spawner = spawner
        self._process: subprocess.Popen[bytes] | None = None
        self._log_fd = -1
        self._pidfd = -1
        self.init_pid = 0
        self._leaving = False  # the init was told to end, another one will come
        self.idle_address_bytes = 0  # address space of the init, which every program starts with
        self.leaf: Leaf | None = None
        self._joining: asyncio.Task[None] | None = None
        self.began = asyncio.Event()  # some program has been asked for
        self.jails = 1  # how many this nsjail has made
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._report: asyncio.Future[bytes] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._control, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @classmethod
    async def start(cls, spawner: Spawner, hierarchy: Hierarchy, name: str, profile: Profile) -> Cell:
        """A jail whose init is ready, in a cgroup leaf of its own where the host has one. JailFailed with the reason."""
        cell = cls(spawner)
        try:
            await cell._start(hierarchy, name, profile)
        except BaseException:
            await outlast(cell.stop())
            raise
        return cell

    async def _start(self, hierarchy: Hierarchy, name: str, profile: Profile) -> None:
        if hierarchy.roots:
            self.leaf = hierarchy.leaf(name)
        self._log_fd, log_far = os.pipe2(os.O_CLOEXEC)
        for end in (self._log_fd, log_far):
            os.set_blocking(end, False)  # a full log loses lines and stops nobody
        try:  # also when cancelled: what the thread starts must be known to be ended, and needs our descriptors until then
            await outlast(self._spawn(profile, log_far))
        finally:
            os.close(log_far)
            self._far.close()
        self._loop.add_reader(self._control.fileno(), self._on_control)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise JailFailed(f"no sign of life within {START_TIMEOUT_S:g} s: {self.log()}") from None

    async def _spawn(self, profile: Profile, log_far: int) -> None:
        far = self._far.fileno()
        born = self.leaf.born if self.leaf is not None else ()
        self._process = await self._spawner.call(lambda: self._spawner.start(profile, far, log_far, born))

    def _on_control(self) -> None:
        try:
            data, ancillary, _, _ = self._control.recvmsg(1024, _ANCILLARY)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if data == b"R":
            try:
                self._meet(next(_CREDENTIALS.unpack(raw)[0] for _, kind, raw in ancillary if kind == 2))
            except OSError as error:
                self._lost(f"its init is gone: {error}")
        elif data[:1] == b"E":
            self._lost(f"its init failed: {data[1:].decode(errors='replace')}")
        elif len(data) == protocol.REPORT_BYTES:
            if self._report is not None and not self._report.done():
                self._report.set_result(data)
                if protocol.unpack(data)[-1]:
                    self._be_ready()
        else:
            self._lost()

    def _meet(self, pid: int) -> None:
        """The init says that it is ready: the same one again, or the first sign of a new jail's."""
        if pid != self.init_pid:
            self._forget_init()
            self.init_pid = pid
            self._pidfd = os.pidfd_open(pid)
            self._loop.add_reader(self._pidfd, self._on_init_exit)
            self._leaving = False
            self.idle_address_bytes = tree.address_bytes(pid)
            if self.leaf is not None:
                self._joining = asyncio.ensure_future(self._join(self.leaf, pid))
                return
        self._be_ready()

    async def _join(self, leaf: Leaf, pid: int) -> None:
        try:
            await self._spawner.call(lambda: leaf.add(pid))
        except OSError as error:
            if self.alive:
                self._lost(f"its cgroup does not take it: {error}")
        else:
            self._be_ready()

    def _be_ready(self) -> None:
        if not self._leaving and not self._ready.done():
            self._ready.set_result(None)

    def _on_init_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if self._leaving:
            return
        while self.alive and select.select([self._control], [], [], 0)[0]:
            self._on_control()  # what it said last
        if self.alive:
            self._lost()

    def _forget_init(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _lost(self, why: str = "") -> None:
        self._loop.remove_reader(self._control.fileno())
        if not self._ended.done():
            self._ended.set_result(None)
        for waiting in (self._ready, self._report):
            if waiting is not None and not waiting.done():
                waiting.set_exception(JailFailed(f"the jail ended: {why or self.log() or 'its init is gone'}"))
                waiting.exception()  # may have no waiter

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def ended(self) -> None:
        """Wait until the jail has ended."""
        await asyncio.shield(self._ended)

    def log(self) -> str:
        """What nsjail logged so far."""
        try:
            return os.read(self._log_fd, 16 * 1024).decode(errors="replace")
        except (BlockingIOError, OSError):
            return ""

    async def ready(self) -> None:
        """Wait until the jail is clean and can take a program. JailFailed when it cannot."""
        if self._ready.done():
            return self._ready.result()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise JailFailed("the jail did not become ready for its next program") from None

    async def run(self, request: Request, limits: Limits) -> Facts:
        """Run one program to its end and report. Raises JailFailed only if the jail was dead before it began."""
        await self.ready()
        run = Run(self, request, limits)
        try:
            return await run.to_end()
        finally:
            run.close()

    def renew(self) -> None:
        """End this jail; nsjail, which stays, makes the next one with fresh namespaces. `ready` waits for it."""
        self._ready = self._loop.create_future()
        self._leaving = True
        self.jails += 1
        self.send(b"Q")

    def begin(self) -> asyncio.Future[bytes]:
        """Expect a report and then a new ready."""
        self._ready = self._loop.create_future()
        self._report = self._loop.create_future()
        self.began.set()
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
        try:
            if self._process is not None and self._process.returncode is None:
                await self._reap()
            if self._joining is not None:
                await asyncio.wait([self._joining])
            if self.leaf is not None:
                leaf, self.leaf = self.leaf, None
                await self._spawner.call(leaf.remove)
        finally:
            if self._control.fileno() >= 0:
                self._lost()
                self._control.close()
                self._far.close()
            self._forget_init()
            log_fd, self._log_fd = self._log_fd, -1
            if log_fd >= 0:
                os.close(log_fd)

    async def _reap(self) -> None:
        assert self._process is not None
        exited = self._loop.create_future()
        pidfd = os.pidfd_open(self._process.pid)

        def on_exit() -> None:
            if not exited.done():
                exited.set_result(None)

        self._loop.add_reader(pidfd, on_exit)
        try:
            for end in (self._process.terminate, self._process.kill):
                end()
                try:
                    async with asyncio.timeout(KILL_TIMEOUT_S):
                        await asyncio.shield(exited)
                    break
                except TimeoutError:
                    if self.leaf is not None:
                        self.leaf.kill()
            if self._process.poll() is None:
                log(f"nsjail (process {self._process.pid}) does not end: the kernel holds it")
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
