"""One run of one program in a jail: its request, its pipes, its deadline, its facts.

Cpu time decides, of the whole tree where the kernel accounts it; the wall clock is the backstop for programs that wait.
Output beyond the limit ends the program and is never held.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from temper.common.grading import KILL_TIMEOUT_S, MOST_SLACK
from temper.common.schema import Limits
from temper.sandbox import tree
from temper.sandbox.inside import protocol
from temper.sandbox.streams import sealed, streams
from temper.sandbox.verdicts import Facts, Killed

if TYPE_CHECKING:
    from temper.sandbox.cell import Cell

CHECK_S = 0.1
HEADROOM_BYTES = 512 * 1024 * 1024  # address space beyond the memory limit where a cgroup decides
ROOM_BYTES = 64 * 1024 * 1024  # the same where nothing but the rlimit decides: libraries, stacks
FILE_BYTES = 64 * 1024 * 1024
DESCRIPTORS = 256


class JailFailed(Exception):
    """The jail did not start or died on its own; the text says what was found."""


class Request(msgspec.Struct, frozen=True):
    """One program run: `kind` and `flags` of the init's protocol, `bundle` a sealed memfd.

    `stdin` is its input, or a descriptor to use as such. `stdout`, when not None, is a descriptor that gets its output
    instead of the facts. `extra` descriptors become 3, 4, ... The caller keeps and closes all of them; `on_sent` is called
    once the init has them, or never will. `stdout_limit` overrides the output limit. `unbounded_address_space`: the
    runtime reserves far more than it uses (node), so RLIMIT_AS would be meaningless.
    """

    kind: int
    bundle: int
    stdin: bytes | int = b""
    flags: int = 0
    unbounded_address_space: bool = False
    stdout: int | None = None
    stdout_limit: int | None = None
    extra: tuple[int, ...] = ()
    on_sent: Callable[[], None] | None = None


def header_of(cell: Cell, request: Request, limits: Limits) -> bytes:
    """The init's message for a request: its limits, in what rlimits can say."""
    address = limits.memory_bytes + cell.idle_address_bytes
    address += ROOM_BYTES if cell.leaf is None else HEADROOM_BYTES
    if request.unbounded_address_space:
        address = 0
    return protocol.pack(request.kind, request.flags, limits.cpu_s, address, FILE_BYTES, limits.pids + 1, DESCRIPTORS)


class Run:
    """One program in a cell: its pipes, its deadline, its end."""

    def __init__(self, cell: Cell, request: Request, limits: Limits) -> None:
        self._cell = cell
        self._limits = limits
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._killed: Killed | None = None
        self._request = request
        limit = limits.output_bytes
        out_limit = limit if request.stdout_limit is None else request.stdout_limit
        self._out, self._err = streams(loop, (out_limit, limit), self._flood)
        self._timer: asyncio.TimerHandle | None = None
        self._started = 0.0
        self._deadline = 0.0

    def _flood(self) -> None:
        self._end("output")

    async def to_end(self) -> Facts:
        cell, limits, request = self._cell, self._limits, self._request
        if cell.leaf is not None:
            cell.leaf.arm(limits.memory_bytes, limits.pids + 1)
        header = header_of(cell, request, limits)
        stdin = sealed("stdin", request.stdin) if isinstance(request.stdin, bytes) else os.dup(request.stdin)
        stdout = self._out.far if request.stdout is None else request.stdout
        report = cell.begin()
        self._started = time.monotonic()
        self._deadline = self._started + limits.wall_s
        try:
            cell.send(header, (request.bundle, stdin, stdout, self._err.far, *request.extra))
        finally:
            os.close(stdin)
            if request.on_sent is not None:
                request.on_sent()
        self._timer = self._loop.call_later(min(CHECK_S, limits.wall_s), self._check)
        try:
            data = await report
        except JailFailed as failed:
            return self._died(str(failed))
        self._out.drain()
        self._err.drain()
        status, cpu_s, wall_s, peak_kib, _, over, _ = protocol.unpack(data)
        peak = int(peak_kib) * 1024
        oom_kills = 0
        if cell.leaf is not None:
            cpu_s = max(cpu_s, cell.leaf.cpu_s() or 0.0)
            peak = max(peak, cell.leaf.peak_bytes() or 0)
            oom_kills = cell.leaf.oom_kills()
        killed = self._killed or ("cpu" if over else None)
        return self._facts(int(status), wall_s=wall_s, cpu_s=cpu_s, peak_bytes=peak, oom_kills=oom_kills, killed=killed)

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
        """Ten times a second: the cpu and memory of the whole tree, then the wall clock."""
        self._timer = self._loop.call_later(CHECK_S, self._check)
        now = time.monotonic()
        if self._killed:
            if now > self._deadline + KILL_TIMEOUT_S:
                self._cell.kill()
            return
        leaf, limits = self._cell.leaf, self._limits
        used = None
        if leaf is None or now > self._deadline:
            used = tree.usage(self._cell.init_pid, limits.memory_bytes)
        cpu_s = leaf.cpu_s() if leaf is not None else None
        if (used.cpu_s if cpu_s is None and used else cpu_s or 0.0) > limits.cpu_s:
            self._end("cpu")
        elif leaf is None and used and used.memory_bytes > limits.memory_bytes:
            self._end("memory")
        elif used and now > self._deadline:
            # A program that was ready to run but got no cpu is not late: load must not change verdicts.
            slack_s = min(used.waited_s, MOST_SLACK * limits.wall_s)
            if now > self._started + limits.wall_s + slack_s:
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
