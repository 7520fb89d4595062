"""The places that a program can write to, and how they are emptied for the next one.

Emptying is done in a forked child, so that no file name of a program enters the init, which later programs are forks of.
"""

import _stat
import posix
from posix import _exit

from temper_libc import LIBC, buffer, call_function, dlsym

STATFS = dlsym(LIBC, "statfs")
STATUS, STATUS_BYTES = buffer(120)
COUNTS = STATUS_BYTES[:56]
SPACES = ("/tmp", "/dev/shm")


def is_folder(path: str) -> bool:
    try:
        return _stat.S_ISDIR(posix.lstat(path).st_mode)
    except OSError:
        return False


def used() -> list[bytes]:
    """What each place holds, as statfs(2) counts it: its blocks and inodes, of the file system and free."""
    found = []
    for folder in SPACES:
        if call_function(STATFS, (folder.encode(), STATUS)):
            raise OSError(f"statfs of {folder}")
        found.append(bytes(COUNTS))
    return found


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


def tidy(empty: list[bytes]) -> bool:
    """Bring the writable places back to `empty` if a program left nothing in them but its source; whether that did it."""
    try:  # noqa: SIM105
        posix.unlink("/tmp/main.py")
    except OSError:
        pass
    if used() != empty:
        return False
    level_spaces()
    return True


def clean(empty: list[bytes]) -> None:
    """Bring the writable places back to `empty`, in a child, so that no file name enters this process."""
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
    if used() != empty:
        _exit(3)  # the worker replaces this jail
    level_spaces()


def level_spaces() -> None:
    """The writable folders themselves tell nothing either."""
    for folder in SPACES:
        posix.chmod(folder, 0o700)
        posix.utime(folder, (0, 0))
