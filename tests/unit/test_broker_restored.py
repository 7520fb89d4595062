"""What of a core survives the broker's death, under random schedules: restored from its ledger after every event, or killed while a
transaction is under way and what may be told ahead of it is told."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from temper.broker import events as ev
from temper.broker.ahead import Ahead
from temper.broker.core import BrokerCore
from temper.broker.ledger import Accepted, Ledger, Transaction
from temper.common import schema
from temper.common.config import Recipe, Run

from tests.unit.broker_kit import Sim, random_world


class Persistent:
    """Keeps a ledger beside a simulation, and now and then replaces the core by one restored from the ledger."""

    def __init__(self, sim: Sim, folder: Path, restart_every: int, lossy: bool) -> None:
        self.sim, self.folder, self.restart_every, self.lossy = sim, folder, restart_every, lossy
        self.ledger = Ledger(folder, "run", cache_bytes=200)
        self.events = self.restarts = 0
        sim.persist = self.persist

    def persist(self, event: ev.Event, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Store):
                assert isinstance(event, ev.SamplesArrived)
                body = schema.Samples(event.lease_id, event.attempt, 0, list(event.samples), [])
                frames = [f"{event.lease_id}:{index}".encode() for index in action.indices]
                assert isinstance(self.ledger.accept(body, frames), Accepted)
            elif isinstance(action, ev.Deliver):
                record = self.sim.core.leases.leases[action.group_id]
                found = [bytes(frame).decode() for _, frames in self.ledger.read(action.group_id) for frame in frames]
                assert sorted(found) == sorted(f"{action.group_id}:{index}" for index in record.have)
            elif isinstance(action, ev.Release):
                self.ledger.release(action.group_ids)
        self.ledger.record(self.sim.core.changes())
        self.ledger.commit()
        if isinstance(event, ev.Tick):
            return  # each restart grants attempts that are out new time, so idle seconds must not restart
        self.events += 1
        if self.events % self.restart_every == 0 and self.sim.core.failed is None and self.sim.finished is None:
            if self.lossy:
                actions[:] = [*(a for a in actions if isinstance(a, ev.Store)), *self.restart(event)]
            else:
                actions += self.restart()
            self.ledger.record(self.sim.core.changes())
            self.ledger.commit()

    def restart(self, event: ev.Event | None = None) -> list[ev.Action]:
        """As after kill -9: nothing but the files counts. With `event`, its actions were never carried out: it was not
        acknowledged, so it is sent again."""
        old = self.sim.core
        self.ledger = Ledger(self.folder, "run", cache_bytes=200)
        restored = self.ledger.restore()
        assert restored is not None
        core = BrokerCore(Recipe(run=Run(seed=7, max_steps=old.max_steps), pacing=old.pacing))
        core.load(restored.state, restored.leases, restored.groups, self.sim.now)
        assert json.dumps(core.save()) == json.dumps(old.save())
        assert core.groups.active == {lane: ids for lane, ids in old.groups.active.items() if ids}
        assert core.groups.groups == old.groups.groups
        for lease_id, lease in core.leases.leases.items():
            changed = [msgspec.structs.replace(each, deadline=0.0) for each in (lease, old.leases.leases[lease_id])]
            assert changed[0] == changed[1]
        sim, actions = self.sim, list[ev.Action]()

        def tell(event: ev.Event) -> None:
            nonlocal actions
            actions += core.on(event, sim.now)

        sim.epoch += event is not None
        for peer in old.peers.values():
            tell(ev.Joined(peer.peer, peer.role, peer.name, peer.slots, returning=event is not None))
        assert not any(isinstance(action, ev.SendLease | ev.Deliver) for action in actions) or event is None
        if isinstance(event, ev.Received | ev.SamplesArrived):
            tell(event)
        for peer in old.peers.values() if event is not None else ():
            if peer.role == "learner":
                asked = {"train": sim.asked} if sim.asked else {}
                tell(ev.Received(peer.peer, schema.Holding(1, groups=list(sim.batch), demand=asked)))
            else:
                tell(ev.Received(peer.peer, schema.Holding(1, attempts=sorted(sim.working[peer.peer]))))
        self.sim.core = core
        self.restarts += 1
        return actions


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_core_restored_from_the_ledger_is_the_same_and_goes_on(seed: int, lossy: bool, tmp_path: Path) -> None:
    """`lossy`: killed after the commit and before any action or acknowledgement; the peers live on and say what they
    hold."""
    world = replace(random_world(seed), learner_crash=0.1, actor_death=0.3)
    sim = Sim(world)
    persistent = Persistent(sim, tmp_path, 17, lossy)
    sim.run()
    assert persistent.restarts > 0 or persistent.events < 17
    persistent.ledger.close()
    if sim.failed is None:
        sim.accounted()
        books = sqlite3.connect(tmp_path / "ledger.sqlite")
        rows = dict(books.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
        assert rows == {state: n for state, n in sim.core.groups.counts["train"].items() if n}
        assert dict(books.execute("SELECT group_id, version FROM groups WHERE state = 'trained'")) == sim.trained
        books.close()


class Hasty:
    """A transaction takes a while; what `Ahead` allows is told before, the rest after. Now and then all that is not on disk is
    lost: peers that live say again what nobody acknowledged, then what they hold."""

    def __init__(self, sim: Sim, folder: Path, kill: float) -> None:
        self.sim, self.folder, self.kill = sim, folder, kill
        self.dice = random.Random(sim.world.seed)
        self.ledger, self.ahead = Ledger(folder, "run"), Ahead()
        self.untold: list[ev.Action] = []
        self.unwritten: list[ev.Event] = []
        self.writing: tuple[Transaction, list[ev.Action], int] | None = None  # and what it has of the two above
        self.attempts: dict[tuple[int, int], str] = {}  # told: whose each token is
        self.kills = 0
        self.early: Counter[type] = Counter()
        sim.persist = self.persist

    def persist(self, event: ev.Event, actions: list[ev.Action]) -> None:
        self.unwritten.append(event)
        kept = self.take(event, actions)
        told, self.untold = self.ahead.divide(self.untold, self.sim.core)
        self.early.update(map(type, told))
        if isinstance(event, ev.Received) and isinstance(event.body, schema.Covered):
            told += self.finish()
            self.begin()
            told += self.finish()
        elif self.dice.random() < 0.3:
            if self.writing is None:
                self.begin()
            else:
                told += self.finish()
        elif not isinstance(event, ev.Tick) and self.dice.random() < self.kill and self.sim.core.failed is None:
            self.tell(told)
            self.restart()
            told = []
        actions[:] = kept + self.tell(told)

    def take(self, event: ev.Event, actions: list[ev.Action]) -> list[ev.Action]:
        """Keep the samples that the core accepts; the rest of its decisions is to be told."""
        kept = [action for action in actions if isinstance(action, ev.Store)]
        for action in kept:
            assert isinstance(event, ev.SamplesArrived) and isinstance(action, ev.Store)
            body = schema.Samples(event.lease_id, event.attempt, 0, list(event.samples), [])
            assert isinstance(self.ledger.accept(body, [bytes(1)] * len(action.indices)), Accepted)
        self.untold += [action for action in actions if not isinstance(action, ev.Store)]
        return kept

    def begin(self) -> None:
        for action in self.untold:
            if isinstance(action, ev.Release):
                self.ledger.release(action.group_ids)
        changes = self.sim.core.changes(3)
        self.ledger.record(changes)
        self.ahead.begun(changes)
        transaction = self.ledger.begin()
        assert transaction is not None
        self.writing, self.untold = (transaction, self.untold, len(self.unwritten)), []

    def finish(self) -> list[ev.Action]:
        if self.writing is None:
            return []
        (transaction, told, events), self.writing = self.writing, None
        transaction.write()
        self.ledger.finish(transaction)
        self.ahead.written()
        del self.unwritten[:events]
        return told

    def tell(self, told: list[ev.Action]) -> list[ev.Action]:
        for action in told:
            if isinstance(action, ev.SendLease):
                key = action.lease.lease_id, action.lease.attempt
                assert key not in self.attempts, (
                    "a token went out twice, and its first samples might pass for the second's"
                )
                self.attempts[key] = action.peer
            elif isinstance(action, ev.Deliver):
                record = self.sim.core.leases.leases.get(action.group_id)
                assert record is None or len(self.ledger.read(action.group_id)) > 0
        return told

    def restart(self) -> None:
        """As after kill -9, perhaps with a transaction on disk that nobody was told of."""
        sim, old = self.sim, self.sim.core
        if self.writing is not None and self.dice.random() < 0.5:
            self.writing[0].write()
        self.writing = None
        for file in self.ledger.segments, self.ledger._db:
            file.close()
        self.ledger, self.ahead, self.untold = Ledger(self.folder, "run"), Ahead(), []
        unwritten, self.unwritten = self.unwritten, []
        core = BrokerCore(Recipe(run=Run(seed=7, max_steps=old.max_steps), pacing=old.pacing))
        if (restored := self.ledger.restore()) is not None:
            core.load(restored.state, restored.leases, restored.groups, sim.now)
        sim.core = core
        sim.epoch += 1
        sim.unheard |= core.leases.held.keys() - old.peers.keys()
        self.kills += 1

        def hear(event: ev.Event) -> None:
            self.unwritten.append(event)
            self.take(event, core.on(event, sim.now))

        peers = list(old.peers.values())
        for peer in peers:
            hear(ev.Joined(peer.peer, peer.role, peer.name, peer.slots, returning=True))
        self.dice.shuffle(peers)
        for peer in peers:
            for event in unwritten:
                held = isinstance(event, ev.Received) and isinstance(
                    event.body, schema.Holding
                )  # by another incarnation
                if isinstance(event, ev.Received | ev.SamplesArrived) and event.peer == peer.peer and not held:
                    hear(event)
            if peer.role == "learner":
                asked = {"train": sim.asked} if sim.asked else {}
                hear(ev.Received(peer.peer, schema.Holding(1, groups=list(sim.batch), demand=asked)))
            else:
                hear(ev.Received(peer.peer, schema.Holding(1, attempts=sorted(sim.working[peer.peer]))))
                hear(ev.Availability(peer.peer, draining=False))  # its next heartbeat


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_what_is_told_before_it_is_written_makes_nothing_go_twice_or_get_lost(start: int, tmp_path: Path) -> None:
    kills = 0
    early: Counter[type] = Counter()
    for seed in range(start, start + 10):
        world = replace(random_world(seed), learner_crash=0.05, actor_death=0.3)
        if seed % 4:  # so that groups wait for the learner
            world = replace(world, batch_order="completion", max_staleness=2, step_s=5.0, max_steps=8, slots=6)
        sim = Sim(world)
        hasty = Hasty(sim, tmp_path / str(seed), 0.03)
        sim.run()
        kills += hasty.kills
        early += hasty.early
        if sim.failed is None:
            sim.accounted()
        hasty.finish()
        hasty.ledger.close()
    assert kills > 5
    assert early[ev.SendLease] > 20 and early[ev.Deliver] > 5
