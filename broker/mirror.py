"""`Mirror`: a relay's weight log. Each chunk comes once from the parent, is verified, kept on disk, and served to the site.

    mirror = Mirror(uplink, store, router, live=passage.versions)
    tasks.create_task(mirror.run())
    mirror.take(peer, fetch); mirror.closed(peer)       # from the bulk socket of the site
    mirror.news(version)                                # an announced version passed, on whosever line

Guarantees: the site is served from the log on disk; what is not there is asked of the parent, once, whoever waits for it;
an entry is served when all of it is there with its digests. Nobody gets less than they know of: a Fetch of the newest
version that arrives after news has passed waits until the parent was asked after that news, so a relay never has to compare
versions, and a parent that is a relay itself answers by the same rule. What is under way from the parent is bounded: a
chunk is acknowledged when it is on disk. A parent that is gone stops news, not service.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from temper.broker.weight_desk import WeightDesk
from temper.broker.weights import WeightStore
from temper.common.log import log
from temper.common.peer import Peer
from temper.common.pump import Router
from temper.common.schema import Body, Chain, Chunk, Fetch, Manifest, Publish, Stored, Version

PARENT = "parent"  # stands for the parent where the desk names peers
IDLE_S = 20.0  # nothing of an answer for this long: ask again
RETRY_S = 0.5
TRIES = 3  # for a version that the parent sends and that does not come out


@dataclass(slots=True)
class _Ask:
    """What one peer of the site wants; `need`: the news it waits for; `verdict`: the parent's answer, once it was asked."""

    fetch: Fetch
    need: int = 0
    parked: bool = False
    tries: int = 0
    verdict: Chain | None = None


@dataclass(slots=True)
class _Reply:
    """An answer of the parent that is arriving. `due` chunks of the entry under way are still to come."""

    request: int
    done: asyncio.Future[Chain | None]
    chain: Chain | None = None
    entries: deque[Manifest] = field(default_factory=deque)
    due: int = 0
    settled: int = 0
    moved: bool = False


