"""The demo over two relays: broker and learner at home, actor and sandbox worker far away, and everything between killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

STEPS = 120


def start_relay(fleet: Any, name: str, parent: str, folder: Path) -> str:
    """Start (again) a relay of `fleet`; its address."""
    address = f"{fleet.address}-{name}"
    arguments = ["--relay", parent, "--run", str(folder / name), "--bind", address, "--name", name]
    fleet.start(name, "temper.broker", *arguments)
    return address


def test_a_far_site_trains_through_two_relays_while_broker_and_relay_are_killed(
    fleet: Any, audit: Any, tmp_path: Path
) -> None:
    recipe = ("demo", f"--run.max_steps={STEPS}", "--eval.tasks_per_domain=10")
    fleet.broker(*recipe)
    near = start_relay(fleet, "relay-near", fleet.address, tmp_path)
    far = start_relay(fleet, "relay-far", near, tmp_path)
    fleet.learner()
    fleet.evaluator()
    fleet.start("actor-1", "temper.actor", "--broker", far, "--name", "actor-1")
    fleet.start("sandbox-1", "temper.sandbox", "--broker", far, "--name", "sandbox-1")
    fleet.wait_step(10, 300)
    status = [sys.executable, "-P", "-m", "temper.cli.main", "status", "--broker", far, "--once", "--json"]
    told = json.loads(subprocess.run(status, capture_output=True, check=True, timeout=120).stdout)
    via = {peer["name"]: peer.get("via", []) for peer in told["peers"]}
    assert via["actor-1"] == via["sandbox-1"] == ["relay-far", "relay-near"]
    assert via["relay-far"] == ["relay-near"] and via["learner"] == via["relay-near"] == []
    fleet.daemons["broker"].kill()
    fleet.broker(*recipe, "--resume")
    fleet.wait_step(min(fleet.steps() + 10, STEPS), 240)
    fleet.daemons["relay-near"].kill()
    start_relay(fleet, "relay-near", fleet.address, tmp_path)
    fleet.wait_step(min(fleet.steps() + 10, STEPS), 240)
    names = ("learner", "broker", "actor-1", "sandbox-1", "eval-1", "relay-far", "relay-near")
    for name in names:
        assert fleet.wait_exit(name, 300) == 0, fleet.logs()
    assert fleet.summary().steps == STEPS
    assert all((fleet.run_dir / "tensorboard" / name).is_dir() for name in ("relay-near", "relay-far"))
    assert audit(fleet.run_dir)["trained"] == STEPS * 16
