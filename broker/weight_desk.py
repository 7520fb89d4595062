"""The broker's weight service between the bulk socket and the log: one thread for the disk, one queue, no blocking.

    desk = WeightDesk(store, send=bulk.send, backlog=bulk.backlog, acknowledge=bulk.acknowledge, announce=announce)
    tasks.create_task(desk.run())
    desk.take(peer, body, frames, sequence)     # Publish, Chunk, Fetch, in the order of arrival
    desk.room(peer); desk.closed(peer)          # from the router's on_room and on_closed
    desk.needed = lambda: (live versions, pinned ordinals)

Guarantees: messages are handled in the order in which they came; a chunk is acknowledged once it is in the log, which is
what bounds a learner's uplink; a peer gets chunks only while its own queue in the router is short, so a slow one holds
back nobody and costs no memory; `announce(version)` is called once for each version that was stored. An error of the
disk ends `run`, and with it the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec
from temper.broker.weight_files import LogFile
from temper.broker.weight_outline import outline
from temper.broker.weights import Route, WeightStore
from temper.common.delta import DeltaError
from temper.common.log import log
from temper.common.schema import Body, Chunk, Fetch, Publish, Stored, Version

T = TypeVar("T")


class Send(Protocol):
    """`Router.send`."""

    def __call__(self, peer: Any, body: Body, frames: Sequence[Any] = ()) -> bool: ...


class WeightDesk:
    """See the module. Everything but the disk runs on the broker's event loop."""

    def __init__(
        self,
        store: WeightStore,
        *,
        send: Send,
        backlog: Callable[[Any], tuple[int, int]],
        acknowledge: Callable[[Any, int], None],
        announce: Callable[[Version], None],
    ) -> None:
        self.needed: Callable[[], tuple[Iterable[Version], Iterable[int]]] = lambda: ((), ())
        self.newest = store.newest()
        self.outline = outline(store.log)
        self.served_nbytes = 0
        self.stored_nbytes = 0
        self.composed = 0
        self._store = store
        self._send = send
        self._backlog = backlog
        self._acknowledge = acknowledge
        self._announce = announce
        self._inbox: asyncio.Queue[tuple[Hashable, Body | None, Any, int]] = asyncio.Queue()
        self._outgoing: dict[Hashable, Iterator[tuple[Chunk, memoryview]]] = {}
        self._disk = ThreadPoolExecutor(1, "weights")
        self._composing: asyncio.Task[None] | None = None

    def take(self, peer: Hashable, body: Body, frames: Sequence[Any], sequence: int) -> None:
        """A Publish, Chunk or Fetch that has arrived; acknowledged when it is dealt with."""
        self._inbox.put_nowait((peer, body, frames[0] if len(frames) == 1 else None, sequence))

    def closed(self, peer: Hashable) -> None:
        """`peer` is gone: what it was sending or getting ends."""
        self._outgoing.pop(peer, None)
        self._inbox.put_nowait((peer, None, None, 0))

    def room(self, peer: Hashable) -> None:
        """What was queued for `peer` has left: go on serving it."""
        if peer in self._outgoing:
            self._serve(peer)

    async def run(self) -> None:
        """Handle what comes in, for ever."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    peer, body, frame, sequence = await self._inbox.get()
                    moved = await self._handle(peer, body, frame)
                    if sequence:
                        self._acknowledge(peer, sequence)
                    if moved:
                        await self._upkeep(tasks)
        finally:
            self._disk.shutdown(wait=False, cancel_futures=True)

    async def _handle(self, peer: Hashable, body: Body | None, frame: Any) -> bool:
        """Whether the log has moved on."""
        store = self._store
        stored: Stored | None = None
        if body is None:
            await self.on_disk(lambda: store.forget(peer))
        elif isinstance(body, Publish):
            stored = await self.on_disk(lambda: store.begin(peer, body))
        elif isinstance(body, Chunk):
            data = memoryview(b"" if frame is None else frame)
            self.stored_nbytes += data.nbytes
            stored = await self.on_disk(lambda: store.chunk(peer, body, data))
        elif isinstance(body, Fetch):
            route = await self.on_disk(lambda: store.route(body.have, body.want, peer))
            self._start(peer, route, body.request)
        if stored is None:
            return False
        self._send(peer, stored)
        if stored.version == self.newest or stored.version.ordinal != stored.answers:
            return False
        self.newest = stored.version
        self._announce(stored.version)
        return True

    def _start(self, peer: Hashable, route: Route, request: int) -> None:
        """Answer a Fetch; one that is still being served ends here."""
        self._send(peer, msgspec.structs.replace(route.chain, request=request))
        self._outgoing[peer] = route.messages()
        self._serve(peer)

    def _serve(self, peer: Hashable) -> None:
        """Hand chunks to the router until it has to queue them."""
        messages = self._outgoing[peer]
        while self._backlog(peer)[0] == 0:
            message = next(messages, None)
            if message is None or not self._send(peer, message[0], [message[1]]):
                self._outgoing.pop(peer, None)
                return
            self.served_nbytes += message[1].nbytes

    async def _upkeep(self, tasks: asyncio.TaskGroup) -> None:
        """Retire what nobody needs; start composing a snapshot when the chain has become long."""
        live, pinned = self.needed()
        await self.on_disk(lambda: self._store.retain(live, pinned))
        await self._outline()
        if self._composing is None or self._composing.done():
            work = await self.on_disk(self._store.compose)
            if work is not None:
                self._composing = tasks.create_task(self._compose(work))

    async def _compose(self, work: Callable[[], LogFile]) -> None:
        try:
            log_file = await asyncio.to_thread(work)
        except DeltaError as error:
            log(f"weights: no snapshot could be composed, newcomers take the longer way: {error}")
            return
        await self.on_disk(lambda: self._store.adopt(log_file))
        await self._outline()
        self.composed += 1
        log(f"weights: composed a snapshot of version {log_file.footer.manifest.version.ordinal}")

    async def _outline(self) -> None:
        self.outline = await self.on_disk(lambda: outline(self._store.log))

    async def on_disk(self, work: Callable[[], T]) -> T:
        """`work` in the thread that the store belongs to, after what was begun before."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
