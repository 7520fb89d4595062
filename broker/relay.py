"""The relay: a broker for a far site. Control passes through to the run's broker, weights and the bundle are kept here.

    peers of the site --control--> `Passage` --one line each--> parent (the run's broker, or another relay)
                      --bulk-----> `Mirror`, bundle  <--once--- parent

Guarantees: what `passage` and `mirror` say. It is itself a peer of the run's broker (role "broker"): its heartbeats, its
version and its place are in `temper status`, the end of the run drains it after its site. Its own end leaves the peers of
the site connected to nothing for as long as they can bear (30 s), so that it can be replaced under them. Started by
``temper broker --relay PARENT``.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import msgspec
from temper.broker.bundle import BundleStore
from temper.broker.daemon import ADDRESS_FILE
from temper.broker.mirror import Mirror
from temper.broker.passage import SILENCE_S, Passage
from temper.broker.site import SiteRouter
from temper.broker.weights import WeightStore
from temper.common import metrics
from temper.common.errors import ConfigError, EnvironmentFault, ProtocolError, TemperError
from temper.common.keys import BrokerKeys
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.peer import Peer
from temper.common.peer_daemon import PeerDaemon
from temper.common.pump import Delivery, PeerId
from temper.common.reports import write_atomically
from temper.common.schema import Bundle, Drain, Fetch, Hello, NeedBundle, NewVersion, Refused, Version, Welcome

FACTS_FILE = "relay.json"
HEARTBEAT_S = 1.0


class Facts(msgspec.Struct, frozen=True):
    """What a relay's directory belongs to."""

    run_id: str


def recorded_run(run_dir: Path) -> str | None:
    """The run that `run_dir` has served, None for a new directory; ConfigError if it is something else's."""
    if (run_dir / "ledger").exists():
        raise ConfigError(f"{run_dir} is the directory of a run's broker: choose another --run DIR for the relay")
    try:
        return msgspec.json.decode((run_dir / FACTS_FILE).read_bytes(), type=Facts).run_id
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{run_dir / FACTS_FILE} cannot be read: {error}: choose another --run DIR") from error


