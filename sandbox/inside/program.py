"""The child's side of a run: from a fork of the init to the program. All that is hostile starts here.

Nothing of a request but its descriptors exists before the fork: the bundle is read in the child.
"""

import _sitebuiltins
import atexit
import builtins
import sys

# By name, not by module: looking an attribute up writes into Python's caches, which costs each child copies of their pages.
from _signal import SIG_DFL, SIG_IGN, SIGINT, SIGPIPE, SIGXFSZ, default_int_handler, signal
from posix import (
    O_CREAT,
    O_NOFOLLOW,
    O_RDONLY,
    O_TRUNC,
    O_WRONLY,
    _exit,
    chdir,
    close,
    closerange,
    dup2,
    environ,
    execve,
    mkdir,
    pread,
    putenv,
    register_at_fork,
    setsid,
    unlink,
    write,
)
from posix import open as open_fd

from temper_libc import ADDRESSES, CPU, DESCRIPTORS, FILE, PROCESSES, set_limit
from temper_protocol import LOUD, PYTHON, UNCAUGHT
from temper_workspace import is_folder

SHORT_BYTES = 4096
CREATE = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW
run_exit_functions = atexit._run_exitfuncs
number_from = int.from_bytes
SYS, MODULES = sys.__dict__, sys.modules
MAIN = type(sys)("__main__")  # what every program is the content of
NAMES = MAIN.__dict__
REHEARSALS = 20  # an interpreter specializes a function's code after 8 calls
PRELOADED: "list[object]" = []  # modules that the init has imported, and whose hooks at a fork it left out
SEEDED = (b"random", b"numpy")  # named in some file of a job: seeded before its program begins
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def read_all(fd: int) -> bytes:
    """The whole file, whatever its offset: tests of one job share the bundle's descriptor."""
    chunk = pread(fd, SHORT_BYTES, 0)
    if len(chunk) < SHORT_BYTES:
        return chunk  # as nearly always: a piece of a megabyte would cost a mapping
    chunks, at = [chunk], SHORT_BYTES
    while chunk := pread(fd, 1 << 20, at):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def unpack_bundle(data: bytes) -> tuple[bytes, list[bytes], list[tuple[bytes, bytes]]]:
    """(seed, arguments, [(name, content)]) of a bundle."""
    items, at = [], 0
    while at < len(data):
        size = number_from(data[at : at + 4], "little")
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
            mkdir("/".join(parts[:n]))


def set_seed(seed: bytes) -> None:
    """In each of the places that an environment is kept in: what os.environ is made from, os.environ, C's."""
    environ[b"TEMPER_SEED"] = seed
    if os := MODULES.get("os"):
        os.environ._data[b"TEMPER_SEED"] = seed
    putenv(b"TEMPER_SEED", seed)


def write_file(name: str, content: bytes) -> None:
    folder = name.rpartition("/")[0]
    if folder:
        make_folders(folder)
    fd = open_fd(name, CREATE, 0o755)
    while content:
        content = content[write(fd, content) :]
    close(fd)


def set_limits(cpu_s: float, address_bytes: int, file_bytes: int, processes: int, descriptors: int) -> None:
    ceiling = int(cpu_s)  # rounded up, without loading the fmod of C that // is made of
    ceiling += ceiling < cpu_s
    set_limit(CPU, ceiling, ceiling + 1)
    if address_bytes:
        set_limit(ADDRESSES, address_bytes, address_bytes)
    set_limit(FILE, file_bytes, file_bytes)
    set_limit(PROCESSES, processes, processes)
    set_limit(DESCRIPTORS, descriptors, descriptors)


def reset_signals() -> None:
    """As an interpreter of its own starts."""
    signal(SIGPIPE, SIG_IGN)
    signal(SIGXFSZ, SIG_IGN)
    signal(SIGINT, default_int_handler)


def prepare() -> None:
    """Make in the init what every program finds, so that no child need make it."""
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    NAMES["__builtins__"] = builtins


