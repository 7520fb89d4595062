"""What an init does once, so that its forks need not: streams, first uses, process ids."""

import gc
import posix
import sys

from temper_libc import NICE, QUEUED_SIGNALS, capability_dropper, set_limit
from temper_program import PRELOADED, rehearse

SIGNALS = 512
BOUND = b"LD_BIND_NOW"
WARM_UP = """
import sys
def f(x, *rest, **more):
    for i in range(3):
        x += [j for j in (1, 2)][0] if i else -1
    return f"{x} {x:.2f}"
class A:
    y = lambda self: {1: 2, **{}}
try:
    print(f(1), A().y(), file=null, flush=True)
    1 / 0
except ZeroDivisionError as error:
    str(error).split()
"""
REHEARSED = b"".join(len(item).to_bytes(4, "little") + item for item in (b"0", b"1", b"main.py", b"main.py", b"pass"))


def warm_up(preload: list[str]) -> None:
    """Do once what every program would have to do first: a fork then costs a third in copied pages."""
    if posix.environ.pop(BOUND, None):
        posix.unsetenv(BOUND)  # the linker has read it
    if "random" in preload:
        import_random()
    for name in preload:
        __import__(name)
    first_uses()
    with open("/dev/null", "w", encoding="utf-8", errors="surrogateescape") as null:
        exec(compile(WARM_UP, "<warm up>", "exec", dont_inherit=True), {"null": null})
    if preload:
        rehearse(REHEARSED)
        gc.collect()  # costs a jail that runs one program more than it saves
    gc.freeze()


def import_random() -> None:
    """Import `random` without its hook, which would seed it anew in every child, for milliseconds in all and by chance."""
    import os

    hook, os.register_at_fork = os.register_at_fork, lambda **_: None
    try:
        import random
    finally:
        os.register_at_fork = hook
    random.seed(0)
    PRELOADED.append(random)


def first_uses() -> None:
    """Call what each child calls first: the linker then looks it up here, once."""
    posix.pread(0, 1, 0)
    posix.closerange(250, 251)
    posix.chdir("/")
    posix.close(posix.dup2(0, 64, True))
    try:  # noqa: SIM105
        posix.setsid()
    except PermissionError:
        pass  # it leads a session already


def open_streams() -> None:
    """The standard streams that every program inherits, made once: their descriptors are replaced in each child by ones of
    the same kinds, a file and two pipes."""
    posix.dup2(posix.open(__file__, posix.O_RDONLY), 0, True)
    posix.dup2(posix.pipe()[1], 1, True)
    for name, fd, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"),
        ("stdout", 1, "w", "surrogateescape"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        stream = open(fd, mode, 1 if fd == 2 else -1, "utf-8", errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def bound_the_users_pools() -> None:
    """Limits of what the kernel counts for the user who runs the jails: queued signals; and no rise in priority."""
    set_limit(QUEUED_SIGNALS, SIGNALS, SIGNALS)
    set_limit(NICE, 0, 0)


class Pids:
    """Gives every program the same process ids, so that none can tell how many ran before it.

    The worker passes ``/proc/sys/kernel/ns_last_pid`` open for writing; the kernel asks for CAP_CHECKPOINT_RESTORE in the
    jail's user namespace, which only this process keeps. Without the descriptor, ids grow from program to program.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.drop = capability_dropper() if fd >= 0 else None

    def restart(self) -> None:
        if self.fd >= 0:
            posix.pwrite(self.fd, b"1", 0)