class Relay(PeerDaemon):
    """One relay. `address`: where the site finds it; `keys`: whom it lets in, over TCP; `key_file`: its own at the parent."""

    hold_bulk = True

    def __init__(
        self,
        name: str,
        parent: str,
        run_dir: Path,
        address: str,
        *,
        keys: BrokerKeys | None = None,
        key_file: str | None = None,
        connect_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(
            "broker",
            name,
            parent,
            key_file=key_file,
            connect_timeout_s=connect_timeout_s,
            run_id=recorded_run(run_dir),
        )
        self.meter = Meter("relay")
        self.run_dir, self.site_address, self.keys = run_dir, address, keys
        self.trim_every_s = 30.0
        self.many_messages = True
        self._passage: Passage | None = None
        self._mirror: Mirror | None = None
        self._router: SiteRouter | None = None
        self._bundle: BundleStore | None = None
        self._awaiting_bundle = False
        self._run_over = False
        self._emptied = asyncio.Event()
        self._counted: dict[str, float] = {}

    # ------------------------------------------------------------ life

    def subscribe(self, peer: Peer) -> None:
        """The parent's messages to the relay itself."""
        peer.on(NewVersion, lambda body, frames: self._news(body.version))
        peer.on(Bundle, self._on_bundle)

    async def setup(self) -> None:
        """Connected to the parent: open the log, then the site's sockets."""
        _raise_descriptor_limit()
        run_id = self.welcome.run_id
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(self.run_dir / FACTS_FILE, msgspec.json.encode(Facts(run_id)) + b"\n")
        except OSError as error:
            raise EnvironmentFault(f"cannot write {self.run_dir}: {error.strerror}") from error
        durable = self.recipe.run.durability == "full"
        store = WeightStore(self.run_dir / "weights", run_id, sync=durable, backfill=True)
        self._bundle = BundleStore(self.run_dir / "bundle")
        self._router = router = SiteRouter(
            self.site_address,
            "bulk",
            self._on_bulk,
            self._bulk_closed,
            welcome=self._welcome_bulk,
            on_room=self._on_room,
            keys=self.keys,
        )
        router.pass_to(self.peer.address, self.peer.keys)
        self._passage = passage = Passage(
            self.site_address,
            self.peer.address,
            self.name,
            news=self._news,
            left=self._left,
            keys=self.keys,
            parent_keys=self.peer.keys,
        )
        self._mirror = Mirror(self.peer, store, router, live=passage.versions)
        self.spawn(self._mirror.run(), "mirror")
        (self.run_dir / ADDRESS_FILE).write_text(self.site_address + "\n", encoding="utf-8")

    async def drain(self, reason: str) -> None:
        """At the end of the run after everybody here; before, the site stays for a successor."""
        passage = self._passage
        if passage is None:
            return
        if not self._run_over:
            names = passage.working()
            if names:
                log(f"{len(names)} peers of this site wait for this relay's return: {', '.join(names[:8])}")
            return
        while names := passage.working():
            self._emptied.clear()
            what = f"{', '.join(names[:8])}: goodbye"
            await self.wait_for(what, self._emptied.wait(), float("inf"))  # the drain itself has a deadline

    async def close(self, exit_code: int, reason: str) -> None:
        """Goodbye to the parent; the sockets close."""
        await super().close(exit_code, reason)
        if self._passage is not None:
            self._passage.close()
        if self._router is not None:
            self._router.close()
            with contextlib.suppress(OSError):
                (self.run_dir / ADDRESS_FILE).unlink()

    def idle(self) -> bool:
        """Nothing is under way from the parent."""
        return self._mirror is None or not self._mirror.busy

    def pulse(self) -> None:
        """The log's end goes into the heartbeat: the parent keeps the way from there."""
        if self._mirror is not None:
            self.version = self._mirror.desk.newest
        super().pulse()

    def tick(self) -> None:
        """Metrics, progress, bulk connections whose peer is gone."""
        passage, mirror, router = self._passage, self._mirror, self._router
        if passage is None or mirror is None or router is None:
            return
        totals = {
            metrics.RELAY_FETCHED: mirror.desk.stored_nbytes,
            metrics.RELAY_SERVED: mirror.desk.served_nbytes,
            metrics.RELAY_ASKED: mirror.asked,
            metrics.RELAY_PASSED: passage.passed(),
            metrics.RELAY_DROPPED: passage.dropped(),
        }
        for name, total in totals.items():
            self.meter.add(name, total - self._counted.get(name, 0.0))
            self._counted[name] = total
        self.meter.set(metrics.RELAY_PEERS, len(passage.lines))
        roles = ", ".join(f"{count} {noun}" for noun, count in sorted(passage.roles().items()) if noun != "status")
        fetched, served = mirror.desk.stored_nbytes / 1e6, mirror.desk.served_nbytes / 1e6
        progress = f"site of {roles or 'nobody'}; weights: {fetched:.1f} MB fetched, {served:.1f} MB served"
        if progress != self.last_progress:
            self.progress(progress)
        for peer in list(router.peers):
            if router.heard(peer) > SILENCE_S:
                router.forget(peer, f"silent for {SILENCE_S:.0f} s")
                self._bulk_closed(peer, "silent")
        self._emptied.set()
        super().tick()

    def _left(self, peer: PeerId) -> None:
        self._emptied.set()
        if self._router is not None and self._passage is not None and peer not in self._passage.lines:
            self._router.end(peer)

    # ------------------------------------------------------------ the parent

    def _news(self, version: Version) -> None:
        if self._mirror is not None:
            self._mirror.news(version)

    def _on_drain(self, drain: Drain, frames: list[memoryview]) -> None:
        self._run_over = True
        super()._on_drain(drain, frames)

    def bulk_resynced(self) -> None:
        """What was asked of the parent's weight service is asked again."""
        if self._mirror is not None:
            self._mirror.resynced()
        if self._awaiting_bundle:
            self.peer.post(NeedBundle())

    def _on_bundle(self, bundle: Bundle, frames: list[memoryview]) -> None:
        store = self._bundle
        if store is not None:
            self._awaiting_bundle = False
            store.put(bundle, frames)
            waiting, store.waiting = list(store.waiting), {}
            for peer in waiting:
                self._send_bundle(peer)
        self.peer.taken(self.peer.arrival)

    # ------------------------------------------------------------ the site's bulk socket

    def _welcome_bulk(self, peer: PeerId, hello: Hello) -> Welcome | Refused:
        run_id = self.welcome.run_id
        if hello.run_id not in (None, run_id):
            return Refused("run_mismatch", f"this is a relay of run {run_id}, the peer belongs to run {hello.run_id}")
        return Welcome(run_id, "", self.welcome.lineage, HEARTBEAT_S)

    def _on_bulk(self, batch: list[Delivery]) -> None:
        assert self._router is not None
        for delivery in batch:
            try:
                self._take(delivery)
            except ProtocolError as error:
                self._router.refuse(delivery.peer, "malformed", str(error))
            except TemperError as error:
                self.fail(error)
                return

    def _take(self, delivery: Delivery) -> None:
        router, mirror, bundle = self._router, self._mirror, self._bundle
        assert router is not None and mirror is not None and bundle is not None
        peer, body = delivery.peer, delivery.body
        if peer not in router.peers:
            return  # closed within this batch
        if isinstance(body, Fetch):
            mirror.take(peer, body)
        elif isinstance(body, NeedBundle):
            if bundle.body is not None:
                self._send_bundle(peer)
            else:
                bundle.waiting[peer] = None
                if not self._awaiting_bundle:
                    self._awaiting_bundle = True
                    self.peer.post(NeedBundle())
        else:
            raise ProtocolError(f"{type(body).__name__} is not for a relay")
        router.acknowledge(peer, delivery.sequence)

    def _send_bundle(self, peer: PeerId) -> None:
        if self._bundle is not None and self._bundle.body is not None and self._router is not None:
            self._router.send(peer, self._bundle.body, self._bundle.frames)

    def _on_room(self, peer: PeerId) -> None:
        if self._mirror is not None:
            self._mirror.desk.room(peer)

    def _bulk_closed(self, peer: PeerId, reason: str) -> None:
        if self._mirror is not None:
            self._mirror.closed(peer)
        if self._bundle is not None:
            self._bundle.waiting.pop(peer, None)


def _raise_descriptor_limit() -> None:
    """A line is four descriptors: take as many as this host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
