"""An SGLang server as a child process: started from the host's own configuration, watched, ended with everything it started.

Interpreter, flags and environment come from the host file, never from the recipe. The server gets the model's config from
a private folder and random weights (`--load-format dummy`); the real ones reach it as updates. It listens on loopback with
an admin key, its working folder is outside any checkout, it dies with its parent. Called by `sglang`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from temper.common.errors import EnvironmentFault
from temper.common.log import log

CPU_SHIMS = Path(__file__).with_name("sglang_cpu")
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--max-total-tokens", "65536"),
)
TAIL_LINES = 20
STOP_S = 5.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class SglangHost:
    """[actor.sglang] of the host file. `python`: interpreter of SGLang's own environment. `flags`: appended to ours.

    `cpu`: run without a GPU, with the flags and stand-ins that needs. `log_dir`: where the server's log goes.
    """

    python: str = ""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = False
    log_dir: str = ""
    start_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What the recipe says about the server."""

    dtype: str
    max_rows: int
    max_length_tokens: int


class ServerProcess:
    """One server. `start`, then wait for it with the client's health check; `stop` always."""

    def __init__(self, host: SglangHost, shape: ServerShape, files: Mapping[str, bytes]) -> None:
        self.host, self.shape = host, shape
        self.admin_key = secrets.token_hex(16)
        self.port = 0
        self._folder = Path(tempfile.mkdtemp(prefix="temper-sglang-"))
        self._model = self._folder / "model"
        self._model.mkdir()
        for name, data in files.items():
            (self._model / name).write_bytes(data)
        folder = Path(host.log_dir) if host.log_dir else self._folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / f"sglang-{os.getpid()}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the process (again); returns at once. EnvironmentFault if the interpreter can't be run."""
        self.port = free_port()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if self.host.cpu:
            environment |= {"PYTHONPATH": str(CPU_SHIMS), "SGLANG_USE_CPU_ENGINE": "1"}
        environment |= {**self.host.environment, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
        self._starting = asyncio.ensure_future(self._spawn(environment))
        try:
            # shielded: a cancelled start would leave a process that nobody knows
            self._process = await asyncio.shield(self._starting)
        except OSError as error:
            raise EnvironmentFault(
                f"SGLang's interpreter {self.host.python!r} can't be run ({error.strerror}): make its environment with"
                " `temper engine install`, or name its python in the host file, [actor.sglang] python = ..."
            ) from error
        log(f"sglang: started (pid {self._process.pid}), log {self.log_path}")

    async def _spawn(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        with self.log_path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *self.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def command(self) -> list[str]:
        """The command line."""
        s = self.shape
        return [
            *(self.host.python, "-P", "-m", "sglang.launch_server", "--model-path", str(self._model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--admin-api-key", self.admin_key),
            *("--load-format", "dummy", "--dtype", s.dtype, "--skip-tokenizer-init", "--skip-server-warmup"),
            *("--max-running-requests", str(s.max_rows), "--context-length", str(s.max_length_tokens)),
            *(CPU_FLAGS if self.host.cpu else ()),
            *self.host.flags,
        ]

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        except OSError as error:
            return f"(no log: {error.strerror})"

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self._process is None:
            raise AssertionError("not started")
        return await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL to its process group: on SIGTERM it would linger for seconds over diagnostics."""
        if self._starting is not None:
            with contextlib.suppress(OSError):
                self._process = await self._starting
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()

    async def stop(self) -> None:
        """`kill`, and remove its folder."""
        await self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
