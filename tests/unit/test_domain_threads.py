"""A domain that blocks its thread is found, blamed and replaced; whoever shared the thread may go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
from temper.actor.domain_threads import DomainThreads, Stuck

SHORT_S = 1.0  # where a call is to be given up


def play(scenario: Callable[[DomainThreads], Awaitable[None]], limit_s: float = 60.0) -> None:
    async def main() -> None:
        threads = DomainThreads(limit_s)
        watch = asyncio.ensure_future(threads.watch(0.02))
        try:
            await scenario(threads)
        finally:
            watch.cancel()
            threads.close()

    asyncio.run(main())


async def where() -> str:
    return threading.current_thread().name


def test_calls_run_on_their_domains_thread() -> None:
    async def scenario(threads: DomainThreads) -> None:
        names = await asyncio.gather(*(threads.run(d, "x", where) for d in ("a", "b", "a")))
        assert names == ["domain-a", "domain-b", "domain-a"]

        async def fails() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await threads.run("a", "x", fails)

    play(scenario)


def test_a_blocking_call_is_blamed_and_the_others_are_not() -> None:
    async def scenario(threads: DomainThreads) -> None:
        started, release = threading.Event(), threading.Event()

        async def patient() -> None:
            started.set()
            await asyncio.get_running_loop().create_future()

        async def blocks() -> None:
            release.wait(30)

        waiting = asyncio.ensure_future(threads.run("a", "lease-1", patient))
        await asyncio.to_thread(started.wait)
        blocking = asyncio.ensure_future(threads.run("a", "lease-2", blocks))
        errors = await asyncio.gather(waiting, blocking, return_exceptions=True)
        release.set()
        assert [isinstance(e, Stuck) and e.culprit for e in errors] == [False, True]
        assert "did not return within 1 s" in str(errors[1]) and threads.abandoned == 1
        assert await threads.run("a", "lease-3", where) == "domain-a"

    play(scenario, SHORT_S)


def test_a_pure_python_loop_is_interrupted() -> None:
    async def scenario(threads: DomainThreads) -> None:
        thread: list[threading.Thread] = []

        async def spins() -> None:
            thread.append(threading.current_thread())
            while True:
                pass

        with pytest.raises(Stuck):
            await threads.run("a", "lease-1", spins)
        await asyncio.to_thread(thread[0].join, 20)
        assert not thread[0].is_alive()

    play(scenario, SHORT_S)


def test_cancelling_the_caller_cancels_the_work() -> None:
    async def scenario(threads: DomainThreads) -> None:
        started, ended = threading.Event(), threading.Event()

        async def patient() -> None:
            started.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ended.set()

        waiting = asyncio.ensure_future(threads.run("a", "x", patient))
        await asyncio.to_thread(started.wait)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await asyncio.to_thread(ended.wait, 20)

    play(scenario)


def test_a_slow_load_has_its_own_limit() -> None:
    async def scenario(threads: DomainThreads) -> None:
        done = threading.Event()

        async def slow() -> str:
            done.wait(2 * SHORT_S)
            return "loaded"

        assert await threads.run("a", "load", slow, limit_s=30) == "loaded"

    play(scenario, SHORT_S)
