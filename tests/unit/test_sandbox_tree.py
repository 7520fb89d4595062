"""What a program's processes use, where no cgroup says it; and what is mounted below a read-only bind."""

from __future__ import annotations

import gc
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from temper.sandbox import mounts, tree

MIB = 1 << 20


@contextmanager
def family(children: int, work: Callable[[], object]) -> Iterator[int]:
    """A process whose `children` have done their `work` and wait; its id."""
    read, write = os.pipe()
    root = os.fork()
    if not root:
        kept = [work()]
        for _ in range(children):
            if not os.fork():
                kept.append(work() if children > 1 else None)
                os.write(write, b"x")
                signal.pause()
        signal.pause()
    try:
        for _ in range(children):
            os.read(read, 1)
        yield root
    finally:
        for pid in [*tree.descendants(root), root]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(root, 0)
        os.close(read)
        os.close(write)


def added(children: int, work: Callable[[], object]) -> int:
    """What the work of a family adds to what its members have in common with this process anyway: which frees nothing meanwhile."""
    gc.collect()
    with family(children, lambda: None) as root:
        without = tree.usage(root, 0).memory_bytes
    with family(children, work) as root:
        return tree.usage(root, 0).memory_bytes - without


def test_private_memory_of_every_process_counts() -> None:
    with family(4, lambda: None) as root:
        assert len(tree.descendants(root)) == 4
    assert 4 * 64 * MIB <= added(4, lambda: bytearray(b"x") * (64 * MIB)) < 6 * 64 * MIB  # five take it


def test_what_processes_share_counts_once() -> None:
    shared = mmap.mmap(-1, 64 * MIB)
    shared.write(b"x" * (64 * MIB))

    def touch() -> int:
        return sum(shared[at] for at in range(0, 64 * MIB, 4096))

    assert added(6, touch) < 2 * 64 * MIB
    with family(6, touch) as root:
        assert tree.usage(root).memory_bytes > 6 * 64 * MIB, "at a glance"
    shared.close()


def test_shared_memory_is_not_overlooked() -> None:
    def take() -> mmap.mmap:
        mine = mmap.mmap(-1, 64 * MIB)
        for _ in range(64):
            mine.write(b"x" * MIB)
        return mine

    assert 4 * 64 * MIB <= added(4, take) < 6 * 64 * MIB


def test_a_process_that_has_ended_uses_nothing() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert tree.proportional_bytes(pid) == 0 and tree.usage(pid) == tree.Usage(0, 0.0, 0.0)


TABLE = """\
24 1 254:1 / / rw,relatime - ext4 /dev/root rw
25 24 0:22 / /usr ro,relatime - ext4 /dev/usr ro
26 25 0:23 / /usr/local rw,relatime shared:1 - ext4 /dev/disk rw
27 25 0:24 / /usr/share/my\\040data rw - tmpfs none rw
28 25 0:25 / /usr/lib/modules ro - tmpfs none ro
29 24 0:26 / /usrother rw - tmpfs none rw
30 24 0:27 / /opt/python rw - tmpfs none rw
31 30 0:27 / /opt/python rw - tmpfs none rw
"""


def test_writable_mounts_below_a_bind_are_found() -> None:
    found = mounts.writable_below([Path("/usr"), Path("/opt/python"), Path("/srv")], TABLE)
    assert found == {Path("/usr"): [Path("/usr/local"), Path("/usr/share/my data")]}
    assert mounts.writable_below([Path("/proc/self")], mounts.here()) == {}
