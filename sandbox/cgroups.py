"""Control groups, version 1 and 2: one leaf per jail, so that limits hold for the whole tree of a program.

`discover` finds out what this host lets the worker do, by doing it; where nothing is possible `Leaf` is absent and only
rlimits hold. The jail's init is moved into its leaf before any program runs, so every process of the program is in it
from birth, and the init's own memory, charged earlier, does not count. Moving takes the kernel milliseconds for each
hierarchy; where memory has one of its own (version 1), nsjail is born into the others with all of its jails.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
WORKER = re.compile(r"temper-\d+-[0-9a-f]{8}")  # how a worker names itself


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where leaves can be made: controller -> folder. In version 2 all controllers share one folder."""

    version: int
    roots: dict[str, Path] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in CONTROLLERS if name in self.roots)

    def leaf(self, name: str) -> Leaf:
        """Make the leaf `name`."""
        folders: dict[str, Path] = {}
        for controller, root in self.roots.items():
            folder = root / name
            if folder not in folders.values():
                folder.mkdir()
            folders[controller] = folder
        return Leaf(
            self.version, folders, sorted({*folders.values()} - {folders.get("memory")}) if "memory" in folders else ()
        )

    def remove(self) -> None:
        """Remove every leaf and the hierarchy's own folders; what still runs in them is killed."""
        for root in set(self.roots.values()):
            sweep(root)


def discover(group: str) -> Hierarchy:
    """The hierarchy `group` (a name unique to this worker) under this process's own cgroups; empty when not allowed."""
    mounts, own = _mounts(), _own()
    roots: dict[str, Path] = {}
    for controller, kernel_names in (("memory", ("memory",)), ("pids", ("pids",)), ("cpu", ("cpuacct", "cpu"))):
        for name in kernel_names:
            if name in mounts and name in own:
                root = mounts[name] / own[name].lstrip("/") / group
                if _usable(root):
                    roots[controller] = root
                    break
    if roots:
        return Hierarchy(1, roots)
    if "" in mounts and "" in own:
        return _discover_v2(mounts[""], own[""], group)
    return Hierarchy(1)


def _discover_v2(mount: Path, own: str, group: str) -> Hierarchy:
    """Version 2: a cgroup whose children have controllers holds no processes itself. So this process's own cgroup will not
    do, unless it is empty otherwise; but the one above, where a user's session manager delegates, may."""
    base = mount / own.lstrip("/")
    for place in (base, *base.parents):
        if not place.is_relative_to(mount):
            break
        found = _try_v2(place, group)
        if found.roots:
            return found
    return Hierarchy(2)


def _try_v2(place: Path, group: str) -> Hierarchy:
    root = place / group
    with contextlib.suppress(OSError):
        root.mkdir(exist_ok=True)
        if not _controllers(root):
            _enable(place, CONTROLLERS)
        wanted = [name for name in CONTROLLERS if name in _controllers(root)]
        _enable(root, wanted)
        enabled = set((root / "cgroup.subtree_control").read_text().split())
        # Moving a process needs the right to write into the cgroup above both its old and its new place.
        if enabled & set(wanted) and os.access(place / "cgroup.procs", os.W_OK):
            return Hierarchy(2, {name: root for name in wanted if name in enabled})
    with contextlib.suppress(OSError):
        root.rmdir()
    return Hierarchy(2)


