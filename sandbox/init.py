"""PID 1 of a jail: runs one program at a time and reports its true wait status and resource use.

The worker binds this file into the jail and starts it as a script (``python -S -s -P``); nothing here may import
Temper. It guarantees that
- the bytes of a program (source, files, stdin, output) never enter this process: it gets file descriptors, and only the
  forked child reads them. So a later program, which is a fork of this process too, finds nothing of an earlier one;
- a report is sent only after every process of the program has been killed and reaped;
- when the worker dies, the control socket closes, this process exits and the kernel kills all that is left.

Protocol, a SEQPACKET socket. Worker -> init: ``REQUEST`` with descriptors (bundle, stdin, stdout, stderr, and more that
the program gets from 3 on), ``b"I"`` (interrupt what runs), ``b"K"`` (kill it) or ``b"Q"`` (end). Init -> worker:
``b"R"`` (ready: clean, nothing runs), ``REPORT``, ``b"E"`` and an error (it cannot go on). The bundle is a sequence of
length-prefixed byte strings: the seed, number of arguments, arguments, then name and content of each file.
"""

import _signal as signal
import _sitebuiltins
import _socket
import _stat
import _struct as struct
import atexit
import builtins
import fcntl
import gc
import posix  # not os, and no other module of Python's own making: they would cost every start milliseconds
import resource
import select
import sys
import time
from posix import _exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = struct.Struct("<BBdQQII")  # kind, flags, cpu seconds, address space, file size, processes, descriptors
REPORT = struct.Struct("<iddQIB")  # wait status, cpu seconds, wall seconds, peak KiB, processes killed, cpu limit hit
PYTHON, COMMAND = 1, 2
KEEP = 1  # flag: leave the workspace as it is after this program
LOUD = 2  # flag: an uncaught exception is exit code 70, not 1
UNCAUGHT = 70
ORPHAN_S = 1.0  # an nsjail that has outlived its worker makes jails until it is swept: slowly, then
LIBRARIES = "/opt/libraries"
SPACES = ("/tmp", "/dev/shm")
POLL_MS = 100


def read_all(fd: int) -> bytes:
    """The whole file, whatever its offset: tests of one job share the bundle's descriptor."""
    chunks, at = [], 0
    while chunk := posix.pread(fd, 1 << 20, at):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def unpack_bundle(data: bytes) -> tuple[bytes, list[bytes], list[tuple[bytes, bytes]]]:
    """(seed, arguments, [(name, content)]) of a bundle."""
    items, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        items.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    count = int(items[1])
    rest = items[2 + count :]
    return items[0], items[2 : 2 + count], list(zip(rest[::2], rest[1::2], strict=True))


