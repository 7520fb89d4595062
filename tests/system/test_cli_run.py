"""`temper run` with the real daemons on a tiny model: the whole path, and what happens when parts of it are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from temper.common.reports import PROGRESS_FILE, SUMMARY_FILE

TEMPER = [sys.executable, "-P", "-m", "temper.cli.main"]
TINY = """
[run]
name = "tiny"
max_steps = 4
checkpoint_every_steps = 2
drain_timeout_s = 10.0
[model]
vocabulary = "abcdefghijklmnopqrstuvwxyz0123456789+-*>"
hidden_size = 32
layers = 1
heads = 2
intermediate_size = 64
max_length_tokens = 16
[pacing]
groups_per_step = 4
samples_per_group = 4
[sampling]
max_new_tokens = 5
[eval]
tasks_per_domain = 4
samples_per_task = 1
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `temper run` in the background; whatever is left at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def _start(*arguments: str) -> subprocess.Popen[str]:
        with (folder / "shown").open("w") as shown:
            started.append(
                subprocess.Popen(
                    [*TEMPER, "run", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=shown, text=True
                )
            )
        return started[-1]

    yield _start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(condition: Callable[[], Any], process: subprocess.Popen[str], what: str) -> None:
    """Poll for what only files and the process table tell; fails when the run ends first."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"the run ended before: {what}"
        assert time.monotonic() < deadline, f"not within 120 s: {what}"
        time.sleep(0.05)


def steps_in(run: Path) -> int:
    path = run / PROGRESS_FILE
    return path.read_text().count('"kind":"step"') if path.exists() else 0


def roles_in(folder: Path) -> set[str]:
    """Who is connected, as `temper status` tells; nobody while there is no broker."""
    command = [*TEMPER, "status", "--run", "run", "--once", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return set() if done.returncode else {peer["role"] for peer in json.loads(done.stdout)["peers"]}


def child(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """The newest process of that name under the supervisor."""
    found = [
        one
        for one in psutil.Process(process.pid).children()
        if name in one.cmdline() or f"temper.{name}" in one.cmdline()
    ]
    return max(found, key=lambda one: one.create_time())


def finish(process: subprocess.Popen[str], folder: Path) -> tuple[int, str, str]:
    out, _ = process.communicate(timeout=240)
    return process.returncode, out, (folder / "shown").read_text()


def check_export(folder: Path, run: Path, checkpoint: Path) -> None:
    """transformers loads the exported folder, and its weights are the checkpoint's."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = [*TEMPER, "export", str(run), "out"]
    done = subprocess.run(export, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    expected = load_file(checkpoint / "model.safetensors")
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(folder / "out").decode([1, 2, 3]) == "abc"
    again = subprocess.run(export, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_a_run_ends_cleanly_and_leaves_what_it_should(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("tiny.toml", "--run", "run", "--json")
    run = folder / "run"
    until(lambda: len(psutil.Process(process.pid).children()) == 4, process, "broker, learner, actor, evaluator")
    children = psutil.Process(process.pid).children()
    code, out, shown = finish(process, folder)
    assert code == 0, shown
    summary = json.loads(out)
    assert (summary["exit_code"], summary["steps"]) == (0, 4)
    assert set(summary["domains"]) == {"reverse"}
    assert summary["accuracy_before"] is not None
    assert summary["accuracy_after"] is not None
    assert summary == json.loads((run / SUMMARY_FILE).read_text())
    assert Path(summary["tensorboard"]).is_dir()
    assert list(Path(summary["tensorboard"]).rglob("events.out*"))
    assert Path(summary["checkpoint"]).is_dir()
    assert not [one for one in children if one.is_running()]
    assert not (run / "run.json").exists()
    for log in (run / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log
    inspected = subprocess.run(
        [*TEMPER, "inspect", "run"], cwd=folder, capture_output=True, text=True, timeout=120, check=True
    )
    assert "evaluation  after" in inspected.stdout
    check_export(folder, run, Path(summary["checkpoint"]))
    again = subprocess.run(
        [*TEMPER, "run", "tiny.toml", "--run", "run"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_a_killed_actor_is_replaced_and_a_killed_learner_ends_the_run_which_can_go_on(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("tiny.toml", "--run", "run", "--run.max_steps=100000", "--run.checkpoint_every_steps=5")
    run = folder / "run"
    until(lambda: steps_in(run) >= 3, process, "three steps")
    child(process, "actor-1").kill()
    until(
        lambda: "actor-1 ended: killed by SIGKILL" in (folder / "shown").read_text(),
        process,
        "the actor's end is shown",
    )
    seen = steps_in(run)
    until(lambda: steps_in(run) >= seen + 5, process, "steps with the new actor")
    until(lambda: list((run / "checkpoints").glob("version-*")), process, "a checkpoint")
    child(process, "temper.learner").kill()
    code, _, shown = finish(process, folder)
    assert code == 3, shown
    assert "learner died: killed by SIGKILL" in shown
    assert "--resume" in shown
    summary = json.loads((run / SUMMARY_FILE).read_text())
    assert "learner died" in summary["exit_reason"]
    done = summary["steps"]
    resumed = start("--resume", "run", f"--run.max_steps={done + 3}", "--json")
    code, out, shown = finish(resumed, folder)
    assert code == 0, shown
    assert json.loads(out)["steps"] == done + 3


def test_ctrl_c_drains_and_the_run_can_go_on(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("tiny.toml", "--run", "run", "--run.max_steps=100000")
    run = folder / "run"
    until(lambda: {"learner", "actor", "eval"} <= roles_in(folder), process, "every daemon in the status")
    until(lambda: steps_in(run) >= 3, process, "three steps")
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    code, _, shown = finish(process, folder)
    assert code == 130, shown
    assert "Traceback" not in shown
    assert not [one for one in children if one.is_running()]
    for log in (run / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log
    done = json.loads((run / SUMMARY_FILE).read_text())["steps"]
    resumed = start("--resume", "run", f"--run.max_steps={done + 2}", "--json")
    code, out, shown = finish(resumed, folder)
    assert code == 0, shown
    assert json.loads(out)["steps"] == done + 2


def test_nothing_survives_a_killed_supervisor(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("tiny.toml", "--run", "run", "--run.max_steps=100000")
    until(lambda: steps_in(folder / "run"), process, "a step")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


FILL = """
mkdir run && mount -t tmpfs -o size=80m none run || exit 99
"$@" &
while [ ! -s run/progress.jsonl ] && kill -0 $!; do sleep 0.1; done
cat /dev/zero > run/filler
wait $!
"""


def test_disk_full_while_the_run_goes(folder: Path) -> None:
    command = [*TEMPER, "run", "tiny.toml", "--run", "run", "--run.max_steps=100000", "--run.checkpoint_every_steps=1"]
    forked = ["unshare", "-Urm", "sh", "-c", FILL, "sh", *command]
    done = subprocess.run(forked, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert "disk" in done.stderr or "space" in done.stderr


TROUBLED = """
from temper.common.domains import SingleTurn, Task

class Troubled(SingleTurn):
    def tasks(self, split, level, seed):
        return Task(f"{split}-{seed % 1000}", "ab>")

    async def score(self, task, completion, grader):
        raise ValueError("out of luck")

def make(options):
    return Troubled()
"""


@pytest.fixture
def troubled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "troubled.py").write_text(TROUBLED)
    (folder / "host.toml").write_text('[actor]\ndomains = ["troubled", "temper.actor.domains.reverse"]\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_a_run_without_a_working_domain_ends_with_the_reason(
    troubled: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    recipe = TINY.replace(
        'name = "reverse"\nmodule = "temper.actor.domains.reverse"', 'name = "t"\nmodule = "troubled"'
    )
    (troubled / "tiny.toml").write_text(recipe)
    code, _, shown = finish(start("tiny.toml", "--run", "run", "--host", "host.toml"), troubled)
    assert code == 2, shown
    assert "out of luck" in shown
    assert "Traceback" not in shown
    assert json.loads((troubled / "run" / SUMMARY_FILE).read_text())["exit_code"] == 2
