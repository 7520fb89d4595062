"""``temper engine``: install SGLang into an environment of its own, and say what is installed.

    temper engine install --cpu | --cuda     make the environment (3 GB, some minutes); again: goes on or does nothing
    temper engine show                       which version, for what, where

The version and, on CPU, everything it imports are pinned: they are what Temper's tests run against. pip is given names and
versions only. The CPU build of torch comes from PyTorch's own index where that is reachable (elsewhere the same version may
be a CUDA build of several GB), unless PIP_INDEX_URL or PIP_FIND_LINKS name where to look.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from temper.cli.engine_pins import CPU
from temper.common.errors import EnvironmentFault

if TYPE_CHECKING:
    from temper.actor.engines.sglang_home import Flavour

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_BYTES = {"cpu": 4 * 1024**3, "cuda": 20 * 1024**3}
TAIL_LINES = 15
_OFFLINE = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known"
    r"|Network is unreachable|Connection refused|ConnectTimeout|Read timed out|NewConnectionError|ProxyError"
)


def main(argv: Sequence[str]) -> int:
    """The command's exit code."""
    parser = argparse.ArgumentParser(prog="temper engine", description="SGLang's own environment on this host.")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="make the environment, or finish it")
    flavour = install.add_mutually_exclusive_group(required=True)
    flavour.add_argument("--cpu", action="store_const", const="cpu", dest="flavour", help="run without a GPU")
    flavour.add_argument("--cuda", action="store_const", const="cuda", dest="flavour", help="for NVIDIA GPUs")
    commands.add_parser("show", help="what is installed, and where")
    options = parser.parse_args(argv)
    from temper.actor.engines.sglang_home import VERSION, home, installed

    found = installed()
    if options.command == "show":
        print(
            f"SGLang {found.version} ({found.flavour}) in {home()}" if found else f"not installed (looked in {home()})"
        )
        return 0
    with alone(home()):
        found = installed()
        if found is not None and (found.version, found.flavour) == (VERSION, options.flavour):
            print(f"SGLang {VERSION} ({found.flavour}) is installed in {home()}")
            return 0
        make(home(), options.flavour, VERSION)
    print(f"SGLang {VERSION} ({options.flavour}) is installed in {home()}; engine.kind = sglang uses it from now on")
    return 0


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One installation into `folder` at a time; a second one waits and says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "install.lock").open("w")
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: {error.strerror or error}; choose another folder with TEMPER_ENGINE_HOME"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another installation into {folder} is under way; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(folder: Path, flavour: Flavour, version: str) -> None:
    """Install into `folder`. EnvironmentFault with pip's last lines when it can't be done; what is there is kept."""
    import msgspec
    from temper.actor.engines.sglang_home import MARK, Installed, python_of

    (folder / MARK).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES[flavour]:
        raise EnvironmentFault(
            f"{folder}: {free >> 20} MiB are free, about {NEEDED_BYTES[flavour] >> 20} are needed; choose another folder"
            " with TEMPER_ENGINE_HOME"
        )
    python, log = python_of(folder), folder / "install.log"
    log.write_bytes(b"")
    if not works(python, "import pip"):
        run("making its environment", [sys.executable, "-m", "venv", str(folder)], log)
    pip = [str(python), "-P", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if flavour == "cuda":
        run(f"installing SGLang {version} and what it pins (some 15 GB)", [*pip, f"sglang=={version}"], log)
    else:
        install_cpu(pip, python, log)
    if error := failure(python, "import sglang, torch, transformers", cpu=flavour == "cpu"):
        raise EnvironmentFault(
            f"{folder}: what was installed does not import ({error}); remove the folder and install again"
        )
    (folder / MARK).write_bytes(msgspec.json.encode(Installed(version, flavour)))


def install_cpu(pip: Sequence[str], python: Path, log: Path) -> None:
    """The pinned packages; torch's CPU build first, from where it is."""
    torch = next(pin for pin in CPU if pin.startswith("torch=="))
    version = torch.partition("==")[2]
    if not works(python, f"import importlib.metadata as m; assert m.version('torch').split('+')[0] == '{version}'"):
        named = os.environ.get("PIP_INDEX_URL") or os.environ.get("PIP_FIND_LINKS")
        command = [*pip, "--no-deps", "--retries", "1", "--timeout", "10", "--index-url", TORCH_CPU_INDEX, torch]
        if named or not attempt(f"installing {torch} (CPU)", command, log):
            if not named:
                say(
                    "PyTorch's CPU index gave no torch; trying the default one, where it may be a CUDA build of several GB"
                )
            run(f"installing {torch}", [*pip, "--no-deps", torch], log)
    run(f"installing SGLang and {len(CPU) - 2} packages that it imports", [*pip, "--no-deps", *CPU], log)


def works(python: Path, code: str) -> bool:
    """Whether that interpreter runs `code`."""
    return not failure(python, code)


def failure(python: Path, code: str, *, cpu: bool = False) -> str:
    """Why that interpreter can't run `code`, its last line; empty if it can. `cpu`: with what the server gets on a CPU."""
    from temper.actor.engines.sglang_process import CPU_SHIMS

    if not python.exists():
        return f"{python} does not exist"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if cpu:
        environment["PYTHONPATH"] = str(CPU_SHIMS)
    command = [str(python), "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=python.parent, env=environment)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def attempt(what: str, command: Sequence[str], log: Path) -> bool:
    """Run a step, its output in `log`; whether it worked."""
    say(f"{what} ...")
    # no constraint file of this machine: the pins are Temper's own
    environment = {key: value for key, value in os.environ.items() if key not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    with log.open("ab") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False, cwd=log.parent, env=environment)
    return done.returncode == 0


def run(what: str, command: Sequence[str], log: Path) -> None:
    """`attempt`; EnvironmentFault with the reason if it did not work."""
    if attempt(what, command, log):
        return
    text = log.read_text(errors="replace")
    if "No space left on device" in text:
        raise EnvironmentFault(f"{what} failed: disk full; free some space and start again: what is installed is kept")
    if _OFFLINE.search(text):
        raise EnvironmentFault(
            f"{what} failed: the package index can't be reached. Connect this machine to the network, or name a mirror"
            f" (PIP_INDEX_URL) or a folder of wheels (PIP_FIND_LINKS), and start again. Log: {log}"
        )
    tail = "\n".join(text.splitlines()[-TAIL_LINES:])
    raise EnvironmentFault(f"{what} failed; all of it is in {log}, the last lines:\n{tail}")


def say(text: str) -> None:
    """A line of progress."""
    print(f"temper engine: {text}", file=sys.stderr, flush=True)
