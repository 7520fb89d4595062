"""The child's side of a run: from a fork of the init to the program. All that is hostile starts here.

Nothing of a request but its descriptors exists before the fork: the bundle is read in the child.
"""

import _signal as signal
import _sitebuiltins
import _struct as struct
import atexit
import builtins
import fcntl
import posix
import resource
import sys
from posix import _exit

from temper_protocol import LOUD, PYTHON, UNCAUGHT
from temper_workspace import is_folder

SEEDED = (b"random", b"numpy")  # named in some file of a job: seeded before its program begins
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


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


def run_python(path: str, arguments: list[str], uncaught: int, seeded: set[bytes]) -> int:
    """Run `path` as ``__main__``, as ``python path`` would; returns the exit code. `seeded`: modules to seed beforehand."""
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
        if b"random" in seeded:
            import random

            random.seed(int(posix.environ[b"TEMPER_SEED"]))
        if b"numpy" in seeded:
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
        seeded = {name for name in SEEDED if any(name in content for _, content in files)}
        del files
        set_seed(seed)
        set_limits(cpu_s, address_bytes, file_bytes, processes, descriptors)
        if kind == PYTHON:
            reset_signals()
            path, *rest = map(text_of, arguments)
            code = run_python(path if path[0] == "/" else f"/tmp/{path}", rest, UNCAUGHT if flags & LOUD else 1, seeded)
            finish(code)
        posix.execve(arguments[0], arguments, posix.environ)
    except BaseException as error:
        posix.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        code = 126 if isinstance(error, OSError) else 1
    finally:
        _exit(code)
