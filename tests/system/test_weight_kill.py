"""A broker's weight log is killed with SIGKILL in the middle of publishing, again and again: what was acknowledged is there."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from temper.broker.weights import WeightStore
from temper.common import delta

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
