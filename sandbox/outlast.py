"""Work that must not be left half done: starting a jail, ending one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def outlast(work: Awaitable[T]) -> T:
    """The result of `work`. A cancellation, or several, is passed on only when it has ended; `work` has its own deadline."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # is told by nobody now
        raise cancelled
    return running.result()
