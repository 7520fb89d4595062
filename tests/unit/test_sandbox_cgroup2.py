"""Control groups of version 2 against a tree of files that keeps the kernel's rules; no host at hand had the real one.

The rules: a new group gets its files, those of a controller only where the group above has it enabled; a group with
processes enables nothing for its children, nor takes processes once it has; a group is removed only when it is empty.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temper.sandbox import cgroups
from temper.sandbox.cgroups import Hierarchy, discover, stale_groups, sweep

FILES = {
    "memory": {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.peak": "0\n",
        "memory.events": "oom 0\noom_kill 0\n",
    },
    "pids": {"pids.max": "max\n"},
    "cpu": {"cpu.max": "max 100000\n"},
    "io": {},
}
CORE = {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.kill": "", "cpu.stat": "usage_usec 0\n"}
MKDIR, RMDIR, WRITE, ACCESS = Path.mkdir, Path.rmdir, Path.write_text, os.access


class Kernel:
    """A mounted cgroup2; `owned` are the folders that this user may write to."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.owned: set[Path] | None = None
        self.grow(root, set(FILES))
        monkeypatch.setattr(Path, "mkdir", lambda path, *a, **k: self.mkdir(path, *a, **k))  # noqa: PLW0108 - binds
        monkeypatch.setattr(Path, "rmdir", lambda path: self.rmdir(path))  # noqa: PLW0108 - binds
        monkeypatch.setattr(Path, "write_text", lambda path, text, *a, **k: self.write(path, text))
        monkeypatch.setattr(os, "access", lambda path, mode: self.may(Path(path).parent) and ACCESS(path, mode))

    def grow(self, folder: Path, controllers: set[str]) -> None:
        for name, text in {**CORE, "cgroup.controllers": " ".join(sorted(controllers)) + "\n"}.items():
            WRITE(folder / name, text)
        for controller in controllers if folder != self.root else ():
            for name, text in FILES[controller].items():
                WRITE(folder / name, text)

    def may(self, folder: Path) -> bool:
        return self.owned is None or any(folder == own or own in folder.parents for own in self.owned)

    def words(self, path: Path) -> set[str]:
        return set(path.read_text().split())

    def mkdir(self, path: Path, *arguments: Any, **options: Any) -> None:
        if self.root in path.parents:
            if path.exists():
                if options.get("exist_ok"):
                    return
                raise FileExistsError(errno.EEXIST, "there", str(path))
            if not self.may(path.parent):
                raise PermissionError(errno.EACCES, "not yours", str(path))
            MKDIR(path)
            self.grow(path, self.words(path.parent / "cgroup.subtree_control"))
        else:
            MKDIR(path, *arguments, **options)

    def rmdir(self, path: Path) -> None:
        if self.root in path.parents and path.exists():
            if self.words(path / "cgroup.procs") or any(child.is_dir() for child in path.iterdir()):
                raise OSError(errno.EBUSY, "busy", str(path))
            for file in path.iterdir():
                file.unlink()
        RMDIR(path)

    def write(self, path: Path, text: str) -> int:
        folder = path.parent
        if folder != self.root and self.root not in folder.parents:
            return WRITE(path, text)
        if not self.may(folder):
            raise PermissionError(errno.EACCES, "not yours", str(path))
        if path.name == "cgroup.subtree_control":
            controller = text.removeprefix("+")
            if controller not in self.words(folder / "cgroup.controllers"):
                raise OSError(errno.ENOENT, "no such controller", controller)
            if folder != self.root and self.words(folder / "cgroup.procs"):
                raise OSError(errno.EBUSY, "it has processes", str(folder))
            WRITE(path, " ".join(sorted(self.words(path) | {controller})) + "\n")
            for child in (each for each in folder.iterdir() if each.is_dir()):
                WRITE(child / "cgroup.controllers", path.read_text())
                for name, content in FILES[controller].items():
                    WRITE(child / name, content)
        elif path.name == "cgroup.procs":
            if folder != self.root and self.words(folder / "cgroup.subtree_control"):
                raise OSError(errno.EBUSY, "its children have controllers", str(folder))
            for other in self.root.rglob("cgroup.procs"):
                WRITE(other, "\n".join(self.words(other) - {text}))
            WRITE(path, "\n".join(self.words(path) | {text}))
        elif path.name == "cgroup.kill":
            for inner in folder.rglob("cgroup.procs"):
                WRITE(inner, "")
        else:
            if not path.exists():
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            WRITE(path, text + "\n")
        return len(text)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    root = tmp_path / "unified"
    MKDIR(root)
    monkeypatch.setattr(cgroups, "_mounts", lambda: {"": root})
    with monkeypatch.context() as patch:
        yield Kernel(root, patch)


