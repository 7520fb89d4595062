"""Kills the broker, actors and sandbox workers with SIGKILL, at random, and reads the ledger afterwards.

    bin/bench soak [--json FILE] [--kills N] [--seed S] [--minutes M] [--onto FILE]

A real ``temper.broker`` with ledger, three actors and two sandbox workers in processes of their own (stand-ins: they speak
the protocol and take a few milliseconds a sample), and a learner that trains what comes. One to four of them are killed again and
again while the others go on. Then: every lease is accounted for, every group is trained once or void with a reason, every
trained sample was accepted once, and every group the learner trained is in the ledger under that step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
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
from temper.broker.ahead import SPARE_IDS
from temper.common import schema
from temper.common.arrays import pack_arrays
from temper.common.errors import PeerLost
from temper.common.peer import Peer, new_session
from temper.common.schema import Hello, pack_frames

GROUPS, SAMPLES = 8, 4
KILLS = 1000
SILENCE_S = 300.0  # the machine may be busy: nobody is to give the broker up while it starts
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
max_staleness = 8
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
    peer = Peer(address, Hello("actor", name, new_session(), pid=os.getpid(), slots=8), silence_s=SILENCE_S)
    peer.beat("READY")
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
    peer = Peer(address, Hello("sandbox", name, new_session(), pid=os.getpid(), slots=4), silence_s=SILENCE_S)
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
    await peer.open(SILENCE_S)
    peer.beat("READY")
    await peer.lost


# ---------------------------------------------------------------- the learner, which lives


class Learner:
    """Trains batches as they come; remembers what it trained in which step."""

    def __init__(self, address: str) -> None:
        self.peer = Peer(address, Hello("learner", "learner", new_session(), pid=os.getpid()), silence_s=SILENCE_S)
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
        await self.peer.open(SILENCE_S)
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


BROKER_EVERY = 5  # rounds: it takes longest to come back
NAMES = ("broker", "actor-1", "actor-2", "actor-3", "worker-1", "worker-2")


class Nursery:
    """Forks stand-ins that have everything imported already: one starts within milliseconds. A process of its own."""

    def __init__(self, address: str, log: Path) -> None:
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, "--nursery", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def start(self, name: str) -> int:
        """The pid of a new stand-in."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=10.0)


def nurse(address: str) -> None:
    """Fork a stand-in for every name on stdin, until it is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        name = line.strip()
        pid = os.fork()
        if pid == 0:
            random.seed()
            asyncio.run((worker if name.startswith("worker") else actor)(address, name))
            os._exit(0)
        print(pid, flush=True)


class Cast:
    """The processes that are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"ipc://{folder}/socket"
        self.broker: subprocess.Popen[bytes] | None = None
        self.pids: dict[str, int] = {}
        (folder / "recipe.toml").write_text(RECIPE)
        self._nursery = Nursery(self.address, folder / "stand-ins.log")

    def start(self, name: str) -> None:
        if name != "broker":
            self.pids[name] = self._nursery.start(name)
            return
        command = [sys.executable, "-P", "-m", "temper.broker", str(self.folder / "recipe.toml")]
        command += ["--run", str(self.folder / "run"), "--bind", self.address, *(["--resume"] if self.broker else [])]
        with (self.folder / "broker.log").open("ab") as log:
            self.broker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    def kill(self, name: str) -> None:
        """SIGKILL, and it is gone."""
        if name == "broker":
            assert self.broker is not None
            self.broker.kill()
            self.broker.wait()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids.pop(name), signal.SIGKILL)

    def dead(self) -> list[str]:
        """Who is not there."""
        gone = ["broker"] if self.broker is not None and self.broker.poll() is not None else []
        for name, pid in self.pids.items():
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                gone.append(name)
        return gone

    def close(self) -> None:
        for name in list(self.pids):
            self.kill(name)
        if self.broker is not None:
            self.broker.kill()
            self.broker.wait()
        self._nursery.close()


