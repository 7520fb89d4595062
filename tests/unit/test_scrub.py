"""The scrub finds a bit that changed by itself, on either side, and is not misled by a commit under way."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from temper.actor.engines.sglang_weights import Mirror
from temper.actor.scrub import Scrub
from temper.actor.weights import WeightClient
from temper.common import delta
from temper.common.bits import TensorBits, Weights, seal
from temper.common.schema import NewVersion, Version


class Nobody:
    """A peer that only takes handlers."""

    def __init__(self) -> None:
        self.handlers: dict[type, Any] = {}

    def on(self, body: type, handler: Any) -> None:
        self.handlers[body] = handler

    async def send(self, body: Any, frames: Any = (), version: int = 0) -> None:
        raise AssertionError("nothing is fetched here")


def version(ordinal: int) -> Weights:
    return seal(ordinal, 1, {n: TensorBits.of(np.full(50, ordinal, np.float32)) for n in ("a", "b")})


async def committed() -> tuple[WeightClient, dict[str, np.ndarray], list[Version]]:
    peer, news = Nobody(), []
    client = WeightClient(peer)
    client.on_new_version = news.append
    peer.handlers[NewVersion](NewVersion(version(0).version), [])
    update = delta.stage(delta.encode(None, version(0)), None)
    await client.commit(update, update.digest)
    return client, {patch.name: patch.values.copy() for patch in update.changed}, news


@pytest.mark.parametrize("side", ["host copy", "engine"])
def test_a_bit_that_changed_is_found_and_a_full_copy_asked_for(side: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        client, engine, news = await committed()
        scrub = Scrub(client, engine.get)
        for _ in range(4):
            await scrub.look()
        assert not client.reseeds
        held = client.weights
        assert held is not None
        (held.tensors["b"].bits if side == "host copy" else engine["b"])[7] ^= 1
        for _ in range(4):
            await scrub.look()
        assert client.reseeds == {"scrub": 1} and client.version is None
        assert news == [version(0).version] * 2  # whoever follows the log is woken to fetch again
        await scrub.look()

    asyncio.run(scenario())
    assert f"b of the {side} is no longer that of version 0" in capsys.readouterr().err


def test_an_engine_ahead_of_the_host_copy_is_no_fault() -> None:
    async def scenario() -> None:
        client, engine, _ = await committed()
        scrub = Scrub(client, engine.get)
        update = delta.stage(delta.encode(version(0), version(1)), version(0))
        for patch in update.changed:
            engine[patch.name][:] = patch.values  # the engine has committed, the host copy not yet
        await scrub.look()
        await client.commit(update, update.digest)
        for _ in range(4):
            await scrub.look()
        assert not client.reseeds

    asyncio.run(scenario())


def test_an_engine_that_cannot_say_is_left_alone() -> None:
    async def scenario() -> None:
        client, _, _ = await committed()
        scrub = Scrub(client, lambda name: None)
        for _ in range(3):
            await scrub.look()
        assert not client.reseeds

    asyncio.run(scenario())


def test_a_copy_that_the_engine_keeps_anyway_is_the_host_copy() -> None:
    """One host copy, not two: SGLang's mirror serves as the base that the next delta is verified against."""

    async def scenario() -> None:
        client = WeightClient(Nobody())
        mirror = Mirror()
        held: Weights | None = None
        for ordinal in range(3):
            new = seal(ordinal, 1, dict(version(ordinal).tensors), held)
            update = delta.stage(delta.encode(held, new), client.weights)
            mirror.overwrite(update)
            await client.commit(update, update.digest, mirror.bits)
            assert client.weights is not None and client.version == new.version
            assert client.weights.tensors["b"].bits is mirror.bits("b")
            held = new
        assert set(client.weights.tensors) == {"a", "b"}

    asyncio.run(scenario())
