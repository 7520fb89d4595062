"""bin/temper's bootstrap on hosts that lack something, with stand-ins for Python where a real one would take minutes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "sh",
    "dirname",
    "readlink",
    "sed",
    "cat",
    "cut",
    "sha256sum",
    "grep",
    "tail",
    "date",
    "sleep",
    "mkdir",
    "mv",
    "rm",
    "flock",
)

# A .venv/bin/python that notes what it is asked to do and says that all went well.
OBEDIENT = '#!/bin/sh\necho "${PIP_CONSTRAINT:+pinned }$*" >> "$CALLS"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the bootstrap needs of a checkout, in a folder with a space in its name."""
    root = tmp_path / "a checkout"
    (root / "bin").mkdir(parents=True)
    for name in ("temper", "bootstrap.sh", "constraints.txt"):
        shutil.copy(ROOT / "bin" / name, root / "bin" / name)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the shell's tools and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(checkout / "bin" / "temper"), *arguments]
    merged = {**os.environ, **environment}
    return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.system
def test_no_python(checkout: Path, tools: Path) -> None:
    done = start(checkout, PATH=str(tools))
    assert done.returncode == 4
    assert "Python 3.11 or newer is needed, none was found on PATH" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.system
def test_python_too_old(checkout: Path, tools: Path) -> None:
    script(tools / "python3", '#!/bin/sh\ncase "$2" in *print*) echo 3.9.2;; *) exit 1;; esac\n')
    done = start(checkout, PATH=str(tools))
    assert done.returncode == 4
    assert f"Python 3.11 or newer is needed, {tools}/python3 is 3.9.2" in done.stderr
    assert "apt install python3.11" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.system
def test_venv_module_missing(checkout: Path, tools: Path) -> None:
    script(tools / "python3", '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; *print*) echo 3.12;; esac\n')
    done = start(checkout, PATH=str(tools))
    assert done.returncode == 4
    assert "has no venv module" in done.stderr
    assert "apt install python3.12-venv" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.system
def test_offline_says_so_and_keeps_what_is_there(checkout: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    environment = {
        "TEMPER_PYTHON": sys.executable,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": nowhere,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = start(checkout, "version", **environment)
    assert done.returncode == 4, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot reach the package index" in last
    assert "start again" in last
    assert (checkout / ".venv" / "bin" / "python").exists()
    assert not (checkout / ".venv" / "temper.stamp").exists()


@pytest.mark.system
def test_a_venv_that_was_interrupted_before_it_had_pip_is_made_again(checkout: Path, tmp_path: Path) -> None:
    script(checkout / ".venv" / "bin" / "python", '#!/bin/sh\ncase "$*" in *"-m pip"*) exit 1;; esac\n')
    script(
        tmp_path / "python",
        '#!/bin/sh\ncase "$1 $2" in\n-c*print*) echo 3.12.0;;\n'
        '"-m venv") printf %s "$OBEDIENT" > .venv/bin/python; : > .venv/bin/pip; chmod +x .venv/bin/pip;;\nesac\n',
    )
    environment = {"TEMPER_PYTHON": str(tmp_path / "python"), "OBEDIENT": OBEDIENT, "CALLS": str(tmp_path / "calls")}
    done = start(checkout, "version", **environment)
    assert done.returncode == 0, done.stderr
    assert "making .venv: done" in done.stderr and "ready in" in done.stderr
    assert "-m temper.cli.main version" in (tmp_path / "calls").read_text()


@pytest.mark.system
def test_installs_once_and_passes_arguments_on(checkout: Path, tmp_path: Path) -> None:
    script(checkout / ".venv" / "bin" / "python", OBEDIENT)
    (checkout / ".venv" / "bin" / "pip").touch(mode=0o755)
    calls = tmp_path / "calls"
    first = start(checkout, "run", "demo", "--run.name=two words", CALLS=str(calls))
    assert first.returncode == 0, first.stderr
    assert "ready in" in first.stderr
    noted = calls.read_text()
    assert "pinned -m pip install -e ." in noted
    assert noted.splitlines()[-1] == "-P -m temper.cli.main run demo --run.name=two words"
    calls.unlink()
    second = start(checkout, "status", CALLS=str(calls))
    assert second.stderr == ""
    assert calls.read_text() == "-P -m temper.cli.main status\n"
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "installing dependencies: done" in start(checkout, "status", CALLS=str(calls)).stderr


@pytest.mark.system
def test_gpu_asks_for_the_default_index(checkout: Path, tmp_path: Path) -> None:
    obedient_without_torch = OBEDIENT + 'case "$*" in *metadata*) exit 1;; esac\n'
    script(checkout / ".venv" / "bin" / "python", obedient_without_torch)
    (checkout / ".venv" / "bin" / "pip").touch(mode=0o755)
    calls = tmp_path / "calls"
    assert start(checkout, "--gpu", "version", CALLS=str(calls)).returncode == 0
    assert "download.pytorch.org" not in calls.read_text()
    assert "--force-reinstall torch==" in calls.read_text()
    pinned = (checkout / ".venv" / "constraints.txt").read_text()
    assert "torch==" in pinned and "triton==" not in pinned
    calls.unlink()
    (checkout / ".venv" / "temper.stamp").unlink()
    assert start(checkout, "version", CALLS=str(calls)).returncode == 0
    assert "--index-url https://download.pytorch.org/whl/cpu torch==" in calls.read_text()


@pytest.mark.system
def test_two_starts_do_not_collide(checkout: Path, tmp_path: Path) -> None:
    script(checkout / ".venv" / "bin" / "python", OBEDIENT)
    (checkout / ".venv" / "bin" / "pip").touch(mode=0o755)
    calls = tmp_path / "calls"
    environment = {**os.environ, "CALLS": str(calls)}
    lock = os.open(checkout / "bin", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = ["sh", str(checkout / "bin" / "temper"), "version"]
    starts = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in starts:
        assert process.stderr is not None
        assert "another start is installing" in process.stderr.readline()
    os.close(lock)
    for process in starts:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert calls.read_text().count("pip install -e .") == 1
