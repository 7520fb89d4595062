"""The broker as a process: sockets and clocks around `BrokerCore`, `Ledger`, `WeightDesk` and `BundleStore`.

Every loop turn is one batch: its messages become events, the core's changes and the accepted samples become one
transaction, and only then are messages acknowledged and actions carried out. So nothing that a peer was told can be
lost by killing this process. Broken messages close their sender and nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

from temper.broker import events as ev
from temper.broker import stats
from temper.broker.assembly import Unsendable, build_group
from temper.broker.bundle import BundleStore
from temper.broker.core import BrokerCore
from temper.broker.ledger import Accepted, Ledger
from temper.broker.validate import BadSamples, check
from temper.broker.weight_desk import WeightDesk
from temper.broker.weights import WeightStore
from temper.common import metrics, schema
from temper.common.config import Recipe
from temper.common.daemon import Daemon
from temper.common.errors import ConfigError, PeerLost, ProtocolError, RunFailed, TemperError
from temper.common.keys import BrokerKeys
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.peer_daemon import metrics_of
from temper.common.pump import Delivery, PeerId, Router
from temper.common.recipe import to_json
from temper.common.reports import PeerStatus, encode
from temper.common.schema import Hello, Refused, Welcome, pack_frames

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
EXIT_ERRORS: dict[int, type[TemperError]] = {1: TemperError, 2: RunFailed, 3: PeerLost}


class Broker(Daemon):
    """One run's broker."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, address: str, *, resume: bool = False, keys: BrokerKeys | None = None
    ) -> None:
        super().__init__("broker", "broker", drain_timeout_s=recipe.run.drain_timeout_s + 5.0)
        self.recipe, self.run_dir, self.address, self.resume, self.keys = recipe, run_dir, address, resume, keys
        self.core = BrokerCore(recipe)
        self.meter = Meter("broker")
        self.started = time.monotonic()
        self.names: dict[PeerId, str] = {}  # peers on the control socket -> their key in the core
        self.ids: dict[str, PeerId] = {}
        self.hellos: dict[str, Hello] = {}
        self.beats: dict[str, schema.Heartbeat] = {}
        self.samples: Counter[str] = Counter()
        self.sampled_tokens = 0.0
        self._actions: list[ev.Action] = []
        self._steered = False
        self._joins: list[tuple[PeerId, Hello]] = []
        self._jobs: dict[str, tuple[bytes, list[Any]]] = {}  # job id -> its message, until a verdict is there
        self._verdicts: dict[str, list[Any]] = {}
        self._digests: dict[str, tuple[str, str]] = {}  # domain module -> (digest, who named it first)
        self._seen: Counter[str] = Counter()
        self._broken = False
        self._serving = False
        self._emptied = asyncio.Event()

    # ------------------------------------------------------------ life

    async def setup(self) -> None:
        """Open the books, then the sockets."""
        self.finished: asyncio.Future[ev.Finish] = asyncio.get_running_loop().create_future()
        ledger_dir = self.run_dir / "ledger"
        if (ledger_dir / "ledger.sqlite").exists() and not self.resume:
            raise ConfigError(
                f"{self.run_dir} holds a run already: go on with it by --resume, or choose another --run DIR"
            )
        self.ledger = Ledger(ledger_dir, None, self.recipe.run.durability)
        restored = self.ledger.restore()
        if restored is not None:
            self.core.load(restored.state, restored.leases, restored.groups, time.monotonic())
            log(
                f"resuming run {self.ledger.run_id} at version {self.core.version}: {len(restored.groups)} groups in the ledger"
            )
        self.recipe_json = to_json(self.recipe)
        self.bundle = BundleStore(self.run_dir / "bundle")
        store = WeightStore(self.run_dir / "weights", self.ledger.run_id, sync=self.ledger.durable)
        self.control = Router(
            self.address,
            "control",
            self._on_control,
            self._on_control_closed,
            welcome=self._welcome_control,
            keys=self.keys,
            silence_s=SILENCE_S,
        )
        self.bulk = Router(
            self.address,
            "bulk",
            self._on_bulk,
            self._on_bulk_closed,
            welcome=self._welcome_bulk,
            on_room=self._on_room,
            keys=self.keys,
            epoch=self.control.epoch,
        )
        self.weights = WeightDesk(
            store,
            send=self.bulk.send,
            backlog=self.bulk.backlog,
            acknowledge=self.bulk.acknowledge,
            announce=self._announce_version,
        )
        self.weights.needed = self._needed_versions
        (self.run_dir / "broker.addr").write_text(self.address + "\n", encoding="utf-8")
        self._serving = True
        self.spawn(self.weights.run(), "weights")

    async def main(self) -> None:
        """Serve until the learner says that the run is over."""
        over = await self.finished
        await self._drain_peers(over.reason)
        if over.exit_code:
            error = EXIT_ERRORS.get(over.exit_code, TemperError)(over.reason)
            error.exit_code = over.exit_code
            raise error

    async def drain(self, reason: str) -> None:
        """Everybody drains; groups and leases stay in the ledger for a resume."""
        await self._drain_peers(reason)

    async def close(self, exit_code: int, reason: str) -> None:
        """Close the books last."""
        if not self._serving:
            return
        self._serving = False
        self.control.close()
        self.bulk.close()
        if not self._broken:
            self.ledger.record(self.core.changes())
            self.ledger.close()
        with contextlib.suppress(OSError):
            (self.run_dir / "broker.addr").unlink()

    async def _drain_peers(self, reason: str) -> None:
        self._take(ev.Closing())
        self._settle()
        deadline_s = self.recipe.run.drain_timeout_s
        for key, peer in self.ids.items():
            if self.hellos[key].role != "status":
                self.control.send(peer, schema.Drain(reason, deadline_s))
        while names := self._guests():
            self._emptied.clear()
            try:
                await self.wait_for(f"{', '.join(names)}: goodbye", self._emptied.wait(), deadline_s + 2.0)
            except PeerLost:
                log(f"closing without a goodbye from {', '.join(self._guests())}")
                return

    def _guests(self) -> list[str]:
        return [hello.name for hello in self.hellos.values() if hello.role != "status"]

    def tick(self) -> None:
        """Deadlines, books in memory mode, metrics."""
        self._take(ev.Tick())
        self._settle(force=True)
        self._report()

    def pulse(self) -> None:
        """What the broker's own heartbeats say."""
        if self._serving:
            phase = self.core.phase.phase if self.core.phase is not None else ""
            self.control.beat(self.state, phase, "; ".join(stats.waits(self.core)))

    # ------------------------------------------------------------ peers

    def _welcome_control(self, peer: PeerId, hello: Hello) -> Welcome | Refused:
        refusal = self._refusal(hello)
        if refusal is not None:
            log(f"{hello.role} {hello.name} is refused: {refusal.reason}")
            return refusal
        self._joins.append((peer, hello))
        asyncio.get_running_loop().call_soon(self._settle)
        return Welcome(self.ledger.run_id, self.recipe_json, self.core.lineage or 0, HEARTBEAT_S)

    def _welcome_bulk(self, peer: PeerId, hello: Hello) -> Welcome | Refused:
        refusal = self._refusal(hello, bulk=True)
        return refusal or Welcome(self.ledger.run_id, "", self.core.lineage or 0, HEARTBEAT_S)

    def _refusal(self, hello: Hello, bulk: bool = False) -> Refused | None:
        if hello.run_id not in (None, self.ledger.run_id):
            return Refused("run_mismatch", f"this is run {self.ledger.run_id}, the peer belongs to run {hello.run_id}")
        if bulk:
            return None
        if hello.role == "broker":
            return Refused("role_taken", "this run has its broker: relays are not served by this version")
        learner = self.core.learner
        if hello.role == "learner" and learner is not None and self.hellos[learner].session != hello.session:
            return Refused("role_taken", f"this run already has a learner: {self.hellos[learner].name}")
        for module, digest in hello.domains.items():
            known, by = self._digests.setdefault(module, (digest, hello.name))
            if known != digest:
                return Refused(
                    "domain",
                    f"domain module {module} has digest {digest} here, {known} at {by}: install the same version on both",
                )
        return None

    def _admit(self) -> None:
        """Tell the core about those who were welcomed since the last turn."""
        joins, self._joins = self._joins, []
        for peer, hello in joins:
            key = peer.hex()
            self.names[peer], self.ids[key], self.hellos[key] = key, peer, hello
            if hello.role == "status":
                continue
            log(f"{hello.role} {hello.name} joined (pid {hello.pid} on {hello.host or 'this host'})")
            slots = hello.slots or (self.recipe.engine.leases_in_flight if hello.role in ("actor", "eval") else 0)
            self._take(ev.Joined(key, hello.role, hello.name, slots, returning=hello.received > 0))
            if self.weights.newest is not None and hello.role in ("actor", "eval", "learner"):
                self.control.send(peer, schema.NewVersion(self.weights.newest))
            if self.core.closing:
                self.control.send(peer, schema.Drain("the run is over", self.recipe.run.drain_timeout_s))

    def _gone(self, peer: PeerId, reason: str, clean: bool = False) -> None:
        key = self.names.pop(peer, None)
        self._joins = [join for join in self._joins if join[0] != peer]
        if key is None:
            return
        hello = self.hellos.pop(key)
        del self.ids[key]
        self.beats.pop(key, None)
        if hello.role == "status":
            return
        log(f"{hello.role} {hello.name} left: {reason}")
        if not self._guests():
            self._emptied.set()
        self.weights.closed(peer)
        self.bundle.waiting.pop(peer, None)
        self._take(ev.Left(key, reason, clean))
        asyncio.get_running_loop().call_soon(self._settle)

    def _on_control_closed(self, peer: PeerId, reason: str) -> None:
        self.bulk.forget(peer, reason)
        self._gone(peer, reason)

    def _on_bulk_closed(self, peer: PeerId, reason: str) -> None:
        self.control.forget(peer, reason)
        self._gone(peer, reason)

    # ------------------------------------------------------------ control messages

    def _on_control(self, batch: list[Delivery]) -> None:
        if self._broken:
            return
        self._admit()
        taken: dict[PeerId, int] = {}
        for delivery in batch:
            key = self.names.get(delivery.peer)
            if key is None:
                continue
            try:
                self._handle(key, delivery)
            except ProtocolError as error:
                self.control.refuse(delivery.peer, "malformed", str(error))
                continue
            if delivery.sequence:
                taken[delivery.peer] = delivery.sequence
        self._settle(taken)

    def _handle(self, key: str, delivery: Delivery) -> None:
        body = delivery.body
        match body:
            case schema.Heartbeat():
                self.beats[key] = body
                draining = body.state == "DRAINING"
                record = self.core.peers.get(key)
                if record is not None and record.draining != draining:
                    self._take(ev.Availability(key, draining))
            case schema.Metrics():
                self._relay(body)
            case schema.StatusRequest():
                self.control.send(delivery.peer, schema.StatusReport(), [encode(self.status())])
            case schema.Goodbye():
                self.control.acknowledge(delivery.peer, delivery.sequence)
                self.control.forget(delivery.peer, "goodbye")
                self.bulk.forget(delivery.peer, "goodbye")
                self._gone(delivery.peer, f"goodbye ({body.reason})", clean=body.exit_code == 0)
            case schema.Samples():
                self._samples(key, body, delivery)
            case schema.Job():
                if self.hellos[key].role in ("actor", "eval"):
                    self._jobs.setdefault(body.job_id, (delivery.raw_meta, delivery.frames))
                self._take(ev.Received(key, body, delivery.header.size))
            case schema.JobDone():
                self._verdicts[body.job_id] = delivery.frames
                self._take(ev.Received(key, body))
            case _:
                self._steered = True
                self._take(ev.Received(key, body))

    def _samples(self, key: str, body: schema.Samples, delivery: Delivery) -> None:
        try:
            check(body, delivery.frames)
        except BadSamples as error:
            self.samples["refused"] += len(body.samples)
            log(f"{self.hellos[key].name}: samples of lease {body.lease_id} are refused: {error}")
            self._actions.append(ev.RefuseAttempt(key, body.lease_id, body.attempt, str(error)))
            self._take(ev.Received(key, schema.Return(body.lease_id, body.attempt, "task", str(error))))
            return
        nbytes = delivery.header.size - len(delivery.raw_meta)
        event = ev.SamplesArrived(key, body.lease_id, body.attempt, tuple(body.samples), nbytes)
        for action in self._take(event):
            if isinstance(action, ev.Store):
                stored = self.ledger.accept(body, delivery.frames)
                if not isinstance(stored, Accepted):
                    raise AssertionError(f"the ledger does not agree with the core about {body.lease_id}: {stored}")
                self.samples["accepted"] += len(body.samples)
            elif isinstance(action, ev.RefuseAttempt):
                self.samples["refused"] += len(body.samples)

    def _take(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.on(event, time.monotonic())
        self._actions += actions
        return actions

    # ------------------------------------------------------------ one turn: write, acknowledge, act

    def _settle(self, taken: dict[PeerId, int] | None = None, force: bool = False) -> None:
        """Write what this turn brought, then acknowledge it and carry its actions out."""
        if self._broken:
            return
        self._admit()
        actions, self._actions = self._actions, []
        try:
            self.ledger.release(i for a in actions if isinstance(a, ev.Release) for i in a.group_ids)
            changed = self._steered or self.core.dirty
            if changed and (force or self.ledger.durable):
                begun = time.perf_counter()
                self.ledger.record(self.core.changes())
                self.ledger.commit()
                self._steered = False
                self.meter.add(metrics.BROKER_COMMIT, time.perf_counter() - begun)
                self.meter.add(metrics.BROKER_COMMITS)
            elif not self.ledger.durable:
                self.ledger.commit(force=False)
        except TemperError as error:
            self._broken = True
            self.fail(error)
            return
        for peer, sequence in (taken or {}).items():
            self.control.acknowledge(peer, sequence)
        for action in actions:
            self._act(action)
        self._verdicts.clear()

    def _act(self, action: ev.Action) -> None:
        match action:
            case ev.SendLease(peer, lease):
                self._send(peer, lease)
            case ev.Deliver(peer, group_id, void):
                self._deliver(peer, group_id, void)
            case ev.RefuseAttempt(peer, lease_id, attempt, reason):
                self._send(peer, schema.SampleRefused(lease_id, attempt, reason[:1000]))
            case ev.RefusePeer(peer, code, reason):
                if peer in self.ids:
                    self.control.refuse(self.ids[peer], code, reason)
            case ev.AssignJob(worker, job_id):
                meta, frames = self._jobs[job_id]
                if worker in self.ids:
                    self.control.forward(self.ids[worker], schema.Job.KIND, meta, frames)
            case ev.CancelJob(worker, job_id):
                self._send(worker, schema.JobCancel(job_id))
            case ev.ForwardVerdict(requester, done):
                self._send(requester, done, self._verdicts.get(done.job_id, ()))
            case ev.FailJob(requester, job_id, reason):
                verdict = schema.Verdict("infra", detail=reason)
                self._send(requester, schema.JobDone(job_id, "infra"), pack_frames(verdict))
            case ev.DropJob(job_id):
                self._jobs.pop(job_id, None)
            case ev.Fail(reason, exit_code):
                self._fail_run(reason, exit_code)
            case ev.Finish():
                self._finish(action)
            case ev.Note(text):
                log(text)

    def _send(self, key: str, body: schema.Body, frames: Any = ()) -> None:
        peer = self.ids.get(key)
        if peer is not None:
            self.control.send(peer, body, frames)

    def _deliver(self, key: str, group_id: int, void: str | None) -> None:
        record = self.core.leases.leases.get(group_id)
        if record is None:
            return  # given up in the same turn
        try:
            body, frames = build_group(record, self.ledger.read(group_id), self.core.lineage or 0, void)
            self._send(key, body, frames)
        except Unsendable as error:
            log(f"group {group_id} fits no message: {error}")
            if record.lane == "eval":
                self._send(key, *build_group(record, [], self.core.lineage or 0, f"it fits no message: {error}"))
                return
            self._take(ev.Unsendable(group_id))
            asyncio.get_running_loop().call_soon(self._settle)

    def _fail_run(self, reason: str, exit_code: int) -> None:
        """The learner ends the run; without one, or if it does not answer, the broker does."""
        learner = self.core.learner
        if learner is not None:
            self._send(learner, schema.RunFailed(reason, exit_code))
        delay_s = self.recipe.run.drain_timeout_s if learner is not None else 0.0
        over = ev.Finish(reason, exit_code)
        asyncio.get_running_loop().call_later(delay_s, self._finish, over)

    def _finish(self, over: ev.Finish) -> None:
        if not self.finished.done():
            self.finished.set_result(over)

    # ------------------------------------------------------------ bulk

    def _on_bulk(self, batch: list[Delivery]) -> None:
        if self._broken:
            return
        for delivery in batch:
            try:
                self._handle_bulk(delivery)
            except ProtocolError as error:
                self.bulk.refuse(delivery.peer, "malformed", str(error))
            except TemperError as error:
                self._broken = True
                self.fail(error)
                return

    def _handle_bulk(self, delivery: Delivery) -> None:
        peer, body = delivery.peer, delivery.body
        hello = self.bulk.peers.get(peer)
        if hello is None:
            return
        if isinstance(body, schema.Publish | schema.Chunk | schema.Bundle) and hello.role != "learner":
            raise ProtocolError(f"{type(body).__name__} came from a peer of role {hello.role}")
        if isinstance(body, schema.Publish | schema.Chunk | schema.Fetch):
            self.weights.take(peer, body, delivery.frames, delivery.sequence)
            return  # acknowledged by the desk
        if isinstance(body, schema.Bundle):
            self.bundle.put(body, delivery.frames)
            waiting, self.bundle.waiting = list(self.bundle.waiting), {}
            for other in waiting:
                self.bulk.send(other, body, self.bundle.frames)
        elif isinstance(body, schema.NeedBundle):
            if self.bundle.body is not None:
                self.bulk.send(peer, self.bundle.body, self.bundle.frames)
            else:
                self.bundle.waiting[peer] = None
        else:
            raise ProtocolError(f"{type(body).__name__} is not for the broker")
        self.bulk.acknowledge(peer, delivery.sequence)

    def _on_room(self, peer: PeerId) -> None:
        self.weights.room(peer)

    def _announce_version(self, version: schema.Version) -> None:
        for key, hello in self.hellos.items():
            if hello.role in ("actor", "eval", "learner"):
                self.control.send(self.ids[key], schema.NewVersion(version))

    def _needed_versions(self) -> tuple[list[schema.Version], list[int]]:
        live = [beat.version for beat in self.beats.values() if beat.version is not None]
        leases = (self.core.leases.leases.get(i) for i in self.core.groups.active["eval"])
        return live, [r.pinned_version for r in leases if r is not None and r.pinned_version is not None]

    # ------------------------------------------------------------ reports

    def status(self) -> Any:
        """`RunStatus` now."""
        facts = stats.Facts(
            self.ledger.run_id,
            self.recipe.run.name,
            time.monotonic() - self.started,
            self.samples,
            int(self.sampled_tokens),
        )
        peers = {
            key: PeerStatus(
                h.name, h.role, host=h.host, pid=h.pid, silent_s=round(self.control.heard(self.ids[key]), 3)
            )
            for key, h in self.hellos.items()
            if h.role != "status"
        }
        return stats.run_status(self.core, facts, self.beats, peers)

    def _relay(self, body: schema.Metrics) -> None:
        self.sampled_tokens += body.counters.get(metrics.ACTOR_TOKENS, 0.0)
        if self.core.learner is not None:
            self._send(self.core.learner, body)

    def _report(self) -> None:
        """The broker's own metrics of this tick, to the learner."""
        core, meter = self.core, self.meter
        counts = core.groups.counts["train"]
        meter.set(metrics.BROKER_QUEUED, counts["queued"])
        meter.set(metrics.BROKER_QUEUED_BYTES, core.groups.nbytes()["queued"])
        meter.set(metrics.BROKER_LEASED, counts["leased"])
        meter.set(metrics.BROKER_TRAINED, counts["trained"])
        meter.set(metrics.BROKER_IN_FLIGHT, core.leases.counts["train"]["in flight"])
        meter.set(metrics.BROKER_JOBS_WAITING, core.jobs.waiting)
        meter.set(metrics.BROKER_JOBS_RUNNING, len(core.jobs.jobs) - core.jobs.waiting)
        meter.set(metrics.BROKER_PEERS, len(self.hellos))
        for reason, n in core.groups.voids["train"].items():
            meter.set(metrics.BROKER_VOID.replace("*", reason.replace("/", "-")), n)
        totals = {
            metrics.BROKER_EXPIRED: core.leases.attempts["expired"],
            metrics.BROKER_RETURNED: core.leases.attempts["returned"],
            metrics.BROKER_ACCEPTED: self.samples["accepted"],
            metrics.BROKER_REFUSED: self.samples["refused"],
            metrics.BROKER_SEGMENT_BYTES: self.ledger.payloads.segments.written_bytes,
            metrics.BROKER_WEIGHTS_STORED: self.weights.stored_nbytes,
            metrics.BROKER_WEIGHTS_SERVED: self.weights.served_nbytes,
        }
        totals |= {metrics.BROKER_OUTCOMES.replace("*", name): n for name, n in core.jobs.outcomes.items()}
        for name, total in totals.items():
            meter.add(name, total - self._seen[name])
            self._seen[name] = total
        for message in metrics_of("broker", meter):
            self._relay(message)
