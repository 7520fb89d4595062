"""Starts nsjail processes from one thread, so that the event loop never waits for fork and exec.

As root, the jail's uid (65534) may be unable to walk to the interpreter's folder (``/root/.pyenv``, mode 0700). The
thread then takes a mount namespace of its own and binds that folder where it can be reached: no other process sees the
mount, and it vanishes with the worker. The thread lives as long as the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import py_compile
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from temper.common.errors import EnvironmentFault
from temper.common.process import follower
from temper.sandbox import mounts
from temper.sandbox.jail import INSIDE, Host, Interpreter, Profile, enterable_by_others

CORE_BYTES = 1
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

T = TypeVar("T")


INIT_PARTS = ("init", "libc", "program", "protocol", "warm", "workspace")
SERVED = ("repl.py", "shell.sh", "snapshot.py")  # run from there: a session's workspace is its own
ETC = {
    "passwd": "nobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
    "group": "nogroup:x:65534:\n",
    "nsswitch.conf": "hosts: files\n",
}
_COMPILE = """
import py_compile, sys
for source, target, name in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    py_compile.compile(source, target, name, doraise=True, optimize=2)
"""


def compiled_inside(interpreter: Interpreter, folder: Path) -> Path:
    """The init's modules as byte code of the jails' interpreter, in a folder below `folder`: compiling them at each start
    would cost milliseconds. Their names there begin with ``temper_``, so that no program's own module is mistaken."""
    target = folder / "inside"
    target.mkdir(mode=0o755)
    parts = []
    for part in INIT_PARTS:
        name = "init" if part == "init" else f"temper_{part}"
        parts += [str(INSIDE / f"{part}.py"), str(target / f"{name}.pyc"), f"{name}.py"]
    if interpreter == Interpreter.of():
        for source, compiled, name in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            py_compile.compile(source, compiled, name, doraise=True, optimize=2)
    else:
        command = [str(interpreter.binary), "-I", "-S", "-c", _COMPILE, *parts]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            raise EnvironmentFault(
                f"the sandbox's interpreter {interpreter.binary} failed: {done.stderr.strip()[-300:]}"
            )
    for name in SERVED:
        (target / name).write_bytes((INSIDE / name).read_bytes())
    etc = target / "etc"
    etc.mkdir(mode=0o755)
    for name, text in ETC.items():
        (etc / name).write_text(text)
    with contextlib.suppress(
        OSError
    ):  # where the linker finds the libraries of /usr: else it tries folder after folder
        (etc / "ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes())
    for path in (*target.iterdir(), *etc.iterdir()):
        path.chmod(0o755 if path == etc else 0o444)
    return target


def uncored() -> list[str]:
    """Words before a command that limit its core files to one byte, the kernel's sign for "not even to a program of the host".
    Empty where this cannot be said: the limit is 0 then, which no core *file* passes."""
    prlimit = shutil.which("prlimit")
    may = resource.getrlimit(resource.RLIMIT_CORE)[1] != 0 or os.geteuid() == 0
    return [prlimit, f"--core={CORE_BYTES}:{CORE_BYTES}"] if prlimit and may else []


def enter(born: Sequence[Path]) -> list[str]:
    """Words before a command that put it into cgroups first. Empty for none."""
    script = 'n=$0; while [ "$n" -gt 0 ]; do echo $$ >"$1" || exit 1; shift; n=$((n - 1)); done; exec "$@"'
    return ["/bin/sh", "-c", script, str(len(born)), *map(str, born)] if born else []


class Spawner:
    """`folder` is the worker's state folder; the init and what the jails' uid cannot walk to are made reachable in it."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.inside = compiled_inside(host.interpreter, folder)
        self.reachable: dict[Path, Path] = {}
        self._below = mounts.writable_below([Path("/usr"), *host.sources()], mounts.here())
        self._uncored = uncored()
        self._follower = [*self._uncored, *follower()]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nsjail-spawner")
        if os.geteuid() == 0:
            for number, source in enumerate(sorted(host.sources())):
                if not enterable_by_others(source):
                    target = folder / f"bind-{number}"
                    target.mkdir(mode=0o755) if source.is_dir() else target.touch(mode=0o644)
                    self.reachable[source] = target
        if self.reachable:
            self._pool.submit(_bind_privately, self.reachable).result(timeout=10)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a short blocking call in the spawner's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def start(
        self, profile: Profile, control_fd: int, log_fd: int, born: Sequence[Path] = ()
    ) -> subprocess.Popen[bytes]:
        """Start one jail (call it in the thread), in the cgroups with these cgroup.procs."""
        pid_fd = _last_pid_fd()
        try:
            command = self.host.command(
                profile,
                log_fd,
                control_fd,
                pid_fd,
                self.inside,
                self.reachable,
                "soft" if self._uncored else "0",
                self._below,
            )
            return _popen(
                [*self._follower, *enter(born), *command],
                log_fd,
                (control_fd, log_fd, *((pid_fd,) if pid_fd >= 0 else ())),
            )
        finally:
            if pid_fd >= 0:
                os.close(pid_fd)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _last_pid_fd() -> int:
    """Open for writing what sets the next process id of the *writer's* pid namespace; -1 where the kernel has it not."""
    try:
        return os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _popen(command: Sequence[str], log_fd: int, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log_fd,  # of nsjail and the init only: a program's own is replaced before it starts
        pass_fds=fds,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        start_new_session=True,  # Ctrl-C is for the worker, which then ends its jails in order
    )


def _bind_privately(targets: Mapping[Path, Path]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise EnvironmentFault(
                f"{', '.join(map(str, targets))} cannot be entered by the jail's uid, and {what} failed "
                f"({os.strerror(ctypes.get_errno())}): `chmod o+x` the folders above, or use another Python"
            )

    check(libc.unshare(_CLONE_NEWNS), "a private mount namespace")
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "making mounts private")
    for source, target in targets.items():
        check(libc.mount(bytes(source), bytes(target), None, _MS_BIND, None), "a private bind mount")
