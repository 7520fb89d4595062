"""SGLang as an engine: token ids in and out over HTTP, weights updated in flight, one or several servers.

Guarantees of `base`, and how: log-probabilities are of the distribution sampled (with truncation, the renormalised ones
that come with the sampling mask); every token carries its version from the server's own spans; prefix-cache entries are
named after the version, and a request that began under another version than its name is run again. What a server aborts,
or loses by its death, goes on elsewhere (or there when it is back) within what is left of its budget. Servers and their
weights are `sglang_fleet`'s. Called by the daemon.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from temper.actor.engines import sglang_server
from temper.actor.engines.base import Cancel, Counts, EngineCaps, GenerateRequest, Generation, OnSwap, check_request
from temper.actor.engines.sglang_answer import Answer
from temper.actor.engines.sglang_fleet import Fleet
from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.actor.engines.sglang_http import ServerBusy, ServerDown
from temper.actor.engines.sglang_models import record_width
from temper.actor.engines.sglang_push import name_of
from temper.actor.engines.sglang_request import Requests
from temper.actor.loops import on_loop
from temper.common.errors import EngineError
from temper.common.lora import Lora
from temper.common.schema import Version

if TYPE_CHECKING:
    import numpy as np
    from temper.common.delta import StagedUpdate

RETRIES = 3  # of one request: status 500, a lost server, a start under an old version, an abort that nobody asked for


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
        `EmbeddedEngine` (abort: the servers give up running requests, they go on from their tokens)."""
        self.fleet = Fleet(host, shape, files, recompute=recompute, on_swap=on_swap, lora=lora)
        self._caps = EngineCaps(
            True, True, False, False, shape.max_length_tokens, shape.max_rows, routed_experts=shape.routed_experts
        )
        self._vocabulary = vocabulary
        self._requests = Requests(vocabulary, record_width(json.loads(files["config.json"])))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle_since: float | None = time.perf_counter()
        self.counts: Counts = self.fleet.counts

    @property
    def caps(self) -> EngineCaps:
        return self._caps

    @property
    def failure(self) -> BaseException | None:
        """Set when no server can be revived."""
        return self.fleet.failure

    @property
    def trouble(self) -> str:
        return self.fleet.trouble

    @property
    def version(self) -> Version | None:
        return self.fleet.version

    def resident(self, name: str) -> np.ndarray | None:
        """None: a server's memory is its own."""
        return None

    def host_copy(self, name: str) -> np.ndarray | None:
        """Of the mirror that servers are brought to."""
        return self.fleet.mirror.bits(name)

    async def start(self) -> None:
        """Start the servers and wait until they answer. EnvironmentFault with the cause if one does not."""
        self._loop = asyncio.get_running_loop()
        await self.fleet.start()

    async def apply(self, update: StagedUpdate) -> str:
        """See `base.Engine.apply`. After an EngineError nothing is served until a full copy has come."""
        return await self.fleet.apply(update)

    async def close(self) -> None:
        """See `base.Engine.close`."""
        self.fleet.closing = True
        await self._requests.close()
        await self.fleet.close()

    async def generate(self, request: GenerateRequest, cancel: Cancel | None = None) -> Generation:
        """See `base.Engine.generate`. What a server aborted by itself goes on within the remaining budget.

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
        fleet = self.fleet
        made = Answer([], [], [], "abort", [] if request.sampling.want_support else None)
        budget = min(request.sampling.max_new_tokens, self._caps.max_length_tokens - len(request.ids))
        problem = ""
        failures = 0
        while failures <= RETRIES and not (cancel is not None and cancel.is_set):
            number, version = await self._turn()
            server, before = fleet.servers[number], len(made.ids)
            try:
                answer = await self._requests.ask(
                    fleet.router or server.client,
                    request.sampling,
                    [*request.ids, *made.ids],
                    budget - len(made.ids),
                    name_of(version),
                    cancel,
                    aborts_to=[each.client for each in fleet.servers if each.up] if fleet.router else (),
                )
            except ServerBusy as error:
                problem = str(error)
                failures += 1
                await asyncio.sleep(sglang_server.POLL_S)
                continue
            except ServerDown as error:
                problem = str(error)
                failures += 1
                server.suspect()  # its rows stay closed until it was looked at
                continue
            finally:
                self._track(-1)
                fleet.rows.leave(number)
            if answer.version_runs and answer.version_runs[0][:2] != (version.lineage, version.ordinal):
                problem = f"started under {answer.version_runs[0][:2]}, not under {name_of(version)}"
                failures += 1
                continue  # it may have met cached keys of other weights
            answer = await fleet.verified(answer)
            made = made.followed_by(answer)
            self.counts.sampled_tokens += len(answer.ids)
            self.counts.retractions += answer.retractions
            ended = fleet.closing or (cancel is not None and cancel.is_set) or len(made.ids) >= budget
            if ended or answer.finish_reason != "abort":
                return made.generation(budget)
            problem = "the server aborted it"
            failures += len(made.ids) == before  # one that gets on is not failing
        if cancel is not None and cancel.is_set:
            return made.generation(budget)
        raise EngineError(f"sglang: a request failed {failures} times, at last: {problem}")

    async def _turn(self) -> tuple[int, Version]:
        """A row on the least loaded server that holds the engine's version."""
        fleet = self.fleet
        while True:
            fleet.alive()
            number = fleet.rows.free()
            if number is not None and fleet.version is not None:
                fleet.rows.take(number)
                self._track(1)
                return number, fleet.version
            await fleet.rows.turn()

    def _track(self, change: int) -> None:
        now = time.perf_counter()
        if self._idle_since is not None:
            self.counts.idle_s += now - self._idle_since
        self.counts.rows += change
        self._idle_since = now if self.counts.rows == 0 else None