def text_of(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def is_folder(path: str) -> bool:
    try:
        return _stat.S_ISDIR(posix.lstat(path).st_mode)
    except OSError:
        return False


def make_folders(path: str) -> None:
    parts = path.split("/")
    for n in range(1, len(parts) + 1):
        if not is_folder("/".join(parts[:n])):
            posix.mkdir("/".join(parts[:n]))


def set_seed(seed: bytes) -> None:
    posix.environ[b"TEMPER_SEED"] = seed  # what os.environ is made from
    if os := sys.modules.get("os"):
        os.environb[b"TEMPER_SEED"] = seed


def write_files(files: list[tuple[str, bytes]]) -> None:
    for name, content in files:
        folder = name.rpartition("/")[0]
        if folder:
            make_folders(folder)
        fd = posix.open(name, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW, 0o755)
        view = memoryview(content)
        while view:
            view = view[posix.write(fd, view) :]
        posix.close(fd)


def set_limits(cpu_s: float, address_bytes: int, file_bytes: int, processes: int, descriptors: int) -> None:
    ceiling = max(1, -int(-cpu_s // 1))
    resource.setrlimit(resource.RLIMIT_CPU, (ceiling, ceiling + 1))
    if address_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


def reset_signals() -> None:
    """As an interpreter of its own starts."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_python(path: str, arguments: list[str], uncaught: int) -> int:
    """Run `path` as ``__main__``, as ``python path`` would; returns the exit code."""
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    sys.argv = [path, *arguments]
    sys.path.insert(0, path.rpartition("/")[0])
    main = type(sys)("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main
    code = 0
    try:
        with open(path, "rb") as file:
            source = file.read()
        if b"random" in source:
            import random

            random.seed(int(posix.environ[b"TEMPER_SEED"]))
        if b"numpy" in source:
            seed_numpy(int(posix.environ[b"TEMPER_SEED"]))
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = exit_code(error)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
        code = uncaught
    return code


def seed_numpy(seed: int) -> None:
    try:
        import numpy
    except ImportError:
        return  # the program will find out itself
    numpy.random.seed(seed % (1 << 32))


def exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def finish(code: int) -> None:
    """The visible part of an interpreter's end: threads, atexit, flush. The memory is the kernel's to free."""
    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = code or 120
    _exit(code)


def child(request: tuple, fds: list[int], drop: "Callable[[], None] | None") -> None:
    """In the forked child: become the program. Never returns."""
    kind, flags, cpu_s, address_bytes, file_bytes, processes, descriptors = request
    code = UNCAUGHT
    try:
        posix.setsid()
        if drop is not None:
            drop()
        bundle, *streams = fds
        seed, arguments, files = unpack_bundle(read_all(bundle))
        apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in streams]
        for number, fd in enumerate(apart):
            posix.dup2(fd, number, True)
        posix.closerange(len(apart), 256)
        posix.chdir("/tmp")
        write_files([(text_of(name), content) for name, content in files])
        del files
        set_seed(seed)
        set_limits(cpu_s, address_bytes, file_bytes, processes, descriptors)
        if kind == PYTHON:
            reset_signals()
            path, *rest = map(text_of, arguments)
            code = run_python(f"/tmp/{path}", rest, UNCAUGHT if flags & LOUD else 1)
            finish(code)
        posix.execve(arguments[0], arguments, posix.environ)
    except BaseException as error:
        posix.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        code = 126 if isinstance(error, OSError) else 1
    finally:
        _exit(code)


def kill_all() -> None:
    """SIGKILL to every process of the jail but this one; the kernel does it atomically against forks."""
    try:  # noqa: SIM105 - contextlib would cost every start a millisecond
        posix.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def interrupt(group: int) -> None:
    try:  # noqa: SIM105
        posix.killpg(group, signal.SIGINT)
    except ProcessLookupError:
        pass


def watch(sock: _socket.socket, pid: int, cpu_s: float) -> tuple[int, float, int, bool]:
    """Wait for the program's main process while the worker may ask for its death; reap what is reparented to us."""
    clock = (~pid << 3) | 2  # the process's cpu clock, see clock_getcpuclockid(3)
    over = False
    total, peak = 0.0, 0
    pidfd = posix.pidfd_open(pid)
    poller = select.poll()
    poller.register(sock.fileno(), select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    status = None
    while status is None:
        for fd, _ in poller.poll(POLL_MS):
            if fd == sock.fileno():
                word = sock.recv(1)
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
        while True:
            reaped, state, usage = posix.wait4(-1, posix.WNOHANG)
            if not reaped:
                break
            total += usage.ru_utime + usage.ru_stime
            peak = max(peak, usage.ru_maxrss)
            if reaped == pid:
                status = state
                break
    posix.close(pidfd)
    return status, total, peak, over


def kill_rest() -> tuple[int, float]:
    """Kill every process but this one and reap them all: (number, cpu seconds)."""
    kill_all()
    count, cpu = 0, 0.0
    while True:
        try:
            _, _, usage = posix.wait4(-1, 0)
        except ChildProcessError:
            return count, cpu
        count += 1
        cpu += usage.ru_utime + usage.ru_stime


def inodes_used() -> list[tuple[int, int]]:
    return [(s.f_files - s.f_ffree, s.f_blocks - s.f_bfree) for s in map(posix.statvfs, SPACES)]


def wipe_flat(folder: str) -> None:
    """Empty `folder` however deep, without recursion or long paths: move grandchildren up, then remove."""
    serial = 0
    posix.chdir(folder)
    while names := posix.listdir("."):
        for name in names:
            try:
                posix.unlink(name)
                continue
            except OSError:
                posix.chmod(name, 0o700)
            for inner in posix.listdir(name):
                serial += 1
                if is_folder(f"{name}/{inner}"):
                    posix.chmod(f"{name}/{inner}", 0o700)
                posix.rename(f"{name}/{inner}", f".{serial}.{posix.getpid()}")
            posix.rmdir(name)


def clean(empty: list[tuple[int, int]]) -> None:
    """Bring the writable places back to `empty`, in a child, so that no file name enters this process."""
    try:  # noqa: SIM105
        posix.unlink("/tmp/main.py")
    except OSError:
        pass
    if inodes_used() != empty:
        pid = posix.fork()
        if not pid:
            code = 1
            try:
                for folder in SPACES:
                    posix.chmod(folder, 0o700)
                    wipe_flat(folder)
                code = 0
            finally:
                _exit(code)
        posix.waitpid(pid, 0)
        if inodes_used() != empty:
            _exit(3)  # the worker replaces this jail
    level_spaces()


def level_spaces() -> None:
    """The writable folders themselves tell nothing either."""
    for folder in SPACES:
        posix.chmod(folder, 0o700)
        posix.utime(folder, (0, 0))


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


def warm_up(preload: list[str]) -> None:
    """Do once what every program would have to do first: a fork then costs a third in copied pages."""
    for name in preload:
        __import__(name)
    with open("/dev/null", "w", encoding="utf-8", errors="surrogateescape") as null:
        exec(compile(WARM_UP, "<warm up>", "exec", dont_inherit=True), {"null": null})
    if preload:
        gc.collect()  # costs a jail that runs one program more than it saves
    gc.freeze()


def capability_dropper() -> "Callable[[], None]":
    """A function that gives up every capability of the calling process for good."""
    import _ctypes  # not ctypes, which would cost every start milliseconds

    libc = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # the process itself
    prctl, capset = _ctypes.dlsym(libc, "prctl"), _ctypes.dlsym(libc, "capset")
    header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this process
    nothing = bytes(24)

    def drop() -> None:
        _ctypes.call_function(prctl, (47, 4, 0, 0, 0))  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
        if _ctypes.call_function(capset, (header, nothing)):
            raise PermissionError("capset")

    return drop


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


def open_streams() -> None:
    """The standard streams that every program inherits, made once: their descriptors are replaced in each child by ones of
    the same kinds, a sealed file and two pipes."""
    posix.dup2(posix.memfd_create("stdin", 0), 0, True)
    posix.dup2(posix.pipe()[1], 1, True)
    for name, fd, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"),
        ("stdout", 1, "w", "surrogateescape"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        stream = open(fd, mode, 1 if fd == 2 else -1, "utf-8", errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main(control_fd: int, pid_fd: int, preload: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel spares the first process of a pid namespace
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if is_folder(LIBRARIES):
        sys.path.append(LIBRARIES)
    open_streams()
    warm_up(preload)
    posix.umask(0o022)
    sock = _socket.socket(fileno=control_fd)
    pids = Pids(pid_fd)
    pids.restart()
    level_spaces()
    empty = inodes_used()
    sock.send(b"R")
    while True:
        data, ancillary, _, _ = sock.recvmsg(REQUEST.size, 64)
        if not data:
            time.sleep(ORPHAN_S)
            _exit(0)
        fds = [fd for _, _, raw in ancillary for fd in struct.unpack(f"{len(raw) // 4}i", raw)]
        if data == b"Q":
            _exit(0)
        if len(data) != REQUEST.size:
            continue  # a late kill or interrupt
        request = REQUEST.unpack(data)
        started = time.monotonic()
        pids.restart()
        pid = posix.fork()
        if not pid:
            child(request, fds, pids.drop)
        for fd in fds:
            posix.close(fd)
        status, cpu, peak, over = watch(sock, pid, request[2])
        wall = time.monotonic() - started
        killed, cpu_rest = kill_rest()
        sock.send(REPORT.pack(status, cpu + cpu_rest, wall, peak, killed, over))
        if not request[1] & KEEP:
            clean(empty)
        sock.send(b"R")


def start(control_fd: int, pid_fd: int, preload: list[str]) -> None:
    """`main`, whose failure is told to the worker: nsjail would start one jail after the other in vain."""
    try:
        main(control_fd, pid_fd, preload)
    except BaseException as error:
        _socket.socket(fileno=posix.dup(control_fd)).send(b"E" + f"{type(error).__name__}: {error}".encode()[:500])
        time.sleep(ORPHAN_S)
        raise


if __name__ == "__main__":
    start(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
