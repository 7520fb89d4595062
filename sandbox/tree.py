"""The processes below one process, from /proc: what limits use where no cgroup accounts for a whole program tree.

Samples, taken a few times a second: short-lived processes are missed, so these are upper bounds only together with the
per-process rlimits. Where cgroups work, nothing here is used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """`memory_bytes`: resident and not shared with others. `cpu_s`: of what lives, and of its children that were awaited.
    `waited_s`: time the processes were ready to run but had no cpu."""

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


def usage(root: int) -> Usage:
    """What everything below `root` uses now."""
    memory, cpu, waited = 0, 0.0, 0.0
    for pid in descendants(root):
        try:
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            delays = Path(f"/proc/{pid}/schedstat").read_text().split()
        except (OSError, ValueError):
            continue
        memory += max(0, resident - shared) * _PAGE
        cpu += sum(map(int, fields[11:15])) / _TICKS
        waited = max(waited, int(delays[1]) / 1e9)
    return Usage(memory, cpu, waited)


def address_bytes(pid: int) -> int:
    """Size of a process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * _PAGE
