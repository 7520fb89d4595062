"""Run directories and the socket folder: where a run's files go, and that no two runs share them.

A run directory holds recipe.json, run.json (pid and address of the running supervisor), logs/, progress.jsonl,
summary.json, and what broker and learner keep there. A fresh run wants a new or empty one; ``--resume`` wants an old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.reports import RECIPE_FILE, write_atomically

RUN_FILE = "run.json"
SOCKET_PREFIX = "temper-run-"


def fresh(run_dir: Path | None, name: str) -> Path:
    """A new, empty run directory: `run_dir`, or runs/NAME-YYYYmmdd-HHMMSS under the working directory."""
    if run_dir is None:
        stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidates = [stem, *(Path(f"{stem}-{number}") for number in range(2, 100))]
        run_dir = next(path for path in candidates if not path.exists())
    run_dir = run_dir.absolute()
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run directory {run_dir} is a file: choose another with --run DIR")
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(
            f"run directory {run_dir} is not empty: choose another with --run DIR, or go on with --resume {run_dir}"
        )
    _make(run_dir)
    return run_dir


def require_recipe(run_dir: Path) -> Path:
    """The recipe that a run directory was started with; ConfigError when it is no run directory."""
    path = run_dir.absolute() / RECIPE_FILE
    if not path.is_file():
        raise ConfigError(f"--resume {run_dir}: no {RECIPE_FILE} there: expected the directory of an earlier run")
    return path


def resumed(run_dir: Path) -> Path:
    """An existing run directory that a run can go on in."""
    require_recipe(run_dir)
    run_dir = run_dir.absolute()
    _make(run_dir)
    return run_dir


def _make(run_dir: Path) -> None:
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(f"run directory {run_dir}: {error.strerror}: choose another with --run DIR") from error


@contextlib.contextmanager
def locked(run_dir: Path, address: str) -> Iterator[None]:
    """Hold the run directory: a second run in it is refused while this one lives. Writes run.json."""
    with (run_dir / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run directory {run_dir} is in use by another run that is still going") from error
        facts = {"pid": os.getpid(), "address": address, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_atomically(run_dir / RUN_FILE, json.dumps(facts).encode() + b"\n")
        try:
            yield
        finally:
            (run_dir / RUN_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A short folder (0700) for the broker's sockets; left-overs of supervisors that were killed are removed."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > 60:
        base = Path("/tmp")
    sweep(base, SOCKET_PREFIX)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{SOCKET_PREFIX}{os.getpid()}-", dir=base))
    except OSError as error:
        raise EnvironmentFault(f"cannot make a folder for sockets in {base}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path, prefix: str) -> None:
    """Remove what processes that are gone left in `base`: own folders called PREFIX + their pid + ``-`` ..."""
    for folder in base.glob(f"{prefix}[0-9]*-*"):
        pid = folder.name.removeprefix(prefix).split("-", 1)[0]
        try:
            mine = folder.lstat().st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink()
        except OSError:
            continue
        if mine and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
