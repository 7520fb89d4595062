"""The command line as a user meets it: help, and one clear line with the right exit code for every bad input."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TEMPER = [sys.executable, "-P", "-m", "temper.cli.main"]
MICRO = """
[run]
name = "bad-input"
[model]
vocabulary = "abcdefghijklmnopqrstuvwxyz>"
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


def temper(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, **environment}
    return subprocess.run(
        [*TEMPER, *arguments], cwd=cwd, env=merged, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a good recipe, a full folder and a folder that is no model."""
    (tmp_path / "micro.toml").write_text(MICRO)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("x")
    (tmp_path / "empty").mkdir()
    return tmp_path


# arguments, exit code, what the one line must say
BAD = [
    (["rnu"], 2, ["unknown command rnu", "did you mean run?"]),
    (["run"], 2, ["no recipe given", "demo"]),
    (["run", "dmeo"], 2, ["no recipe is called 'dmeo'", "did you mean demo?"]),
    (["run", "missing.toml"], 2, ["missing.toml", "No such file"]),
    (["run", "micro.toml", "--pacing.group_per_step=3"], 2, ["pacing.group_per_step", "pacing.groups_per_step"]),
    (["run", "micro.toml", "--run.max_steps=many"], 2, ["run.max_steps", "an integer"]),
    (["run", "micro.toml", "--sampling.temperature=0"], 2, ["sampling.temperature", "greedy"]),
    (["run", "micro.toml", "--warm_start.learning_rate=1"], 2, ["warm_start.learning_rate has no effect"]),
    (["run", "micro.toml", "--objective.name=gropo"], 2, ["objective.name", "grpo"]),
    (["run", "micro.toml", "--domains.reverse.module=no.such.thing"], 2, ["no.such.thing", "no such module"]),
    (["run", "smollm2", "--model.path=nowhere"], 2, ["model.path = nowhere", "no such folder"]),
    (["run", "smollm2", "--model.path=empty"], 2, ["model.path = empty", "no config.json"]),
    (["run", "micro.toml", "--run", "full"], 2, ["full is not empty", "--resume"]),
    (["run", "micro.toml", "--run", "micro.toml"], 2, ["is a file"]),
    (["run", "--resume", "empty"], 2, ["no recipe.json there"]),
    (["run", "micro.toml", "--resume", "empty"], 2, ["leave RECIPE and --run out"]),
    (["run", "micro.toml", "--run", "/proc/nothing/here"], 4, ["/proc/nothing/here"]),
    (["status", "--once"], 2, ["no run is going on", "--broker"]),
    (["status", "--once", "--run", "empty"], 2, ["no run.json"]),
    (["status", "--once", "--broker", "nonsense"], 2, ["nonsense", "ipc://FOLDER or tcp://HOST:PORT"]),
    (["status", "--once", "--broker", "ipc://nobody", "--timeout", "0.3"], 3, ["no broker answered", "nobody"]),
    (["status", "--once", "--broker", "tcp://127.0.0.1:9"], 2, ["key"]),
    (["status", "--once", "--broker", "tcp://127.0.0.1:9", "--key", "no.key"], 2, ["no.key", "temper keys new"]),
    (["actor", "--broker", "ipc://nobody", "--connect-timeout", "0.3"], 3, ["no broker answered", "nobody"]),
    (["learner", "--broker", "ipc://nobody", "--connect-timeout", "0.3"], 3, ["no broker answered", "nobody"]),
    (["eval", "--broker", "ipc://nobody", "--connect-timeout", "0.3"], 3, ["no broker answered", "nobody"]),
    (["actor", "--broker", "tcp://127.0.0.1:9"], 2, ["key"]),
    (["actor", "--broker", "ipc://nobody", "--host", "no.toml"], 2, ["no.toml"]),
    (["broker", "micro.toml", "--run", "b", "--bind", "tcp://127.0.0.1:7311"], 2, ["key"]),
    (["broker", "micro.toml", "--run", "b", "--bind", "tcp://127.0.0.1:x"], 2, ["PORT"]),
    (["broker", "dmeo", "--run", "b"], 2, ["no recipe is called 'dmeo'"]),
    (["keys", "show", "--keys", "empty"], 2, ["broker.key", "temper keys new"]),
    (["plot", "empty"], 2, ["nothing to draw"]),
    (["inspect", "empty"], 2, ["empty"]),
    (["export", "empty", "out"], 2, ["empty", "config.json"]),
    (["export", "empty", "full"], 2, ["full exists already"]),
]


@pytest.mark.system
@pytest.mark.parametrize(("arguments", "code", "words"), BAD, ids=[" ".join(arguments) for arguments, _, _ in BAD])
def test_bad_input_gets_one_clear_line(folder: Path, arguments: list[str], code: int, words: list[str]) -> None:
    before = sorted(folder.rglob("*"))
    done = temper(arguments, folder)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert lines[0].startswith("temper")
    assert sorted(folder.rglob("*")) == before, "something was written"


@pytest.mark.system
def test_help_lists_every_command_quickly(folder: Path) -> None:
    done = temper(["--help"], folder)
    assert done.returncode == 0
    for name in ("run", "demo", "broker", "learner", "actor", "sandbox", "eval", "status", "check", "keys", "inspect"):
        assert f"  {name}" in done.stdout
    assert temper([], folder).returncode == 2


@pytest.mark.system
def test_debug_shows_the_traceback(folder: Path) -> None:
    done = temper(["run", "dmeo"], folder, TEMPER_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


NO_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


@pytest.mark.system
def test_nsjail_impossible(folder: Path) -> None:
    """A host without user namespaces: a recipe that needs programs executed exits 4, `required = false` goes on without."""
    forbid = ["unshare", "-Ur", "sh", "-c", NO_NAMESPACES, "sh"]
    strict = [*forbid, *TEMPER, "run", "demo", "--sandbox.required=true"]
    done = subprocess.run(strict, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 4, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "tinycode" in done.stderr
    assert "max_user_namespaces" in done.stderr
    assert not (folder / "runs").exists()
    lenient = [*forbid, *TEMPER, "check", "recipe", "demo"]
    done = subprocess.run(lenient, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "domain tinycode would be left out: nsjail cannot run here" in done.stdout


@pytest.mark.system
def test_disk_full(folder: Path) -> None:
    """A run directory on a full disk is refused before anything starts."""
    mount = 'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", str(folder / "empty"), *TEMPER, "run", "micro.toml"]
    done = subprocess.run(
        [*command, "--run", "empty"], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 4, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "disk full" in done.stderr


@pytest.mark.system
def test_port_taken(folder: Path) -> None:
    """Another program has the port: exit code 4, naming it."""
    assert temper(["keys", "new", "--keys", "keys"], folder).returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = temper(["broker", "micro.toml", "--run", "b", "--bind", address, "--keys", "keys"], folder)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("temper broker:")
    assert address in last


@pytest.mark.system
def test_keys_are_made_shown_and_revoked(folder: Path) -> None:
    made = temper(["keys", "new", "actor-1", "--keys", "keys"], folder)
    assert made.returncode == 0, made.stderr
    assert (folder / "keys" / "actor-1.key").stat().st_mode & 0o777 == 0o600
    assert "actor-1" in temper(["keys", "show", "--keys", "keys"], folder).stdout
    assert temper(["keys", "new", "actor-1", "--keys", "keys"], folder).returncode == 2
    assert temper(["keys", "revoke", "actor-1", "--keys", "keys"], folder).returncode == 0
    assert "actor-1" not in temper(["keys", "show", "--keys", "keys"], folder).stdout
