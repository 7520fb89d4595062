"""Kills the broker, actors and sandbox workers with SIGKILL, at random, and reads the ledger afterwards.

    bin/bench soak [--json FILE] [--kills N] [--seed S]

A real ``temper.broker`` with ledger, two actors and a sandbox worker in processes of their own (stand-ins: they speak the
protocol and take a few milliseconds a sample), and a learner that trains what comes. One of them is killed again and again
while the others go on. Then: every lease is accounted for, every group is trained once or void with a reason, every
trained sample was accepted once, and every group the learner trained is in the ledger under that step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from temper.common import schema
from temper.common.arrays import pack_arrays
from temper.common.errors import PeerLost
from temper.common.peer import Peer, new_session
from temper.common.schema import Hello, pack_frames

GROUPS, SAMPLES = 8, 4
RECIPE = f"""
[run]
name = "soak"
max_steps = 10000000
drain_timeout_s = 5.0
[model]
vocabulary = "abcdef"
[pacing]
groups_per_step = {GROUPS}
samples_per_group = {SAMPLES}
max_staleness = 2
lease_timeout_s = 10.0
weights_timeout_s = 10.0
max_void_in_a_row = 100000
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


# ---------------------------------------------------------------- stand-ins, each in a process of its own


def message(lease: schema.Lease, index: int) -> tuple[schema.Samples, list[memoryview]]:
    """One sample whose tokens say whose it is."""
    specs, frames = pack_arrays(
        {
            "tokens": np.array([lease.lease_id % 2**20, index, 1, 2], np.int32),
            "behaviour_logprob": np.array([0, 0, -1, -1], np.float32),
            "loss_mask": np.array([0, 0, 1, 1], np.uint8),
            "cu_seqlens": np.array([0, 4], np.int64),
        }
    )
    run = (lease.lineage, lease.min_version, 4)
    meta = schema.SampleMeta(index, "stop", float(index & 1), index & 1 == 1, {}, "ok", [run])
    return schema.Samples(lease.lease_id, lease.attempt, lease.lineage, [meta], specs), frames


async def actor(address: str, name: str) -> None:
    """Has each sample's program run by a sandbox worker, then sends it."""
    peer = Peer(address, Hello("actor", name, new_session(), pid=os.getpid(), slots=8))
    held: dict[tuple[int, int], asyncio.Task[None]] = {}
    jobs: dict[str, tuple[schema.Job, Any, asyncio.Future[None]]] = {}
    loop = asyncio.get_running_loop()

    async def work(lease: schema.Lease) -> None:
        await peer.send(schema.Touch(lease.lease_id, lease.attempt))
        for index in lease.indices:
            body = schema.Job(
                f"{name}-{os.getpid()}-{lease.lease_id}-{lease.attempt}-{index}", lease.lease_id, "reverse", None
            )
            frames = pack_frames(schema.SandboxJob(body.job_id, "python", {"main.py": b"1"}, []))
            verdict = loop.create_future()
            jobs[body.job_id] = (body, frames, verdict)
            await peer.send(body, frames)
            await verdict
            await peer.send(*message(lease, index))
        del held[lease.lease_id, lease.attempt]

    def on_lease(lease: schema.Lease, frames: Any) -> None:
        held[lease.lease_id, lease.attempt] = loop.create_task(work(lease))

    def on_refused(refused: schema.SampleRefused, frames: Any) -> None:
        task = held.pop((refused.lease_id, refused.attempt), None)
        if task is not None:
            task.cancel()

    def on_done(done: schema.JobDone, frames: Any) -> None:
        found = jobs.pop(done.job_id, None)
        if found is not None and not found[2].done():
            found[2].set_result(None)

    def resynced(welcome: schema.Welcome) -> None:
        peer.post(schema.Holding(peer.broker_epoch, attempts=list(held)))
        for body, frames, _ in list(jobs.values()):
            peer.post(body, frames)

    peer.on(schema.Lease, on_lease)
    peer.on(schema.SampleRefused, on_refused)
    peer.on(schema.JobDone, on_done)
    peer.on_resync = resynced
    await serve(peer)