async def soak(folder: Path, kills: int, seed: int, least_groups: int = 2, minutes: float = math.inf) -> dict[str, Any]:
    """Kill until it were `kills` or `minutes` are over, let the rest finish, compare learner and ledger.

    Each round kills one to four of them within the same moment, as soon as `least_groups` to twice as many groups have come
    since the last round (or after a second without)."""
    dice = random.Random(seed)
    cast = Cast(folder)
    for name in NAMES:
        cast.start(name)
    learner = Learner(cast.address)
    await learner.begin()
    killed: Counter[str] = Counter()
    rounds = 0
    serving: list[float] = []
    started = time.perf_counter()
    try:
        while sum(killed.values()) < kills and time.perf_counter() - started < minutes * 60:
            with contextlib.suppress(TimeoutError):  # kill what works, or what has been starting for a while
                async with asyncio.timeout(1.0):
                    await learner.groups(dice.randint(least_groups, 2 * least_groups))
            victims = dice.sample(NAMES[1:], dice.choice((1, 2, 3, 4)))
            if rounds % BROKER_EVERY == 1:
                victims[0] = "broker"
            victims = victims[: kills - sum(killed.values())]
            learner.faults += [f"{name} ended by itself" for name in cast.dead()]
            begun = time.perf_counter()
            for victim in victims:
                cast.kill(victim)
                killed[victim.split("-")[0]] += 1
            for victim in victims:
                cast.start(victim)
            rounds += 1
            if "broker" in victims:
                await comes_back(learner, cast)
                serving.append(time.perf_counter() - begun)
            if learner.faults:
                break
        try:
            async with asyncio.timeout(120.0):  # it still works after all that
                await learner.steps(3)
        except TimeoutError:
            said = (folder / "broker.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"no three steps within 120 s after {rounds} rounds; {learner.faults}: {said}") from None
        await learner.peer.send(schema.RunOver("soak over", 0))
        await learner.peer.close("soak over", 0)
        assert cast.broker is not None
        cast.broker.wait(60.0)
    finally:
        cast.close()
    found = audit(folder / "run" / "ledger" / "ledger.sqlite", learner, killed["broker"])
    serving.sort()
    return {
        "kills": sum(killed.values()),
        **{f"kills_{role}": count for role, count in sorted(killed.items())},
        "rounds": rounds,
        "seed": seed,
        "seconds": round(time.perf_counter() - started),
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
    async with asyncio.timeout(SILENCE_S):
        while control.broker_epoch == before:
            if learner.peer.over:
                raise PeerLost(f"the learner lost the broker: {learner.peer.fault}")
            if "broker" in cast.dead():
                raise PeerLost(f"the broker did not start: see {cast.folder}/broker.log")
            await asyncio.sleep(0.01)


def audit(path: Path, learner: Learner, restarts: int) -> dict[str, Any]:
    """What the ledger says against what the learner knows; `faults` must be empty. A broker that was killed may have given out
    ids that its ledger does not know: each of the `restarts` begins beyond them."""
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
    (state,) = books.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()
    counted = json.loads(state)["leases"]["train"]["created"]
    if created != counted or not 0 <= last + 1 - created <= restarts * SPARE_IDS:
        faults.append(f"{created} leases of {counted}, the last has number {last} after {restarts} kills of the broker")
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
    parser = argparse.ArgumentParser(prog="bin/bench soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least-groups", type=int, default=2, help="that come between two rounds of kills")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no round of kills after them")
    parser.add_argument(
        "--onto",
        type=Path,
        metavar="FILE",
        help="an earlier report: its rows are kept and counted, each with the commit that it was made on",
    )
    arguments = parser.parse_args(argv)
    from temper.cli.bench import commit

    rows: list[dict[str, Any]] = []
    if arguments.onto is not None:
        earlier = json.loads(arguments.onto.read_text(encoding="utf-8"))
        rows = [{"commit": earlier["commit"], **row} for row in earlier["rows"]]
    made_on = commit()
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        run = soak(Path(folder), arguments.kills, arguments.seed, arguments.least_groups, arguments.minutes)
        rows.append({**asyncio.run(run), "commit": made_on})
    faults = [fault for row in rows for fault in row["faults"]]
    kills = sum(row["kills"] for row in rows)
    back_s = rows[-1]["broker_back_p50_s"]
    goals = [
        {"name": "kills over all rows", "goal": f">= {KILLS}", "value": kills, "met": kills >= KILLS},
        {"name": "faults after the kills", "goal": "none", "value": faults, "met": not faults},
        {
            "name": "serving again after a kill of the broker, p50 s, last row",
            "goal": "< 2",
            "value": back_s,
            "met": back_s is not None and back_s < 2,
        },
    ]
    return {"rows": rows, "goals": goals}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--nursery"]:
        nurse(sys.argv[2])
    else:
        main(sys.argv[1:])
