"""Messaging failures of other systems that no other file tests by name (`tests/unit/test_field_failures.py` lists them all)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from temper.common.schema import Lease, Touch


def test_two_thousand_sends_to_a_stalled_peer_all_arrive_once_it_goes_on(kit: Any) -> None:
    """A ROUTER without MANDATORY, or one that relies on high-water marks, loses nearly all of them."""

    async def stall() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer(window_messages=16)
        got: list[int] = []
        everything = asyncio.Event()

        def on_lease(lease: Lease, frames: list[memoryview]) -> None:
            got.append(lease.lease_id)
            if len(got) == 2000:
                everything.set()

        peer.on(Lease, on_lease)
        await peer.open(60)
        side = peer._sides[0]
        side.link.close()  # it reads nothing from here on
        for number in range(2000):
            assert broker.control.send(broker.greeted[0], kit.lease(number))
        assert broker.control.unacknowledged(broker.greeted[0]) == 16
        assert broker.control.backlog(broker.greeted[0])[0] == 1984
        side.redial()
        async with asyncio.timeout(60):
            await everything.wait()
        assert got == list(range(2000))
        await peer.close("done", 0)
        broker.close()

    asyncio.run(stall())


def test_waiting_that_is_cancelled_again_and_again_loses_no_message(kit: Any) -> None:
    """asyncio.timeout around a socket's recv loses messages under load; here a queue is waited on, never the socket."""

    async def impatient() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer()
        queue: asyncio.Queue[int] = asyncio.Queue()
        peer.on(Lease, lambda lease, frames: queue.put_nowait(lease.lease_id))
        await peer.open(60)
        for number in range(4000):
            broker.control.send(broker.greeted[0], kit.lease(number))
        got: list[int] = []
        cancelled = 0
        async with asyncio.timeout(60):
            while len(got) < 4000:
                waiter = asyncio.ensure_future(queue.get())
                await asyncio.sleep(0)
                if not waiter.done() and len(got) % 2 == 0:
                    waiter.cancel()
                    cancelled += 1
                with contextlib.suppress(asyncio.CancelledError):
                    got.append(await waiter)
        assert cancelled > 0
        assert got == list(range(4000))
        await peer.close("done", 0)
        broker.close()

    asyncio.run(impatient())


def test_a_full_peer_holds_nothing_up_for_the_others(kit: Any) -> None:
    """With ROUTER_MANDATORY an awaited send to one full peer queues behind it everything for everybody."""

    async def one_is_full() -> None:
        broker = kit.Broker(kit.address)
        deaf, fine = kit.peer(window_messages=4), kit.peer()
        got: list[int] = []
        everything = asyncio.Event()

        def on_lease(lease: Lease, frames: list[memoryview]) -> None:
            got.append(lease.lease_id)
            if len(got) == 500:
                everything.set()

        fine.on(Lease, on_lease)
        await deaf.open(60)
        await fine.open(60)
        one, other = dict.fromkeys(broker.greeted)
        deaf._sides[0].link.close()
        for number in range(500):
            broker.control.send(one, kit.lease(number))
            broker.control.send(other, kit.lease(number))
        await fine.send(Touch(1, 1))
        async with asyncio.timeout(60):
            await everything.wait()
        assert broker.control.backlog(one)[0] == 496 and got == list(range(500))
        await fine.close("done", 0)
        deaf.over = True
        await deaf.close("deaf", 0)
        broker.close()

    asyncio.run(one_is_full())
