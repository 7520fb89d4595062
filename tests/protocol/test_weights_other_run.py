"""Weights stay in their run: real broker processes, a learner's publisher, actors' weight clients.

Of FIELD_FAILURES, "Weights": left-over weights of run A are read by run B -> run id in every handshake and file. Files are
tried in `test_weight_store` (unit), a relay of another run in `test_relay`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_stage import Guest, Stage, play, stage
from temper.actor.weights import WeightClient
from temper.common.bits import TensorBits, Tensors, seal
from temper.common.errors import ConfigError, PeerLost
from temper.common.schema import Chain, Chunk, Fetch, Version
from temper.learner.publisher import Publisher

LINEAGE = 1
DEADLINE_S = 20.0


def tensors(seed: int) -> Tensors:
    return {"w": TensorBits("bfloat16", (3000,), np.random.default_rng(seed).integers(0, 1 << 16, 3000, np.uint16))}


async def published(s: Stage, seed: int) -> Version:
    """A learner of the stage's run has published its weights as version 0."""
    learner = await s.learner(LINEAGE)
    publisher = Publisher(learner.peer, LINEAGE)
    running = asyncio.create_task(publisher.run())
    await publisher.publish(0, tensors(seed))
    await publisher.flush(DEADLINE_S)
    running.cancel()
    return seal(0, LINEAGE, tensors(seed)).version


async def fetched(actor: Guest) -> WeightClient:
    """A weight client of an actor that has joined, at the newest version."""
    client = WeightClient(actor.peer)
    update = await client.fetch(deadline_s=DEADLINE_S)
    await client.commit(update, update.digest)
    return client


def test_an_actor_of_another_run_is_given_no_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            truth = await published(s, seed=1)
            stranger = Guest(s.address, "actor", "stranger", 1, run_id="feedface")
            s.guests.append(stranger)
            with pytest.raises(ConfigError, match=r"this is run [0-9a-f]{16}, the peer belongs to run feedface"):
                await stranger.peer.open(DEADLINE_S)
            with pytest.raises(PeerLost, match="the peer belongs to run feedface"):
                await stranger.peer.send(Fetch(None, None, 1))
            client = await fetched(await s.guest("actor", "of-this-run", 1))
            assert client.version == truth
            assert stranger.queues[Chain].empty() and stranger.queues[Chunk].empty()
            assert {peer.name for peer in (await s.status()).peers if peer.role == "actor"} == {"of-this-run"}

    play(scene)


def test_an_actor_takes_no_weights_of_another_run_that_is_served_at_the_same_address(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with stage(tmp_path / "a") as a:
            truth = await published(a, seed=1)
            actor = await a.guest("actor", "of-run-a", 1)
            client = await fetched(actor)
            assert a.process is not None
            os.killpg(a.process.pid, signal.SIGKILL)
            await a.process.wait()
            async with stage(tmp_path / "b", "--bind", a.address) as b:  # the last --bind counts
                b.address = a.address
                assert await published(b, seed=2) != truth  # the same ordinal and lineage, other weights
                fetching = asyncio.create_task(client.fetch(deadline_s=DEADLINE_S))  # asked for before it is told
                assert "belongs to run" in await asyncio.wait_for(actor.peer.lost, DEADLINE_S)
                assert isinstance(actor.peer.fault, ConfigError)
                with pytest.raises(PeerLost, match="belongs to run"):
                    await actor.peer.send(Fetch(None, None, 2))
                fetching.cancel()
                assert client.version == truth and client.newest in (None, truth) and not client.reseeds
                client = await fetched(await b.guest("actor", "of-run-b", 1))
                assert client.version == seal(0, LINEAGE, tensors(2)).version

    play(scene)
