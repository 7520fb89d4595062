"""The broker's core under hundreds of random schedules, in virtual time: actors that are slow, fail, vanish or die, a
learner that voids, crashes and resumes. Checked at every step: the books add up; in lease order no token's lag passes
S; a group is trained once in the surviving lineage; the run ends."""

from __future__ import annotations

import heapq
import json
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
from temper.broker import events as ev
from temper.broker.ahead import Ahead
from temper.broker.core import BrokerCore
from temper.broker.ledger import Accepted, Ledger, Transaction
from temper.common import schema
from temper.common.config import Pacing, Recipe, Run


@dataclass
class World:
    """What can go wrong, and how often (shares of attempts or of steps)."""

    seed: int = 0
    groups_per_step: int = 4
    samples_per_group: int = 3
    max_staleness: int = 1
    max_steps: int = 6
    batch_order: str = "lease"
    dynamic_sampling: bool = False
    actors: int = 2
    slots: int = 4
    step_s: float = 2.0
    publish_s: float = 0.5
    durations_s: dict[str, float] = field(default_factory=lambda: {"a": 1.0, "b": 3.0})
    task_error: float = 0.0
    infra_error: float = 0.0
    drain: float = 0.0
    vanish: float = 0.0
    half: float = 0.0
    uniform: float = 0.0
    learner_void: float = 0.0
    actor_death: float = 0.0
    learner_crash: float = 0.0
    bad_task: float = 0.0
    max_void_in_a_row: int = 0


