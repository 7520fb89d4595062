"""The demo as a user gets it: one command, or five daemons by hand in any order, with actors joining and dying."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from temper.common import reports

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


def check_accuracies(summary: reports.Summary) -> None:
    """What the demo promises."""
    assert summary.exit_code == 0
    assert summary.accuracy_before is not None
    assert 0.15 <= summary.accuracy_before <= 0.5
    reverse, code = summary.domains["reverse"], summary.domains["tinycode"]
    assert reverse.accuracy_after is not None
    assert reverse.accuracy_after >= 0.9
    assert reverse.tasks >= 100
    assert code.accuracy_before is not None
    assert code.accuracy_after is not None
    assert code.accuracy_after >= 0.85
    assert code.accuracy_after >= code.accuracy_before + 0.2
    assert code.tasks >= 100


def test_one_command_takes_the_model_past_ninety_percent(tmp_path: Path, audit: Any) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "temper.cli.main", "demo", "--run", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted((run_dir / "logs").glob("*.log")))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    summary = reports.read_summary(run_dir)
    assert summary is not None
    check_accuracies(summary)
    assert json.loads(done.stdout)["accuracy_after"] == summary.accuracy_after
    states = audit(run_dir)
    assert states["trained"] == summary.steps * 16


def test_five_daemons_by_hand_with_a_second_actor_and_a_killed_one(fleet: Any, audit: Any) -> None:
    fleet.peer("actor-1", "temper.actor")
    fleet.peer("sandbox-1", "temper.sandbox")
    fleet.learner()
    fleet.evaluator()
    fleet.wait_log("actor-1", "waiting for broker", 120)
    fleet.broker("demo")
    fleet.wait_step(60, 480)
    fleet.peer("actor-2", "temper.actor")
    fleet.wait_log("actor-2", "READY", 120)
    fleet.wait_step(fleet.steps() + 40, 240)
    fleet.daemons["actor-1"].kill()
    for name in ("learner", "broker", "actor-2", "sandbox-1", "eval-1"):
        assert fleet.wait_exit(name, 600) == 0, fleet.logs()
    summary = fleet.summary()
    check_accuracies(summary)
    states = audit(fleet.run_dir)
    assert states["trained"] == summary.steps * 16


def test_four_steps_of_staleness_still_learn(fleet: Any) -> None:
    # Two and a half steps' groups are sampled at once: then their tokens are old by Little's law, and not only where the
    # learner is slower than the actor.
    wide = ("--engine.leases_in_flight=40", "--engine.max_rows=640")
    fleet.broker("demo", "--pacing.max_staleness=4", "--run.seed=3", *wide)
    fleet.peer("sandbox-1", "temper.sandbox")
    fleet.learner()
    fleet.peer("actor-1", "temper.actor")
    fleet.evaluator()
    assert fleet.wait_exit("learner", 900) == 0, fleet.logs()
    assert fleet.wait_exit("broker", 120) == 0, fleet.logs()
    summary = fleet.summary()
    check_accuracies(summary)
    assert summary.lag_mean is not None
    assert summary.lag_mean >= 1.0
    steps = [line for line in fleet.progress() if line.kind == "step"]
    assert max(line.lag_max for line in steps) <= 8


def test_dynamic_sampling_at_staleness_zero_fills_every_step(fleet: Any, audit: Any) -> None:
    fleet.broker(
        "demo",
        "--pacing.max_staleness=0",
        "--pacing.dynamic_sampling=true",
        "--run.max_steps=30",
        "--eval.tasks_per_domain=10",
    )
    fleet.peer("sandbox-1", "temper.sandbox")
    fleet.learner()
    fleet.peer("actor-1", "temper.actor")
    fleet.evaluator()
    assert fleet.wait_exit("learner", 600) == 0, fleet.logs()
    assert fleet.wait_exit("broker", 120) == 0, fleet.logs()
    summary = fleet.summary()
    assert summary.steps == 30
    assert summary.lag_mean == 0.0
    states = audit(fleet.run_dir)
    assert states["trained"] == 30 * 16
    assert states.get("void", 0) > 0
