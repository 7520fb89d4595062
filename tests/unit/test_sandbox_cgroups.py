"""Control groups of both versions on plain files: what is written where, in which order, and what is read back."""

import subprocess
from pathlib import Path

import pytest
from temper.common.errors import EnvironmentFault
from temper.sandbox import cgroups
from temper.sandbox.cgroups import Hierarchy, Leaf
from temper.sandbox.spawner import enter
from temper.sandbox.state import State

V1 = {
    "memory": (
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
    ),
    "pids": ("pids.max",),
    "cpu": ("cpuacct.usage",),
}
V2 = ("memory.max", "memory.swap.max", "memory.peak", "memory.events", "pids.max", "cpu.stat")


@pytest.fixture
def version_1(tmp_path: Path) -> tuple[Leaf, Path]:
    hierarchy = Hierarchy(1, {name: tmp_path / name for name in V1})
    for name, files in V1.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "leaf").mkdir()
        for file in files:
            (tmp_path / name / "leaf" / file).write_text("0\n")
        (tmp_path / name / "leaf" / "cgroup.procs").write_text("")
    return Leaf(1, {name: root / "leaf" for name, root in hierarchy.roots.items()}), tmp_path


@pytest.fixture
def version_2(tmp_path: Path) -> tuple[Leaf, Path]:
    for file in (*V2, "cgroup.procs"):
        (tmp_path / file).write_text("0\n")
    (tmp_path / "memory.events").write_text("low 0\noom 0\noom_kill 2\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    return Leaf(2, {name: tmp_path for name in ("memory", "pids", "cpu")}), tmp_path


def test_version_1_sets_the_limits_of_each_program(version_1: tuple[Leaf, Path]) -> None:
    leaf, root = version_1
    for memory in (1 << 28, 1 << 20, 1 << 30):
        leaf.arm(memory, 9)
        assert (root / "memory/leaf/memory.limit_in_bytes").read_text() == str(memory)
        assert (root / "memory/leaf/memory.memsw.limit_in_bytes").read_text() == str(memory)
    assert (root / "pids/leaf/pids.max").read_text() == "9"


def test_version_1_writes_memory_and_swap_in_the_order_that_the_kernel_accepts(
    version_1: tuple[Leaf, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, _ = version_1
    written: list[tuple[str, int]] = []
    original = Path.write_text

    def note(path: Path, text: str) -> int:
        written.append((path.name, int(text)))
        return original(path, text)

    monkeypatch.setattr(Path, "write_text", note)
    limits = {"memory.limit_in_bytes": 1 << 62, "memory.memsw.limit_in_bytes": 1 << 62}
    for memory in (1 << 28, 1 << 20, 1 << 30, 1 << 29):
        leaf.arm(memory, 9)
        for name, value in written:
            if name in limits:
                limits[name] = value
                assert limits["memory.limit_in_bytes"] <= limits["memory.memsw.limit_in_bytes"], written
        written.clear()


def test_version_1_accounts_start_anew_with_each_program(version_1: tuple[Leaf, Path]) -> None:
    leaf, root = version_1
    (root / "memory/leaf/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (root / "cpu/leaf/cpuacct.usage").write_text("5000000000\n")
    leaf.arm(1 << 28, 9)
    assert (leaf.oom_kills(), leaf.cpu_s()) == (0, 0.0)
    (root / "memory/leaf/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    (root / "cpu/leaf/cpuacct.usage").write_text("5250000000\n")
    (root / "memory/leaf/memory.max_usage_in_bytes").write_text("12345\n")
    assert (leaf.oom_kills(), leaf.cpu_s(), leaf.peak_bytes()) == (1, 0.25, 12345)


def test_version_1_moves_an_init_only_where_memory_is_counted(tmp_path: Path) -> None:
    """Each move costs the kernel milliseconds: nsjail enters the other hierarchies itself, and counts as a process there."""
    for name in V1:
        (tmp_path / name).mkdir()
    leaf = Hierarchy(1, {name: tmp_path / name for name in V1}).leaf("jail-1")
    assert leaf.born == [tmp_path / name / "jail-1" / "cgroup.procs" for name in ("cpu", "pids")]
    for name, files in V1.items():
        for file in (*files, "cgroup.procs"):
            (tmp_path / name / "jail-1" / file).write_text("0\n")
    leaf.add(4321)
    assert (tmp_path / "memory/jail-1/cgroup.procs").read_text() == "4321"
    done = subprocess.run([*enter(leaf.born), "/bin/sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    for name in ("cpu", "pids"):
        assert (tmp_path / name / "jail-1" / "cgroup.procs").read_text() == done.stdout
    leaf.arm(1 << 28, 9)
    assert (tmp_path / "pids/jail-1/pids.max").read_text() == "10"


def test_a_command_that_may_not_enter_its_cgroup_does_not_start(tmp_path: Path) -> None:
    command = [*enter([tmp_path / "missing" / "cgroup.procs"]), "/bin/echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and done.stdout == ""


def test_version_2_limits_and_accounts(version_2: tuple[Leaf, Path]) -> None:
    leaf, root = version_2
    leaf.add(4321)
    leaf.arm(1 << 28, 9)
    assert (root / "cgroup.procs").read_text() == "4321"
    assert (root / "memory.max").read_text() == str(1 << 28) and (root / "memory.swap.max").read_text() == "0"
    assert (root / "pids.max").read_text() == "9"
    (root / "memory.events").write_text("oom_kill 3\n")
    (root / "cpu.stat").write_text("usage_usec 1750000\n")
    (root / "memory.peak").write_text("777\n")
    assert (leaf.oom_kills(), leaf.cpu_s(), leaf.peak_bytes()) == (1, 0.25, 777)


def test_what_a_host_lacks_is_unknown_not_zero(tmp_path: Path) -> None:
    leaf = Leaf(2, {"pids": tmp_path})
    leaf.arm(1 << 28, 9)
    assert (leaf.cpu_s(), leaf.peak_bytes(), leaf.oom_kills()) == (None, None, 0)


def test_a_sweep_leaves_the_living_and_strangers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    monkeypatch.setattr(cgroups, "_mounts", lambda: {"memory": group})
    monkeypatch.setattr(cgroups, "_own", lambda: {"memory": "/"})
    base = tmp_path / "base"
    living, sweeper = State(base), State(base)
    dead = base / "temper-1-00000000"
    dead.mkdir()
    (dead / "lock").touch()
    for name in (living.name, dead.name, "temper-2-11111111", "temper-foo.service", "temper-a-b"):
        (group / name / "jail-1").mkdir(parents=True)
    (group / "temper-2-11111111" / "jail-1" / "cgroup.procs").write_text("not empty: a folder that rmdir refuses")
    assert sweeper.sweep() == [dead.name]
    assert sorted(path.name for path in base.iterdir()) == sorted([living.name, sweeper.name])
    assert sorted(path.name for path in group.iterdir()) == sorted(
        [living.name, "temper-2-11111111", "temper-foo.service", "temper-a-b"]
    )
    living.close()
    sweeper.close()
    assert list(base.iterdir()) == []


def test_a_state_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    with pytest.raises(EnvironmentFault, match="only this user can write"):
        State(base)
