"""Serving leases: each is awaited weights, run on its domain's thread, delivered, and ended in one of the known ways.

Every lease taken ends with all its samples sent or with a `Return` that names the cause. Samples are sent as they
finish, siblings together. Called by `daemon`; `episodes.run_lease` does the work itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from temper.actor.catalog import DomainRefused
from temper.actor.domain_threads import DomainThreads, Stuck
from temper.actor.engines.base import Cancel, Engine
from temper.actor.episodes import LeaseResult, SampleOut, lease_name, run_lease
from temper.actor.packing import OversizedSample, pack_samples
from temper.actor.rewards import SandboxGrader
from temper.actor.text import Text
from temper.common import metrics
from temper.common.config import Recipe
from temper.common.domains import Domain
from temper.common.errors import PeerLost
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.schema import Lease, Return, Touch
from temper.common.waiting import first

FLUSH_S = 0.2  # finished samples wait this long for their siblings before they are sent
STUCK_RETRIES = 3  # how often a lease runs again because another one blocked its domain's thread
ERROR_LIMIT = 1000
LEAVING = "the actor is leaving"


class Link(Protocol):
    """What is needed of a `Peer`."""

    async def send(self, body: Any, frames: Any = ()) -> None: ...

    def post(self, body: Any, frames: Any = ()) -> bool: ...


@dataclass(slots=True, eq=False)
class Held:
    """A lease being served. `finished` are samples not sent yet; `missing` the indices without a sample."""

    lease: Lease
    missing: set[int]
    cancel: Cancel = field(default_factory=Cancel)
    task: asyncio.Task[None] | None = None
    finished: deque[SampleOut] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What serving needs."""

    link: Link
    recipe: Recipe
    engine: Engine
    text: Text
    grader: SandboxGrader
    threads: DomainThreads
    domains: Mapping[str, asyncio.Task[Domain | DomainRefused]]
    weights_ready: Callable[[Lease], Awaitable[None]]
    meter: Meter
    progress: Callable[[str], None]


class RowGate:
    """Lets leases start, in order, while the engine has a free row: then a lease's deadline runs from its first token
    and not from a place in the engine's queue."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._used = 0
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    async def enter(self, rows: int) -> None:
        """Take `rows`; waits while all are taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((turn, rows))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(rows)
            raise

    def leave(self, rows: int) -> None:
        """Give `rows` back."""
        self._used -= rows
        self._next()

    def _next(self) -> None:
        while self._queue and (self._used < self._rows or self._queue[0][0].done()):
            turn, rows = self._queue.popleft()
            if not turn.done():
                self._used += rows
                turn.set_result(None)


