"""Every wait has an owner, a deadline and a log line."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from temper.common.errors import PeerLost
from temper.common.log import log

T = TypeVar("T")

FIRST_LINE_S = 2.0
NEXT_LINE_S = 30.0
EARLY = 0.05  # of a period: so little before its end, a timer fires for the next one


async def wait_for(what: str, awaitable: Awaitable[T], deadline_s: float) -> T:
    """The result of `awaitable`, which is `what` ("learner: model bundle"); PeerLost after `deadline_s` seconds.

    Logs ``waiting for WHAT (2 s)`` after 2 s and every 30 s from then on. The awaitable is cancelled on timeout.
    """
    future = asyncio.ensure_future(awaitable)
    started = time.monotonic()
    next_line = FIRST_LINE_S
    try:
        while True:
            waited = time.monotonic() - started
            left = deadline_s - waited
            done, _ = await asyncio.wait({future}, timeout=max(0.0, min(left, next_line - waited)))
            if done:
                return future.result()
            waited = time.monotonic() - started
            if waited >= deadline_s:
                raise PeerLost(f"waited {deadline_s:.0f} s for {what}: nothing came")
            if waited >= next_line:
                log(f"waiting for {what} ({waited:.0f} s)")
                next_line = waited + NEXT_LINE_S
    finally:
        if not future.done():
            future.cancel()


def on_the_beat(loop: asyncio.AbstractEventLoop, period_s: float, what: Callable[[], object]) -> asyncio.TimerHandle:
    """Have `what` called when the host's clock shows the next multiple of `period_s`. Everything periodic does it this way, in
    every daemon: what happens at once wakes a processor once, and what it sends arrives together."""
    return loop.call_at((math.floor(loop.time() / period_s + EARLY) + 1) * period_s, what)


async def first(*futures: asyncio.Future[Any]) -> None:
    """Return when one of `futures` is done. None of them is cancelled, whatever becomes of this wait."""
    await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)
