"""A daemon and its parent process, its signals' names and its last words. Linux only where it must be."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator

from temper.common.errors import EnvironmentFault, TemperError
from temper.common.log import clean, emit, log

PARENT_VARIABLE = "TEMPER_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
KEPT_BYTES = 64 * 1024 * 1024
BLOCKED_S = 2.0
ORPHANED_S = 10.0
ORPHAN_EXIT = 3


def follow_parent() -> None:
    """If the parent asked for it (its pid in TEMPER_PARENT_PID): get SIGTERM when it dies, however it dies.

    The kernel watches the *thread* that started this process, so a parent starts its children from its main thread.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent.isdigit() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        raise EnvironmentFault(f"the process that started this one (pid {parent}) is gone")


def follower() -> list[str]:
    """Words before a command that give it SIGTERM when the thread that started it dies, however this process dies.

    For programs that are not ours, from processes with threads: nothing of Python runs between fork and exec. The shell looks
    whether the parent is still there: it may have died before the signal was asked for. Empty where setpriv is missing: then
    the caller has another way to get rid of what a killed process leaves, or says that it has none.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    return [setpriv, "--pdeathsig", "TERM", "--", "/bin/sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]


def orphaned() -> bool:
    """True if this process was to follow a parent that is gone."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    return parent.isdigit() and os.getppid() != int(parent)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside (nested) exception groups, cancellations left out."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [] if isinstance(error, asyncio.CancelledError) else [error]


def expected(error: BaseException) -> TemperError | None:
    """`error` as an expected one, None if it is a bug. A full disk is expected wherever it strikes."""
    if isinstance(error, TemperError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return EnvironmentFault(f"the disk is full{where}: free space or choose another run directory")
    return None


def report(role: str, error: BaseException) -> int:
    """Write the cause to stderr, one line for an expected error, a traceback for a bug; the exit code."""
    found = leaves(error)
    bugs = [leaf for leaf in found if expected(leaf) is None]
    cause = bugs[0] if bugs else (found[0] if found else error)
    known = expected(cause)
    if known is not None:
        emit(f"temper {role}: {clean(str(known))}\n")
        return known.exit_code
    for line in "".join(traceback.format_exception(cause)).splitlines():
        emit(clean(line) + "\n")
    emit(f"temper {role}: a bug: {clean(f'{type(cause).__name__}: {cause}')}\n")
    return 1


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside, and none ever of what was made there: for loading much at once."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def settle_garbage() -> None:
    """Call once everything is set up: what exists now is never looked at again by the garbage collector, which runs less
    often from here on. Messages hold no cycles, so collecting every 700 allocations only costs time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def share_memory_between_threads() -> None:
    """Let all threads allocate from one pool, so that what one has freed serves the others: glibc gives each a pool of its
    own, and a daemon that holds tensors keeps its freed gigabytes there. Call it before threads are made. No-op elsewhere."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Let the allocator keep what messages of up to 16 MiB leave, for those that come next: else glibc returns each large one to
    the system at once, which clears the memory again for the next one. `give_memory_back` returns what is too much. Call it
    before threads are made. No-op elsewhere."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        tune(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_memory_back() -> None:
    """Return freed memory to the system (glibc keeps it otherwise, in the I/O thread's arena above all).

    Takes about half a millisecond a freed MiB, without the interpreter's lock: call it in a thread. No-op elsewhere.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def leave_within(seconds: float, code: int) -> None:
    """Once the interpreter begins to shut down, give its threads `seconds`, then exit with `code` whatever hangs.

    A thread in a grader or a native call that never returns would otherwise be joined for ever.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        return
    begun = threading.Event()

    def watch() -> None:
        begun.wait()
        threading.Event().wait(seconds)
        log(f"threads do not end ({', '.join(_busy_threads())}); leaving without them")
        os._exit(code)

    threading.Thread(target=watch, name="exit-watch", daemon=True).start()
    register(begun.set)


def _busy_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()] or ["none"]


class BlockedLoopWatch:
    """Notices, from a thread, that the event loop stands still, and logs where. `beat` is called from the loop.

    A daemon that is still there `ORPHANED_S` after its parent died, because its loop cannot drain, is ended from here.
    """

    def __init__(self) -> None:
        self._beats = 0
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="blocked-loop-watch", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """The loop is alive."""
        self._beats += 1

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        seen, blocked_s, orphaned_s = self._beats, 0.0, 0.0
        while not self._stopped.wait(BLOCKED_S):
            orphaned_s = orphaned_s + BLOCKED_S if orphaned() else 0.0
            if orphaned_s >= ORPHANED_S:
                log(f"the process that started this one has been gone for {orphaned_s:.0f} s; exiting at once")
                os._exit(ORPHAN_EXIT)
            if self._beats != seen:
                seen, blocked_s = self._beats, 0.0
                continue
            blocked_s += BLOCKED_S
            if blocked_s in (BLOCKED_S, 5 * BLOCKED_S, 15 * BLOCKED_S):
                log(f"the event loop has stood still for {blocked_s:.0f} s in {self._where()}")

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "an unknown place"
        calls = traceback.extract_stack(frame)[-3:]
        return " > ".join(f"{os.path.basename(call.filename)}:{call.lineno} {call.name}" for call in calls)