class Serving:
    """Lives on the daemon's event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._gate = RowGate(parts.engine.caps.max_rows)
        self.held: dict[tuple[int, int], Held] = {}
        self._warned: set[str] = set()  # domains whose jobs may take longer than a stall

    def take(self, lease: Lease) -> Held:
        """Register a lease; `serve` it next."""
        held = self.held[lease.lease_id, lease.attempt] = Held(lease, set(lease.indices))
        return held

    async def serve(self, held: Held) -> None:
        """Run a lease to its end."""
        lease = held.lease
        try:
            cause, error = await self._attempt(held)
        except asyncio.CancelledError:
            self._return(held, "drain", LEAVING)
            raise
        finally:
            self.held.pop((lease.lease_id, lease.attempt), None)  # a drain that it outlasted has given it back
        if cause == "task":
            self._parts.meter.add(metrics.ACTOR_TASK_ERRORS)
            log(f"{lease_name(lease.lease_id)} ({lease.domain}): {error}")
        if held.missing and not held.refused:
            self._return(held, cause or "infra", error or "samples are missing without a cause")
        self._parts.progress(f"{lease_name(lease.lease_id)} of {lease.domain} ended")

    def drain(self, held: Held) -> None:
        """Stop generating for a lease; what is being graded goes on. One that has not started goes back at once."""
        if held.started:
            self._parts.threads.call_soon(held.lease.domain, held.cancel.set)
        elif held.task is not None:
            held.task.cancel()

    def give_back(self, held: Held) -> None:
        """Return a lease whose task was cancelled before it ran at all, or does not end although it was cancelled."""
        if self.held.pop((held.lease.lease_id, held.lease.attempt), None) is not None:
            self._return(held, "drain", LEAVING)
            held.refused = True  # nothing more is sent for it

    def refuse(self, held: Held) -> None:
        """The broker has abandoned this attempt: drop it and its jobs; it wants no `Return`."""
        held.refused = True
        if held.task is not None:
            held.task.cancel()

    async def _attempt(self, held: Held) -> tuple[Literal["task", "infra", "drain"] | None, str]:
        parts, lease = self._parts, held.lease
        loading = parts.domains.get(lease.domain)
        if loading is None:
            return "task", f"domain {lease.domain} is not in this run's recipe"
        domain = await asyncio.shield(loading)
        if isinstance(domain, DomainRefused):
            return "task", f"refused: {domain}"
        try:
            await parts.weights_ready(lease)
        except PeerLost as error:
            return "infra", str(error)
        rows = 0 if lease.lane == "demo" else len(lease.indices)
        await self._gate.enter(rows)
        try:
            held.started = True
            parts.link.post(Touch(lease.lease_id, lease.attempt))
            return await self._run(held, domain)
        finally:
            self._gate.leave(rows)

    async def _run(self, held: Held, domain: Domain) -> tuple[Literal["task", "infra", "drain"] | None, str]:
        """Run on the domain's thread, sending what finishes meanwhile."""
        parts, result = self._parts, LeaseResult()
        grader = parts.grader.bound(held.lease.lease_id, held.lease.domain)
        for _ in range(STUCK_RETRIES):
            lease = msgspec.structs.replace(held.lease, indices=sorted(held.missing))

            async def work(lease: Lease = lease) -> LeaseResult:
                return await run_lease(
                    lease,
                    domain,
                    parts.engine,
                    parts.text,
                    grader,
                    parts.recipe,
                    cancel=held.cancel,
                    on_sample=lambda sample: self._finished(held, sample),
                    on_prolonged=lambda more_s: self._prolonged(held, more_s),
                )

            running = asyncio.ensure_future(parts.threads.run(lease.domain, lease_name(lease.lease_id), work))
            try:
                await self._deliver_while(held, running)
                result = running.result()
                break
            except Stuck as error:
                result = LeaseResult([], "task" if error.culprit else "infra", str(error))
                if error.culprit:
                    break
            except OversizedSample as error:
                return "task", str(error)
            finally:
                running.cancel()
        return result.cause, result.error

    def _finished(self, held: Held, sample: SampleOut) -> None:
        """Called on the domain's thread."""
        held.finished.append(sample)
        self._loop.call_soon_threadsafe(held.wake.set)

    def _prolonged(self, held: Held, more_s: float) -> None:
        """Called on the domain's thread: the broker must leave the lease's jobs their time too."""
        lease, patience_s = held.lease, self._parts.recipe.run.stall_timeout_s
        if more_s > patience_s and lease.domain not in self._warned:
            self._warned.add(lease.domain)
            log(f"{lease.domain}: its jobs may take {more_s:.0f} s, longer than run.stall_timeout_s = {patience_s:g}")
        self._loop.call_soon_threadsafe(self._parts.link.post, Touch(lease.lease_id, lease.attempt, more_s))

    async def _deliver_while(self, held: Held, running: asyncio.Future[LeaseResult]) -> None:
        while not running.done():
            waking = asyncio.ensure_future(held.wake.wait())
            try:
                await first(running, waking)
            finally:
                waking.cancel()
            held.wake.clear()
            if not running.done():
                await asyncio.wait({running}, timeout=FLUSH_S)
            await self._send(held)
        await self._send(held)

    async def _send(self, held: Held) -> None:
        batch: list[SampleOut] = []
        while held.finished:
            sample = held.finished.popleft()
            if sample.meta.index in held.missing:  # a lease that ran again may finish an index twice
                held.missing.discard(sample.meta.index)
                batch.append(sample)
        if not batch or held.refused:
            return
        for body, frames in pack_samples(held.lease, batch):
            await self._parts.link.send(body, frames)
        self._parts.meter.add(metrics.ACTOR_SAMPLES, len(batch))

    def _return(self, held: Held, cause: Literal["task", "infra", "drain"], error: str) -> None:
        if held.refused:
            return
        self._parts.link.post(Return(held.lease.lease_id, held.lease.attempt, cause, error[:ERROR_LIMIT]))
