"""The weight log over real sockets: a snapshot larger than every window, many newcomers at once, slow ones, and restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from temper.actor.weights import WeightClient
from temper.broker.weight_desk import WeightDesk
from temper.broker.weights import WeightStore
from temper.common.bits import TensorBits, Tensors, Weights, seal
from temper.common.pump import Delivery
from temper.common.schema import Chunk, Fetch, NewVersion, Publish, Version
from temper.learner.publisher import Publisher

LINEAGE = 5
DEADLINE_S = 60.0
WINDOW_BYTES = 24 << 20  # less than the snapshot


def tensors(size: int, ordinal: int) -> Tensors:
    """Random bits, of which a few differ from version to version."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, size, np.uint32)
    bits[: 10 * ordinal] ^= np.uint32(1)
    return {"w": TensorBits("float32", (size,), bits), "b": TensorBits("float32", (4,), np.arange(4, dtype=np.uint32))}


@contextlib.asynccontextmanager
async def service(kit: Any, folder: Path, **options: Any) -> AsyncIterator[Any]:
    """A broker that does nothing but weights."""

    class WeightBroker(kit.Broker):  # type: ignore[misc]
        desk: WeightDesk

        def _batch(self, deliveries: list[Delivery]) -> None:
            for d in deliveries:
                if d.type in (Publish, Chunk, Fetch):
                    self.desk.take(d.peer, d.body, d.frames, d.sequence)
                elif d.sequence:
                    self.acknowledge(d)

        def _room(self, peer: bytes) -> None:
            self.desk.room(peer)

        def announce(self, version: Version) -> None:
            for peer in self.control.peers:
                self.control.send(peer, NewVersion(version))

    broker = WeightBroker(kit.address, **options)
    broker.desk = WeightDesk(
        WeightStore(folder, "run-1", sync=False),
        send=broker.bulk.send,
        backlog=broker.bulk.backlog,
        acknowledge=broker.bulk.acknowledge,
        announce=broker.announce,
    )
    task = asyncio.create_task(broker.desk.run())
    try:
        yield broker
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        broker.close()


class Member:
    """A peer with a publisher (the learner) or a client (an actor)."""

    def __init__(self, kit: Any, **options: Any) -> None:
        self.peer = kit.peer(**options)
        self.client = WeightClient(self.peer)
        self.publisher = Publisher(self.peer, LINEAGE)
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> Member:
        await self.peer.open(DEADLINE_S)
        self.tasks.append(asyncio.create_task(self.publisher.run()))
        return self

    async def swap(self, want: int | None = None) -> Version:
        update = await self.client.fetch(want, deadline_s=DEADLINE_S)
        await self.client.commit(update, update.digest)
        return update.version

    async def publish(self, size: int, ordinal: int) -> Weights:
        made = tensors(size, ordinal)
        await self.publisher.publish(ordinal, made)
        await self.publisher.flush(DEADLINE_S)
        return seal(ordinal, LINEAGE, made)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.peer.close("done", 0)


def test_a_snapshot_larger_than_the_windows_arrives_and_heartbeats_go_on(kit: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        size = 8 << 20
        async with service(kit, tmp_path, window_bytes=WINDOW_BYTES) as broker:
            learner = await Member(kit).open()
            actors = [await Member(kit, window_bytes=WINDOW_BYTES).open() for _ in range(2)]
            truth = await learner.publish(size, 0)
            assert await asyncio.gather(*(actor.swap() for actor in actors)) == [truth.version] * 2
            truth = await learner.publish(size, 1)
            assert learner.publisher.stored == truth.version
            assert await asyncio.gather(*(actor.swap() for actor in actors)) == [truth.version] * 2
            for actor in actors:
                assert actor.client.last is not None and actor.client.last.nbytes < 10_000
                held = actor.client._weights
                assert held is not None and (held.tensors["w"].bits == truth.tensors["w"].bits).all()
                assert not actor.client.reseeds
            assert not broker.closed
            for member in (learner, *actors):
                await member.close()

    asyncio.run(scenario())


def test_sixty_four_actors_join_at_once_while_versions_go_on(kit: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        size = 20_000
        async with service(kit, tmp_path) as broker:
            learner = await Member(kit).open()
            await learner.publish(size, 0)
            actors = [Member(kit) for _ in range(64)]
            await asyncio.gather(*(actor.open() for actor in actors))
            joining = asyncio.gather(*(actor.swap() for actor in actors))
            for ordinal in range(1, 6):
                truth = await learner.publish(size, ordinal)
            await joining
            assert set(await asyncio.gather(*(actor.swap() for actor in actors))) == {truth.version}
            assert not broker.closed and not any(actor.client.reseeds for actor in actors)
            await asyncio.gather(*(member.close() for member in (learner, *actors)))

    asyncio.run(scenario())


def test_an_actor_that_stops_reading_holds_nobody_back(kit: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        size = 6 << 20
        async with service(kit, tmp_path) as broker:
            learner = await Member(kit).open()
            truth = await learner.publish(size, 0)
            stuck, lively = Member(kit, window_bytes=20 << 20), Member(kit)
            await stuck.open()
            await lively.open()
            await stuck.peer.send(Fetch(None, None, 1))
            stuck.peer._sides[1].link.close()  # its process is stopped: nothing is read from the bulk socket any more
            assert await lively.swap() == truth.version
            truth = await learner.publish(size, 1)
            assert await lively.swap() == truth.version
            assert broker.bulk.backlog(broker.greeted[-1])[1] < 40 << 20
            await lively.close()
            await learner.close()
            await stuck.close()

    asyncio.run(scenario())


def test_a_pinned_fetch_over_sockets_gets_exactly_its_version(kit: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(kit, tmp_path):
            learner, evaluator = await Member(kit).open(), await Member(kit).open()
            for ordinal in range(3):
                made = tensors(5000, ordinal)
                await learner.publisher.publish(ordinal, made, keep=ordinal == 1)
                await learner.publisher.flush(DEADLINE_S)
            assert await evaluator.swap(1) == seal(1, LINEAGE, tensors(5000, 1)).version
            assert await evaluator.swap() == seal(2, LINEAGE, tensors(5000, 2)).version
            await evaluator.close()
            await learner.close()

    asyncio.run(scenario())
