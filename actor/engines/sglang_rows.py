"""Which server takes the next request: the one with the fewest, among those that serve the engine's version. Pure asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol


class Seat(Protocol):
    """What is needed of a server."""

    open: bool
    rows: int


class Rows:
    """`rows` places on each of several servers, handed out in order of asking."""

    def __init__(self, seats: Sequence[Seat], rows: int) -> None:
        self._seats, self._rows = seats, rows
        self._queue: deque[asyncio.Future[None]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    def free(self) -> int | None:
        """The number of the least loaded open server with a free row, None if there is none."""
        found = [(seat.rows, index) for index, seat in enumerate(self._seats) if seat.open and seat.rows < self._rows]
        return min(found)[1] if found else None

    def take(self, number: int) -> None:
        """A request begins on that server."""
        self._seats[number].rows += 1
        self._empty.clear()

    async def emptied(self) -> None:
        """Wait until no request runs."""
        await self._empty.wait()

    async def turn(self) -> None:
        """Wait until it is worth looking again; `wake` or `leave` end it."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._next()  # its turn goes to somebody else
            raise

    def leave(self, number: int) -> None:
        """A request on that server has ended."""
        self._seats[number].rows -= 1
        if not any(seat.rows for seat in self._seats):
            self._empty.set()
        self._next()

    def wake(self) -> None:
        """Something has changed: everybody looks."""
        while self._queue:
            self._next()

    def _next(self) -> None:
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
