"""Connections that break, stall and come back; brokers that restart as another run."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from temper.common.errors import ConfigError
from temper.common.schema import Lease, Touch, Welcome


class Cutter:
    """Relays a broker's two sockets, and cuts a connection whenever `every` bytes or so have gone through it."""

    def __init__(self, outside: Path, inside: Path, every: int, seed: int) -> None:
        self.outside, self.inside = outside, inside
        self.every = every
        self.random = random.Random(seed)
        self.cuts = 0
        self.whole = False
        self.servers: list[asyncio.Server] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.outside.mkdir(mode=0o700)
        for name in ("control.sock", "bulk.sock"):
            accept = self._accept_for(self.inside / name)
            self.servers.append(await asyncio.start_unix_server(accept, self.outside / name))

    def _accept_for(self, target: Path) -> Any:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_unix_connection(target)
            both = (writer, far_writer)
            self._spawn(self._copy(reader, far_writer, both))
            self._spawn(self._copy(far_reader, writer, both))

        return accept

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _copy(self, reader: Any, writer: Any, both: Any) -> None:
        budget = self.random.randrange(self.every)
        try:
            while data := await reader.read(16_384):
                budget -= len(data)
                if budget < 0 and not self.whole:
                    self.cuts += 1
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other direction was cut
        finally:
            for end in both:
                end.transport.abort()

    async def close(self) -> None:
        for server in self.servers:
            server.close()
            await server.wait_closed()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn


def test_nothing_is_lost_doubled_or_reordered_however_often_the_connection_breaks(kit: Any) -> None:
    async def cut() -> None:
        broker = kit.Broker(kit.address)
        cutter = Cutter(kit.folder / "o", kit.folder / "b", every=700_000, seed=1)
        await cutter.start()
        peer = kit.peer(f"ipc://{kit.folder}/o", silence_s=60.0)
        leases: list[int] = []
        peer.on(Lease, lambda lease, frames: leases.append(lease.lease_id))
        await peer.open(60)
        payload = os.urandom(2000)
        for number in range(600):
            await peer.send(Touch(number, 1), [payload])
            broker.control.send(broker.greeted[0], kit.lease(number), [payload])
        async with asyncio.timeout(60):
            while len(leases) < 600 or len(broker.got) < 600:
                beats = len(broker.beats)
                await broker.until(lambda beats=beats: len(broker.beats) > beats)
        assert cutter.cuts >= 2
        assert leases == [touch.lease_id for touch in broker.bodies(Touch)] == list(range(600))
        assert len(broker.greeted) == 2 and not peer.over  # once on each socket
        cutter.whole = True
        await peer.close("done", 0)
        await cutter.close()
        broker.close()

    asyncio.run(cut())


def test_a_broker_of_another_run_at_the_same_address_is_not_served(kit: Any) -> None:
    async def another() -> None:
        old = kit.Broker(kit.address)
        peer = kit.peer()
        await peer.open(60)
        old.close()
        new = kit.Broker(kit.address)
        new.answer = lambda hello: Welcome("run-2", "{}", 0, 1.0)
        async with asyncio.timeout(60):
            assert "serves run run-2, this process belongs to run run-1: start it anew" in await peer.lost
        assert isinstance(peer.fault, ConfigError)
        assert new.control.peers[new.greeted[0]].run_id == "run-1"
        await peer.close("another run", 2)
        new.close()

    asyncio.run(another())