def run_python(
    path: str, source: "bytes | None", arguments: list[str], uncaught: int, seed: bytes, named: list[bytes]
) -> int:
    """Run `path`, whose content is `source` unless it must be read, as ``__main__``, as ``python path`` would; returns the
    exit code. The modules `named` are seeded before."""
    SYS["argv"] = [path, *arguments]
    SYS["path"].insert(0, path.rpartition("/")[0])
    NAMES["__file__"] = path
    MODULES["__main__"] = MAIN
    code = 0
    try:
        if source is None:
            fd = open_fd(path, O_RDONLY)
            source = read_all(fd)
            close(fd)
        if b"random" in named:
            seed_random(int(seed))
        if b"numpy" in named:
            seed_numpy(int(seed))
        exec(compile(source, path, "exec", dont_inherit=True), NAMES)
    except SystemExit as error:
        code = exit_code(error)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
        code = uncaught
    return code


def seed_random(seed: int) -> None:
    """The hook that seeds each child of a program anew was left out in the init (see warm.py): here is its turn."""
    import random

    random.seed(seed)
    if random in PRELOADED:
        register_at_fork(after_in_child=random._inst.seed)


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
    if threading := MODULES.get("threading"):
        threading._shutdown()
    run_exit_functions()
    _exit(close_main(code))


def close_main(code: int) -> int:
    """Let go of the program's names and flush what it wrote; the exit code, which is another one when that fails."""
    MODULES["__main__"].__dict__.clear()
    streams = [SYS.get("stdout"), SYS.get("stderr")]
    for now, name in ((streams[0], "__stdout__"), (streams[1], "__stderr__")):
        if SYS.get(name) is not now:
            streams.append(SYS.get(name))
    for stream in streams:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code


def rehearse(bundle: bytes) -> None:
    """Walk a child's path in the init, for a program that does nothing: what is bound, cached and specialized here need not
    be in each child, where it costs copies of pages. All is as it was afterwards."""
    argv, main, names = SYS["argv"], MODULES["__main__"], dict(NAMES)
    for _ in range(REHEARSALS):
        seed, arguments, files = unpack_bundle(bundle)
        chdir("/tmp")
        path, *rest = map(text_of, arguments)
        for name, content in files:
            write_file(text_of(name), content)
        set_seed(seed)
        reset_signals()
        close_main(run_python(f"/tmp/{path}", None, rest, 1, seed, []))
        unlink(path)
        chdir("/")
        NAMES.update(names)
        del SYS["path"][0]
    SYS["argv"], MODULES["__main__"] = argv, main
    for number in (SIGPIPE, SIGXFSZ, SIGINT):
        signal(number, SIG_DFL)


def child(request: "list[float]", fds: list[int], drop: "Callable[[], None] | None") -> None:
    """In the forked child: become the program. Never returns."""
    kind, flags, cpu_s = int(request[0]), int(request[1]), request[2]
    code = UNCAUGHT
    try:
        setsid()
        if drop is not None:
            drop()
        bundle, *streams = fds
        seed, arguments, files = unpack_bundle(read_all(bundle))
        for number, fd in enumerate(streams):
            dup2(fd, number, True)  # which is none of the later ones: they came in ascending order, after the bundle
        closerange(len(streams), 256)
        chdir("/tmp")
        named, source, content = [], None, b""
        for name, content in files:
            write_file(text_of(name), content)
            if name == arguments[0]:
                source = content
            for module in SEEDED:
                if module in content:
                    named.append(module)
        del files, content
        set_seed(seed)
        set_limits(cpu_s, *map(int, request[3:]))
        if kind == PYTHON:
            reset_signals()
            path, *rest = map(text_of, arguments)
            if path[0] != "/":
                path = f"/tmp/{path}"
            code = run_python(path, source, rest, UNCAUGHT if flags & LOUD else 1, seed, named)
            finish(code)
        execve(arguments[0], arguments, environ)
    except BaseException as error:
        write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        code = 126 if isinstance(error, OSError) else 1
    finally:
        _exit(code)
