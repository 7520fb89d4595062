"""An actor's end of the weight log: fetch, stage and verify while sampling goes on; commit is the engine's overwrite.

    client = WeightClient(peer)                       # before peer.open
    update = await client.fetch(deadline_s=60)        # newest; fetch(want=7) for exactly version 7
    digest = await engine.apply(update)
    client.commit(update, digest)                     # the host copy follows; client.version is now update.version

Guarantees: an update handed out leads from the committed version (or from nothing) to the version it names, root digest
verified; whatever does not (gap, damage, another base, an engine that answers with another digest) is dropped, counted
by reason, and the next fetch takes a snapshot and its chain. One fetch at a time. The host copy of the bits, which
deltas are verified against, is the client's own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from temper.common import delta
from temper.common.bits import TensorBits, Weights
from temper.common.delta import DeltaError, StagedUpdate
from temper.common.errors import PeerLost
from temper.common.log import log
from temper.common.schema import Body, Chain, Chunk, Fetch, NewVersion, Version

if TYPE_CHECKING:
    import numpy as np

B = TypeVar("B", bound=Body)

RESEEDS_IN_A_ROW = 3  # before a fetch gives up
IDLE_S = 20.0  # nothing of a reply for this long: ask again (the broker was restarted)
SAY_AFTER_S = 2.0
INLINE_BYTES = 4 << 20  # smaller updates are staged and committed where they are: a thread costs more


class WeightsUnavailable(PeerLost):
    """The version asked for did not come, or never will."""


Held = Callable[[str], "np.ndarray | None"]


class Link(Protocol):
    """What the client needs of a `Peer`."""

    def on(self, body: type[B], handler: Callable[[B, list[memoryview]], None]) -> None: ...

    async def send(self, body: Body, frames: Any = (), version: int = 0) -> None: ...


@dataclass(slots=True)
class _Reply:
    """An answer that is arriving: `due` chunks are still to come."""

    request: int
    done: asyncio.Future[None]
    chain: Chain | None = None
    due: int = 0
    frames: list[memoryview] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Of the last fetch: bytes and entries received, seconds of transfer and of staging."""

    nbytes: int
    entries: int
    transfer_s: float
    stage_s: float