def _controllers(root: Path) -> set[str]:
    return set((root / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)


def _enable(folder: Path, names: tuple[str, ...] | list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{name}")


def _mounts() -> dict[str, Path]:
    """Controller name (version 1) or "" (version 2) -> mount point."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, kind, options, *_ = line.split()
            if kind == "cgroup":
                for option in options.split(","):
                    found.setdefault(option, Path(point))
            elif kind == "cgroup2":
                found.setdefault("", Path(point))
    return found


def _own() -> dict[str, str]:
    """Controller name (version 1) or "" (version 2) -> this process's path in it."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                found[name] = path
    return found


def _usable(root: Path) -> bool:
    """Whether leaves can be made below `root` and processes moved into them."""
    try:
        root.mkdir(exist_ok=True)
        probe = root / "probe"
        probe.mkdir(exist_ok=True)
        writable = os.access(probe / "cgroup.procs", os.W_OK)
        probe.rmdir()
    except OSError:
        return False
    return writable


class Leaf:
    """The cgroup of one jail."""

    def __init__(self, version: int, folders: dict[str, Path], born: Sequence[Path] = ()) -> None:
        """`born`: those folders that nsjail enters itself before it makes jails."""
        self.version = version
        self.born = [folder / "cgroup.procs" for folder in born]
        self._folders = folders
        self._joined = sorted({*folders.values()} - {*born})
        self._residents = 1 if folders.get("pids") in born else 0  # nsjail counts as a process there
        self._limits: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, str], int] = {}  # files that are read for every program stay open
        self._oom_before = 0
        self._cpu_before = 0.0

    def add(self, pid: int) -> None:
        """Move an init into the leaf, as far as it was not born there. Blocks for milliseconds."""
        for folder in self._joined:
            (folder / "cgroup.procs").write_text(str(pid))

    def _set(self, controller: str, name: str, value: int) -> None:
        folder = self._folders.get(controller)
        if folder is None or self._limits.get((controller, name)) == value:
            return
        path = folder / name
        if path.exists():
            path.write_text(str(value))
            self._limits[controller, name] = value

    def arm(self, memory_bytes: int, pids: int) -> None:
        """Set the limits of the next program and start its accounts."""
        if self.version == 1:
            before = self._limits.get(("memory", "memory.limit_in_bytes"), 1 << 62)
            names = ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]
            for name in names if memory_bytes > before else reversed(names):  # memsw may never be below the limit
                self._set("memory", name, memory_bytes)
            self._reset("memory", "memory.max_usage_in_bytes")
        else:
            self._set("memory", "memory.max", memory_bytes)
            self._set("memory", "memory.swap.max", 0)
            self._reset("memory", "memory.peak")
        self._set("pids", "pids.max", pids + self._residents)
        self._oom_before = self._oom_total()
        self._cpu_before = self._cpu_total()

    def _read(self, controller: str, name: str) -> bytes:
        """The file's content now; b"" where there is none."""
        try:
            return os.pread(self._descriptor(controller, name), 4096, 0)
        except (KeyError, OSError):
            return b""

    def _reset(self, controller: str, name: str) -> None:
        """Start an account anew. Version 2 does so for the very descriptor that is written to, and only since Linux 6.12."""
        with contextlib.suppress(KeyError, OSError):
            os.pwrite(self._descriptor(controller, name), b"0\n", 0)

    def _descriptor(self, controller: str, name: str) -> int:
        fd = self._open.get((controller, name))
        if fd is None:
            path = self._folders[controller] / name
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # the kernel refuses to open for writing what nobody writes
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open[controller, name] = fd
        return fd

    def _number(self, controller: str, name: str) -> int | None:
        try:
            return int(self._read(controller, name))
        except ValueError:
            return None

    def _field(self, controller: str, file: str, name: bytes) -> int:
        for line in self._read(controller, file).splitlines():
            if line.startswith(name + b" "):
                return int(line.split()[1])
        return 0

    def _oom_total(self) -> int:
        return self._field("memory", "memory.oom_control" if self.version == 1 else "memory.events", b"oom_kill")

    def _cpu_total(self) -> float:
        if self.version == 1:
            return (self._number("cpu", "cpuacct.usage") or 0) / 1e9
        return self._field("cpu", "cpu.stat", b"usage_usec") / 1e6

    def oom_kills(self) -> int:
        """Processes the kernel killed for memory since `arm`."""
        return self._oom_total() - self._oom_before

    def cpu_s(self) -> float | None:
        """CPU seconds of the whole tree since `arm`; None when not accounted."""
        return self._cpu_total() - self._cpu_before if "cpu" in self._folders else None

    def peak_bytes(self) -> int | None:
        """Highest memory use since `arm` (since the jail's start before Linux 6.12 with cgroup version 2)."""
        return self._number("memory", "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")

    def kill(self) -> None:
        """SIGKILL to every process of the leaf."""
        for folder in set(self._folders.values()):
            _kill(folder)

    def remove(self, timeout_s: float = 2.0) -> bool:
        """Remove the leaf, killing what is left in it. False if the kernel would not let go in time."""
        while self._open:
            os.close(self._open.popitem()[1])
        return all([_remove(folder, timeout_s) for folder in set(self._folders.values())])


def _kill(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")
        return
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)


def _remove(folder: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            _kill(folder)
            time.sleep(0.002)  # dying processes leave a cgroup asynchronously; the deadline is above
        else:
            return True


def sweep(root: Path) -> None:
    """Remove a worker's folder with all of its leaves."""
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if folder.is_dir():
                _remove(folder, 2.0)
    _remove(root, 2.0)


def remove_empty(root: Path) -> None:
    """Remove a worker's folder if nothing runs in it."""
    with contextlib.suppress(OSError):
        for folder in (*(f for f in root.iterdir() if f.is_dir()), root):
            folder.rmdir()


def stale_groups(but: str) -> dict[str, set[Path]]:
    """Groups named like a worker's, except `but`, where `discover` may have made them: name -> their folders."""
    mounts, own = _mounts(), _own()
    found: dict[str, set[Path]] = {}
    for controller in ("memory", "pids", "cpuacct", "cpu", ""):
        if controller in mounts and controller in own:
            base = mounts[controller] / own[controller].lstrip("/")
            above = [] if controller else [p for p in base.parents if p.is_relative_to(mounts[controller])]
            for place in (base, *above):
                with contextlib.suppress(OSError):
                    for folder in place.glob("temper-*"):
                        if folder.name != but and WORKER.fullmatch(folder.name):
                            found.setdefault(folder.name, set()).add(folder)
    return found
