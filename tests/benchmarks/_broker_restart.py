"""How long a broker takes to serve again after kill -9 with many queued groups in its ledger."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _broker_clients import LINEAGE, SAMPLES_PER_GROUP, Line, Payload
from temper.broker import events as ev
from temper.broker.core import BrokerCore
from temper.broker.ledger import Ledger
from temper.common.config import Recipe
from temper.common.recipe import load
from temper.common.schema import LearnerReady, Phase, SampleMeta

GROUPS_PER_STEP = 2000
RECIPE = f"""
[run]
name = "restart"
max_steps = 1000000
[model]
vocabulary = "abcdef"
[pacing]
groups_per_step = {GROUPS_PER_STEP}
samples_per_group = {SAMPLES_PER_GROUP}
max_staleness = {{staleness}}
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


def fill(folder: Path, recipe: Recipe, groups: int, nbytes: int) -> None:
    """A ledger with that many complete groups that no learner has taken."""
    core, ledger, payload = BrokerCore(recipe), Ledger(folder, None), Payload(nbytes)
    core.on(ev.Joined("learner", "learner", "learner"), 0.0)
    core.on(ev.Received("learner", LearnerReady(LINEAGE, None, 0, 0)), 0.0)
    core.on(ev.Received("learner", Phase("train", {"reverse": (0, 1.0)}, GROUPS_PER_STEP, SAMPLES_PER_GROUP)), 0.0)
    actions: Sequence[ev.Action] = core.on(ev.Joined("actor", "actor", "actor", groups), 0.0)
    leases = [action.lease for action in actions if isinstance(action, ev.SendLease)]
    assert len(leases) == groups
    for number, lease in enumerate(leases):
        for index in lease.indices:
            meta = SampleMeta(index, "stop", 1.0, True, {"exact": 1.0}, "ok", [(LINEAGE, 0, payload.tokens)])
            core.on(ev.SamplesArrived("actor", lease.lease_id, lease.attempt, [meta], nbytes), 0.0)
            ledger.store(lease.lease_id, (index,), payload.meta(lease, [index]), payload.frames(), nbytes)
        if number % 500 == 499:
            ledger.record(core.changes())
            ledger.commit()
    ledger.record(core.changes())
    ledger.close()


def start(folder: Path) -> tuple[subprocess.Popen[bytes], float]:
    """A broker that goes on with the run in `folder`, and the seconds until a peer was welcomed."""
    begun = time.perf_counter()
    command = [
        sys.executable,
        "-P",
        "-m",
        "temper.broker",
        f"{folder}/recipe.toml",
        "--run",
        f"{folder}/run",
        "--resume",
    ]
    child = subprocess.Popen(
        [*command, "--bind", f"ipc://{folder}/socket"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    Line(f"{folder}/socket", "actor", "actor", 1)
    return child, time.perf_counter() - begun


def restart(groups: int, nbytes: int, times: int) -> dict[str, Any]:
    """One row: the best of `times` kills."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE.format(staleness=groups // GROUPS_PER_STEP - 1))
        fill(folder / "run" / "ledger", load(str(folder / "recipe.toml"), []), groups, nbytes)
        found = []
        for _ in range(times):
            child, seconds = start(folder)
            child.kill()
            child.wait()
            found.append(seconds)
    return {
        "relay": "broker, restarted after kill -9",
        "queued_groups": groups,
        "samples": groups * SAMPLES_PER_GROUP,
        "serving_again_s": round(min(found[1:] or found), 2),
    }