class WeightClient:
    """See the module. Called on the actor's event loop; large updates are staged and committed in a thread."""

    def __init__(self, peer: Link, *, threads: int = 1, idle_s: float = IDLE_S) -> None:
        self.newest: Version | None = None
        self.reseeds: Counter[str] = Counter()
        self.last: FetchStats | None = None
        self.fetched_nbytes = 0
        self.on_new_version: Callable[[Version], None] | None = None
        self._peer = peer
        self.threads = threads
        self._idle_s = idle_s
        self._weights: Weights | None = None
        self._lock = asyncio.Lock()
        self._requests = 0
        self._reply: _Reply | None = None
        self._news = asyncio.Event()
        self._moved = asyncio.Event()
        self.moving = False  # an update is out: what is resident may be ahead of the committed version
        peer.on(NewVersion, self._on_new_version)
        peer.on(Chain, self._on_chain)
        peer.on(Chunk, self._on_chunk)

    @property
    def version(self) -> Version | None:
        """The committed version."""
        return self._weights.version if self._weights else None

    @property
    def weights(self) -> Weights | None:
        """The host copy: only to be read, and only as long as it is the committed one."""
        return self._weights

    @property
    def behind(self) -> bool:
        """Whether the log holds another version than the committed one."""
        return self.newest is not None and self.newest != self.version

    async def fetch(self, want: int | None = None, *, deadline_s: float = 120.0) -> StagedUpdate:
        """The verified update from the committed version to the newest one, or to exactly `want`, waiting until the log
        holds it. WeightsUnavailable after `deadline_s`, if `want` was retired, or if full copies fail too."""
        what = "newest version" if want is None else f"version {want}"
        try:
            async with asyncio.timeout(deadline_s), self._lock:
                update = await self._fetch(want, what)
                self.moving = True
                return update
        except TimeoutError:
            ends = self.newest.ordinal if self.newest else "nothing"
            raise WeightsUnavailable(
                f"weights: the {what} did not come within {deadline_s:.0f} s; the log ends at {ends}"
            ) from None
        finally:
            self._reply = None

    async def commit(self, update: StagedUpdate, engine_digest: str, held: Held | None = None) -> None:
        """The engine has applied `update` and reports `engine_digest`: move the host copy along. `held` gives the bits of
        a copy that the engine keeps in host memory anyway: it becomes the host copy, and there is no second one.

        If it is not the digest of the version, the engine does not hold what it should: DeltaError("engine"), and the
        next fetch is a snapshot.
        """
        self.moving = False
        if engine_digest != update.digest:
            self.reseed("engine")
            raise DeltaError(
                "engine", f"the engine reports {engine_digest} after version {update.version.ordinal} ({update.digest})"
            )
        if held is not None and (adopted := _adopted(self._weights, update, held)) is not None:
            self._weights = adopted
        elif sum(patch.values.nbytes for patch in update.changed) < INLINE_BYTES:
            self._weights = delta.overwrite(self._weights, update)
        else:
            self._weights = await asyncio.to_thread(delta.overwrite, self._weights, update)

    def reseed(self, reason: str) -> None:
        """Forget the committed version: the next fetch takes a snapshot and its chain. Counted by reason."""
        self._weights, self.moving = None, False
        self.reseeds[reason] += 1
        log(f"weights: taking a full copy ({reason})")
        if self.newest is not None and self.on_new_version is not None:
            self.on_new_version(self.newest)

    # ------------------------------------------------------------ inside

    async def _fetch(self, want: int | None, what: str) -> StagedUpdate:
        failures = 0
        while True:
            base = self._weights
            began = time.monotonic()
            reply = await self._transfer(base, want, what)
            chain, transferred = reply.chain, time.monotonic()
            if chain is None:
                log(f"waiting for broker: {what} of the weights (nothing came for {self._idle_s:.0f} s, asking again)")
                continue
            if not chain.entries:
                if base is not None and chain.version is not None and chain.version.digest == base.version.digest:
                    return StagedUpdate(chain.version, base.version.digest, base.version.digest, [], 0, 0)
                if want is not None and chain.version is not None and chain.version.ordinal > want:
                    raise WeightsUnavailable(f"weights: {chain.reason}; it was retired")
                await self._wait_for_news(chain.reason, what)
                continue
            try:
                update = await self._staged(chain, reply.frames, base)
            except DeltaError as error:
                log(f"weights: {error}")
                self.reseed(error.reason)
                failures += 1
                if failures >= RESEEDS_IN_A_ROW:
                    raise WeightsUnavailable(
                        f"weights: {failures} full copies in a row failed, at last: {error}"
                    ) from error
                continue
            now = time.monotonic()
            self.fetched_nbytes += update.nbytes
            self.last = FetchStats(update.nbytes, update.entries, transferred - began, now - transferred)
            return update

    async def _staged(self, chain: Chain, frames: list[memoryview], base: Weights | None) -> StagedUpdate:
        if chain.entries[0].base is None:
            base = None

        def work() -> StagedUpdate:
            update = delta.stage(frames, base, threads=self.threads)
            if update.version != chain.entries[-1].version:
                raise DeltaError("gap", f"the chain leads to {update.version}, not to {chain.entries[-1].version}")
            return update

        if chain.entries[-1].full_size < INLINE_BYTES:
            return work()
        return await asyncio.to_thread(work)

    async def _transfer(self, base: Weights | None, want: int | None, what: str) -> _Reply:
        """Ask, and collect the answer; one without a chain if nothing came for `idle_s`."""
        self._requests += 1
        self._news.clear()
        reply = self._reply = _Reply(self._requests, asyncio.get_running_loop().create_future())
        await self._peer.send(Fetch(base.version if base else None, want, reply.request))
        patience = min(SAY_AFTER_S, self._idle_s)
        while not reply.done.done():
            self._moved.clear()
            moved = asyncio.ensure_future(self._moved.wait())
            await asyncio.wait([moved], timeout=patience)
            if moved.done():
                continue
            moved.cancel()
            if patience == self._idle_s:
                reply.chain = None
                break
            log(f"waiting for broker: {what} of the weights")
            patience = self._idle_s
        return reply

    async def _wait_for_news(self, reason: str, what: str) -> None:
        said = False
        while not self._news.is_set():
            try:
                async with asyncio.timeout(None if said else SAY_AFTER_S):
                    await self._news.wait()
            except TimeoutError:
                log(f"waiting for learner: {what} of the weights ({reason})")
                said = True

    def resynced(self) -> None:
        """The broker restarted: a chain that was on its way will not go on."""
        reply = self._reply
        if reply is not None and not reply.done.done():
            reply.chain = None
            reply.done.set_result(None)
            self._moved.set()

    def _on_new_version(self, news: NewVersion, frames: list[memoryview]) -> None:
        self.newest = news.version
        self._news.set()
        if self.on_new_version is not None:
            self.on_new_version(news.version)

    def _on_chain(self, chain: Chain, frames: list[memoryview]) -> None:
        reply = self._reply
        if reply is None:
            return
        if chain.request != reply.request:
            reply.chain = None  # of an earlier fetch: so are the chunks that follow
            return
        reply.chain, reply.due, reply.frames = chain, sum(entry.chunks for entry in chain.entries), []
        self._advance(reply)

    def _on_chunk(self, chunk: Chunk, frames: list[memoryview]) -> None:
        reply = self._reply
        if reply is None or reply.chain is None or reply.due == 0 or len(frames) != 1:
            return
        reply.frames.append(frames[0])
        reply.due -= 1
        self._advance(reply)

    def _advance(self, reply: _Reply) -> None:
        self._moved.set()
        if reply.due == 0 and not reply.done.done():
            reply.done.set_result(None)


def _adopted(base: Weights | None, update: StagedUpdate, held: Held) -> Weights | None:
    """`base` moved to `update.version`, its tensors being those that `held` gives; None if it doesn't give a changed one, or
    if `base` is not what the update starts from."""
    whole = update.base_digest is None
    if not whole and (base is None or base.version.digest not in (update.base_digest, update.digest)):
        return None
    tensors = {} if whole or base is None else dict(base.tensors)
    digests = {} if whole or base is None else dict(base.digests)
    for patch in update.changed:
        bits = held(patch.name)
        if bits is None:
            return None
        tensors[patch.name] = TensorBits(patch.dtype, patch.shape, bits)
        digests[patch.name] = patch.digest
    for name, tensor in tensors.items():  # copies take turns: unchanged tensors have moved too
        bits = held(name)
        if bits is not None and bits is not tensor.bits:
            tensors[name] = TensorBits(tensor.dtype, tensor.shape, bits)
    return Weights(update.version, tensors, digests)
