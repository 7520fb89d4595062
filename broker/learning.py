"""What the learner says, and what it gets: phases, demand, steps done, evaluations; a new lineage takes the run over.

Every handler tolerates a message that is repeated after a restart of the broker. Pure; a part of `BrokerCore`.
"""

from __future__ import annotations

from temper.broker.events import Action, Deliver, Finish, Note, PeerKey, Release
from temper.broker.fates import Fates
from temper.broker.groups import GroupRecord
from temper.broker.issuing import Issuing
from temper.broker.state import LANE_OF_PHASE, RunState
from temper.common import schema
from temper.common.schema import Lane

TRAINING_LANES: tuple[Lane, ...] = ("demo", "train")


class Learning:
    """Handlers of the learner's messages."""

    def __init__(self, run: RunState, fates: Fates, issuing: Issuing) -> None:
        self.run = run
        self.fates = fates
        self.issuing = issuing

    def deliver(self) -> list[Action]:
        """Groups the learner asked for, as they become ready, and evaluation groups."""
        run = self.run
        actions: list[Action] = []
        if not run.learner_serves:
            return actions
        assert run.learner is not None
        while run.reports:
            group = run.groups.groups[run.reports.popleft()]
            void = group.reason if group.state == "void" else None
            if group.state == "queued":
                run.groups.report(group)
            actions.append(Deliver(run.learner, group.group_id, void))
        for lane in TRAINING_LANES:
            while run.demand[lane] > 0 and (ready := run.groups.ready(lane)) is not None:
                run.groups.lease(ready)
                run.demand[lane] -= 1
                actions.append(Deliver(run.learner, ready.group_id))
        return actions

    def ready(self, peer: PeerKey, body: schema.LearnerReady, now: float) -> list[Action]:
        """A new epoch of the learner: attempts in flight are taken back, provisional groups queued again, but for those that
        its checkpoint has trained: their `Done` was lost with both sides."""
        run = self.run
        if body.lineage == run.lineage and peer == run.owner:
            return []  # said before
        run.owner, run.lineage = peer, body.lineage
        run.version, run.steps_done, run.evaluations = body.version, body.steps_done, 0
        run.phase = run.failed = None  # whatever ended an earlier attempt at this run may be mended
        run.paused.clear()
        run.quarantine_row.clear()
        run.demand.clear()
        run.void_row.clear()
        run.void_causes.clear()
        run.peers[peer].returning = False
        actions = self.fates.clear_lane("eval", "learner restarted")
        actions += self.fates.recall("a new learner started")
        for version, ids in body.trained:
            for group in filter(None, map(self._with_learner, ids)):
                run.groups.train(group, version)
        since = body.resumed_from or 0
        again = [g for g in run.groups.groups.values() if g.state == "leased"]
        again += [g for g in run.groups.groups.values() if g.state == "trained" and (g.version or 0) >= since]
        for group in again:
            group.version = None
            run.groups.enqueue(group)
        if again:
            actions.append(
                Note(f"{len(again)} groups are queued again: the learner starts from version {body.version}")
            )
        return actions

    def holding(self, body: schema.Holding) -> list[Action]:
        """What the learner still has after this broker came back: the other groups leased to it are delivered again, and those
        that it got before the books said so are leased to it."""
        run = self.run
        told = set(body.groups)
        for group in list(run.groups.groups.values()):
            if group.group_id in told:
                if group.state == "queued" and group.lane in TRAINING_LANES:
                    run.groups.lease(group)
                continue
            if group.state == "leased":
                run.groups.enqueue(group)
            elif group.lane == "eval" and group.state in ("reported", "void") and group.group_id not in run.reports:
                run.reports.append(group.group_id)
        run.demand.clear()
        run.demand.update({lane: n for lane, n in body.demand.items() if lane in TRAINING_LANES and n > 0})
        return [run.failed] if run.failed is not None else []

    def phase(self, peer: PeerKey, body: schema.Phase, now: float) -> list[Action]:
        """Which lane is leased from now on."""
        run = self.run
        before, run.phase = run.phase, body
        actions: list[Action] = []
        if body.phase != "warm":
            actions += self.fates.clear_lane("demo", "warm start over")
        if body.phase in ("eval", "over"):
            actions += self.fates.recall(body.reason or "no more training")
        if before is None or before.phase != body.phase:
            actions.append(Note(f"phase {body.phase}{': ' + body.reason if body.reason else ''}"))
        if body.phase in LANE_OF_PHASE and not run.shares():
            actions += run.fail(f"no domain is left to lease: shares {body.shares}, paused {run.paused}")
        return actions

    def demand(self, peer: PeerKey, body: schema.Demand, now: float) -> list[Action]:
        """More groups are wanted. Evaluation groups come without being asked for."""
        if body.lane in TRAINING_LANES:
            self.run.demand[body.lane] += max(0, body.groups)
        return []

    def done(self, peer: PeerKey, body: schema.Done, now: float) -> list[Action]:
        """One step is done."""
        run = self.run
        if body.version < run.version:
            return [Note(f"Done of version {body.version} is repeated or late, this run is at {run.version}: ignored")]
        trained = [g for i in body.trained if (g := self._with_learner(i)) is not None]
        for group in trained:
            run.groups.train(group, body.version)
        if trained:
            self.fates.row_ends("learner")
        actions = self.void(peer, schema.Void(body.void), now)
        run.version = body.version + 1
        run.steps_done += body.counted
        if len(trained) != len(body.trained):
            actions.append(Note(f"Done names {len(body.trained)} groups, {len(trained)} of them with the learner"))
        return actions

    def void(self, peer: PeerKey, body: schema.Void, now: float) -> list[Action]:
        """Groups that the learner gives up: their places are free at once."""
        actions: list[Action] = []
        for key, reason in body.groups.items():
            group = self._with_learner(int(key)) if key.isdecimal() else None
            if group is not None:
                actions += self.fates.give_up(group, reason, "learner")
        return actions

    def _with_learner(self, group_id: int) -> GroupRecord | None:
        """The group if the learner can have it: leased to it, or (`Ahead`) sent to it by an incarnation of the broker that died
        before the books said so, in which it is queued."""
        group = self.run.groups.groups.get(group_id)
        if group is None or group.lane not in TRAINING_LANES or group.state not in ("leased", "queued"):
            return None
        return group

    def covered(self, peer: PeerKey, body: schema.Covered, now: float) -> list[Action]:
        """A checkpoint is complete: what no retained checkpoint can need again is final."""
        run = self.run
        run.oldest_checkpoint = body.oldest
        final = [g for g in run.groups.groups.values() if g.state == "trained" and (g.version or 0) < body.oldest]
        for group in list(run.groups.groups.values()):
            if group.lane == "eval" and group.state in ("reported", "void") and group.group_id not in run.reports:
                pinned = run.leases.leases[group.group_id].pinned_version
                if pinned is not None and pinned < body.examined:
                    final.append(group)
        for group in final:
            self.fates.forget(group)
        return [Release(tuple(group.group_id for group in final))] if final else []

    def evaluate(self, peer: PeerKey, body: schema.Evaluate, now: float) -> list[Action]:
        """Held-out tasks for a pinned version; a repeated request is the same one."""
        if body.request and body.request <= self.run.evaluations:
            return []
        self.run.evaluations = max(self.run.evaluations, body.request)
        for domain, level, tasks in body.tasks:
            for index in range(tasks):
                task = self.run.schedule.held_out(domain, level, index)
                self.issuing.create("eval", task, body.samples_per_task, body.version)
        return []

    def run_over(self, peer: PeerKey, body: schema.RunOver, now: float) -> list[Action]:
        """The run has ended: what is left is void(run over)."""
        self.run.over = Finish(body.reason, body.exit_code)
        actions: list[Action] = []
        for lane in (*TRAINING_LANES, "eval"):
            actions += self.fates.clear_lane(lane, "run over")
        return [*actions, self.run.over]