class Mirror:
    """See the module. Everything but the disk runs on the relay's event loop."""

    def __init__(
        self, uplink: Peer, store: WeightStore, router: Router, *, live: Callable[[], Iterable[Version]]
    ) -> None:
        self.desk = WeightDesk(
            store,
            send=self._send,
            backlog=router.backlog,
            acknowledge=self._acknowledge,
            announce=lambda version: None,
        )
        self.desk.needed = self._needed
        self.asked = 0  # times the parent was asked
        self._uplink, self._store, self._router, self._live = uplink, store, router, live
        self._asks: dict[Hashable, _Ask] = {}
        self._last_news: Version | None = None
        self._news_count = 1  # 1: whatever happened before this relay was there
        self._known = 0  # the news up to here is in the log
        self._wake = asyncio.Event()
        self._reply: _Reply | None = None
        self._requests = 0
        uplink.on(Chain, self._on_chain)
        uplink.on(Chunk, self._on_chunk)

    @property
    def busy(self) -> bool:
        """Whether something is under way from the parent."""
        return self._reply is not None

    async def run(self) -> None:
        """Follow the parent and serve, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.desk.run())
            tasks.create_task(self._follow())

    def news(self, version: Version) -> None:
        """A new version was announced to somebody."""
        if version != self._last_news:
            self._last_news = version
            self._news_count += 1
            self._wake.set()

    def resynced(self) -> None:
        """The parent restarted: what was under way will not go on, and it may know more than was heard."""
        self._news_count += 1
        self._wake.set()
        if self._reply is not None and not self._reply.done.done():
            self._reply.done.set_result(None)

    # ------------------------------------------------------------ the site

    def take(self, peer: Hashable, fetch: Fetch) -> None:
        """A peer of the site wants weights."""
        ask = self._asks[peer] = _Ask(fetch, self._news_count)
        if fetch.want is None and self._known < ask.need:
            self._park(ask)
        else:
            self.desk.take(peer, fetch, (), 0)

    def closed(self, peer: Hashable) -> None:
        """That peer is gone."""
        self._asks.pop(peer, None)
        self.desk.closed(peer)

    def _park(self, ask: _Ask) -> None:
        ask.parked = True
        self._wake.set()

    def _send(self, peer: Any, body: Body, frames: Sequence[Any] = ()) -> bool:
        """What the desk sends: to the site, except that "not here" becomes a question to the parent first."""
        if peer == PARENT:
            if isinstance(body, Stored):
                self._settled()
            return True
        ask = self._asks.get(peer)
        if isinstance(body, Chain) and ask is not None and body.request == ask.fetch.request:
            if body.reason and ask.verdict is None and ask.tries < TRIES:
                self._park(ask)
                return True
            if body.reason and ask.verdict is not None:
                body = msgspec.structs.replace(ask.verdict, request=body.request)
            del self._asks[peer]
        return self._router.send(peer, body, frames)

    def _needed(self) -> tuple[Iterable[Version], Iterable[int]]:
        asks = list(self._asks.values())
        holding = [ask.fetch.have for ask in asks if ask.fetch.have is not None]
        return [*self._live(), *holding], [ask.fetch.want for ask in asks if ask.fetch.want is not None]

    # ------------------------------------------------------------ the parent

    async def _follow(self) -> None:
        while True:
            self._wake.clear()
            parked = [ask for ask in self._asks.values() if ask.parked]
            behind = self._known < self._news_count
            if not parked and not behind:
                await self._wake.wait()
                continue
            want = None if behind or not parked else parked[0].fetch.want
            news = self._news_count
            answer = await self._ask(want)
            if answer is None:
                await asyncio.sleep(RETRY_S)
                continue
            if want is None:
                self._known = news
            self._serve(want, answer)

    def _serve(self, want: int | None, answer: Chain) -> None:
        """Whoever waited for this answer goes (back) to the desk."""
        for peer, ask in self._asks.items():
            if ask.parked and ask.fetch.want == want and (want is not None or ask.need <= self._known):
                ask.parked = False
                ask.tries += 1
                ask.verdict = answer if answer.reason else None
                self.desk.take(peer, ask.fetch, (), 0)

    async def _ask(self, want: int | None) -> Chain | None:
        """Bring the log to `want` (None: the newest) and return the parent's answer; None if that must be tried again."""
        base = await self.desk.on_disk(lambda: self._base(want))
        self._requests += 1
        self.asked += 1
        reply = self._reply = _Reply(self._requests, asyncio.get_running_loop().create_future())
        try:
            await self._uplink.send(Fetch(base, want, reply.request))
            while not reply.done.done():
                reply.moved = False
                await asyncio.wait({reply.done}, timeout=IDLE_S)
                if not reply.done.done() and not reply.moved:
                    log(f"waiting for the parent: weights (nothing came for {IDLE_S:.0f} s, asking again)")
                    return None
            chain = reply.done.result()
        finally:
            self._reply = None
        if chain is None or chain.reason or chain.version is None:
            return chain
        version = chain.version
        if await self.desk.on_disk(lambda: self._store.log.holds(version)):
            return chain
        log(f"weights: version {version.ordinal} did not arrive whole, asking again")
        return None

    def _base(self, want: int | None) -> Version | None:
        """The version of the log that a way to `want` may start from."""
        index = self._store.log
        if want is None:
            return index.newest()
        places = [ordinal for ordinal in index.places if ordinal <= want and index.way(None, ordinal) is not None]
        return index.places[places[-1]].version if places else None

    def _on_chain(self, chain: Chain, frames: list[memoryview]) -> None:
        reply, arrival = self._reply, self._uplink.arrival
        if reply is not None:
            fits = chain.request == reply.request and not reply.done.done()
            reply.chain, reply.due, reply.settled = chain if fits else None, 0, 0
            reply.entries = deque(chain.entries if fits else ())
            if fits and not chain.entries:
                reply.done.set_result(chain)
        self._uplink.taken(arrival)

    def _on_chunk(self, chunk: Chunk, frames: list[memoryview]) -> None:
        reply, arrival = self._reply, self._uplink.arrival
        if reply is None or not (reply.due or reply.entries):
            self._uplink.taken(arrival)  # of an answer that nobody waits for any more
            return
        if not reply.due:
            manifest = reply.entries.popleft()
            reply.due = manifest.chunks
            self.desk.take(PARENT, Publish(manifest), (), 0)
        reply.due -= 1
        reply.moved = True
        epoch, sequence = arrival
        self.desk.take(PARENT, chunk, frames, epoch << 64 | sequence)

    def _acknowledge(self, peer: Hashable, token: int) -> None:
        """The desk is done with a chunk of the parent's (what the site sends is acknowledged on arrival)."""
        self._uplink.taken((token >> 64, token & (1 << 64) - 1))

    def _settled(self) -> None:
        """One entry is on disk, or was not taken."""
        reply = self._reply
        if reply is None or reply.chain is None:
            return
        reply.settled += 1
        if reply.settled == len(reply.chain.entries) and not reply.done.done():
            reply.done.set_result(reply.chain)
