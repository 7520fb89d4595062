"""Domain code runs here: one thread with an event loop for each domain, so that no domain can stop a heartbeat.

A domain may block its thread. When a thread's loop has not answered for its limit, it is abandoned: the task that holds
it is the culprit (`Stuck.culprit`), an exception is raised inside it to end pure Python loops, and whatever else ran
there fails with `Stuck(culprit=False)` and may be run again on the fresh thread that the next call gets. Called by the
daemon; the in-process loop calls domains directly.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop
from temper.common.errors import TemperError
from temper.common.log import log

T = TypeVar("T")

BLOCK_LIMIT_S = 10.0  # a domain may hold its thread's loop this long
JOIN_S = 1.0  # for all threads together at the end


class Stuck(TemperError):
    """A domain did not return. `culprit`: this very call held the thread; otherwise it only shared it."""

    def __init__(self, text: str, *, culprit: bool) -> None:
        super().__init__(text)
        self.culprit = culprit


class _Interrupted(BaseException):
    """Raised inside an abandoned thread."""


@dataclass(slots=True)
class _Call:
    name: str
    done: asyncio.Future[Any]
    task: asyncio.Task[Any] | None = None


class _Thread:
    """One domain's thread. `answered_at` is when its loop last ran a callback of ours."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.loop = uvloop.new_event_loop()
        self.calls: dict[int, _Call] = {}
        self.limit_s = BLOCK_LIMIT_S
        self.answered_at = time.monotonic()
        self.asked = False
        self._thread = threading.Thread(target=self._run, name=f"domain-{domain}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        except _Interrupted:
            log(f"domain {self.domain}: the abandoned thread has ended")

    def ask(self) -> None:
        """Have the loop answer, if it has answered the last question."""
        if not self.asked:
            self.asked = True
            self.answered_at = time.monotonic()
            self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self.answered_at = time.monotonic()
        self.asked = False

    def current(self) -> str:
        """The name of the task that holds the loop now; empty if none does."""
        task = asyncio.current_task(self.loop)
        return task.get_name() if task else ""

    def interrupt(self) -> None:
        """Raise inside the thread (takes effect when it next runs Python code) and let its loop end."""
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(_Interrupted)
            )
        self.loop.call_soon_threadsafe(self.loop.stop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class DomainThreads:
    """The threads of all domains. Used on one event loop, the daemon's; `watch` must run beside the calls."""

    def __init__(self, block_limit_s: float = BLOCK_LIMIT_S) -> None:
        self._block_limit_s = block_limit_s
        self._threads: dict[str, _Thread] = {}
        self._loop = asyncio.get_running_loop()
        self.abandoned = 0

    async def run(
        self, domain: str, name: str, make: Callable[[], Coroutine[Any, Any, T]], *, limit_s: float | None = None
    ) -> T:
        """Run the coroutine that `make` gives on the thread of `domain`, as a task called `name`. Stuck if it blocks
        longer than `limit_s` (default: the block limit)."""
        thread = self._threads.get(domain)
        if thread is None:
            thread = self._threads[domain] = _Thread(domain)
        thread.limit_s = limit_s or self._block_limit_s
        call = _Call(name, self._loop.create_future())
        thread.calls[id(call)] = call

        def start() -> None:
            call.task = thread.loop.create_task(make(), name=name)
            call.task.add_done_callback(finish)

        def finish(task: asyncio.Task[Any]) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_settle, call.done, task)

        thread.loop.call_soon_threadsafe(start)
        try:
            result: T = await call.done
            return result
        except asyncio.CancelledError:
            thread.loop.call_soon_threadsafe(_cancel, call)
            raise
        finally:
            thread.calls.pop(id(call), None)

    def call_soon(self, domain: str, call: Callable[[], None]) -> None:
        """Run `call` on the thread of `domain`, if it has one."""
        if domain in self._threads:
            self._threads[domain].loop.call_soon_threadsafe(call)

    async def watch(self, every_s: float = 1.0) -> None:
        """Find blocked threads for ever."""
        while True:
            await asyncio.sleep(every_s)
            for thread in list(self._threads.values()):
                if not thread.calls:
                    continue
                blocked_s = time.monotonic() - thread.answered_at
                if thread.asked and blocked_s > thread.limit_s:
                    self._abandon(thread, blocked_s)
                else:
                    thread.ask()

    def close(self) -> None:
        """End all threads; one that is blocked is left to the end of the process."""
        for thread in self._threads.values():
            thread.stop()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    def _abandon(self, thread: _Thread, blocked_s: float) -> None:
        culprit = thread.current()
        log(
            f"domain {thread.domain}: {culprit or 'a callback'} has blocked its thread for {blocked_s:.0f} s; abandoning it"
        )
        del self._threads[thread.domain]
        self.abandoned += 1
        thread.interrupt()
        for call in thread.calls.values():
            if not call.done.done():
                text = f"domain {thread.domain} did not return within {thread.limit_s:.0f} s"
                call.done.set_exception(Stuck(text, culprit=call.name == culprit))


def _settle(done: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    if done.done():
        if not task.cancelled():
            task.exception()  # seen: its caller is gone
    elif task.cancelled():
        done.cancel()
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


def _cancel(call: _Call) -> None:
    if call.task is not None:
        call.task.cancel()
