"""The actor daemon: leases in, samples out; weights staged beside sampling and committed between two steps.

Guarantees: a lease starts only on weights of its lineage that are new enough (in the eval lane: exactly its version),
its deadline runs from then; every lease ends with all its samples or with a `Return` that names the cause; nothing a
domain does stops the heartbeats. The evaluator is the same daemon with role ``eval``. Started by ``python -m
temper.actor``; wires `serving`, `versions`, `rewards` and an engine to the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from typing import Literal

from temper.actor.bundle import unpack_bundle
from temper.actor.catalog import DomainRefused, by_name, check_allowed, check_domain, load_domain
from temper.actor.domain_threads import DomainThreads, Stuck
from temper.actor.engines.base import Engine
from temper.actor.engines.factory import make_engine
from temper.actor.episodes import Failed, lease_name
from temper.actor.host import ActorHost, built_in_domains, domain_digests
from temper.actor.rewards import SandboxGrader
from temper.actor.scrub import Scrub
from temper.actor.serving import LEAVING, Parts, Serving
from temper.actor.text import Text
from temper.actor.versions import Versions
from temper.actor.weights import WeightClient
from temper.common import metrics
from temper.common.domains import Domain
from temper.common.errors import ConfigError, PeerLost
from temper.common.log import log
from temper.common.peer import Peer
from temper.common.peer_daemon import PeerDaemon
from temper.common.recipe_derived import domain_sampling
from temper.common.schema import (
    Bundle,
    Holding,
    JobDone,
    Lease,
    NeedBundle,
    Return,
    SampleRefused,
    State,
    Version,
    Welcome,
)

LOAD_LIMIT_S = 120.0  # a domain may take this long to import and to make itself
RETRY_S = 2.0  # between two tries of what infrastructure prevented
GRADING_GRACE_S = 2.0  # a drain gives verdicts under way this long
SWITCH_INTERVAL_S = 0.001  # of the interpreter lock: the engine's thread and the loop alternate in small steps


class ActorDaemon(PeerDaemon):
    """See the module's text."""

    def __init__(
        self,
        role: Literal["actor", "eval"],
        name: str,
        address: str,
        *,
        key_file: str | None = None,
        host: ActorHost | None = None,
    ) -> None:
        host = host or ActorHost()
        modules = built_in_domains() if host.domains is None else list(host.domains)
        super().__init__(role, name, address, key_file=key_file, slots=host.slots, domains=domain_digests(modules))
        self._leases: asyncio.Queue[Lease] = asyncio.Queue()
        self._queued: set[tuple[int, int]] = set()  # (lease, attempt) in the queue
        self._domains: dict[str, asyncio.Task[Domain | DomainRefused]] = {}
        self._bundle: asyncio.Future[dict[str, bytes]] | None = None
        self._client: WeightClient | None = None
        self._serving: Serving | None = None
        self._versions: Versions | None = None
        self._threads: DomainThreads | None = None
        self._grader: SandboxGrader | None = None
        self._engine: Engine | None = None
        self._host = host
        self._down_since: float | None = None
        self._counted: tuple[float, ...] = (0,) * 9
        self._reseeds: Counter[str] = Counter()

    # ------------------------------------------------------------ life

    def subscribe(self, peer: Peer) -> None:
        """Handlers only put into queues and futures."""
        self._bundle = asyncio.get_running_loop().create_future()
        self._client = WeightClient(peer)
        peer.on(Lease, self._on_lease)
        peer.on(SampleRefused, self._on_refused)
        peer.on(Bundle, self._on_bundle)
        peer.on(JobDone, self._on_job_done)

    async def setup(self) -> None:
        """Bundle, tokenizer, engine; the domains begin to load."""
        recipe = self.recipe
        assert self._bundle is not None and self._client is not None
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        check_allowed(recipe, self.hello.domains)
        await self.peer.send(NeedBundle())
        files = await self.wait_for("learner: model bundle", self._bundle, recipe.run.connect_timeout_s)
        text = Text(files)
        stops = {name: text.stop_ids(domain_sampling(recipe, own).stop) for name, own in by_name(recipe).items()}
        engine = self._engine = await make_engine(recipe, files, self._host.sglang)
        grader = self._grader = SandboxGrader(self.peer, recipe.sandbox)
        threads = self._threads = DomainThreads()
        self._client.threads = recipe.daemons.threads_per_process
        self._versions = Versions(self._client, engine, self._on_commit)
        self.spawn(threads.watch(), "domain watch")
        for name in by_name(recipe):
            self._domains[name] = self.spawn(self._load(name, text, stops[name]), f"load {name}")
        self._serving = Serving(
            Parts(
                self.peer,
                recipe,
                engine,
                text,
                grader,
                threads,
                self._domains,
                self._weights_ready,
                self.meter,
                self.progress,
            )
        )

    async def main(self) -> None:
        """Take leases until drained."""
        serving, versions = self._serving, self._versions
        assert serving is not None and versions is not None
        if self._client is not None and self._engine is not None:
            self.spawn(Scrub(self._client, self._engine.resident).run(), "scrub")
        if self.role == "actor":
            self.spawn(versions.follow(self.recipe.run.stall_timeout_s), "weights")
        while True:
            if serving.held or not self._leases.empty():
                lease = await self._leases.get()
            else:
                lease = await self.wait_for("broker: a lease", self._leases.get(), float("inf"))
            if (lease.lease_id, lease.attempt) not in self._queued:
                continue  # refused meanwhile
            self._queued.discard((lease.lease_id, lease.attempt))
            if self.stopping:
                self._send_back(lease)  # it came with the drain
                continue
            if self.idle():
                self.progress(f"{lease_name(lease.lease_id)} of {lease.domain} begun")
            held = serving.take(lease)
            held.task = self.spawn(serving.serve(held), f"serve {lease_name(lease.lease_id)}")

    def idle(self) -> bool:
        """No lease is being served."""
        return self._serving is None or not self._serving.held

    async def drain(self, reason: str) -> None:
        """Return what is held: generation stops at once, verdicts under way get a moment, the rest goes back."""
        serving = self._serving
        if serving is None:
            return
        while not self._leases.empty():
            lease = self._leases.get_nowait()
            if (lease.lease_id, lease.attempt) in self._queued:
                self._queued.discard((lease.lease_id, lease.attempt))
                self._send_back(lease)
        for held in list(serving.held.values()):
            serving.drain(held)
        tasks = [held.task for held in serving.held.values() if held.task is not None]
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=GRADING_GRACE_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=GRADING_GRACE_S)
        for held in list(serving.held.values()):
            serving.give_back(held)
        with contextlib.suppress(PeerLost):
            await self.peer.flush(max(self.drain_timeout_s / 2, 1.0))

    async def close(self, exit_code: int, reason: str) -> None:
        """Domain threads and engine end, then goodbye."""
        if self._threads is not None:
            self._threads.close()
        if self._engine is not None:
            await self._engine.close()
        await super().close(exit_code, reason)

    def holding(self) -> Holding:
        """The attempts that wait or run here."""
        held = self._serving.held.values() if self._serving is not None else ()
        running = [(h.lease.lease_id, h.lease.attempt) for h in held if not h.refused]
        return Holding(self.peer.broker_epoch, attempts=[*self._queued, *running])

    def resynced(self, welcome: Welcome) -> None:
        """Jobs were in the broker's memory only: ask again."""
        super().resynced(welcome)
        if self._grader is not None:
            self._grader.resend()

    def bulk_resynced(self) -> None:
        """So were the bundle and weights on their way."""
        if self._client is not None:
            self._client.resynced()
        if self._bundle is not None and not self._bundle.done():
            self.peer.post(NeedBundle())

    def standing(self) -> tuple[State, str]:
        """Without an engine that answers it is as good as starting: it gets no leases meanwhile."""
        trouble = self._engine.trouble if self._engine is not None else "starting"
        now = time.monotonic()
        self._down_since = (self._down_since or now) if trouble else None
        self.meter.set(metrics.ACTOR_STARTING, now - self._down_since if self._down_since else 0.0)
        if trouble and self.state == "READY":
            return "STARTING", "; ".join(filter(None, (f"engine: {trouble}", self.waiting_for)))
        return super().standing()

    def tick(self) -> None:
        """Metrics of engine, weights and grading; a dead engine ends the daemon."""
        engine, grader, client = self._engine, self._grader, self._client
        if engine is not None and grader is not None and client is not None:
            if engine.failure is not None:
                self.fail(engine.failure)
            now = {
                metrics.ACTOR_TOKENS: engine.counts.sampled_tokens,
                metrics.ACTOR_WAIT: engine.counts.idle_s,
                metrics.ACTOR_SWAPS: engine.counts.swaps,
                metrics.ACTOR_RESEEDS: client.reseeds.total(),
                metrics.ACTOR_FETCHED: client.fetched_nbytes,
                metrics.ACTOR_JOBS: grader.counts.jobs,
                metrics.ACTOR_CACHE_HITS: grader.counts.shared,
                metrics.ACTOR_RESTARTS: engine.counts.restarts,
                metrics.ACTOR_RETRACTIONS: engine.counts.retractions,
            }
            for (name, value), before in zip(now.items(), self._counted, strict=True):
                self.meter.add(name, value - before)
            self._counted = tuple(now.values())
            self.meter.set(metrics.ACTOR_ROWS, engine.counts.rows)
            self.meter.set(metrics.ACTOR_PAUSE, engine.counts.last_pause_s)
            if client.last is not None:
                self.meter.set(metrics.ACTOR_FETCH_TIME, client.last.transfer_s)
                self.meter.set(metrics.ACTOR_STAGE_TIME, client.last.stage_s)
            for reason, count in (client.reseeds - self._reseeds).items():
                self.meter.add(metrics.ACTOR_RESEED_REASONS.replace("*", reason), count)
            self._reseeds = client.reseeds.copy()
        super().tick()

    # ------------------------------------------------------------ messages

    def _on_bundle(self, bundle: Bundle, frames: list[memoryview]) -> None:
        files = unpack_bundle(bundle, frames)
        if self._bundle is not None and not self._bundle.done():
            self._bundle.set_result(files)

    def _on_job_done(self, done: JobDone, frames: list[memoryview]) -> None:
        if self._grader is not None:
            self._grader.on_done(done, frames)

    def _on_lease(self, lease: Lease, frames: list[memoryview]) -> None:
        if self.stopping:
            return self._send_back(lease)
        self._queued.add((lease.lease_id, lease.attempt))
        self._leases.put_nowait(lease)

    def _send_back(self, lease: Lease) -> None:
        self.peer.post(Return(lease.lease_id, lease.attempt, "drain", LEAVING))

    def _on_refused(self, refused: SampleRefused, frames: list[memoryview]) -> None:
        key = (refused.lease_id, refused.attempt)
        held = self._serving.held.get(key) if self._serving is not None else None
        if key not in self._queued and (held is None or held.refused):
            return  # it has ended already
        log(f"{lease_name(refused.lease_id)} attempt {refused.attempt} is abandoned: {refused.reason}")
        self._queued.discard(key)
        if held is not None and self._serving is not None:
            self._serving.refuse(held)

    def _on_commit(self, version: Version) -> None:
        self.version = version

    # ------------------------------------------------------------ weights and domains

    async def _weights_ready(self, lease: Lease) -> None:
        """A demonstration needs no weights; an evaluation exactly its version; a rollout a new enough one."""
        assert self._versions is not None
        deadline_s = self.recipe.pacing.weights_timeout_s
        if lease.lane == "demo":
            return
        if lease.pinned_version is not None:
            await self._versions.exactly(lease.pinned_version, deadline_s)
        else:
            await self._versions.at_least(lease, deadline_s)

    async def _load(self, name: str, text: Text, stops: tuple[int, ...]) -> Domain | DomainRefused:
        """Load and check a domain on its thread. What comes out is what its leases wait for."""
        config, threads, grader = by_name(self.recipe)[name], self._threads, self._grader
        assert threads is not None and grader is not None
        bound = grader.bound(0, name)

        async def make() -> Domain:
            return load_domain(config)

        try:
            domain = await threads.run(name, f"load {name}", make, limit_s=LOAD_LIMIT_S)
            while True:
                try:
                    await threads.run(name, f"check {name}", lambda: check_domain(config, domain, text, bound, stops))
                    return domain
                except Failed as error:
                    log(f"domain {name}: its check waits for the sandbox: {error}")
                    await asyncio.sleep(RETRY_S)
        except (DomainRefused, Stuck) as error:
            return self._refuse(name, DomainRefused(str(error)))

    def _refuse(self, name: str, refused: DomainRefused) -> DomainRefused:
        log(f"domain {name} is refused: {refused}")
        self.meter.add(metrics.ACTOR_TASK_ERRORS)
        others = [task for other, task in self._domains.items() if other != name]
        if all(task.done() and isinstance(task.result(), DomainRefused) for task in others):
            self.fail(ConfigError(f"no domain of the recipe can be used here; the last was refused: {refused}"))
        return refused
