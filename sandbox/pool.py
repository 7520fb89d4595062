"""Jails that are started before they are needed.

`pool`: a jail serves one job. `fork`: a warm jail serves one job after another; its init forks the already started (and
preloaded) interpreter for each program, and empties the workspace in between. A jail that has served its share, died, or
did not come back clean is replaced; nobody waits for a replacement as long as another jail is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from temper.common.log import log
from temper.sandbox.cell import Cell
from temper.sandbox.run import JailFailed

JOBS_PER_JAIL = 2000


class Pool:
    """At most `size` idle jails, made by `start` and ended by `stop`; `jobs_per_jail` 1 means used once."""

    def __init__(
        self,
        size: int,
        jobs_per_jail: int,
        start: Callable[[], Awaitable[Cell]],
        stop: Callable[[Cell], Coroutine[Any, Any, None]],
    ) -> None:
        self._size = size
        self._jobs_per_jail = jobs_per_jail
        self._start = start
        self._stop = stop
        self._idle: list[Cell] = []
        self._served: dict[Cell, int] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Cell]:
        """A ready jail. It comes back when the block is left in order, and is ended when the block raises."""
        cell = await self._take()
        try:
            yield cell
        except BaseException:
            await asyncio.shield(self._end(cell))
            raise
        self._give_back(cell)

    async def _take(self) -> Cell:
        while self._idle:
            cell = self._idle.pop()
            if self._served[cell] + 1 >= self._jobs_per_jail:
                self._refill()  # it will not come back
            if cell.alive:
                return cell
            self._end(cell)
        cell = await self._start()
        self._served[cell] = 0
        return cell

    def _give_back(self, cell: Cell) -> None:
        self._served[cell] += 1
        spent = self._served[cell] >= self._jobs_per_jail or not cell.alive
        if spent or self._closed or len(self._idle) >= self._size:
            self._end(cell)
            if not self._closed:
                self._refill()
        else:
            self._idle.append(cell)

    def _refill(self) -> None:
        """Start jails ahead, in the background, up to `size`."""
        if len(self._idle) + len(self._starting) < self._size and not self._closed:
            task = asyncio.ensure_future(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_one(self) -> None:
        try:
            cell = await self._start()
        except (JailFailed, OSError) as error:
            log(f"a jail could not be started ahead: {error}")
            return
        self._served[cell] = 0
        if self._closed:
            self._end(cell)
        else:
            self._idle.append(cell)

    def _end(self, cell: Cell) -> asyncio.Task[None]:
        """End a jail in the background: its last job need not wait; `close` does."""
        self._served.pop(cell, None)
        cell.kill()
        task = asyncio.ensure_future(self._stop(cell))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def close(self) -> None:
        """End every jail."""
        self._closed = True
        if self._starting:
            await asyncio.wait(self._starting)
        for cell in self._idle:
            self._end(cell)
        self._idle.clear()
        if self._ending:
            await asyncio.wait(self._ending)
