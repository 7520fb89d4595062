"""Jails that are kept: renewed before each job (`fresh`), renewed ahead of it (`pool`), or warm for many jobs (`fork`).

A jail that has served its share of jobs is renewed: the same nsjail process makes the next one. A warm jail serves one job
after another; its init forks the already started (and preloaded) interpreter for each program, and empties the workspace in
between. One that died, or did not come back clean, is ended with its nsjail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from temper.common.log import log
from temper.sandbox.cell import Cell
from temper.sandbox.outlast import outlast
from temper.sandbox.run import JailFailed

JOBS_PER_JAIL = 2000
JAILS_PER_NSJAIL = 1000


class Pool:
    """At most `size` idle cells, made by `start` and ended by `stop`. A jail serves `share` jobs and is then renewed, `ahead`
    of its next job or only when that has come."""

    def __init__(
        self,
        size: int,
        share: int,
        start: Callable[[], Awaitable[Cell]],
        stop: Callable[[Cell], Coroutine[Any, Any, None]],
        *,
        ahead: bool = True,
    ) -> None:
        self._size = size
        self._share = share
        self._ahead = ahead
        self._start = start
        self._stop = stop
        self._idle: list[Cell] = []
        self._served: dict[Cell, int] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Cell]:
        """A ready jail. It comes back when the block is left in order, and is ended when the block raises."""
        cell = await self._take()
        try:
            yield cell
        except BaseException:
            await outlast(self._end(cell))
            raise
        self._give_back(cell)

    async def _take(self) -> Cell:
        while self._idle:
            cell = self._idle.pop(0 if self._share == 1 else -1)  # the longest renewed, or the warmest
            try:
                await cell.ready()
                if self._served[cell] >= self._share:
                    self._renew(cell)
                    await cell.ready()
            except JailFailed as error:
                log(f"an idle jail failed: {error}")
            except BaseException:
                await outlast(self._end(cell))
                raise
            else:
                return cell
            self._end(cell)
        cell = await self._start()
        self._served[cell] = 0
        return cell

    def _renew(self, cell: Cell) -> None:
        cell.renew()
        self._served[cell] = 0

    def _give_back(self, cell: Cell) -> None:
        self._served[cell] += 1
        if self._closed or not cell.alive or len(self._idle) >= self._size or cell.jails >= JAILS_PER_NSJAIL:
            self._end(cell)
            return
        self._idle.append(cell)
        if self._ahead and self._served[cell] >= self._share:
            task = asyncio.ensure_future(self._renew_ahead(cell))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _renew_ahead(self, cell: Cell) -> None:
        try:
            await cell.ready()
            if cell in self._idle and self._served.get(cell, 0) >= self._share:
                self._renew(cell)
        except JailFailed:
            return  # found out by whoever takes it

    def _end(self, cell: Cell) -> asyncio.Task[None]:
        """End a cell in the background: its last job need not wait; `close` does."""
        self._served.pop(cell, None)
        cell.kill()
        task = asyncio.ensure_future(self._stop(cell))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def close(self) -> None:
        """End every cell."""
        self._closed = True
        for cell in self._idle:
            self._end(cell)
        self._idle.clear()
        if self._ending:
            await asyncio.wait(self._ending)
