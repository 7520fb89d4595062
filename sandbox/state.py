"""A worker's place on the host: one folder with a lock, and the sweep of what dead workers left.

The lock is held as long as the process lives, so a folder whose lock is free belongs to a dead worker: its cgroup
leaves are killed and removed, then the folder. Names of cgroups carry the folder's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import stat
import tempfile
from pathlib import Path

from temper.common.errors import EnvironmentFault
from temper.common.log import log
from temper.sandbox import cgroups
from temper.sandbox.jail import enterable_by_others


def default_base() -> Path:
    """Where all workers of this user keep their folders. As root it must be a place that the jails' uid can enter."""
    places = [Path(tempfile.gettempdir())]
    if os.geteuid() == 0:
        places = [place for place in (Path("/run"), *places, Path("/var/tmp")) if enterable_by_others(place)]
    for place in places:
        if os.access(place, os.W_OK | os.X_OK):
            return place / f"temper-sandbox-{os.geteuid()}"
    raise EnvironmentFault(
        "no writable folder for the sandbox's state that other users can enter: tried /run and TMPDIR"
    )


class State:
    """The folder of a living worker. `folder` can be entered, not listed, by other users."""

    def __init__(self, base: Path | None = None) -> None:
        self.base = base or default_base()
        self._prepare_base()
        self.name = f"temper-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = self.base / self.name
        unborn = self.base / f".{self.name}"  # no other worker's sweep may meet it before it is locked
        unborn.mkdir(mode=0o711)
        self._lock = os.open(unborn / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unborn.rename(self.folder)

    def _prepare_base(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.base.mkdir(mode=0o711, parents=True)
        found = self.base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise EnvironmentFault(f"{self.base} is not a folder that only this user can write: remove it")

    def sweep(self) -> list[str]:
        """Remove what dead workers left here; returns their names."""
        swept = []
        for folder in self.base.glob("temper-*"):
            if folder.name != self.name and _dead(folder):
                _end_processes(folder)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder.name)
        for name, folders in cgroups.stale_groups(self.name).items():
            if name in swept:
                for root in folders:
                    cgroups.sweep(root)
            elif not (self.base / name).exists():
                for root in folders:
                    cgroups.remove_empty(root)  # never kill what might be another container's
        for name in swept:
            log(f"swept what the dead worker {name} left")
        return swept

    def close(self) -> None:
        """Remove the folder and release the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _end_processes(folder: Path) -> None:
    """SIGTERM to the nsjail processes that were started out of `folder`: they take their jails with them."""
    mark = f"{folder.name}/inside:".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGTERM)


def _dead(folder: Path) -> bool:
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
