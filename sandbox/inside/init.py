"""PID 1 of a jail: runs one program at a time and reports its true wait status and resource use.

The worker compiles this file and the ones beside it, binds them into the jail and starts this one as a script (``python -S -s
-P``); nothing here may import Temper, nor any module that Python does not have built in: that would cost every start
milliseconds. It guarantees that
- the bytes of a program (source, files, stdin, output) never enter this process: it gets file descriptors, and only the
  forked child reads them. So a later program, which is a fork of this process too, finds nothing of an earlier one;
- a report is sent only after every process of the program has been killed and reaped;
- when the worker dies, the control socket closes, this process exits and the kernel kills all that is left.
"""

import _signal as signal
import posix
import sys
import time
from posix import _exit

sys.path.insert(0, "/opt/temper")

from temper_libc import Control, Reaper, kill_all
from temper_program import child, prepare
from temper_protocol import KEEP, REQUEST_BYTES, pack, unpack
from temper_warm import Pids, bound_the_users_pools, open_streams, warm_up
from temper_workspace import clean, is_folder, level_spaces, tidy, used

del sys.path[0]

ORPHAN_S = 1.0  # an nsjail that has outlived its worker makes jails until it is swept: slowly, then
LIBRARIES = "/opt/libraries"
POLL_MS = 100


def interrupt(group: int) -> None:
    try:  # noqa: SIM105 - contextlib would cost every start a millisecond
        posix.killpg(group, signal.SIGINT)
    except ProcessLookupError:
        pass


def watch(control: Control, reaper: Reaper, pid: int, cpu_s: float) -> tuple[int, float, int, bool]:
    """Wait for the program's main process while the worker may ask for its death; reap what is reparented to us."""
    clock = (~pid << 3) | 2  # the process's cpu clock, see clock_getcpuclockid(3)
    over = False
    total, peak = 0.0, 0
    pidfd = posix.pidfd_open(pid)
    status = None
    while status is None:
        if control.wait(pidfd, POLL_MS):
            word = posix.read(control.fd, 1)
            if word == b"I":
                interrupt(pid)
            elif word == b"K":
                kill_all()
            else:
                _exit(0)  # the worker is gone
        try:
            if not over and time.clock_gettime(clock) > cpu_s:
                over = True
                kill_all()
        except OSError:
            pass  # it has just ended
        while (reaped := reaper.reap(posix.WNOHANG)) > 0:
            state, cpu, most = reaper.found()
            total += cpu
            peak = max(peak, most)
            if reaped == pid:
                status = state
                break
    posix.close(pidfd)
    return status, total, peak, over


def kill_rest(reaper: Reaper) -> tuple[int, float]:
    """Kill every process but this one and reap them all: (number, cpu seconds)."""
    kill_all()
    count, cpu = 0, 0.0
    while reaper.reap(0) > 0:
        count += 1
        cpu += reaper.found()[1]
    return count, cpu


def main(control_fd: int, pid_fd: int, preload: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel spares the first process of a pid namespace
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if is_folder(LIBRARIES):
        sys.path.append(LIBRARIES)
    open_streams()
    bound_the_users_pools()
    prepare()
    warm_up(preload)
    posix.umask(0o022)
    control = Control(control_fd, REQUEST_BYTES)
    reaper = Reaper()
    pids = Pids(pid_fd)
    pids.restart()
    level_spaces()
    empty = used()
    posix.write(control_fd, b"R")
    while True:
        data, fds = control.receive()
        if not data:
            time.sleep(ORPHAN_S)
            _exit(0)
        if data == b"Q":
            _exit(0)
        if len(data) != REQUEST_BYTES:
            continue  # a late kill or interrupt
        request = unpack(data)
        started = time.monotonic()
        pids.restart()
        pid = posix.fork()
        if not pid:
            child(request, fds, pids.drop)
        for fd in fds:
            posix.close(fd)
        status, cpu, peak, over = watch(control, reaper, pid, request[2])
        wall = time.monotonic() - started
        killed, cpu_rest = kill_rest(reaper)
        keep = int(request[1]) & KEEP
        ready = keep or tidy(empty)
        posix.write(control_fd, pack(status, cpu + cpu_rest, wall, peak, killed, over, ready))
        if not ready:
            clean(empty)
            posix.write(control_fd, b"R")


def lowered(fd: int) -> int:
    """The same file under the lowest free number. The worker's own, which nsjail keeps, may be any: also one that a child would
    use itself, or one beyond all that it closes."""
    if fd < 0:
        return fd
    low = posix.dup(fd)
    posix.close(fd)
    return low


def start(control_fd: int, pid_fd: int, preload: list[str]) -> None:
    """`main`, whose failure is told to the worker: nsjail would start one jail after the other in vain."""
    control_fd, pid_fd = lowered(control_fd), lowered(pid_fd)
    try:
        main(control_fd, pid_fd, preload)
    except BaseException as error:
        posix.write(control_fd, b"E" + f"{type(error).__name__}: {error}".encode()[:500])
        time.sleep(ORPHAN_S)
        raise


if __name__ == "__main__":
    start(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
