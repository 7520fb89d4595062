"""The learner's end of the weight log: each version becomes a delta against what the broker stored last, off the loop.

    publisher = Publisher(peer, lineage)              # before peer.open
    group.create_task(publisher.run())                # owned by the daemon's TaskGroup
    await publisher.publish(0, tensors, keep=True)    # returns at once
    ...
    await publisher.flush(timeout_s=60)               # everything published is stored, or was replaced by a newer one

Guarantees: publishing never waits for the broker. While one version is on its way the newest of the others waits and
replaces older ones (ordinals jump), except versions published with `keep`, which an evaluation is pinned to: those are
stored one by one. A delta is only ever based on a version that the broker said it has stored; after a refusal or
silence the next entry is a snapshot. The bits handed over are not copied: hand over tensors of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from temper.common import delta
from temper.common.bits import Tensors, Weights, seal
from temper.common.errors import PeerLost
from temper.common.log import log
from temper.common.schema import Body, Chunk, Manifest, Publish, Stored, Version

B = TypeVar("B", bound=Body)

STORED_TIMEOUT_S = 60.0  # from the last chunk
ATTEMPTS = 3  # at one version, all but the first as snapshots
SNAPSHOT_FROM_SHARE = (
    0.5  # a delta of this share of a full copy brings nothing: send the full copy, which needs no base
)
INLINE_BYTES = 1 << 20  # smaller models are encoded on the loop: a thread costs more


class Link(Protocol):
    """What the publisher needs of a `Peer`."""

    def on(self, body: type[B], handler: Callable[[B, list[memoryview]], None]) -> None: ...

    async def send(self, body: Body, frames: Any = (), version: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Published:
    """What one version cost. `nbytes` on the wire, `full_nbytes` of a full copy, `density` share of changed values."""

    version: Version
    snapshot: bool
    nbytes: int
    full_nbytes: int
    density: float
    encode_s: float
    transfer_s: float


@dataclass(slots=True)
class _Waiting:
    ordinal: int
    tensors: Tensors
    keep: bool


@dataclass(slots=True)
class _Entry:
    """An encoded version. A snapshot's chunks are made as they are sent."""

    manifest: Manifest
    chunks: Iterator[bytes]
    tally: delta.Tally
    encode_s: float


