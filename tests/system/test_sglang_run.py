"""A whole run whose actors sample through real SGLang servers; the actor's server is killed in the middle of it."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sglang_live import need_sglang

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]
SHORT = (
    "--engine.kind=sglang",
    "--run.max_steps=20",
    "--warm_start.max_steps=20",
    "--pacing.groups_per_step=4",
    "--pacing.samples_per_group=4",
    "--pacing.weights_timeout_s=30",
    "--eval.tasks_per_domain=4",
    "--eval.samples_per_task=1",
    "--eval.timeout_s=900",
    "--engine.max_rows=16",
)


def test_a_run_samples_through_sglang_and_survives_its_servers_death(fleet: Any, audit: Any) -> None:
    need_sglang()
    fleet.broker("demo", *SHORT)
    fleet.learner()
    fleet.peer("sandbox-1", "temper.sandbox")
    fleet.peer("actor-1", "temper.actor")
    fleet.wait_log("actor-1", r"READY", 700)
    fleet.evaluator()
    fleet.wait_step(3, 300)
    (log,) = {Path(found) for found in re.findall(r"started \(pid \d+\), log (\S+)", fleet.daemons["actor-1"].text())}
    assert "fired up" in log.read_text()
    server = next(
        child
        for child in psutil.Process(fleet.daemons["actor-1"].process.pid).children()
        if "launch_server" in " ".join(child.cmdline())
    )
    os.killpg(server.pid, signal.SIGKILL)
    for name in ("learner", "broker", "actor-1", "sandbox-1", "eval-1"):
        assert fleet.wait_exit(name, 900) == 0, fleet.logs()
    assert "killed by SIGKILL" in fleet.daemons["actor-1"].text()
    summary = fleet.summary()
    assert summary.exit_code == 0 and summary.steps == 20 and summary.accuracy_after is not None
    states = audit(fleet.run_dir)
    assert states["trained"] == 20 * 4
    assert not server.is_running()
    assert "disagree by" not in fleet.daemons["learner"].text()  # the alarm of engine and learner apart
