"""What a sample costs in the real broker process: leases out, samples in, groups to the learner, steps done.

    bin/bench broker_run [--json FILE] [--samples N] [--payload BYTES]

A real ``temper.broker`` serves one stand-in actor, which answers every lease at once with samples of `--payload` bytes, one
message each, and one stand-in learner, which takes groups as they come and reports steps. `cpu_us` is the broker's processor
time a sample, all threads, leases and groups and acknowledgements included; with durability "full" an accepted sample
is on disk before it is acknowledged.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from temper.common.arrays import pack_arrays
from temper.common.peer import Peer, new_session
from temper.common.schema import (
    Demand,
    Done,
    Group,
    Hello,
    LearnerReady,
    Lease,
    Phase,
    SampleMeta,
    Samples,
    Touch,
)

GROUPS_PER_STEP, SAMPLES_PER_GROUP, STALENESS = 32, 16, 4
LINEAGE = 7
BYTES_PER_TOKEN = 9  # i32 token, f32 log-probability, u8 mask
RECIPE = f"""
[run]
name = "bench"
max_steps = 1000000
[model]
vocabulary = "abcdef"
[pacing]
groups_per_step = {GROUPS_PER_STEP}
samples_per_group = {SAMPLES_PER_GROUP}
max_staleness = {STALENESS}
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


class Actor:
    """Answers leases with random samples."""

    def __init__(self, address: str, payload: int) -> None:
        tokens = max(payload // BYTES_PER_TOKEN, 2)
        mask = np.ones(tokens, dtype=np.uint8)
        mask[0] = 0
        self.specs, self.frames = pack_arrays(
            {
                "tokens": np.arange(tokens, dtype=np.int32),
                "behaviour_logprob": np.zeros(tokens, dtype=np.float32),
                "loss_mask": mask,
                "cu_seqlens": np.array([0, tokens], dtype=np.int64),
            }
        )
        self.tokens = tokens
        self.leases: asyncio.Queue[Lease] = asyncio.Queue()
        self.peer = Peer(address, Hello("actor", "actor-1", new_session(), slots=64))
        self.peer.on(Lease, lambda lease, frames: self.leases.put_nowait(lease))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            lease = await self.leases.get()
            self.peer.post(Touch(lease.lease_id, lease.attempt))
            for index in lease.indices:
                meta = SampleMeta(
                    index,
                    "stop",
                    float(index & 1),
                    index & 1 == 1,
                    {"exact": float(index & 1)},
                    "ok",
                    [(LINEAGE, lease.min_version, self.tokens)],
                )
                body = Samples(lease.lease_id, lease.attempt, lease.lineage, [meta], self.specs)
                await self.peer.send(body, self.frames)


class Learner:
    """Takes groups and reports steps; `enough` completes when `samples` were trained."""

    def __init__(self, address: str, samples: int) -> None:
        self.peer = Peer(address, Hello("learner", "learner", new_session()))
        self.peer.on(Group, self.on_group)
        self.enough = asyncio.get_running_loop().create_future()
        self.samples = samples
        self.version = self.trained = 0
        self.batch: list[int] = []

    async def begin(self) -> None:
        """Ready, train phase, first demand."""
        await self.peer.send(LearnerReady(LINEAGE, None, 0, 0))
        await self.peer.send(Phase("train", {"reverse": (0, 1.0)}, GROUPS_PER_STEP, SAMPLES_PER_GROUP))
        await self.peer.send(Demand("train", GROUPS_PER_STEP))

    def on_group(self, group: Group, frames: list[memoryview]) -> None:
        self.batch.append(group.group_id)
        self.trained += sum(len(part.samples) for part in group.parts)
        if len(self.batch) < GROUPS_PER_STEP:
            return
        self.peer.post(Done(self.version, self.batch, {}, counted=True))
        self.version, self.batch = self.version + 1, []
        self.peer.post(Demand("train", GROUPS_PER_STEP))
        if self.trained >= self.samples and not self.enough.done():
            self.enough.set_result(None)


async def serve(address: str, samples: int, payload: int, broker: psutil.Process) -> dict[str, float]:
    """Drive the broker; its CPU and rate over `samples` samples, after a tenth of them as a warm-up."""
    learner, actor = Learner(address, samples // 10), Actor(address, payload)
    await learner.peer.open(30)
    await actor.peer.open(30)
    actor.peer.beat("READY")
    learner.peer.beat("READY")
    working = asyncio.ensure_future(actor.run())
    await learner.begin()
    await learner.enough
    learner.enough, learner.samples = asyncio.get_running_loop().create_future(), learner.trained + samples
    before, started = sum(broker.cpu_times()[:2]), time.perf_counter()
    first = learner.trained
    await learner.enough
    seconds, cpu_s = time.perf_counter() - started, sum(broker.cpu_times()[:2]) - before
    done = learner.trained - first
    working.cancel()
    for peer in (actor.peer, learner.peer):
        await peer.close("measured", 0)
    return {"cpu_us": round(cpu_s / done * 1e6, 1), "rate": round(done / seconds), "samples": done}


def measure(durability: str, samples: int, payload: int) -> dict[str, Any]:
    """One row."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        recipe = Path(folder) / "bench.toml"
        recipe.write_text(RECIPE)
        address = f"ipc://{folder}/socket"
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "temper.broker", str(recipe), "--run", f"{folder}/run"),
                *("--bind", address, f"--run.durability={durability}"),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            found = asyncio.run(serve(address, samples, payload, psutil.Process(child.pid)))
        finally:
            child.terminate()
            child.wait(30)
    return {"durability": durability, "payload_bytes": payload, **found}


def main(argv: Sequence[str]) -> dict[str, Any]:
    """A row for each durability."""
    parser = argparse.ArgumentParser(prog="bin/bench broker_run", description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--payload", type=int, default=1024)
    arguments = parser.parse_args(argv)
    rows = [measure(durability, arguments.samples, arguments.payload) for durability in ("memory", "full")]
    goals = [
        {
            "name": f"broker CPU for a sample of {row['payload_bytes']} bytes, durability {row['durability']}, us",
            "goal": f"<= {most}",
            "value": row["cpu_us"],
            "met": row["cpu_us"] <= most,
        }
        for row, most in zip(rows, (8, 16), strict=True)
    ]
    return {"rows": rows, "goals": goals}
