"""`PeerDaemon`: a daemon that connects out to the broker: learner, actor, evaluator, sandbox worker.

    class Worker(PeerDaemon):
        def subscribe(self, peer):                 # handlers, before the connection is made
            peer.on(Job, self.on_job)
        async def setup(self):                     # connected: self.recipe, self.peer, self.welcome are there
            ...
        async def main(self):                      # READY; see ``daemon``
            ...
        async def drain(self, reason):             # a signal or the broker's Drain: finish or return what you hold
            ...
    sys.exit(run_daemon(Worker("sandbox", "sandbox-1", address)))

Beyond ``daemon``: heartbeats and the meter's full key set every second, the broker's Drain is a drain, its silence or
refusal ends the daemon (exit code 3, or 2 where the configuration is to blame), a Goodbye with the exit code at the end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from temper.common import waiting
from temper.common.config import Recipe
from temper.common.daemon import Daemon
from temper.common.errors import ConfigError, PeerLost
from temper.common.keys import load_peer
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.peer import Peer, new_session
from temper.common.schema import Drain, Hello, Holding, Metrics, Role, State, Welcome

T = TypeVar("T")

METRICS_IN_A_MESSAGE = 400


class PeerDaemon(Daemon):
    """A daemon that connects out to the broker. After `start`: `peer`, `welcome`, `recipe`, `meter`."""

    def __init__(
        self,
        role: Role,
        name: str,
        address: str,
        *,
        key_file: str | None = None,
        slots: int = 0,
        domains: Mapping[str, str] | None = None,
        connect_timeout_s: float = 300.0,
        run_id: str | None = None,
    ) -> None:
        super().__init__(role, name)
        self.address = address
        self.key_file = key_file
        self.connect_timeout_s = connect_timeout_s
        self.hello = Hello(
            role, name, new_session(), run_id, socket.gethostname(), os.getpid(), slots, dict(domains or {})
        )
        self.meter = Meter("actor" if role == "eval" else role)
        self._peer: Peer | None = None
        self._welcome: Welcome | None = None
        self._recipe: Recipe | None = None

    hold_bulk = False  # see `Peer`

    def subscribe(self, peer: Peer) -> None:
        """Override: register handlers with ``peer.on``, before the connection is made."""

    def holding(self) -> Holding:
        """Override: what of the broker's this daemon still has. The broker asks for it after a restart, and takes back
        what is not named: it may never have arrived."""
        return Holding(self.peer.broker_epoch)

    def resynced(self, welcome: Welcome) -> None:
        """The broker restarted and knows us again; what it had acknowledged it still has, the rest went out again. Override
        to send again what only the broker's memory held, after calling this."""
        self.peer.post(self.holding())

    def bulk_resynced(self) -> None:
        """Override: whoever serves weights and the bundle (the broker, or a relay before it) restarted; what was asked of
        it must be asked again."""

    @property
    def peer(self) -> Peer:
        """The connection."""
        return _there(self._peer)

    @property
    def welcome(self) -> Welcome:
        """The broker's answer."""
        return _there(self._welcome)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe, from the broker."""
        return _there(self._recipe)

    async def start(self) -> None:
        """Connect; everything that the broker tells is there afterwards."""
        keys = load_peer(Path(self.key_file)) if self.key_file else None
        self._peer = Peer(self.address, self.hello, keys=keys, hold_bulk=self.hold_bulk)
        self._peer.on(Drain, self._on_drain)
        self._peer.on_resync = self.resynced
        self._peer.on_bulk_resync = self.bulk_resynced
        self.subscribe(self._peer)
        self._welcome = await self._peer.open(self.connect_timeout_s)
        self.spawn(self._watch_broker(self._peer), "broker watch")
        self._recipe = parse_recipe(self._welcome.recipe)
        self.drain_timeout_s = self._recipe.run.drain_timeout_s
        self.stall_timeout_s = self._recipe.run.stall_timeout_s
        log(f"connected to the broker at {self.address}, run {self._welcome.run_id}")

    async def close(self, exit_code: int, reason: str) -> None:
        """Goodbye."""
        if self._peer is not None:
            await self._peer.close(reason[:1000], exit_code)

    def pulse(self) -> None:
        """Heartbeat contents and one tick of metrics."""
        if self._peer is None or self._peer.over or self._welcome is None:
            return
        state, waiting_for = self.standing()
        self._peer.beat(state, self.last_progress[:500], waiting_for[:500], self.version)
        for message in metrics_of(self.name, self.meter):
            if not self._peer.post(message):  # the broker is not there just now: count it with the next tick
                for name, value in message.counters.items():
                    self.meter.add(name, value)

    def standing(self) -> tuple[State, str]:
        """What heartbeats say of this daemon: its state and what it waits for. Override where READY is not the whole truth."""
        return self.state, self.waiting_for

    def _on_drain(self, drain: Drain, frames: list[memoryview]) -> None:
        self.drain_timeout_s = min(self.drain_timeout_s, drain.deadline_s)
        self.stop(drain.reason)

    async def _watch_broker(self, peer: Peer) -> None:
        await waiting.first(peer.lost)  # which is not cancelled with this task
        raise peer.fault or PeerLost("the connection was closed")


def _there(value: T | None) -> T:
    if value is None:
        raise AssertionError("not connected yet: use this from setup() on")
    return value


def parse_recipe(text: str) -> Recipe:
    """The recipe that a broker sent, as JSON."""
    try:
        return msgspec.json.decode(text, type=Recipe)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the broker's recipe does not fit this installation: {error}: install the same version"
        ) from error


def metrics_of(source: str, meter: Meter) -> list[Metrics]:
    """One tick of `meter`, in as many messages as its key set needs."""
    counters, gauges = meter.tick()
    keys = [(True, key) for key in counters] + [(False, key) for key in gauges]
    messages = []
    for start in range(0, max(len(keys), 1), METRICS_IN_A_MESSAGE):
        part = keys[start : start + METRICS_IN_A_MESSAGE]
        messages.append(
            Metrics(source, {k: counters[k] for c, k in part if c}, {k: gauges[k] for c, k in part if not c})
        )
    return messages
