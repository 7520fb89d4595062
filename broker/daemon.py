"""The broker as a process: opens the books and the sockets, wires `ControlDesk` and `BulkDesk` to them, ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec
from temper.broker import events as ev
from temper.broker import stats
from temper.broker.bulk import BulkDesk
from temper.broker.bundle import BundleStore
from temper.broker.control import LAZY, TOLD_READY, ControlDesk
from temper.broker.core import BrokerCore
from temper.broker.guests import Guests
from temper.broker.ledger import Ledger
from temper.broker.succession import Succession
from temper.broker.weight_desk import WeightDesk
from temper.broker.weights import WeightStore
from temper.common import metrics, schema
from temper.common.budget import Budget
from temper.common.config import Recipe
from temper.common.credit import LARGEST_BYTES
from temper.common.daemon import Daemon
from temper.common.errors import ConfigError, PeerLost, RunFailed, TemperError
from temper.common.keys import BrokerKeys
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.peer_daemon import metrics_of
from temper.common.process import uncollected
from temper.common.pump import PeerId, Router
from temper.common.recipe import to_json
from temper.common.recipe_derived import io_threads, leases_held
from temper.common.reports import PeerStatus, encode
from temper.common.schema import Hello, Refused, Role, Welcome
from temper.common.sockets import use_io_threads

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
CLOSE_S = 30.0
ADDRESS_FILE = "broker.addr"
UNDER_WAY_BYTES = 96 * 1024 * 1024
"""From all that send samples, and as much from everybody else: samples that wait for the disk hold up nobody else."""
SAMPLE: tuple[Role, ...] = ("actor", "eval")
FOLLOW_WEIGHTS: tuple[Role, ...] = ("actor", "eval", "learner", "broker")  # who hears of new versions; "broker": relays
EXIT_ERRORS: dict[int, type[TemperError]] = {1: TemperError, 2: RunFailed, 3: PeerLost}


class Broker(Daemon):
    """One run's broker."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, address: str, *, resume: bool = False, keys: BrokerKeys | None = None
    ) -> None:
        super().__init__("broker", "broker", drain_timeout_s=recipe.run.drain_timeout_s + 5.0)
        self.recipe, self.run_dir, self.address, self.resume, self.keys = recipe, run_dir, address, resume, keys
        self.recipe_json = to_json(recipe)
        self.core = BrokerCore(recipe)
        self.meter = Meter("broker")
        self.started = time.monotonic()
        self.trim_every_s = 30.0
        self.many_messages = True
        self._sampling, self._others = Budget(UNDER_WAY_BYTES, LARGEST_BYTES), Budget(UNDER_WAY_BYTES, LARGEST_BYTES)
        self._seen: dict[str, float] = {}
        self._joins: list[tuple[PeerId, Hello]] = []
        self._succession = Succession()
        self._serving = False
        self._emptied = asyncio.Event()

    # ------------------------------------------------------------ life

    async def setup(self) -> None:
        """Open the books, then the sockets."""
        self.finished: asyncio.Future[ev.Finish] = asyncio.get_running_loop().create_future()
        use_io_threads(io_threads(self.recipe))
        with uncollected():  # nothing of what a ledger holds is garbage
            self.ledger = self._open_ledger()
        self.guests = Guests(self.ledger.run_id)
        self.control = ControlDesk(
            self.core,
            self.ledger,
            self.guests,
            self.meter,
            finish=self._finish,
            broken=self.fail,
            status=self._status,
            fail_after_s=self.recipe.run.drain_timeout_s,
        )
        self.control.gone = self._gone
        self.bulk = BulkDesk(BundleStore(self.run_dir / "bundle"), self.guests, self.fail)
        store = WeightStore(self.run_dir / "weights", self.ledger.run_id, sync=self.ledger.durable)
        self._bind()
        self.weights = self.bulk.weights = WeightDesk(
            store,
            send=self.bulk.router.send,
            backlog=self.bulk.router.backlog,
            acknowledge=self.bulk.router.acknowledge,
            announce=self._announce_version,
        )
        self.weights.needed = self._needed_versions
        (self.run_dir / ADDRESS_FILE).write_text(self.address + "\n", encoding="utf-8")
        self._serving = True
        self.spawn(self.weights.run(), "weights")

    def _open_ledger(self) -> Ledger:
        folder = self.run_dir / "ledger"
        if (folder / "ledger.sqlite").exists() and not self.resume:
            raise ConfigError(
                f"{self.run_dir} holds a run already: go on with it by --resume, or choose another --run DIR"
            )
        ledger = Ledger(folder, None, self.recipe.run.durability)
        restored = ledger.restore()
        if restored is not None:
            self.core.load(restored.state, restored.leases, restored.groups, time.monotonic())
            self.core.letters.extend(restored.letters)
            groups = f"{len(restored.groups)} groups in the ledger"
            log(f"resuming run {ledger.run_id} at version {self.core.version}: {groups}")
        return ledger

    def _bind(self) -> None:
        self.control.router = Router(
            self.address,
            "control",
            self._on_control,
            self._on_control_closed,
            welcome=self._welcome,
            keys=self.keys,
            lazy=LAZY,
            budget_of=lambda hello: self._sampling if hello.role in SAMPLE else self._others,
            silence_s=SILENCE_S,
        )
        self.bulk.router = Router(
            self.address,
            "bulk",
            self.bulk.on_batch,
            self._on_bulk_closed,
            welcome=self.bulk.welcome,
            on_room=self.bulk.on_room,
            keys=self.keys,
            epoch=self.control.router.epoch,
        )

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
        await self.wait_for("the disk: the last transaction", self.control.settled(), CLOSE_S)
        self.control.router.close()
        self.bulk.router.close()
        self.control.close()
        with contextlib.suppress(OSError):
            (self.run_dir / ADDRESS_FILE).unlink()

    async def _drain_peers(self, reason: str) -> None:
        self.control.take(ev.Closing())
        self.control.settle()
        deadline_s = self.recipe.run.drain_timeout_s
        for peer in self.guests.working():
            self.control.router.send(peer, schema.Drain(reason, deadline_s))
        while names := self.guests.working().values():
            self._emptied.clear()
            try:
                await self.wait_for(f"{', '.join(names)}: goodbye", self._emptied.wait(), deadline_s + 2.0)
            except PeerLost:
                log(f"closing without a goodbye from {', '.join(self.guests.working().values())}")
                return

    def tick(self) -> None:
        """Deadlines, books in memory mode, metrics."""
        self.control.take(ev.Tick())
        self.control.settle(books=True)
        totals = stats.count(self.core, self.control.samples, self.ledger, self.weights)
        for name, total in totals.items():
            self.meter.add(name, total - self._seen.get(name, 0.0))
            self._seen[name] = total
        stats.gauge(self.meter, self.core, len(self.guests))
        for message in metrics_of("broker", self.meter):
            self.control.relay(message)

    def pulse(self) -> None:
        """What the broker's own heartbeats say."""
        if self._serving:
            phase = self.core.phase.phase if self.core.phase is not None else ""
            self.control.router.beat(self.state, phase, "; ".join(stats.waits(self.core)))

    def _finish(self, over: ev.Finish) -> None:
        if not self.finished.done():
            self.finished.set_result(over)

    # ------------------------------------------------------------ peers

    def _welcome(self, peer: PeerId, hello: Hello) -> Welcome | Refused | None:
        refusal = self.guests.refusal(hello)
        present = self.guests.id(self.core.learner or "")
        if refusal is None and hello.role == "learner" and present is not None and self.guests.is_other(present, hello):
            now, silent_s = asyncio.get_running_loop().time(), self.control.router.heard(present)
            verdict, name = self._succession.ask(peer, now, now - silent_s), self.guests.name(present)
            if verdict == "asked":
                log(f"learner {hello.name} waits for the place of {name}, which was heard {silent_s:.1f} s ago")
            if verdict in ("asked", "wait"):
                return None
            if verdict == "free":
                log(f"learner {hello.name} takes the place of {name}, which was not heard for {silent_s:.1f} s")
                reason = f"not heard for {silent_s:.0f} s when a new learner came"
                self.control.left(present, reason)  # before the new one joins, whatever else this turn brings
                self.control.router.refuse(present, "silent", reason)
            else:
                refusal = Refused("role_taken", f"this run already has a learner: {name}")
        if refusal is not None:
            log(f"{hello.role} {hello.name} is refused: {refusal.reason}")
            return refusal
        self._joins.append((peer, hello))
        asyncio.get_running_loop().call_soon(self._admit)
        return Welcome(self.guests.run_id, self.recipe_json, self.core.lineage or 0, HEARTBEAT_S)

    def _admit(self) -> None:
        """Tell the core about those who were welcomed: after their Welcome has left, before their first message."""
        joins, self._joins = self._joins, []
        for peer, hello in joins:
            key = self.guests.add(peer, hello)
            if hello.role == "status":
                continue
            log(f"{hello.role} {hello.name} joined (pid {hello.pid} on {hello.host or 'this host'})")
            slots = hello.slots or leases_held(self.recipe, hello.role)
            self.control.take(
                ev.Joined(
                    key,
                    hello.role,
                    hello.name,
                    slots,
                    returning=hello.known_epoch not in (0, self.control.router.epoch),
                    ready=hello.role not in TOLD_READY,
                )
            )
            if self.weights.newest is not None and hello.role in FOLLOW_WEIGHTS:
                self.control.router.send(peer, schema.NewVersion(self.weights.newest))
            if self.core.closing:
                self.control.router.send(peer, schema.Drain("the run is over", self.recipe.run.drain_timeout_s))
        if joins:
            self.control.settle_soon()

    def _on_control(self, batch: list) -> None:
        self._admit()
        self.control.on_batch(batch)

    def _on_control_closed(self, peer: PeerId, reason: str) -> None:
        self.control.left(peer, reason)

    def _on_bulk_closed(self, peer: PeerId, reason: str) -> None:
        self.control.router.forget(peer, reason)
        self.control.left(peer, reason)

    def _gone(self, peer: PeerId) -> None:
        self.bulk.router.forget(peer, "its control socket is closed")
        self.bulk.left(peer)
        if not self.guests.working():
            self._emptied.set()

    # ------------------------------------------------------------ weights and reports

    def _announce_version(self, version: schema.Version) -> None:
        for peer in self.guests.with_role(*FOLLOW_WEIGHTS):
            self.control.router.send(peer, schema.NewVersion(version))

    def _needed_versions(self) -> tuple[list[schema.Version], list[int]]:
        live = [beat.version for beat in self.guests.beats.values() if beat.version is not None]
        leases = (self.core.leases.leases.get(i) for i in self.core.groups.active["eval"])
        return live, [r.pinned_version for r in leases if r is not None and r.pinned_version is not None]

    def _status(self) -> bytes:
        reported = self.control.reported
        facts = stats.Facts(
            self.guests.run_id,
            self.recipe.run.name,
            time.monotonic() - self.started,
            self.control.samples,
            int(reported.sampled_tokens),
            reported.learner,
        )
        peers = {
            key: self._connection(peer, hello)
            for key, hello in self.guests.hellos.items()
            if hello.role != "status" and (peer := self.guests.id(key)) is not None
        }
        weights = msgspec.structs.replace(
            self.weights.outline,
            stored_bytes=self.weights.stored_nbytes,
            served_bytes=self.weights.served_nbytes,
            needed=self._needs(),
            encode_s=reported.learner.get(metrics.LEARNER_ENCODE_TIME, 0.0),
            publish_s=reported.learner.get(metrics.LEARNER_PUBLISH_TIME, 0.0),
            fetch_s=reported.longest(metrics.ACTOR_FETCH_TIME),
            stage_s=reported.longest(metrics.ACTOR_STAGE_TIME),
            pause_s=reported.longest(metrics.ACTOR_PAUSE),
            reseeds=dict(reported.reseeds),
        )
        return encode(stats.run_status(self.core, facts, self.guests.beats, peers, weights))

    def _connection(self, peer: PeerId, hello: Hello) -> PeerStatus:
        router = self.control.router
        messages, size = router.credit(peer)
        queued, queued_size = router.backlog(peer)
        return PeerStatus(
            hello.name,
            hello.role,
            host=hello.host,
            pid=hello.pid,
            silent_s=round(router.heard(peer), 3),
            via=hello.via,
            credit_messages=messages,
            credit_bytes=size,
            unacked_messages=router.unacknowledged(peer),
            queued_messages=queued,
            queued_bytes=queued_size,
            blocked_bytes=router.blocked(peer),
        )

    def _needs(self) -> dict[str, list[str]]:
        """Who holds or waits for which version: the log keeps the ways from and to these."""
        needs: dict[str, list[str]] = {}
        for key, beat in self.guests.beats.items():
            if beat.version is not None and key in self.guests.hellos:
                version = f"{beat.version.ordinal} {beat.version.digest}"
                needs.setdefault(version, []).append(self.guests.hellos[key].name)
        for ordinal in sorted(set(self._needed_versions()[1])):
            needs.setdefault(str(ordinal), []).append("evaluation")
        return needs
