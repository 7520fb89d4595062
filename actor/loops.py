"""Awaiting on another thread's event loop: domains run on loops of their own, sockets live on the daemon's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def on_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` gives on `loop`, wherever the caller runs; cancelling the caller cancels it there."""
    if asyncio.get_running_loop() is loop:
        return await make()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))
