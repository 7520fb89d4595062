"""An SGLang server as a child process: started from the host's own configuration, watched, ended with everything it started.

Interpreter, flags and environment come from the host file, never from the recipe. The server gets the model's config from
a private folder and random weights (`--load-format dummy`); the real ones reach it as updates. It listens on loopback (or
where the host file says) with an admin key that no command line shows, its working folder is outside any checkout, it dies
with its parent. `RunningServer` is one that somebody else started. Called by `sglang_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.common.errors import EnvironmentFault
from temper.common.log import log
from temper.common.process import follower

CPU_SHIMS = Path(__file__).with_name("sglang_cpu")
CPU_FLAGS = (
    "--sleep-on-idle",  # a scheduler without work would spin on a core that others need
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--max-total-tokens", "65536"),
)
# A dying server would stay for 5 s, on a GPU for over a minute, to dump what hangs; its actor wants a new one.
NO_POST_MORTEM = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
RESERVED_TOKENS = 8  # SGLang refuses prompts of more than its context less 6 tokens
TAIL_LINES = 20
TAIL_BYTES = 64 << 10
STOP_S = 5.0


class ServerProcess:
    """One server. `start`, then wait for it with the client's health check; `stop` always."""

    owned = True

    def __init__(self, host: SglangHost, shape: ServerShape, files: Mapping[str, bytes], number: int = 0) -> None:
        self.host, self.shape, self.number = host, shape, number
        self.admin_key = "temper-" + secrets.token_hex(16)
        self.port = 0
        self._folder = Path(tempfile.mkdtemp(prefix="temper-sglang-"))
        self._model = self._folder / "model"
        self._model.mkdir()
        for name, data in served_files(files, self.context_tokens).items():
            (self._model / name).write_bytes(data)
        folder = Path(host.log_dir or os.environ.get("TEMPER_LOG_DIR") or self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / (f"sglang-{os.getpid()}-{number}.log" if number else f"sglang-{os.getpid()}.log")
        self._secret = self._folder / "server.yaml"
        self._secret.touch(mode=0o600)
        self._secret.write_text(f"admin-api-key: {self.admin_key}\n", encoding="ascii")
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None

    @property
    def context_tokens(self) -> int:
        """What the server is told: it keeps some tokens of its context to itself."""
        return self.shape.max_length_tokens + RESERVED_TOKENS

    @property
    def url(self) -> str:
        """Where it is reached."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
        return f"http://{everywhere.get(self.host.bind, self.host.bind)}:{self.port}"

    @property
    def where(self) -> str:
        """For messages: where more is to be read."""
        return f"see {self.log_path}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Start the process (again); returns at once. EnvironmentFault if the interpreter can't be run."""
        if shutil.which(self.host.python) is None:
            raise self._no_interpreter("no such program")
        self.port = free_port()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if self.host.cpu:
            environment |= {"PYTHONPATH": str(CPU_SHIMS), "SGLANG_USE_CPU_ENGINE": "1"}
        environment |= {**NO_POST_MORTEM, **self.host.environment, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
        self._starting = asyncio.ensure_future(self._spawn(environment))
        try:
            # shielded: a cancelled start would leave a process that nobody knows
            self._process = await asyncio.shield(self._starting)
        except OSError as error:
            raise self._no_interpreter(str(error.strerror)) from error
        log(f"sglang: started (pid {self._process.pid}), log {self.log_path}")

    def _no_interpreter(self, problem: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"SGLang's interpreter {self.host.python!r} can't be run ({problem}): make its environment with"
            " `temper engine install`, or name its python in the host file, [actor.sglang] python = ..."
        )

    async def _spawn(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        following = follower()
        if not following:
            log(
                "sglang: setpriv (util-linux) is missing: should this process be killed, the server has to be ended by hand"
            )
        with self.log_path.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *following,
                *self.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """The command line."""
        s, h = self.shape, self.host
        parallel = (("--tp-size", h.tp_size), ("--dp-size", h.dp_size), ("--ep-size", h.ep_size))
        return [
            *(h.python, "-P", "-m", "sglang.launch_server", "--model-path", str(self._model)),
            *("--host", h.bind, "--port", str(self.port), "--config", str(self._secret)),
            *("--load-format", "dummy", "--dtype", s.dtype, "--skip-tokenizer-init", "--skip-server-warmup"),
            # one more than rows: the probe after a commit finds a place beside a full batch
            *("--max-running-requests", str(s.max_rows + 1), "--context-length", str(self.context_tokens)),
            *(("--enable-return-routed-experts",) if s.routed_experts else ()),
            *(part for flag, size in parallel if size > 1 for part in (flag, str(size))),
            *(CPU_FLAGS if h.cpu else ()),
            *h.flags,
        ]

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-TAIL_LINES:])
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


class RunningServer:
    """A server that somebody else runs: it is used, never started or ended."""

    owned = False
    exit_code: int | None = None

    def __init__(self, url: str, admin_key: str) -> None:
        self.url, self.admin_key = url.rstrip("/"), admin_key

    @property
    def where(self) -> str:
        """For messages: where more is to be read."""
        return f"see the log of {self.url}"

    async def start(self) -> None:
        """It runs already."""

    async def wait(self) -> int:
        """For ever: its end shows in its health only."""
        return await asyncio.get_running_loop().create_future()

    def tail(self) -> str:
        """Its log is elsewhere."""
        return ""

    async def kill(self) -> None:
        """It is not ours."""

    async def stop(self) -> None:
        """It is not ours."""


def served_files(files: Mapping[str, bytes], tokens: int) -> dict[str, bytes]:
    """A model bundle as a server gets it: positions for `tokens` at least (what is only reserved is never computed), and no
    end of its own, in config.json or generation_config.json: requests name what ends them."""
    found: Any = json.loads(files["config.json"])
    found |= {"eos_token_id": None}
    if isinstance(limit := found.get("max_position_embeddings"), int) and limit < tokens:
        found["max_position_embeddings"] = tokens
    kept = {name: data for name, data in files.items() if name != "generation_config.json"}
    return kept | {"config.json": json.dumps(found).encode()}


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
