"""The processes below one process, from /proc: what limits use where no cgroup accounts for a whole program tree.

Memory is what the tree would give back: pages that its processes share (after a fork, or on purpose) count once.

Samples, taken a few times a second: short-lived processes are missed, so these are upper bounds only together with the
per-process rlimits. Where cgroups work, nothing here is used.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """`memory_bytes`: anonymous and shared memory, or more where that is within the limit asked about. `cpu_s`: of what
    lives, and of its children that were awaited. `waited_s`: time the processes were ready to run but had no cpu."""

    memory_bytes: int
    cpu_s: float
    waited_s: float


def descendants(root: int) -> list[int]:
    """Every living process below `root`, itself not included."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                children = [int(word) for word in path.read_text().split()]
            except OSError:
                continue  # it ended meanwhile
            found += children
            todo += children
    return found


def usage(root: int, memory_limit: int = 1 << 62) -> Usage:
    """What everything below `root` uses now. Memory is looked at closely only where a glance says that it may be too much."""
    memory, cpu, waited = 0, 0.0, 0.0
    pids = descendants(root)
    for pid in pids:
        try:
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, ValueError):
            continue
        with contextlib.suppress(OSError, IndexError):  # a kernel may not account for waits
            waited = max(waited, int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9)
        memory += resident * _PAGE
        cpu += sum(map(int, fields[11:15])) / _TICKS
    if memory > memory_limit:
        memory = sum(map(proportional_bytes, pids))
    return Usage(memory, cpu, waited)


def proportional_bytes(pid: int) -> int:
    """A process's share of its anonymous and shared memory: a page that n processes map counts 1/n; 0 if it has ended.
    Where the kernel does not tell: what it does not share with a file."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (PermissionError, FileNotFoundError):
        try:
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        except (OSError, ValueError):
            return 0
        return (resident - shared) * _PAGE
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def address_bytes(pid: int) -> int:
    """Size of a process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * _PAGE
