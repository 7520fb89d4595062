"""The SGLang servers of one actor and the weights they hold.

An update goes to all servers at once, the changed tensors only where a server holds the version before it; one that is
down, hangs or does not take it is replaced and gets everything, while the others serve. A version counts as applied when
one server serves it, and only servers that do get requests: read back bit by bit and probed (`sglang_push`,
`sglang_probe`). Called by `sglang`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from temper.actor.engines.base import Counts, OnSwap
from temper.actor.engines.sglang_answer import Answer
from temper.actor.engines.sglang_host import ServerShape, SglangHost, check, read_key
from temper.actor.engines.sglang_http import Client, ServerDown
from temper.actor.engines.sglang_probe import Probe
from temper.actor.engines.sglang_process import RunningServer, ServerProcess
from temper.actor.engines.sglang_push import Folder, PauseMode, Pusher, name_of
from temper.actor.engines.sglang_rows import Rows
from temper.actor.engines.sglang_server import Server
from temper.actor.engines.sglang_weights import Mirror
from temper.common.errors import EngineError
from temper.common.log import log
from temper.common.lora import Lora
from temper.common.schema import Version
from temper.common.waiting import wait_for

if TYPE_CHECKING:
    from temper.common.delta import StagedUpdate

PUSHES = 5  # of one update, while servers die under it
ABORT_S = 10.0
REMEMBERED = 4096  # pushes whose weights were found right: more than a request lives through
DRAIN_S = 600.0


class Fleet:
    """Lives on the engine's event loop. `version`: what open servers serve, None before the first and during an update."""

    def __init__(
        self,
        host: SglangHost,
        shape: ServerShape,
        files: Mapping[str, bytes],
        *,
        recompute: bool,
        on_swap: OnSwap = "in_flight",
        lora: Lora | None = None,
    ) -> None:
        check(host)
        key = read_key(host.admin_key_file)
        places: Sequence[ServerProcess | RunningServer] = (
            [RunningServer(url, key) for url in host.servers]
            if host.servers
            else [ServerProcess(host, shape, files, number) for number in range(host.count)]
        )
        connections = 2 * shape.max_rows + 8
        self.servers = [Server(place, shape, connections, host.start_timeout_s) for place in places]
        self.router: Client | None = None
        self._router_of = (host.router.rstrip("/"), key, connections * len(self.servers))
        self.mirror = Mirror(lora, shared=host.how == "shared")
        self._folder = Folder(host.disk_dir, files) if host.how == "disk" else None
        self._probe = Probe.of(
            json.loads(files.get("config.json", b"{}")), self.mirror, shape.dtype, shape.max_length_tokens
        )
        self._drains = on_swap == "drain"
        mode: PauseMode = "abort" if on_swap == "abort" else "retract" if recompute else "in_place"
        verified = 1 if self._probe else 3
        self._pushers = {
            id(server): Pusher(self.mirror, mode, ranks=host.tp_size, folder=self._folder, verified=verified)
            for server in self.servers
        }
        self.rows = Rows(self.servers, shape.max_rows)
        self.version: Version | None = None
        self._verified: dict[str, None] = {}  # labels, oldest first
        self._updating = asyncio.Lock()
        self._news = asyncio.Event()  # a server went, came, or was found alive
        self._keepers: list[asyncio.Task[None]] = []
        self.closing = False
        self.gap_nats = 0.0  # of the last probe
        self.counts = Counts()
        self.failure: BaseException | None = None

    @property
    def trouble(self) -> str:
        """Why no server answers; empty when one does."""
        return "" if any(server.up for server in self.servers) else "; ".join(server.trouble for server in self.servers)

    async def start(self) -> None:
        """Start the servers and wait until they answer. EnvironmentFault with the cause if one does not."""
        url, key, connections = self._router_of
        if url:
            self.router = Client(url, key, connections)
        for problem in await asyncio.gather(*(server.start() for server in self.servers), return_exceptions=True):
            if problem is not None:
                raise problem
        for server in self.servers:
            work = server.keep(partial(self._lost, server), partial(self._returned, server))
            self._keepers.append(asyncio.create_task(work, name=f"keeper of {server.place.url}"))

    async def close(self) -> None:
        """End the servers that are ours."""
        self.closing = True
        for task in self._keepers:
            task.cancel()
        if self.router is not None:
            await self.router.close()
        await asyncio.gather(*(server.close() for server in self.servers))
        if self._folder is not None:
            self._folder.close()
        self._news.set()
        self.rows.wake()  # whoever waits sees that it is closed

    def alive(self) -> None:
        """EngineError if nothing can be served any more."""
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {type(self.failure).__name__}: {self.failure}")
        if self.closing:
            raise EngineError("the engine is closed")

    # ------------------------------------------------------------ weights

    async def apply(self, update: StagedUpdate) -> str:
        """See `base.Engine.apply`."""
        async with self._updating:
            self.alive()
            names = await asyncio.to_thread(self.mirror.overwrite, update)
            self.version = None
            for server in self.servers:
                server.open = False
            if self._drains:
                await wait_for("sglang: running requests to end before a swap", self.rows.emptied(), DRAIN_S)
            for _ in range(PUSHES):
                await self._some_server()
                self._news.clear()
                if await self._push_all(names, update):
                    self.counts.swaps += 1
                    self.version = update.version
                    self.rows.wake()
                    return update.digest
                await self._news.wait()  # what became of those that died under it
            raise EngineError(f"sglang: no server lived through {PUSHES} tries to update it")

    async def _push_all(self, names: Sequence[str], update: StagedUpdate) -> bool:
        """Push to every server that is up; whether one holds the version now. EngineError if none took it."""
        base = (update.base_digest, update.digest)
        up = [server for server in self.servers if server.up]
        whole = self.mirror.names
        work = (
            self._bring(server, names if update.base_digest and server.holds in base else whole, update.version)
            for server in up
        )
        errors = [error for error in await asyncio.gather(*work) if error is not None]
        refusals = [error for error in errors if not isinstance(error, ServerDown)]
        served = any(server.open for server in up)
        if refusals and not served:
            raise refusals[0]
        if served and refusals:
            for server in up:
                if server.up and not server.open:
                    server.condemn(f"it did not take version {name_of(update.version)}: {refusals[0]}")
        return served

    async def _bring(self, server: Server, names: Sequence[str], version: Version) -> EngineError | None:
        """Push, probe, open; the error if it did not work."""
        server.busy, server.open, server.holds = True, False, None
        try:
            if self._probe is not None:
                self._probe.begin()
            self.counts.last_pause_s = await self._pushers[id(server)].push(server.client, names, version)
            if self._probe is not None:
                self.gap_nats = await self._probe.check(server.client, version)
        except EngineError as error:
            if isinstance(error, ServerDown):
                server.suspect()
            else:  # keys and values of such weights are of no use: what runs begins again with what it had before
                with contextlib.suppress(EngineError):
                    await server.client.post("/abort_request", {"abort_all": True}, timeout_s=ABORT_S)
            return error
        finally:
            server.busy = False
        server.holds, server.open = self.mirror.digest, True
        self._verified[self._pushers[id(server)].label] = None
        while len(self._verified) > REMEMBERED:
            del self._verified[next(iter(self._verified))]
        return None

    async def verified(self, answer: Answer) -> Answer:
        """The part of an answer that was sampled from weights which a push has verified, the push under way included."""
        if any(label not in self._verified for label in answer.labels):
            async with self._updating:
                pass
        return answer.until_not(self._verified.__contains__)

    async def _some_server(self) -> None:
        """Wait until a server answers."""
        while not any(server.up for server in self.servers):
            self.alive()
            self._news.clear()
            await self._news.wait()
        self.alive()

    # ------------------------------------------------------------ servers that go and come

    def _lost(self, server: Server) -> None:
        self.counts.restarts = sum(each.restarts for each in self.servers)
        self._pushers[id(server)].forget()
        if all(each.failure is not None for each in self.servers):
            self.failure = server.failure
        self._news.set()
        self.rows.wake()

    async def _returned(self, server: Server) -> None:
        """It answers (again): all weights for the version that is served, unless it still has them."""
        self._news.set()
        async with self._updating:  # an update under way has brought it what it needs
            version = self.version
            if version is None or server.open or not server.up:
                return
            if server.holds is not None and server.holds == self.mirror.digest and await self._serves(server):
                server.open = True
            else:
                error = await self._bring(server, self.mirror.names, version)
                if error is not None and server.up:
                    log(f"sglang: {server.place.url} did not take its weights: {error}")
                    server.condemn(f"it did not take its weights: {error}")
        self.rows.wake()

    async def _serves(self, server: Server) -> bool:
        """Whether it still says that it serves what was pushed last."""
        try:
            info = await server.client.get("/model_info")
        except EngineError:
            return False
        return isinstance(info, dict) and info.get("weight_version") == self._pushers[id(server)].label
