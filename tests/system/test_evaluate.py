"""`temper evaluate` with the real daemons: a run's checkpoint and its export agree with the run, a built-in model is judged
in jails, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from temper.cli.export import export
from temper.common.reports import EVALUATIONS_FILE, read_summary
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TEMPER = [sys.executable, "-P", "-m", "temper.cli.main"]
RECIPE = """
[run]
name = "tiny"
max_steps = 2
[model]
vocabulary = "abcdefghijklmnopqrstuvwxyz>"
hidden_size = 32
layers = 2
heads = 4
intermediate_size = 64
max_length_tokens = 12
[pacing]
groups_per_step = 2
samples_per_group = 4
[sampling]
max_new_tokens = 5
[warm_start]
max_steps = 200
until_likelihood = 0.3
learning_rate = 5e-3
[eval]
tasks_per_domain = 20
samples_per_task = 2
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
options = { length = 2 }
[[domains]]
name = "single"
module = "temper.actor.domains.reverse"
train = false
floor = true
options = { length = 1, eval_share = 0.5 }
eval_tasks = 5
"""
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def temper(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.run(
        [*TEMPER, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def evaluated(folder: Path, *arguments: str) -> dict[str, Any]:
    done = temper(folder, "evaluate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not list((folder / "tmp").glob("temper-*")), "the evaluation left files behind"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_run_its_checkpoint_and_its_export_are_measured_alike(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tiny.toml").write_text(RECIPE)
    done = temper(tmp_path, "run", "tiny.toml", "--run", "run")
    assert done.returncode == 0, done.stderr
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary.domains["single"].status == "floor"
    assert summary.accuracy_after == summary.domains["reverse"].accuracy_after, "the floor is in the mean"
    lines = [json.loads(line) for line in (tmp_path / "run" / EVALUATIONS_FILE).read_bytes().splitlines()]
    assert [(line["when"], line["expected"]) for line in lines] == [
        (when, {"reverse": 20, "single": 5}) for when in ("before", "after")
    ]

    board = EventAccumulator(summary.tensorboard)
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"learner/eval/reverse", "learner/floor/single"} <= tags and "learner/eval/single" not in tags

    of_run = evaluated(tmp_path, "run")
    assert (of_run["step"], set(of_run["domains"])) == (2, {"reverse", "single"})
    row = of_run["domains"]["reverse"]
    assert (row["tasks"], row["samples"], row["samples_per_task"], row["missing"]) == (20, 40, 2, 0)
    # the same weights, tasks and seeds as the run's own last evaluation
    assert row["mean_at_k"]["value"] == pytest.approx(summary.domains["reverse"].accuracy_after, abs=0.051)
    assert row["mean_at_k"]["value"] > 0.05, "a warmed model knows something"
    assert row["pass_at_k"]["2"]["value"] >= row["mean_at_k"]["value"]
    assert row["greedy"]["low"] <= row["greedy"]["value"] <= row["greedy"]["high"]
    assert row["greedy"]["interval"] == "wilson"
    assert of_run["mean"] == row["mean_at_k"]["value"], "the floor is in the mean"

    export(tmp_path / "run", tmp_path / "out", tmp_path / "run" / "bundle", None, None)
    arguments = ("out", "--recipe", "run/recipe.json", "--domains", "reverse", "--samples", "3", "--k", "1,3")
    of_folder = evaluated(tmp_path, *arguments)
    plain = of_folder["domains"]["reverse"]
    assert plain["greedy"] == row["greedy"]
    assert (plain["samples"], set(plain["pass_at_k"])) == (60, {"1", "3"})


def test_a_built_in_model_is_judged_in_jails_and_shown_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = temper(tmp_path, "evaluate", "micro", "--tasks", "4", "--domains", "tinycode")
    assert done.returncode == 0, done.stderr
    assert "tinycode" in done.stdout and "reverse" not in done.stdout
    assert "pass@k" in done.stdout and "[" in done.stdout
    assert "8 tasks" in done.stderr


def test_ctrl_c_ends_an_evaluation_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "shown").open("w") as shown:
        process = subprocess.Popen(
            [*TEMPER, "evaluate", "micro", "--tasks", "1000", "--samples", "64"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            stdout=shown,
            stderr=shown,
        )
    deadline = time.monotonic() + 120
    logs = tmp_path / "tmp"
    while not any("READY" in log.read_text() for log in logs.glob("temper-evaluate-*/run/logs/eval-1.log")):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "shown").read_text()
        time.sleep(0.05)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, (tmp_path / "shown").read_text()
    assert "Traceback" not in (tmp_path / "shown").read_text()
    assert not [one for one in children if one.is_running()]
    assert not list((tmp_path / "tmp").glob("temper-*"))
