"""Relays as processes between a broker and its guests, and guests that hold weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from broker_stage import Guest, Stage
from temper.actor.weights import WeightClient
from temper.common.bits import TensorBits, Tensors
from temper.common.keys import PeerKeys
from temper.common.reports import WeightsStatus
from temper.common.schema import Version
from temper.learner.publisher import Publisher

DEADLINE_S = 60.0


class Relay:
    """One relay process below a parent's address."""

    def __init__(self, folder: Path, name: str, parent: str, *arguments: str, address: str = "") -> None:
        self.name = name
        self.run_dir = folder / name
        self.address = address or f"ipc://{folder / (name + '.s')}"
        self.command = [sys.executable, "-P", "-m", "temper.broker", "--relay", parent, "--run", str(self.run_dir)]
        self.command += ["--bind", self.address, "--name", name, *arguments]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> Relay:
        self.process = await asyncio.create_subprocess_exec(
            *self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        told = b"" if line else await self.process.stderr.read()
        assert line.startswith(f"READY {self.name} pid=".encode()), (line, told)
        return self

    async def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def end(self) -> tuple[int, str]:
        assert self.process is not None
        _, errors = await asyncio.wait_for(self.process.communicate(), DEADLINE_S)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def relays(scene: Stage, folder: Path, depth: int = 1) -> AsyncIterator[list[Relay]]:
    """`depth` relays in a row below the broker of `scene`, the last one farthest from it."""
    chain: list[Relay] = []
    try:
        for level in range(depth):
            parent = chain[-1].address if chain else scene.address
            chain.append(Relay(folder, f"relay-{level + 1}", parent))
            await chain[-1].start()
        yield chain
    finally:
        await asyncio.gather(*(guest.peer.close("done", 0, timeout_s=0.2) for guest in scene.guests))
        scene.guests.clear()
        for relay in chain:
            await relay.kill()


async def guest_at(scene: Stage, address: str, role: str, name: str, slots: int = 0) -> Guest:
    """A guest of `scene` that connects somewhere else than to its broker."""
    guest = Guest(address, role, name, slots)
    scene.guests.append(guest)
    await guest.peer.open(DEADLINE_S)
    return guest


def tensors(size: int, ordinal: int, seed: int = 0) -> Tensors:
    """Random bits, of which a few differ from version to version, all from seed to seed."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32)
    bits[: 10 * ordinal] ^= np.uint32(1)
    return {"w": TensorBits("float32", (size,), bits)}


class Writer:
    """A learner that publishes weights and does nothing else."""

    def __init__(self, guest: Guest, lineage: int) -> None:
        self.publisher = Publisher(guest.peer, lineage)
        self.task = asyncio.create_task(self.publisher.run())

    async def publish(self, size: int, ordinal: int, *, keep: bool = False, seed: int = 0) -> Version:
        await self.publisher.publish(ordinal, tensors(size, ordinal, seed), keep=keep)
        await self.publisher.flush(DEADLINE_S)
        assert self.publisher.stored is not None
        return self.publisher.stored

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class LightActor:
    """A peer of role actor (or eval) that follows weights and nothing else, and says in its heartbeats what it holds."""

    def __init__(
        self, scene: Stage, address: str, name: str, role: str = "actor", keys: PeerKeys | None = None
    ) -> None:
        self.guest = Guest(address, role, name, keys=keys)
        scene.guests.append(self.guest)
        self.client = WeightClient(self.guest.peer, idle_s=5.0)
        self.guest.peer.on_bulk_resync = self.client.resynced

    async def open(self) -> LightActor:
        await self.guest.peer.open(DEADLINE_S)
        return self

    async def swap(self, want: int | None = None) -> Version:
        update = await self.client.fetch(want, deadline_s=DEADLINE_S)
        await self.client.commit(update, update.digest)
        assert self.client.version is not None
        self.guest.peer.beat("READY", "swapped", "", self.client.version)
        return self.client.version

    async def swap_until(self, version: Version) -> None:
        """Follow to exactly that version; what is announced meanwhile counts too."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.swap() != version:
                pass


async def weights_of(scene: Stage) -> WeightsStatus:
    """The broker's weight log, from its status."""
    status = await scene.status()
    assert status.weights is not None
    return status.weights