async def worker(address: str, name: str) -> None:
    """Answers every job after a moment."""
    peer = Peer(address, Hello("sandbox", name, new_session(), pid=os.getpid(), slots=4))
    running: dict[str, asyncio.Task[None]] = {}

    async def work(job: schema.Job) -> None:
        await asyncio.sleep(random.uniform(0, 0.01))
        running.pop(job.job_id, None)
        await peer.send(schema.JobDone(job.job_id, "ok", 0.005), pack_frames(schema.Verdict("ok")))

    def on_job(job: schema.Job, frames: Any) -> None:
        if job.job_id not in running:
            running[job.job_id] = asyncio.get_running_loop().create_task(work(job))

    def resynced(welcome: schema.Welcome) -> None:
        peer.post(schema.Holding(peer.broker_epoch, jobs=list(running)))

    peer.on(schema.Job, on_job)
    peer.on(schema.JobCancel, lambda cancel, frames: None)
    peer.on_resync = resynced
    await serve(peer)


async def serve(peer: Peer) -> None:
    """Until the broker is lost for good."""
    await peer.open(60.0)
    peer.beat("READY")
    await peer.lost


# ---------------------------------------------------------------- the learner, which lives


class Learner:
    """Trains batches as they come; remembers what it trained in which step."""

    def __init__(self, address: str) -> None:
        self.peer = Peer(address, Hello("learner", "learner", new_session(), pid=os.getpid()))
        self.peer.on(schema.Group, self.on_group)
        self.peer.on(schema.NewVersion, lambda body, frames: None)
        self.peer.on(schema.Metrics, lambda body, frames: None)
        self.peer.on_resync = self.resynced
        self.batch: dict[int, int] = {}
        self.asked = 0
        self.version = 0
        self.trained: dict[int, int] = {}
        self.faults: list[str] = []
        self.stepped = asyncio.Event()
        self.came = asyncio.Event()

    async def begin(self) -> None:
        await self.peer.open(60.0)
        self.peer.beat("READY")
        self.peer.post(schema.LearnerReady(7, None, 0, 0))
        self.peer.post(schema.Phase("train", {"reverse": (0, 1.0)}, GROUPS, SAMPLES))
        self.ask()

    def ask(self) -> None:
        missing = GROUPS - len(self.batch) - self.asked
        if missing > 0:
            self.asked += missing
            self.peer.post(schema.Demand("train", missing))

    def on_group(self, group: schema.Group, frames: Any) -> None:
        if group.group_id in self.batch or group.group_id in self.trained:
            self.faults.append(f"group {group.group_id} came twice")
            return
        self.asked = max(0, self.asked - 1)
        indices = sorted(meta.index for part in group.parts for meta in part.samples)
        if len(set(indices)) != len(indices):
            self.faults.append(f"group {group.group_id} has the samples {indices}")
        self.batch[group.group_id] = len(indices)
        self.came.set()
        if len(self.batch) == GROUPS:
            self.trained |= dict.fromkeys(self.batch, self.version)
            self.peer.post(schema.Done(self.version, list(self.batch), {}, True))
            self.version += 1
            self.stepped.set()
            self.batch.clear()
            self.ask()

    async def groups(self, count: int) -> None:
        """Until `count` more groups have come."""
        for _ in range(count):
            self.came.clear()
            await self.came.wait()

    async def steps(self, count: int) -> None:
        """Until `count` more steps are done."""
        for _ in range(count):
            self.stepped.clear()
            await self.stepped.wait()

    def resynced(self, welcome: schema.Welcome) -> None:
        self.peer.post(schema.Holding(self.peer.broker_epoch, groups=list(self.batch), demand={"train": self.asked}))


# ---------------------------------------------------------------- the soak


