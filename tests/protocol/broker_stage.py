"""A broker process and scripted peers for the tests around it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from temper.common import schema
from temper.common.arrays import pack_arrays
from temper.common.keys import PeerKeys
from temper.common.peer import Peer, new_session
from temper.common.reports import RunStatus, decode
from temper.common.schema import Hello

B = TypeVar("B", bound=schema.Body)

RECIPE = """
[run]
name = "script"
max_steps = 3
drain_timeout_s = 5.0
[pacing]
groups_per_step = 2
samples_per_group = 2
max_staleness = 1
[model]
path = "micro"
vocabulary = "ab"
[[domains]]
name = "a"
module = "temper.actor.domains.reverse"
"""


class Guest:
    """A scripted peer: every message it gets waits in a queue of its type."""

    def __init__(
        self,
        address: str,
        role: str,
        name: str,
        slots: int = 0,
        run_id: str | None = None,
        keys: PeerKeys | None = None,
    ) -> None:
        hello = Hello(role, name, new_session(), run_id, pid=os.getpid(), slots=slots)  # type: ignore[arg-type]
        self.peer = Peer(address, hello, keys=keys)
        self.peer.beat("READY")
        self.queues: dict[type[schema.Body], asyncio.Queue[tuple[Any, list[memoryview]]]] = {}
        for kind in schema.BODIES.values():
            self.queues[kind] = asyncio.Queue()
            self.peer.on(kind, self._keep(kind))

    def _keep(self, kind: type[schema.Body]) -> Callable[[Any, list[memoryview]], None]:
        return lambda body, frames: self.queues[kind].put_nowait((body, frames))

    def holds(self, **held: Any) -> None:
        """Say this when the broker has come back, after a word to an incarnation that died before it heard it."""

        def answer(welcome: schema.Welcome) -> None:
            self.peer.post(schema.Holding(1))
            self.peer.post(schema.Holding(self.peer.broker_epoch, **held))

        self.peer.on_resync = answer

    async def next(self, kind: type[B]) -> tuple[B, list[memoryview]]:
        return await asyncio.wait_for(self.queues[kind].get(), 60.0)


class Stage:
    """A broker process and its guests."""

    def __init__(self, folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.run_dir = folder / "run"
        self.address = f"ipc://{folder / 's'}"
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE)
        self.command = [*prefix, sys.executable, "-P", "-m", "temper.broker", str(recipe), "--run", str(self.run_dir)]
        self.command += ["--bind", self.address, *arguments]
        self.guests: list[Guest] = []
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *arguments: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.command, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60.0)
        assert line.startswith(b"READY broker pid="), (line, await self.process.stderr.read() if not line else b"")  # type: ignore[union-attr]

    async def guest(self, role: str, name: str, slots: int = 0) -> Guest:
        guest = Guest(self.address, role, name, slots)
        self.guests.append(guest)
        await guest.peer.open(60)
        return guest

    async def learner(self, lineage: int = 1, resumed: int | None = None) -> Guest:
        learner = await self.guest("learner", "learner")
        await learner.peer.send(schema.LearnerReady(lineage, resumed, resumed or 0, resumed or 0))
        await learner.peer.send(schema.Phase("train", {"a": (0, 1.0)}, 2, 2))
        return learner

    async def status(self) -> RunStatus:
        client = await self.guest("status", "status")
        client.peer.post(schema.StatusRequest())
        _, frames = await client.next(schema.StatusReport)
        return decode(bytes(frames[0]), RunStatus, "status")

    async def end(self) -> tuple[int, str]:
        assert self.process is not None
        _, errors = await asyncio.wait_for(self.process.communicate(), 60.0)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def stage(folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> AsyncIterator[Stage]:
    scene = Stage(folder, *arguments, prefix=prefix)
    await scene.start()
    try:
        yield scene
    finally:
        for guest in scene.guests:
            await guest.peer.close("done", 0, timeout_s=0.2)
        if scene.process is not None and scene.process.returncode is None:
            os.killpg(scene.process.pid, signal.SIGKILL)  # what runs under a prefix, too
            await scene.process.wait()


def samples(
    lease: schema.Lease,
    indices: Sequence[int] | None = None,
    *,
    rewards: tuple[float, ...] = (1.0, 0.0),
    **changed: np.ndarray,
) -> tuple[schema.Samples, list[memoryview]]:
    """Two tokens of prompt, two of completion for each index; tokens say whose they are."""
    indices = lease.indices if indices is None else indices
    n = len(indices)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.array([[lease.lease_id % 1000, i, 7, 8] for i in indices], np.int32).reshape(-1),
        "behaviour_logprob": np.tile(np.array([0, 0, -1.0, -0.5], np.float32), n),
        "loss_mask": np.tile(np.array([0, 0, 1, 1], np.uint8), n),
        "cu_seqlens": np.arange(n + 1, dtype=np.int64) * 4,
        **changed,
    }
    specs, frames = pack_arrays(arrays)
    run = (lease.lineage, lease.min_version, 4)
    metas = [
        schema.SampleMeta(i, "stop", rewards[i % len(rewards)], rewards[i % len(rewards)] > 0, {}, "ok", [run])
        for i in indices
    ]
    return schema.Samples(lease.lease_id, lease.attempt, lease.lineage, metas, specs), frames


def play(scene: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 60.0) -> None:
    asyncio.run(asyncio.wait_for(scene(), limit_s))
