"""SIGKILL in the middle of a publish: of a weight log, again and again, and of a learner, a broker and an actor of a real run.
What was acknowledged is there, nothing torn is served, and every actor goes on with the learner's bits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temper.broker.weight_files import PART, Damaged, read, scan
from temper.broker.weights import WeightStore
from temper.cli.client import StatusClient
from temper.common import delta
from temper.common.reports import RunStatus

WRITER = """
import hashlib, sys
from pathlib import Path
import numpy as np
from temper.broker.weights import WeightStore
from temper.common import delta
from temper.common.bits import TensorBits, seal
from temper.common.schema import Chunk, Manifest, Publish

store = WeightStore(Path(sys.argv[1]), "run-a")
print("start", store.newest().ordinal if store.newest() else -1, flush=True)
newest = store.newest()
base = None
ordinal = newest.ordinal + 1 if newest else 0
lineage = newest.lineage + 1 if newest else 1
while True:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 300_000, np.uint32)
    bits[: 100 * (ordinal + 1)] += np.uint32(ordinal)
    new = seal(ordinal, lineage, {"w": TensorBits("float32", (300_000,), bits)}, base)
    chunks = list(delta.encode(base, new))
    of = base.version if base else None
    store.begin("learner", Publish(Manifest(new.version, of, len(chunks), sum(map(len, chunks)), new.nbytes, 0.1)))
    for i, chunk in enumerate(chunks):
        digest = hashlib.blake2b(chunk, digest_size=16).hexdigest()
        store.chunk("learner", Chunk(ordinal, base is None, i, digest), memoryview(chunk))
    print("stored", new.version.lineage, new.version.ordinal, new.version.digest, flush=True)
    work = store.compose()
    if work is not None:
        store.adopt(work())
    store.retain([])
    base, ordinal = new, ordinal + 1
"""


@pytest.mark.system
def test_what_was_acknowledged_survives_sigkill_and_nothing_torn_is_served(tmp_path: Path) -> None:
    rng = random.Random(0)
    acknowledged: tuple[int, int, str] | None = None
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        assert next(lines).split()[0] == "start"
        for _ in range(rng.randint(1, 12)):
            _, lineage, ordinal, digest = next(lines).split()
            acknowledged = int(lineage), int(ordinal), digest
        child.kill()
        for line in lines:  # what it had said before the signal took effect
            if line.endswith("\n"):
                _, lineage, ordinal, digest = line.split()
                acknowledged = int(lineage), int(ordinal), digest
        child.wait()
        child.stdout.close()
        store = WeightStore(tmp_path, "run-a")
        newest = store.newest()
        assert newest is not None and acknowledged is not None
        assert (newest.lineage, newest.ordinal) >= acknowledged[:2]
        if newest.ordinal == acknowledged[1]:
            assert newest.digest == acknowledged[2]
        for place in store.log.places:
            route = store.route(None, place)
            update = delta.stage([frame for _, frame in route.messages()], None)
            assert update.version == route.chain.version
        assert not list(tmp_path.glob("*.part"))


RECIPE = """
[run]
name = "kill"
max_steps = 60
checkpoint_every_steps = 2
[model]
path = "micro"
vocabulary = "abcdefghijklmnopqrstuvwxyz>"
hidden_size = 384
intermediate_size = 1536
layers = 4
heads = 4
max_length_tokens = 12
[pacing]
groups_per_step = 2
samples_per_group = 4
max_staleness = 2
lease_timeout_s = 30.0
[sampling]
max_new_tokens = 6
[optimizer]
learning_rate = 1e-4
[eval]
tasks_per_domain = 1
samples_per_task = 1
[engine]
kind = "embedded"
max_rows = 16
[daemons]
sandboxes = 0
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""
DEADLINE_S = 300.0


