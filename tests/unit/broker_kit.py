"""A broker's core among random actors and a learner, in virtual time: actors that are slow, fail, vanish or die, a learner that
voids, crashes and resumes. `Sim` checks at every step that the books add up, that in lease order no token's lag passes S, and that
a group is trained once in the surviving lineage."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from temper.broker import events as ev
from temper.broker.core import BrokerCore
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