class Sim:
    """Virtual time around one core."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, random.Random(world.seed)
        pacing = Pacing(
            groups_per_step=world.groups_per_step,
            samples_per_group=world.samples_per_group,
            max_staleness=world.max_staleness,
            batch_order=world.batch_order,  # type: ignore[arg-type]
            dynamic_sampling=world.dynamic_sampling,
            lease_timeout_s=20.0,
            weights_timeout_s=30.0,
            infra_attempts=3,
            max_void_in_a_row=world.max_void_in_a_row,
        )
        self.core = BrokerCore(Recipe(run=Run(seed=7, max_steps=world.max_steps), pacing=pacing))
        self.now, self._sequence = 0.0, 0
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self.actors: set[str] = set()
        self.published = 0  # version that actors have
        self.version = self.steps = 0
        self.incarnation = 0
        self.batch: list[int] = []
        self.stepping = False
        self.trained: dict[int, int] = {}
        self.sampled: dict[int, list[int]] = {}  # group -> versions that sampled it
        self.delivered: Counter[tuple[int, int]] = Counter()
        self.lags: list[int] = []
        self.domains: Counter[str] = Counter()
        self.first_out: dict[int, str] = {}
        self.failed: ev.Fail | None = None
        self.finished: ev.Finish | None = None
        self.checkpoint = 0
        self.most_active = 0
        self.epoch = 0  # of the broker: what an earlier one sent and nobody received yet is lost
        self.working: dict[str, set[tuple[int, int]]] = {}  # what each actor believes that it works on
        self.unheard: set[str] = set()  # they died, and the broker before it had written that down
        self.asked = 0  # groups that the learner believes it is still to get
        self.persist: Callable[[ev.Event, list[ev.Action]], None] = lambda event, actions: None

    # -------------------------------------------------------- time

    def later(self, delay_s: float, what: Callable[..., object], *arguments: object) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (self.now + delay_s, self._sequence, lambda: what(*arguments)))

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.on(event, self.now)
        assert all(a.lease.min_version == self.version for a in actions if isinstance(a, ev.SendLease))
        self.persist(event, actions)  # before anything is carried out
        for action in actions:
            self.act(action)
        self.check()
        return actions

    def run(self, limit_s: float = 20_000.0) -> None:
        for _ in range(self.world.actors):
            self.start_actor()
        self.start_learner(None)
        self.later(1.0, self.tick)
        while self._agenda and self.finished is None:
            self.now, _, what = heapq.heappop(self._agenda)
            assert self.now < limit_s, f"no end: {self.core.groups.counts}, {self.core.leases.counts}"
            what()

    def tick(self) -> None:
        self.tell(ev.Tick())
        self.later(1.0, self.tick)

    # -------------------------------------------------------- actors

    def start_actor(self) -> None:
        self._sequence += 1
        name = f"actor-{self._sequence}"
        self.actors.add(name)
        self.working[name] = set()
        self.tell(ev.Joined(name, "actor", name, self.world.slots))
        if self.random.random() < self.world.actor_death:
            self.later(self.random.uniform(0, 10), lambda: self.kill(name))

    def kill(self, name: str) -> None:
        self.actors.discard(name)
        self.tell(ev.Left(name, "killed"))
        self.later(self.random.uniform(0, 2), self.start_actor)

    def act(self, action: ev.Action) -> None:
        match action:
            case ev.SendLease(peer, lease):
                if lease.lease_id not in self.first_out:
                    self.first_out[lease.lease_id] = lease.domain
                self.later(0.01, self.start, self.epoch, peer, lease)
            case ev.RefuseAttempt(peer, lease_id, attempt, _):
                self.working.get(peer, set()).discard((lease_id, attempt))
            case ev.Deliver(_, group_id, None):
                self.delivered[self.incarnation, group_id] += 1
                self.later(0.01, self.receive, self.incarnation, self.epoch, group_id)
            case ev.Fail():
                self.failed = action
                self.later(0.01, self.over)
            case ev.Finish():
                self.finished = action
            case ev.RefusePeer():
                raise AssertionError(action)

    def over(self) -> None:
        code = self.failed.exit_code if self.failed else 0
        self.tell(ev.Received(f"learner-{self.incarnation}", schema.RunOver("over", code)))

    def start(self, epoch: int, peer: str, lease: schema.Lease) -> None:
        if epoch == self.epoch and peer in self.actors:
            self.working[peer].add((lease.lease_id, lease.attempt))
            self.begin(peer, lease)

    def begin(self, peer: str, lease: schema.Lease) -> None:
        if peer not in self.actors or (lease.lease_id, lease.attempt) not in self.working[peer]:
            return
        if self.published < lease.min_version:
            self.later(0.1, lambda: self.begin(peer, lease))
            return
        self.tell(ev.Received(peer, schema.Touch(lease.lease_id, lease.attempt)))
        version = self.published
        luck, world = self.random.random(), self.world
        bad = random.Random(lease.task_seed).random() < world.bad_task
        duration = world.durations_s[lease.domain] * self.random.uniform(0.5, 1.5)
        for share, cause in ((world.task_error + bad, "task"), (world.infra_error, "infra"), (world.drain, "drain")):
            if luck < share:
                first = lease.indices[:1] if self.random.random() < world.half else []
                self.later(duration / 2, self.finish, peer, lease, first, version)
                back = schema.Return(lease.lease_id, lease.attempt, cause, "no")  # type: ignore[arg-type]
                self.later(duration, self.give_back, peer, back)
                return
            luck -= share
        if luck < world.vanish:
            return
        self.later(duration, lambda: self.finish(peer, lease, lease.indices, version))

    def give_back(self, peer: str, body: schema.Return) -> None:
        if peer in self.actors and (body.lease_id, body.attempt) in self.working[peer]:
            self.working[peer].discard((body.lease_id, body.attempt))
            self.tell(ev.Received(peer, body))
            self.later(1.0, self.heartbeat, peer)

    def heartbeat(self, peer: str) -> None:
        self.tell(ev.Availability(peer, draining=False))

    def finish(self, peer: str, lease: schema.Lease, indices: list[int], version: int) -> None:
        if peer not in self.actors or not indices or (lease.lease_id, lease.attempt) not in self.working[peer]:
            return
        if indices == lease.indices:
            self.working[peer].discard((lease.lease_id, lease.attempt))
        dice = random.Random(lease.task_seed)
        same, value = dice.random() < self.world.uniform, dice.random() < 0.5
        samples = []
        for index in indices:
            correct = value if same else index % 2 == 0
            samples.append(schema.SampleMeta(index, "stop", float(correct), correct, {}, "ok", []))
        event = ev.SamplesArrived(peer, lease.lease_id, lease.attempt, tuple(samples), 10)
        if any(isinstance(action, ev.Store) for action in self.tell(event)):
            self.sampled.setdefault(lease.lease_id, []).append(version)

    # -------------------------------------------------------- learner

    def start_learner(self, resumed: int | None) -> None:
        self.incarnation += 1
        peer = f"learner-{self.incarnation}"
        self.version = self.steps = resumed or 0
        self.published = self.version
        self.batch, self.stepping, self.asked = [], False, 0
        self.trained = {group: version for group, version in self.trained.items() if version < self.version}
        self.tell(ev.Joined(peer, "learner", peer))
        ready = schema.LearnerReady(self.incarnation, resumed, self.steps, self.version)
        self.tell(ev.Received(peer, ready))
        shares = {name: (0, 1.0) for name in self.world.durations_s}
        phase = schema.Phase("train", shares, self.world.groups_per_step, self.world.samples_per_group)
        self.tell(ev.Received(peer, phase))
        self.ask(self.world.groups_per_step)

    def ask(self, groups: int) -> None:
        self.asked += groups
        self.tell(ev.Received(f"learner-{self.incarnation}", schema.Demand("train", groups)))

    def receive(self, incarnation: int, epoch: int, group_id: int) -> None:
        if incarnation != self.incarnation or epoch != self.epoch:
            return
        assert group_id not in self.batch, "delivered twice"
        self.asked -= 1
        if self.random.random() < self.world.learner_void:
            peer = f"learner-{self.incarnation}"
            self.tell(ev.Received(peer, schema.Void({str(group_id): "no contrast"})))
            self.ask(1)
            return
        self.batch.append(group_id)
        if len(self.batch) == self.world.groups_per_step and not self.stepping:
            self.stepping = True
            self.later(self.world.step_s, lambda: self.step(incarnation))

    def step(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            return
        if self.random.random() < self.world.learner_crash:
            peer = f"learner-{self.incarnation}"
            self.incarnation += 1
            self.tell(ev.Left(peer, "killed"))
            self.later(3.0, lambda: self.start_learner(self.checkpoint))
            return
        for group in self.batch:
            assert group not in self.trained, "trained twice in one lineage"
            self.trained[group] = self.version
            self.lags += [max(0, self.version - version) for version in self.sampled[group]]
            self.domains[self.first_out[group]] += 1
        peer = f"learner-{self.incarnation}"
        batch, start = self.batch, self.version
        self.version += 1
        self.steps += 1
        self.batch, self.stepping = [], False
        self.tell(ev.Received(peer, schema.Done(start, batch, {}, True)))
        version = self.version
        self.later(self.world.publish_s, lambda: setattr(self, "published", max(self.published, version)))
        if self.steps % 2 == 0:
            self.checkpoint = self.version
            self.tell(ev.Received(peer, schema.Covered(self.version, self.version, "", self.version)))
        if self.steps == self.world.max_steps:
            self.over()
        else:
            self.ask(self.world.groups_per_step)

    # -------------------------------------------------------- what must always hold

    def check(self) -> None:
        leases, groups = self.core.leases, self.core.groups
        for lane, counts in leases.counts.items():
            fates = sum(counts[name] for name in ("in flight", "accepted", "quarantined", "cancelled"))
            assert counts["created"] == fates
            out = sum(r.out for r in leases.leases.values() if r.lane == lane)
            assert counts["in flight"] == out + len(leases.waiting[lane])
            states = groups.counts[lane]
            assert sum(states.values()) == counts["created"]
            assert states["assembling"] == counts["in flight"]
            assert states["void"] == sum(groups.voids[lane].values())
            active = states["assembling"] + states["queued"] + states["leased"]
            assert active == len(groups.active[lane])
            self.most_active = max(self.most_active, active)
            for group_id in groups.active[lane]:
                assert groups.groups[group_id].state in ("assembling", "queued", "leased")
        for peer, held in leases.held.items():
            assert peer in self.core.peers or peer in self.unheard
            assert held
            assert len(held) <= self.world.slots

    def accounted(self) -> None:
        """At the end every group is trained once or void with a reason."""
        counts = self.core.groups.counts["train"]
        assert counts["assembling"] == counts["queued"] == counts["leased"] == 0
        assert counts["trained"] == len(self.trained) == self.world.max_steps * self.world.groups_per_step


def random_world(seed: int) -> World:
    dice = random.Random(seed)

    def sometimes(limit: float) -> float:
        return dice.choice([0.0, dice.uniform(0, limit)])

    return World(
        seed=seed,
        groups_per_step=dice.randint(1, 6),
        samples_per_group=dice.randint(2, 4),
        max_staleness=dice.choice([0, 0, 1, 2, 4]),
        max_steps=dice.randint(1, 8),
        batch_order=dice.choice(["lease", "completion"]),
        dynamic_sampling=dice.random() < 0.5,
        actors=dice.randint(1, 4),
        slots=dice.randint(1, 6),
        task_error=sometimes(0.2),
        infra_error=sometimes(0.5),
        drain=sometimes(0.2),
        vanish=sometimes(0.2),
        half=sometimes(1.0),
        uniform=sometimes(0.6),
        learner_void=sometimes(0.4),
        actor_death=sometimes(0.8),
        learner_crash=sometimes(0.15),
        bad_task=sometimes(0.1),
        max_void_in_a_row=10_000,
    )


@pytest.mark.parametrize("start", range(0, 400, 50))
def test_random_schedules_end_with_every_group_accounted_for(start: int) -> None:
    for seed in range(start, start + 50):
        world = random_world(seed)
        sim = Sim(world)
        sim.run()
        if sim.failed is not None:
            assert "no domain is left" in sim.failed.reason
            continue
        sim.accounted()
        if world.batch_order == "lease" or world.max_staleness == 0:
            assert max(sim.lags, default=0) <= world.max_staleness, seed


def test_half_of_all_groups_void_at_staleness_0_reaches_max_steps() -> None:
    sim = Sim(World(max_staleness=0, dynamic_sampling=True, uniform=0.5, max_steps=10))
    sim.run()
    sim.accounted()
    assert sim.finished == ev.Finish("over", 0)
    assert set(sim.lags) == {0}
    assert sim.core.groups.voids["train"]["no contrast"] > 10


def test_half_of_all_groups_void_by_the_learner_at_staleness_0_reaches_max_steps() -> None:
    sim = Sim(World(max_staleness=0, learner_void=0.5, max_steps=10))
    sim.run()
    sim.accounted()
    assert set(sim.lags) == {0}


@pytest.mark.parametrize("staleness", [0, 2])
def test_all_groups_void_ends_the_run_with_domain_and_reason(staleness: int) -> None:
    sim = Sim(World(max_staleness=staleness, dynamic_sampling=True, uniform=1.0, durations_s={"twins": 1.0}))
    sim.run()
    assert sim.finished == ev.Finish("over", 2)
    assert sim.failed is not None
    assert "no contrast" in sim.failed.reason
    assert "twins" in sim.failed.reason
    assert sim.core.groups.voids["train"]["no contrast"] == 20 * 4


def test_all_groups_void_by_the_learner_ends_the_run() -> None:
    sim = Sim(World(learner_void=1.0))
    sim.run()
    assert sim.finished == ev.Finish("over", 2)


def test_a_domain_that_always_fails_is_paused_and_the_others_go_on() -> None:
    world = World(durations_s={"good": 1.0, "broken": 1.0}, max_steps=12)
    sim = Sim(world)
    fine = sim.begin

    def begin(peer: str, lease: schema.Lease) -> None:
        if lease.domain == "broken":
            back = schema.Return(lease.lease_id, lease.attempt, "task", "ValueError: no tasks")
            sim.tell(ev.Received(peer, back))
        else:
            fine(peer, lease)

    sim.begin = begin  # type: ignore[method-assign]
    sim.run()
    sim.accounted()
    assert set(sim.core.paused) == {"broken"}
    assert "ValueError: no tasks" in sim.core.paused["broken"]
    assert sim.domains["broken"] == 0


def test_no_domain_left_ends_the_run_with_the_reason() -> None:
    sim = Sim(World(task_error=1.0, durations_s={"only": 1.0}))
    sim.run()
    assert sim.finished == ev.Finish("over", 2)
    assert sim.failed is not None
    assert "no domain is left: only: 8 quarantined tasks in a row" in sim.failed.reason


def test_one_bad_task_in_a_batch_of_four_is_quarantined_and_replaced() -> None:
    sim = Sim(World(max_staleness=0, max_steps=1, durations_s={"a": 1.0}))
    fine = sim.begin

    def begin(peer: str, lease: schema.Lease) -> None:
        if lease.lease_id == 2:
            sim.tell(ev.Received(peer, schema.Return(2, lease.attempt, "task", "prompt too long")))
        else:
            fine(peer, lease)

    sim.begin = begin  # type: ignore[method-assign]
    sim.run()
    sim.accounted()
    assert sim.core.leases.counts["train"]["quarantined"] == 1
    assert sorted(sim.trained) == [0, 1, 3, 4]
    (letter,) = sim.core.letters
    assert (letter["lease_id"], letter["attempts"], letter["error"]) == (2, 2, "prompt too long")


def test_expired_leases_that_fill_the_capacity_at_staleness_0_go_out_again() -> None:
    sim = Sim(World(max_staleness=0, max_steps=3, slots=2))
    fine = sim.begin
    swallowed: list[int] = []

    def begin(peer: str, lease: schema.Lease) -> None:
        if len(swallowed) < 4:
            swallowed.append(lease.lease_id)
            sim.tell(ev.Received(peer, schema.Touch(lease.lease_id, lease.attempt)))
        else:
            fine(peer, lease)

    sim.begin = begin  # type: ignore[method-assign]
    sim.run()
    sim.accounted()
    assert swallowed == [0, 1, 2, 3]
    assert sim.core.leases.attempts["expired"] == 4
    assert sorted(sim.trained) == list(range(12))
    assert set(sim.lags) == {0}


def test_fast_and_slow_classes_are_trained_as_often_as_sampled() -> None:
    world = World(
        max_staleness=2,
        batch_order="completion",
        durations_s={"fast": 1.0, "slow": 10.0},
        step_s=2.0,
        groups_per_step=8,
        max_steps=60,
        actors=4,
        slots=16,
    )
    sim = Sim(world)
    sim.run()
    sim.accounted()
    share = sim.domains["slow"] / sim.domains.total()
    assert abs(share - 0.5) <= 0.02
    assert set(sim.core.groups.voids["train"]) <= {"run over"}


def test_restarts_of_the_learner_do_not_change_which_lengths_are_trained() -> None:
    """A resume that skips what was under way skips the long ones."""
    calm = World(
        max_staleness=2,
        batch_order="completion",
        durations_s={"short": 0.5, "middle": 2.0, "long": 6.0, "longest": 12.0},
        groups_per_step=8,
        max_steps=40,
        actors=4,
        slots=16,
    )
    found = []
    for world in (calm, replace(calm, learner_crash=0.15, seed=2)):
        sim = Sim(world)
        sim.run()
        sim.accounted()
        assert set(sim.core.groups.voids["train"]) <= {"run over"}
        found.append(Counter(sim.first_out[group] for group in sim.trained))
    crashes = sim.incarnation // 2  # each one makes two incarnations: the dead one's end and the next one's start
    assert crashes >= 5
    without, restarted = found
    assert without.total() == restarted.total() == 320
    for length in calm.durations_s:
        assert abs(without[length] - 80) <= 2 and abs(restarted[length] - 80) <= 2, found


def test_killing_an_actor_with_8_rollouts_in_flight_leases_all_8_again() -> None:
    core = BrokerCore(Recipe(pacing=Pacing(groups_per_step=8, samples_per_group=2, max_staleness=0)))
    core.on(ev.Joined("one", "actor", "one", 8), 0.0)
    core.on(ev.Joined("learner", "learner", "learner"), 0.0)
    core.on(ev.Received("learner", schema.LearnerReady(1, None, 0, 0)), 0.0)
    out = core.on(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, 8, 2)), 0.0)
    first = [action.lease for action in out if isinstance(action, ev.SendLease)]
    assert len(first) == 8
    done = schema.SampleMeta(1, "stop", 1.0, True, {}, "ok", [])
    core.on(ev.SamplesArrived("one", first[3].lease_id, 1, (done,), 1), 1.0)
    core.on(ev.Joined("two", "actor", "two", 8), 1.0)
    again = [action.lease for action in core.on(ev.Left("one", "kill -9"), 2.0)]  # type: ignore[union-attr]
    assert [replace_attempt(lease) for lease in again] == [
        replace_attempt(lease, [0] if lease is first[3] else None) for lease in first
    ]
    assert all(lease.attempt == 2 for lease in again)
    late = core.on(ev.SamplesArrived("one", first[0].lease_id, 1, (done,), 1), 3.0)
    assert late == [ev.RefuseAttempt("one", first[0].lease_id, 1, "this attempt was abandoned")]


def replace_attempt(lease: schema.Lease, indices: list[int] | None = None) -> tuple:
    return (lease.lease_id, lease.task_seed, indices or lease.indices)


def test_capacity_after_a_resume_is_96_not_3296() -> None:
    core = BrokerCore(Recipe(run=Run(max_steps=1000), pacing=Pacing(groups_per_step=32, max_staleness=2)))
    core.on(ev.Joined("actor", "actor", "actor", 10_000), 0.0)
    core.on(ev.Joined("learner", "learner", "learner"), 0.0)
    core.on(ev.Received("learner", schema.LearnerReady(1, 100, 100, 100)), 0.0)
    out = core.on(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, 32, 2)), 0.0)
    assert sum(isinstance(action, ev.SendLease) for action in out) == 96
    assert all(action.lease.min_version == 100 for action in out if isinstance(action, ev.SendLease))


def test_the_simulation_notices_a_broken_pacing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.broker.pacing.capacity", lambda s, g, active, left: max(0, (s + 3) * g - active))
    sim = Sim(replace(World(max_staleness=0), max_steps=8))
    sim.run()
    assert max(sim.lags) > 0


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