class Witness:
    """Watches a run's weight log from outside. `published`: digests by ordinal, of every lineage seen so far."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.folder = fleet.run_dir / "weights"
        self.published: dict[int, set[str]] = {}

    def look(self) -> list[Path]:
        """Take in what is complete; returns what is being written."""
        parts = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name.endswith(PART):
                parts.append(path)
                continue
            with contextlib.suppress(Damaged, FileNotFoundError):  # retired meanwhile
                version = read(path, verify=False).footer.manifest.version
                self.published.setdefault(version.ordinal, set()).add(version.digest)
        return parts

    def until(self, done: Callable[[], Any], what: str) -> None:
        """Look until `done`, very often: a publish is a matter of milliseconds."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            dead = [d.name for d in self.fleet.daemons.values() if d.process.poll() not in (None, 0, -9)]
            if dead or time.monotonic() > deadline:
                pytest.fail(f"{what}: {dead or 'not within its time'}\n{self.fleet.logs()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.fleet.daemons["learner"].process.wait(0.001)

    def kill_in_a_publish(self, name: str) -> list[Path]:
        """Kill a daemon while an entry is being written; returns the entry's file. It is stopped first: one that was
        done by then goes on, and the next is waited for."""
        process = self.fleet.daemons[name].process
        while True:
            self.until(self.look, f"a publish to kill {name} in")
            process.send_signal(signal.SIGSTOP)
            if parts := self.look():
                self.fleet.daemons[name].kill()
                return parts
            process.send_signal(signal.SIGCONT)

    def followed(self, actor: str, beyond: int) -> None:
        """Until `actor` serves a version beyond `beyond`: under its ordinal the learner published that digest."""

        async def ask() -> RunStatus:
            client = StatusClient(self.fleet.address)
            await client.open(DEADLINE_S)
            try:
                return await client.fetch(DEADLINE_S)
            finally:
                await client.close()

        def is_there() -> bool:
            self.look()
            found = next((p for p in asyncio.run(ask()).peers if p.name == actor and p.version is not None), None)
            if found is None or found.version is None:
                return False
            self.look()
            known = self.published.get(found.version)
            assert known is None or found.digest in known, (found, known)
            return known is not None and found.version > beyond

        self.until(is_there, f"{actor} beyond version {beyond}")


@pytest.mark.system
@pytest.mark.timeout(1500)
def test_learner_broker_and_actor_killed_in_the_middle_of_a_publish(fleet: Any, audit: Any, tmp_path: Path) -> None:
    (tmp_path / "kill.toml").write_text(RECIPE)
    witness = Witness(fleet)
    fleet.broker(str(tmp_path / "kill.toml"))
    fleet.learner()
    fleet.peer("actor-1", "temper.actor")
    fleet.evaluator()
    checkpoints = fleet.run_dir / "checkpoints"
    witness.until(lambda: checkpoints.is_dir() and any(checkpoints.glob("version-*")), "a checkpoint")

    witness.kill_in_a_publish("learner")
    fleet.learner("--resume", str(fleet.run_dir))
    fleet.wait_log("learner", "resumed from the checkpoint of version", DEADLINE_S)
    step = fleet.steps()
    fleet.wait_step(step + 1, DEADLINE_S)
    witness.followed("actor-1", 1)

    torn = witness.kill_in_a_publish("broker")
    step = fleet.steps()  # it may have taken many more until a publish was met
    fleet.broker(str(tmp_path / "kill.toml"), "--resume")
    fleet.wait_step(step + 4, DEADLINE_S)
    witness.followed("actor-1", step + 1)  # through the new broker
    assert not any(path.exists() for path in torn)

    witness.kill_in_a_publish("actor-1")
    fleet.peer("actor-2", "temper.actor")
    witness.followed("actor-2", step + 4)

    for name in ("learner", "broker", "actor-2", "eval-1"):
        assert fleet.wait_exit(name, DEADLINE_S) == 0, fleet.logs()
    assert fleet.summary().steps == 60
    assert audit(fleet.run_dir)["trained"] == 60 * 2
    files, damaged = scan(witness.folder)
    assert files and not damaged and not list(witness.folder.glob(f"*{PART}"))
