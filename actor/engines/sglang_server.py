"""One SGLang server's life: started or attached to, recognised, watched, revived with back-off, given up with its cause.

Its owner hears of every change of `up` and brings it its weights again after each return. Called by `sglang`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from temper.actor.engines.sglang_causes import cause_of
from temper.actor.engines.sglang_home import VERSION
from temper.actor.engines.sglang_host import ServerShape
from temper.actor.engines.sglang_http import Client, ServerBusy, ServerDown
from temper.actor.engines.sglang_process import RunningServer, ServerProcess
from temper.common.errors import EngineError, EnvironmentFault, PeerLost
from temper.common.log import log
from temper.common.waiting import wait_for

STARTS_IN_A_ROW = 3  # a server that never becomes ready this often is beyond repair
SHORT_LIVES = 5  # so is one that dies this often before it has lived `STEADY_S`
STEADY_S = 120.0
BACKOFF_S = (1.0, 5.0, 20.0)
POLL_S = 0.5
HEALTH_EVERY_S = 10.0
HEALTH_TIMEOUT_S = 30.0
HEALTH_FAILURES = 3
NEEDED = (
    "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/begin_weight_update",
    "/end_weight_update", "/update_weights_from_tensor", "/update_weights_from_disk", "/update_weight_version",
    "/get_weights_by_name", "/weights_checker", "/health", "/model_info",
)  # fmt: skip
FIELDS = ("input_ids", "extra_key", "return_logprob", "logprob_start_len", "return_sampling_mask", "rid")

Place = ServerProcess | RunningServer


class Server:
    """`up`: it answers. `holds`: the digest of the weights it has, None when unknown. `rows`: requests under way."""

    def __init__(self, place: Place, shape: ServerShape, connections: int, start_timeout_s: float) -> None:
        self.place, self._shape = place, shape
        self._connections, self._timeout_s = connections, start_timeout_s
        self.up = False
        self.open = False  # it serves the engine's version
        self.busy = False  # an update is under way, which settles by itself whether it is open
        self.holds: str | None = None
        self.rows = 0
        self.restarts = 0
        self.failure: BaseException | None = None
        self.trouble = "starting"
        self.version = ""
        self._client: Client | None = None
        self._doubt = asyncio.Event()
        self._handing: set[asyncio.Task[None]] = set()
        self._recover = ""  # why it has to be replaced

    @property
    def client(self) -> Client:
        """Its connections."""
        if self._client is None:
            raise AssertionError("start() first")
        return self._client

    def suspect(self) -> None:
        """A request found nobody there: look at once."""
        if self.up:
            self.open = False
            self._doubt.set()

    def condemn(self, reason: str) -> None:
        """It serves something else than it should: replace it (an attached one gets its weights again)."""
        self.holds, self.open, self._recover = None, False, reason
        self._doubt.set()

    async def start(self) -> None:
        """Until it answers. EnvironmentFault with its cause if it does not, or if it can't do what is needed."""
        for attempt in range(STARTS_IN_A_ROW):
            if attempt:
                await asyncio.sleep(BACKOFF_S[min(attempt - 1, len(BACKOFF_S) - 1)])
            await self.place.start()
            if self._client is not None:
                await self._client.close()
            self._client = Client(self.place.url, self.place.admin_key, self._connections)
            begun = time.monotonic()
            if await self._ready():
                await self._recognise()
                log(
                    f"sglang: {self.place.url} ready after {time.monotonic() - begun:.0f} s ({self.version or 'unknown version'})"
                )
                self.up, self.trouble = True, ""
                return
            self.trouble = cause_of(self.place.exit_code, self.place.tail())
            log(f"sglang: start {attempt + 1} of {STARTS_IN_A_ROW} failed: {self.trouble}; its last lines:")
            self._show_tail()
            await self.place.kill()
        raise EnvironmentFault(
            f"the SGLang server did not become ready in {STARTS_IN_A_ROW} starts of at most {self._timeout_s:.0f} s:"
            f" {self.trouble}; {self.place.where}"
        )

    async def close(self) -> None:
        """End it if it is ours."""
        for task in self._handing:
            task.cancel()
        if self._client is not None:
            await self._client.close()
        await self.place.stop()

    # ------------------------------------------------------------ watching

    async def keep(self, lost: Callable[[], None], returned: Callable[[], Awaitable[None]]) -> None:
        """Watch and revive it for ever. `lost` hears that it is down, `returned` that it answers again (or that it was
        only suspected). Ends with `failure` set when it is beyond repair."""
        lives, begun = 0, time.monotonic()
        try:
            while True:
                reason = await self._watch(returned)
                self.up = self.open = False
                self.holds, self.trouble = None, reason
                self.restarts += 1
                lost()
                log(
                    f"sglang: {self.place.url}: {reason}; its last lines:"
                    if self.place.owned
                    else f"sglang: {self.place.url}: {reason}"
                )
                self._show_tail()
                await self.place.kill()
                lives = 1 if time.monotonic() - begun > STEADY_S else lives + 1
                if lives >= SHORT_LIVES:
                    raise EnvironmentFault(
                        f"the SGLang server ended {lives} times in a row soon after its start: {reason}; {self.place.where}"
                    )
                if lives > 1:
                    await asyncio.sleep(BACKOFF_S[min(lives - 2, len(BACKOFF_S) - 1)])
                await self.start()
                begun = time.monotonic()
                self._hand_back(returned)
        except Exception as error:
            self.failure = error
            self.trouble = str(error)
            log(f"sglang: {self.place.url} is given up: {error}")
            lost()

    def _hand_back(self, returned: Callable[[], Awaitable[None]]) -> None:
        """Call `returned` beside the watching: it waits for updates, which may wait for what is seen here."""

        async def call() -> None:
            await returned()

        def ended(task: asyncio.Task[None]) -> None:
            self._handing.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log(f"sglang: {self.place.url}: {type(error).__name__}: {error}")
                self.condemn(f"its weights could not be brought: {error}")

        task = asyncio.create_task(call(), name=f"weights of {self.place.url}")
        self._handing.add(task)
        task.add_done_callback(ended)

    async def _watch(self, returned: Callable[[], Awaitable[None]]) -> str:
        """Until it has ended, hangs, or is condemned: why."""
        ended = asyncio.create_task(self.place.wait())
        try:
            while True:
                doubted = asyncio.create_task(self._doubt.wait())
                try:
                    await asyncio.wait({ended, doubted}, timeout=HEALTH_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    doubted.cancel()
                asked = self._doubt.is_set()
                self._doubt.clear()
                if ended.done():
                    return f"the server has ended: {cause_of(self.place.exit_code, self.place.tail())}"
                if self._recover:
                    reason, self._recover = self._recover, ""
                    return reason
                if self.busy:
                    continue  # paused: it would not pass
                if await self._hangs():
                    await asyncio.wait({ended}, timeout=POLL_S)
                    if ended.done():  # it was dying
                        continue
                    return "the server does not answer any more"
                if asked:
                    self._hand_back(returned)
        finally:
            ended.cancel()

    async def _hangs(self) -> bool:
        """Whether several health checks in a row go unanswered (one generates a token; a paused server answers 503)."""
        for _ in range(HEALTH_FAILURES):
            try:
                await self.client.get("/health", timeout_s=HEALTH_TIMEOUT_S)
                return False
            except EngineError:
                if self.place.exit_code is not None:
                    return False  # its end is noticed by itself
        return True

    # ------------------------------------------------------------ starting

    async def _ready(self) -> bool:
        """Whether it answers within its time, and before it ends."""
        try:
            return await wait_for("the SGLang server to become ready", self._answers(), self._timeout_s)
        except PeerLost as error:
            log(f"sglang: {error}")
            return False

    async def _answers(self) -> bool:
        while self.place.exit_code is None:
            try:
                await self.client.get("/health", timeout_s=POLL_S * 10)
                return True
            except (ServerBusy, ServerDown):  # 503 while it starts
                await asyncio.sleep(POLL_S)
            except EngineError as error:
                raise EnvironmentFault(
                    f"{self.place.url} is no SGLang server, or the admin key is not its: {error}"
                ) from error
        return False

    async def _recognise(self) -> None:
        """Its version and limits. EnvironmentFault if it lacks what is needed, naming it."""
        try:
            info: Any = await self.client.get("/server_info", timeout_s=HEALTH_TIMEOUT_S)
        except (ServerBusy, ServerDown) as error:
            raise EnvironmentFault(f"{self.place.url} does not say what it is: {error}") from error
        except EngineError as error:
            raise EnvironmentFault(
                f"{self.place.url} is no SGLang server, or the admin key is not its: {error}"
            ) from error
        info = info if isinstance(info, dict) else {}
        self.version = str(info.get("version", ""))
        length, rows = info.get("context_length"), info.get("max_running_requests")
        if isinstance(length, int) and length < self._shape.max_length_tokens:
            raise EnvironmentFault(
                f"{self.place.url} takes {length} tokens, the recipe's model.max_length_tokens is"
                f" {self._shape.max_length_tokens}: start it with --context-length {self._shape.max_length_tokens}"
            )
        if isinstance(rows, int) and rows <= self._shape.max_rows:
            log(
                f"sglang: {self.place.url} runs {rows} requests at once, engine.max_rows is {self._shape.max_rows}: some will queue"
            )
        if self.version != VERSION:
            log(
                f"sglang: {self.place.url} is version {self.version or 'unknown'}, tested is {VERSION}: looking for what is needed"
            )
            await self._probe_interface()

    async def _probe_interface(self) -> None:
        try:
            table: Any = await self.client.get("/openapi.json", timeout_s=HEALTH_TIMEOUT_S)
            paths, schemas = table["paths"], table["components"]["schemas"]
        except (EngineError, KeyError, TypeError) as error:
            log(f"sglang: it does not describe its interface ({error}); what it lacks will show")
            return
        missing = [path for path in NEEDED if path not in paths]
        fields = schemas.get("GenerateReqInput", {}).get("properties")
        if fields:
            missing += [f"{name} of /generate" for name in FIELDS if name not in fields]
        if missing:
            raise EnvironmentFault(
                f"{self.place.url} (SGLang {self.version}) lacks {', '.join(missing)}: use {VERSION}"
            )

    def _show_tail(self) -> None:
        for line in self.place.tail().splitlines():
            log(f"sglang| {line}")