class Publisher:
    """See the module. Called on the learner's event loop; large models are encoded in a thread, or in several (`threads`)."""

    def __init__(
        self, peer: Link, lineage: int, *, threads: int = 1, stored_timeout_s: float = STORED_TIMEOUT_S
    ) -> None:
        self.lineage = lineage
        self.stored: Version | None = None
        self.on_published: Callable[[Published], None] | None = None
        self._peer = peer
        self.threads = threads
        self._timeout_s = stored_timeout_s
        self._base: Weights | None = None
        self._waiting: deque[_Waiting] = deque()
        self._busy = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._answer: asyncio.Future[Stored] | None = None
        self._awaited = -1
        self._failed: BaseException | None = None
        peer.on(Stored, self._on_stored)

    async def publish(self, ordinal: int, tensors: Tensors, *, keep: bool = False) -> None:
        """Hand `tensors` (canonical name -> bits, tied ones once) over as version `ordinal`; returns at once.

        `keep`: this very version will be asked for. Raises what ended `run`, if anything did.
        """
        self._check()
        if self._waiting and not self._waiting[-1].keep:
            self._waiting.pop()
        self._waiting.append(_Waiting(ordinal, tensors, keep))
        self._idle.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until nothing is on its way. PeerLost after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            ordinals = [waiting.ordinal for waiting in self._waiting]
            raise PeerLost(f"weights: not stored within {timeout_s:.0f} s; waiting are versions {ordinals}") from None
        self._check()

    async def run(self) -> None:
        """Publish what is handed over, for ever. Ends with the error that makes publishing impossible."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._store(self._waiting.popleft())
                self._idle.set()
        except BaseException as error:
            self._failed = error
            self._idle.set()
            raise

    # ------------------------------------------------------------ inside

    def _check(self) -> None:
        if self._failed is not None:
            raise PeerLost(f"weights can no longer be published: {self._failed!r}") from self._failed

    async def _store(self, waiting: _Waiting) -> None:
        """Get this version stored: as a delta if it pays, else (or after a refusal) as a snapshot."""
        for _ in range(ATTEMPTS):
            new, entry = await self._off_loop(waiting.tensors, lambda: self._prepare(waiting))
            if await self._send(new, entry):
                return
            self._base = None
        raise PeerLost(f"weights: the broker did not store version {waiting.ordinal} in {ATTEMPTS} attempts")

    def _prepare(self, waiting: _Waiting) -> tuple[Weights, _Entry]:
        began = time.perf_counter()
        base = self._base
        new = seal(waiting.ordinal, self.lineage, waiting.tensors, base)
        full, tally = new.nbytes, delta.Tally()
        if base is not None:
            chunks: list[bytes] = []
            for chunk in delta.encode(base, new, threads=self.threads, tally=tally):
                if tally.nbytes < SNAPSHOT_FROM_SHARE * full:
                    chunks.append(chunk)
                else:
                    chunks.clear()
            if chunks:
                manifest = Manifest(
                    new.version, base.version, len(chunks), tally.nbytes, full, tally.density, waiting.keep
                )
                return new, _Entry(manifest, iter(chunks), tally, time.perf_counter() - began)
        density = tally.density if base is not None else 1.0
        tally = delta.Tally()
        chunked = delta.encode(None, new, threads=self.threads, tally=tally)
        manifest = Manifest(new.version, None, 0, 0, full, density, waiting.keep)
        return new, _Entry(manifest, chunked, tally, time.perf_counter() - began)

    async def _send(self, new: Weights, entry: _Entry) -> bool:
        """Send an entry and wait for `Stored`; False if the broker did not take it or does not answer."""
        began = time.perf_counter()
        version, snapshot = new.version, entry.manifest.base is None
        self._awaited = version.ordinal
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._peer.send(Publish(entry.manifest), (), version.ordinal)
            await self._send_chunks(new, entry)
            async with asyncio.timeout(self._timeout_s):
                stored = await self._answer
        except TimeoutError:
            log(
                f"weights: version {version.ordinal} was not stored within {self._timeout_s:.0f} s: sending a full copy"
            )
            return False
        finally:
            self._answer = None
        if stored.version != version:
            log(f"weights: the broker holds {stored.version}, not {version}: sending a full copy")
            return False
        self._base, self.stored = new, version
        if self.on_published is not None:
            spent = time.perf_counter() - began
            self.on_published(
                Published(
                    version, snapshot, entry.tally.nbytes, entry.manifest.full_size, entry.manifest.density,
                    entry.encode_s, spent,
                )
            )  # fmt: skip
        return True

    async def _send_chunks(self, new: Weights, entry: _Entry) -> None:
        """Send the chunks, each made while the one before travels; stop when the broker has answered (a refusal)."""
        ordinal, snapshot, index = new.version.ordinal, entry.manifest.base is None, 0
        chunk = await self._off_loop(new.tensors, lambda: next(entry.chunks, None))
        while chunk is not None and self._answer is not None and not self._answer.done():
            following = await self._off_loop(new.tensors, lambda: next(entry.chunks, None))
            digest = hashlib.blake2b(chunk, digest_size=16).hexdigest()
            await self._peer.send(Chunk(ordinal, snapshot, index, digest, following is None), [chunk], ordinal)
            chunk, index = following, index + 1

    @staticmethod
    async def _off_loop(tensors: Tensors, work: Callable[[], Any]) -> Any:
        if sum(tensor.nbytes for tensor in tensors.values()) < INLINE_BYTES:
            return work()
        return await asyncio.to_thread(work)

    def resynced(self) -> None:
        """The broker restarted: an entry that it had not stored is lost, send it anew."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TimeoutError())

    def _on_stored(self, stored: Stored, frames: list[memoryview]) -> None:
        if stored.answers not in (None, self._awaited):
            return  # the late answer to an entry that was given up
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(stored)
