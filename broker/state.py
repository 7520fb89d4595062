"""What the broker knows of a run beside the books' records: plain values, and how they are saved and restored."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import msgspec
from temper.broker.events import Action, Fail, Finish, Note, PeerKey
from temper.broker.groups import GroupBook, GroupRecord
from temper.broker.jobs import JobBook
from temper.broker.leases import LeaseBook, LeaseRecord
from temper.common import schema
from temper.common.config import Recipe
from temper.common.schedule import Schedule
from temper.common.schema import Lane

LANE_OF_PHASE: dict[str, Lane] = {"warm": "demo", "train": "train"}


class PeerRecord(msgspec.Struct):
    """A peer that is there. `joined` orders peers by arrival.

    `draining`: gets nothing new (it leaves, or it is not ready). `returning`: it knew an earlier incarnation of this
    broker and gets nothing new until it has said what it still holds (`Holding`).
    """

    peer: PeerKey
    role: schema.Role
    name: str
    slots: int
    joined: int
    draining: bool = False
    returning: bool = False


class RunState:
    """The books and everything beside them. `BrokerCore` is one; its parts work on it."""

    def __init__(self, recipe: Recipe) -> None:
        self.pacing = recipe.pacing
        self.max_steps = recipe.run.max_steps
        self.deterministic = recipe.run.deterministic
        ordered = recipe.pacing.batch_order == "lease" or recipe.pacing.max_staleness == 0 or self.deterministic
        self.leases = LeaseBook()
        self.groups = GroupBook(lease_order=ordered)
        self.jobs = JobBook()
        self.schedule = Schedule(recipe.run.seed)
        self.peers: dict[PeerKey, PeerRecord] = {}
        self.learner: PeerKey | None = None
        self.owner: PeerKey | None = None  # the learner whose lineage it is; it may be gone, or there again
        self.lineage: int | None = None
        self.version = 0  # ordinal: steps done, warm-start steps included
        self.steps_done = 0  # RL steps
        self.phase: schema.Phase | None = None
        self.demand: Counter[str] = Counter()
        self.evaluations = 0  # the last Evaluate request taken in this lineage
        self.reports: deque[int] = deque()  # evaluation groups to send, oldest first
        self.void_row: Counter[str] = Counter()  # voids in a row, by who decided them: "broker", "learner"
        self.void_causes: Counter[tuple[str, str]] = Counter()  # (domain, reason) of the present row
        self.quarantine_row: Counter[str] = Counter()
        self.paused: dict[str, str] = {}  # domain -> why
        self.letters: deque[dict[str, Any]] = deque(maxlen=200)  # dead letters: what was given up, and why
        self.trouble = ""  # what last went wrong with an actor or evaluator
        self.oldest_checkpoint: int | None = None
        self.failed: Fail | None = None
        self.over: Finish | None = None
        self.closing = False

    @property
    def lane(self) -> Lane | None:
        """The lane that is leased in the present phase, beside the eval lane."""
        return LANE_OF_PHASE.get(self.phase.phase) if self.phase is not None else None

    @property
    def learner_serves(self) -> bool:
        """The learner of the present lineage is there, and nothing about it is in doubt."""
        return self.learner is not None and self.learner == self.owner and not self.peers[self.learner].returning

    def shares(self) -> dict[str, tuple[int, float]]:
        """The phase's shares without paused domains."""
        if self.phase is None:
            return {}
        return {d: s for d, s in self.phase.shares.items() if d not in self.paused and 0 < s[1] < math.inf}

    def fail(self, reason: str) -> list[Action]:
        """The run cannot go on; said once."""
        if self.failed is not None:
            return []
        self.failed = Fail(reason, 2)
        return [self.failed, Note(reason)]

    def save(self) -> dict[str, Any]:
        """Everything beside the records, as plain values."""
        return {
            "owner": self.owner,
            "lineage": self.lineage,
            "version": self.version,
            "steps_done": self.steps_done,
            "order": self.groups.order,
            "oldest_checkpoint": self.oldest_checkpoint,
            "schedule": self.schedule.state(),
            "phase": None if self.phase is None else msgspec.to_builtins(self.phase),
            "demand": dict(self.demand),
            "evaluations": self.evaluations,
            "paused": dict(self.paused),
            "quarantine_row": dict(self.quarantine_row),
            "void_row": dict(self.void_row),
            "void_causes": [[*cause, times] for cause, times in self.void_causes.items()],
            "failed": None if self.failed is None else [self.failed.reason, self.failed.exit_code],
            "leases": {lane: dict(counts) for lane, counts in self.leases.counts.items()},
            "attempts": dict(self.leases.attempts),
            "groups": {lane: dict(counts) for lane, counts in self.groups.counts.items()},
            "voids": {lane: dict(counts) for lane, counts in self.groups.voids.items()},
        }

    def load(self, state: dict[str, Any], leases: list[LeaseRecord], groups: list[GroupRecord], now: float) -> None:
        """Continue from what was saved. Call before any event.

        Attempts that were out stay with their peers, which have `weights_timeout_s` to show up again.
        """
        self.owner, self.lineage = state["owner"], state["lineage"]
        self.version, self.steps_done = state["version"], state["steps_done"]
        self.groups.order = state["order"]
        self.oldest_checkpoint = state["oldest_checkpoint"]
        self.schedule.load(state["schedule"])
        self.phase = None if state["phase"] is None else msgspec.convert(state["phase"], schema.Phase)
        self.demand.update(state["demand"])
        self.evaluations = state["evaluations"]
        self.paused.update(state["paused"])
        self.quarantine_row.update(state["quarantine_row"])
        self.void_row.update(state["void_row"])
        self.void_causes.update({(domain, reason): times for domain, reason, times in state["void_causes"]})
        self.failed = None if state["failed"] is None else Fail(*state["failed"])
        self.leases.attempts.update(state["attempts"])
        for book, key in ((self.leases.counts, "leases"), (self.groups.counts, "groups"), (self.groups.voids, "voids")):
            for lane, counts in state[key].items():
                book[lane].update(counts)
        for lease in leases:
            lease.deadline = now + self.pacing.weights_timeout_s
            self.leases.restore(lease)
        for group in groups:
            self.groups.restore(group)
            if group.lane == "eval" and group.state == "queued":
                self.reports.append(group.group_id)
