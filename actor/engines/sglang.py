"""SGLang as an engine: token ids in and out over HTTP, weights updated in flight, the server owned and revived.

Guarantees of `base`, and how: log-probabilities are of the distribution sampled (with truncation, the renormalised ones
that come with the sampling mask); every token carries its version from the server's own spans; prefix-cache entries are
named after the version, and a request that began under another version than its name is run again; after each commit
some changed tensors are read back and compared bit by bit. A server that dies or hangs fails its requests, is restarted
and gets all weights again. Called by the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from temper.actor.engines.base import Cancel, Counts, EngineCaps, GenerateRequest, Generation, OnSwap, check_request
from temper.actor.engines.sglang_answer import Answer, parse
from temper.actor.engines.sglang_http import Client, ServerBusy, ServerDown, serialized
from temper.actor.engines.sglang_process import ServerProcess, ServerShape, SglangHost
from temper.actor.engines.sglang_weights import Mirror
from temper.actor.loops import on_loop
from temper.common.errors import EngineError, EnvironmentFault, PeerLost
from temper.common.log import log
from temper.common.lora import Lora
from temper.common.schema import Version
from temper.common.waiting import wait_for

if TYPE_CHECKING:
    import numpy as np
    from temper.common.delta import StagedUpdate

STARTS_IN_A_ROW = 3  # a server that never becomes ready this often is beyond repair
RETRIES = 3  # of one request: status 500, a lost server, a start under an old version, an abort that nobody asked for
BACKOFF_S = (1.0, 5.0, 20.0)
POLL_S = 0.5
HEALTH_EVERY_S = 10.0
HEALTH_TIMEOUT_S = 30.0
HEALTH_FAILURES = 3
COMMAND_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 600.0
ABORT_EVERY_S = 0.2
CLOSE_ABORT_S = 1.0
VERIFIED_TENSORS = 3  # read back after each commit, another choice each time


class SglangEngine:
    """Implements `base.Engine`. `start` it before use, on the daemon's event loop."""

    def __init__(
        self,
        host: SglangHost,
        shape: ServerShape,
        files: Mapping[str, bytes],
        vocabulary: int,
        *,
        recompute: bool,
        on_swap: OnSwap = "in_flight",
        lora: Lora | None = None,
    ) -> None:
        """`files`: the model bundle; `recompute`: running requests get new keys and values after a swap; `on_swap`: see
        `EmbeddedEngine` (abort: the server gives up running requests, they go on from their tokens)."""
        self._server = ServerProcess(host, shape, files)
        self._timeout_s = host.start_timeout_s
        self._vocabulary, self._recompute = vocabulary, recompute
        self._caps = EngineCaps(True, True, False, False, shape.max_length_tokens, shape.max_rows)
        self._on_swap: OnSwap = on_swap
        self._mirror = Mirror(lora)
        self._version: Version | None = None
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rows = asyncio.Semaphore(shape.max_rows)
        self._open = asyncio.Event()  # requests may go out: the server holds the version
        self._up = asyncio.Event()  # the server answers
        self._empty = asyncio.Event()  # no request runs
        self._empty.set()
        self._updating = asyncio.Lock()
        self._numbers = itertools.count()
        self._verified = 0
        self._readable = True  # the model can be asked for its tensors by name
        self._checksum = ""
        self._idle_since: float | None = time.perf_counter()
        self._keeper: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._closing = False
        self.restarts = 0
        self.counts = Counts()
        self.failure: BaseException | None = None

    @property
    def caps(self) -> EngineCaps:
        return self._caps

    @property
    def version(self) -> Version | None:
        return self._version

    def resident(self, name: str) -> np.ndarray | None:
        """None: the server's memory is its own."""
        return None

    async def start(self) -> None:
        """Start the server and wait until it answers. EnvironmentFault with its last log lines if it does not."""
        self._loop = asyncio.get_running_loop()
        await self._launch()
        self._keeper = asyncio.create_task(self._keep(), name="sglang keeper")

    async def close(self) -> None:
        """See `base.Engine.close`."""
        self._closing = True
        if self._client is not None and self._up.is_set():
            with contextlib.suppress(EngineError):
                await self._client.post("/abort_request", {"abort_all": True}, timeout_s=CLOSE_ABORT_S)
        for task in (self._keeper, *self._background):
            if task is not None:
                task.cancel()
        if self._client is not None:
            await self._client.close()
        await self._server.stop()
        self._open.set()  # whoever waits sees that it is closed
        self._up.set()

    # ------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest, cancel: Cancel | None = None) -> Generation:
        """See `base.Engine.generate`. What the server aborted by itself goes on within the remaining budget.

        Callable from any thread's loop; the connections live on the loop that called `start`.
        """
        if self._loop is asyncio.get_running_loop() or self._loop is None:
            return await self._generate(request, cancel)
        loop, here = self._loop, Cancel()

        def pass_on() -> None:
            loop.call_soon_threadsafe(here.set)

        if cancel is not None:
            cancel.attach(pass_on)
        try:
            return await on_loop(loop, lambda: self._generate(request, here))
        finally:
            if cancel is not None:
                cancel.detach(pass_on)

    async def _generate(self, request: GenerateRequest, cancel: Cancel | None) -> Generation:
        check_request(request, self._caps, self._vocabulary)
        made = Answer([], [], [], "abort", [] if request.sampling.want_support else None)
        budget = min(request.sampling.max_new_tokens, self._caps.max_length_tokens - len(request.ids))
        problem, attempts = "", 0
        while attempts <= RETRIES:
            attempts += 1
            if cancel is not None and cancel.is_set:
                break
            version = await self._turn()
            key = f"{version.lineage}:{version.ordinal}"
            try:
                answer = await self._ask(request, [*request.ids, *made.ids], budget - len(made.ids), key, cancel)
            except (ServerBusy, ServerDown) as error:
                problem = str(error)
                await asyncio.sleep(POLL_S)  # time to notice that the server has ended, if it has
                continue
            finally:
                self._rows.release()
                self._track(-1)
            if answer.version_runs and answer.version_runs[0][:2] != (version.lineage, version.ordinal):
                problem = f"started under {answer.version_runs[0][:2]}, not under {key}"
                continue  # it may have met cached keys of other weights
            made = made.followed_by(answer)
            self.counts.sampled_tokens += len(answer.ids)
            if answer.finish_reason != "abort" or (cancel is not None and cancel.is_set) or len(made.ids) >= budget:
                return made.generation(budget)
            problem = "the server aborted it"
            attempts -= self._on_swap == "abort" and bool(answer.ids)  # stopped at a swap: as it should
        if cancel is not None and cancel.is_set:
            return made.generation(budget)
        raise EngineError(f"sglang: a request failed {RETRIES + 1} times, at last: {problem}")

    async def _turn(self) -> Version:
        """A free row on a server that holds a version."""
        while True:
            await self._open.wait()
            self._alive()
            await self._rows.acquire()
            if self._open.is_set() and self._version is not None:
                self._track(1)
                return self._version
            self._rows.release()
            self._alive()

    async def _ask(
        self, request: GenerateRequest, ids: Sequence[int], budget: int, key: str, cancel: Cancel | None
    ) -> Answer:
        params = request.sampling
        rid = f"temper-{next(self._numbers)}"
        body = {
            "rid": rid,
            "input_ids": list(ids),
            "extra_key": key,
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_sampling_mask": params.truncates,
            "sampling_params": {
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "min_p": params.min_p,
                "max_new_tokens": budget,
                "stop_token_ids": list(params.stop_token_ids),
                "sampling_seed": params.seed % (1 << 31),
                "skip_special_tokens": False,
            },
        }
        done = asyncio.Event()

        def abort() -> None:
            task = asyncio.create_task(self._abort(rid, done))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

        if cancel is not None:
            cancel.attach(abort)
        try:
            return parse(await self._there().post("/generate", body), params)
        except asyncio.CancelledError:
            abort()
            raise
        finally:
            done.set()
            if cancel is not None:
                cancel.detach(abort)

    async def _abort(self, rid: str, done: asyncio.Event) -> None:
        """Abort a request; again until it has ended, since an abort may overtake its request."""
        for _ in range(50):
            with contextlib.suppress(EngineError):
                await self._there().post("/abort_request", {"rid": rid}, timeout_s=10.0)
            if done.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_EVERY_S):
                    await done.wait()

    def _track(self, change: int) -> None:
        now = time.perf_counter()
        if self._idle_since is not None:
            self.counts.idle_s += now - self._idle_since
        self.counts.rows += change
        if self.counts.rows:
            self._empty.clear()
        else:
            self._empty.set()
        self._idle_since = now if self.counts.rows == 0 else None

    # ------------------------------------------------------------ weights

    async def apply(self, update: StagedUpdate) -> str:
        """See `base.Engine.apply`. After an EngineError nothing is served until a full copy has come."""
        async with self._updating:
            self._alive()
            names = await asyncio.to_thread(self._mirror.overwrite, update)
            self._open.clear()
            self._version = None
            await self._up.wait()
            self._alive()
            begun = time.perf_counter()
            if self._on_swap == "drain":
                await wait_for("sglang: running requests to end before a swap", self._empty.wait(), UPDATE_TIMEOUT_S)
            await self._push(names, update.version)
            self.counts.last_pause_s = time.perf_counter() - begun
            self.counts.swaps += 1
            self._version = update.version
            self._open.set()
            return update.digest

    async def _push(self, names: Sequence[str], version: Version) -> None:
        """Pause, send the changed tensors, read some back, go on: whatever happens, generation goes on."""
        client = self._there()
        name = f"{version.lineage}:{version.ordinal}"
        mode = "abort" if self._on_swap == "abort" else "retract" if self._recompute else "in_place"
        await client.command("/pause_generation", {"mode": mode}, timeout_s=COMMAND_TIMEOUT_S)
        try:
            if self._recompute:
                await client.post("/flush_cache", {}, timeout_s=COMMAND_TIMEOUT_S)
            await client.command("/begin_weight_update", {}, timeout_s=COMMAND_TIMEOUT_S)
            try:
                for bucket in self._mirror.buckets(names):
                    packed = await asyncio.to_thread(serialized, bucket)
                    body = {"serialized_named_tensors": [packed], "weight_version": name, "flush_cache": False}
                    await client.command("/update_weights_from_tensor", body, timeout_s=UPDATE_TIMEOUT_S)
            finally:
                await client.command("/end_weight_update", {}, timeout_s=COMMAND_TIMEOUT_S)
            if not names:  # the same bits under a new name
                body = {"new_version": name, "abort_all_requests": False}
                await client.command("/update_weight_version", body, timeout_s=COMMAND_TIMEOUT_S)
            await self._verify(names)
        finally:
            await client.command("/continue_generation", {}, timeout_s=COMMAND_TIMEOUT_S)

    async def _verify(self, names: Sequence[str]) -> None:
        """Some changed tensors read back must be the mirror's; where the model can't be read, its checksum must be another
        one than before."""
        if not names:
            return
        if self._readable:
            for _ in range(min(VERIFIED_TENSORS, len(names))):
                name = names[self._verified % len(names)]
                self._verified += 1
                body = {"name": name, "truncate_size": 2}
                try:
                    found = await self._there().post("/get_weights_by_name", body, timeout_s=COMMAND_TIMEOUT_S)
                except (ServerBusy, ServerDown):
                    raise
                except EngineError as error:
                    log(f"sglang: this model's weights can't be read back ({error}); comparing checksums instead")
                    self._readable = False
                    break
                problem = self._mirror.mismatch(name, found)
                if problem:
                    raise EngineError(f"sglang did not take the update: {problem}")
        if not self._readable:
            before, self._checksum = self._checksum, await self._checksums()
            if before == self._checksum:
                raise EngineError(
                    f"sglang did not take the update: its checksum is still that of before {names[:3]} changed"
                )

    async def _checksums(self) -> str:
        answer = await self._there().post("/weights_checker", {"action": "checksum"}, timeout_s=UPDATE_TIMEOUT_S)
        try:
            return str([sorted(rank["checksums"].items()) for rank in answer["ranks"]])
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"sglang: no checksum of its weights: {str(answer)[:200]}") from error

    # ------------------------------------------------------------ the server's life

    async def _launch(self) -> None:
        """Start the server until it answers."""
        for attempt in range(STARTS_IN_A_ROW):
            if attempt:
                await asyncio.sleep(BACKOFF_S[min(attempt - 1, len(BACKOFF_S) - 1)])
            await self._server.start()
            self._checksum = ""  # it holds random weights
            if self._client is not None:
                await self._client.close()
            self._client = Client(self._server.url, self._server.admin_key, 2 * self._caps.max_rows + 8)
            begun = time.monotonic()
            if await self._ready():
                log(f"sglang: ready after {time.monotonic() - begun:.0f} s")
                self._up.set()
                return
            log(f"sglang: start {attempt + 1} of {STARTS_IN_A_ROW} failed; its last lines:")
            for line in self._server.tail().splitlines():
                log(f"sglang| {line}")
            await self._server.kill()
        raise EnvironmentFault(
            f"the SGLang server did not become ready in {STARTS_IN_A_ROW} starts of at most {self._timeout_s:.0f} s; see"
            f" {self._server.log_path}"
        )

    async def _ready(self) -> bool:
        """Whether it answers within its time, and before it ends."""
        try:
            return await wait_for("the SGLang server to become ready", self._answers(), self._timeout_s)
        except PeerLost as error:
            log(f"sglang: {error}")
            return False

    async def _answers(self) -> bool:
        while self._server.exit_code is None:
            try:
                await self._there().get("/health", timeout_s=POLL_S * 10)
                return True
            except EngineError:
                await asyncio.sleep(POLL_S)
        return False

    async def _keep(self) -> None:
        """Revive a server that has ended or hangs, for ever."""
        try:
            while True:
                ended = asyncio.create_task(self._server.wait())
                try:
                    while not ended.done():
                        await asyncio.wait({ended}, timeout=HEALTH_EVERY_S)
                        if not ended.done() and not self._updating.locked() and await self._hangs():
                            log("sglang: the server does not answer any more; killing it")
                            await self._server.kill()
                finally:
                    ended.cancel()
                self._open.clear()
                self._up.clear()
                self.restarts += 1
                log(f"sglang: the server has ended (exit code {self._server.exit_code}); its last lines:")
                for line in self._server.tail().splitlines():
                    log(f"sglang| {line}")
                await self._server.kill()
                await self._launch()
                await self._restore()
        except Exception as error:
            self.failure = error
            log(f"sglang: given up: {error}")
            self._open.set()
            self._up.set()

    async def _hangs(self) -> bool:
        """Whether several health checks in a row go unanswered (one generates a token: not asked during an update)."""
        for _ in range(HEALTH_FAILURES):
            try:
                await self._there().get("/health", timeout_s=HEALTH_TIMEOUT_S)
                return False
            except ServerDown:
                if self._server.exit_code is not None:
                    return False
            except EngineError:
                continue  # 503: busy with a long step or an update
        return True

    async def _restore(self) -> None:
        """All weights again, for the version that was served; an update under way does it itself."""
        version = self._version
        if version is None or self._updating.locked():
            return
        async with self._updating:
            await self._push(self._mirror.names, version)
            self._open.set()

    def _there(self) -> Client:
        if self._client is None:
            raise AssertionError("start() first")
        return self._client

    def _alive(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {type(self.failure).__name__}: {self.failure}")
        if self._closing:
            raise EngineError("the engine is closed")