def lives_in(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, *parts: str, controllers: str = "memory pids cpu"
) -> Path:
    """This process's own group below groups that pass `controllers` on."""
    folder = kernel.root
    for part in parts:
        for controller in controllers.split():
            folder.joinpath("cgroup.subtree_control").write_text(f"+{controller}")
        folder = folder / part
        folder.mkdir()
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    monkeypatch.setattr(cgroups, "_own", lambda: {"": "/" + "/".join(parts)})
    return folder


def test_beside_the_own_group_where_a_session_manager_delegates(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lives_in(kernel, monkeypatch, "user.slice", "user@1000.service", "app.scope")
    kernel.owned = {own.parent}
    found = discover("temper-7-00000000")
    root = own.parent / "temper-7-00000000"
    assert found == Hierarchy(2, {name: root for name in ("memory", "pids", "cpu")})
    assert found.names == ("memory", "pids", "cpu")


def test_a_program_in_a_leaf_has_its_limits_and_accounts(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    lives_in(kernel, monkeypatch, "app.scope")
    hierarchy = discover("temper-7-00000000")
    leaf = hierarchy.leaf("jail-1")
    folder = hierarchy.roots["memory"] / "jail-1"
    leaf.add(4321)
    leaf.arm(1 << 28, 9)
    assert (folder / "cgroup.procs").read_text() == "4321"
    assert [(folder / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")] == [
        f"{1 << 28}\n",
        "0\n",
        "9\n",
    ]
    WRITE(folder / "memory.events", "low 0\noom 3\noom_kill 2\n")
    WRITE(folder / "cpu.stat", "usage_usec 1750000\nuser_usec 1\n")
    WRITE(folder / "memory.peak", "777\n")
    assert (leaf.oom_kills(), leaf.cpu_s(), leaf.peak_bytes()) == (2, 1.75, 777)
    leaf.arm(1 << 28, 9)
    assert (leaf.oom_kills(), leaf.cpu_s()) == (0, 0.0) and leaf.peak_bytes() != 777
    assert leaf.remove() and not folder.exists(), "what was in it was killed by cgroup.kill"
    hierarchy.remove()
    assert not hierarchy.roots["memory"].exists()


def test_controllers_that_are_not_passed_on_are_not_promised(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lives_in(kernel, monkeypatch, "user.slice", "app.scope", controllers="memory pids")
    kernel.owned = {own.parent}
    found = discover("temper-7-00000000")
    assert found.names == ("memory", "pids")
    leaf = found.leaf("jail-1")
    leaf.arm(1 << 28, 9)
    assert leaf.cpu_s() is None and leaf.remove()


@pytest.mark.parametrize("owned", [set(), {"app.scope"}])
def test_where_nothing_is_delegated_nothing_is_left_behind(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, owned: set[str]
) -> None:
    own = lives_in(kernel, monkeypatch, "user.slice", "app.scope")
    kernel.owned = {own.parent / name for name in owned}
    before = sorted(kernel.root.rglob("*"))
    assert discover("temper-7-00000000") == Hierarchy(2)
    assert sorted(kernel.root.rglob("*")) == before


def test_the_groups_of_a_dead_worker_are_swept(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lives_in(kernel, monkeypatch, "user.slice", "app.scope")
    dead = discover("temper-6-deadbeef")
    dead.leaf("jail-1").add(99)
    dead.leaf("jail-2")
    found = stale_groups("temper-7-00000000")
    assert found == {"temper-6-deadbeef": {dead.roots["memory"]}}
    sweep(dead.roots["memory"])
    assert not dead.roots["memory"].exists() and (own / "cgroup.procs").read_text() == str(os.getpid())