class Cast:
    """The processes that are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/socket"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "recipe.toml").write_text(RECIPE)

    def start(self, name: str) -> None:
        here = [sys.executable, "-P"]
        if name == "broker":
            command = [
                *here,
                "-m",
                "temper.broker",
                str(self.folder / "recipe.toml"),
                "--run",
                str(self.folder / "run"),
            ]
            command += ["--bind", self.address, *(["--resume"] if name in self.processes else [])]
        else:
            command = [*here, __file__, "--stand-in", name, self.address]
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        log.close()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def dead(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.poll() is not None]


NAMES = ("broker", "actor-1", "actor-2", "worker-1")


async def soak(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `kills` times, let the rest finish, compare learner and ledger."""
    dice = random.Random(seed)
    cast = Cast(folder)
    for name in NAMES:
        cast.start(name)
    learner = Learner(cast.address)
    await learner.begin()
    killed: Counter[str] = Counter()
    serving: list[float] = []
    try:
        while sum(killed.values()) < kills:
            with contextlib.suppress(TimeoutError):  # kill what works, or what has been starting for a while
                async with asyncio.timeout(5.0):
                    await learner.groups(dice.randint(1, 12))
            victim = dice.choice(NAMES)
            cast.kill(victim)
            killed[victim.split("-")[0]] += 1
            begun = time.perf_counter()
            cast.start(victim)
            if victim == "broker":
                await comes_back(learner, cast)
                serving.append(time.perf_counter() - begun)
            learner.faults += [f"{name} ended by itself" for name in cast.dead() if name != victim]
            if learner.faults:
                break
        async with asyncio.timeout(120.0):  # it still works after all that
            await learner.steps(3)
        await learner.peer.send(schema.RunOver("soak over", 0))
        await learner.peer.close("soak over", 0)
        cast.processes["broker"].wait(60.0)
    finally:
        for name in NAMES:
            cast.processes[name].send_signal(signal.SIGKILL)
            cast.processes[name].wait()
    found = audit(folder / "run" / "ledger" / "ledger.sqlite", learner)
    serving.sort()
    return {
        "kills": sum(killed.values()),
        **{f"kills_{role}": count for role, count in sorted(killed.items())},
        "steps": learner.version,
        "groups_trained": len(learner.trained),
        "broker_back_p50_s": round(serving[len(serving) // 2], 2) if serving else None,
        "broker_back_max_s": round(serving[-1], 2) if serving else None,
        **found,
    }


async def comes_back(learner: Learner, cast: Cast) -> None:
    """Until the learner has shaken hands with the restarted broker."""
    control = learner.peer._sides[0]
    before = control.broker_epoch
    async with asyncio.timeout(60.0):
        while control.broker_epoch == before:
            if learner.peer.over:
                raise PeerLost(f"the learner lost the broker: {learner.peer.fault}")
            if "broker" in cast.dead():
                raise PeerLost(f"the broker did not start: see {cast.folder}/broker.log")
            await asyncio.sleep(0.01)


def audit(path: Path, learner: Learner) -> dict[str, Any]:
    """What the ledger says against what the learner knows; `faults` must be empty."""
    books = sqlite3.connect(path)
    faults = list(learner.faults)
    trained = dict(books.execute("SELECT group_id, version FROM groups WHERE state = 'trained'"))
    if trained != learner.trained:
        odd = {i for i in trained.keys() | learner.trained.keys() if trained.get(i) != learner.trained.get(i)}
        faults.append(f"{len(odd)} groups differ between ledger and learner, first {sorted(odd)[:5]}")
    unexplained = books.execute(
        "SELECT COUNT(*) FROM groups WHERE state NOT IN ('trained', 'void') OR (state = 'void' AND reason = '')"
    ).fetchone()[0]
    if unexplained:
        faults.append(f"{unexplained} groups are neither trained nor void with a reason")
    created, last = books.execute("SELECT COUNT(*), MAX(lease_id) FROM leases").fetchone()
    if created != last + 1:
        faults.append(f"{created} leases, the last has number {last}")
    states = dict(books.execute("SELECT state, COUNT(*) FROM leases GROUP BY state"))
    if states.pop("in flight", 0):
        faults.append("leases are in flight after the end")
    missing = books.execute(
        "SELECT COUNT(*) FROM leases WHERE state = 'accepted' AND filled = '[]' AND size != "
        "(SELECT COUNT(*) FROM samples WHERE samples.lease_id = leases.lease_id)"
    ).fetchone()[0]
    if missing:
        faults.append(f"{missing} accepted leases lack samples")
    voids = dict(books.execute("SELECT reason, COUNT(*) FROM groups WHERE state = 'void' GROUP BY reason"))
    books.close()
    return {"leases": created, "lease_states": states, "voids": voids, "faults": faults}


def main(argv: Sequence[str]) -> dict[str, Any]:
    """One row."""
    if argv[:1] == ["--stand-in"]:
        _, name, address = argv
        asyncio.run((worker if name.startswith("worker") else actor)(address, name))
        return {"rows": []}
    parser = argparse.ArgumentParser(prog="bin/bench soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        row = asyncio.run(soak(Path(folder), arguments.kills, arguments.seed))
    goals = [
        {"name": "faults after the kills", "goal": "none", "value": row["faults"], "met": not row["faults"]},
        {
            "name": "serving again after a kill of the broker, p50 s",
            "goal": "< 2",
            "value": row["broker_back_p50_s"],
            "met": row["broker_back_p50_s"] is not None and row["broker_back_p50_s"] < 2,
        },
    ]
    return {"rows": [row], "goals": goals}


if __name__ == "__main__":
    main(sys.argv[1:])
