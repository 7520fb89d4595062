"""What becomes of leases and groups: accepted, quarantined, void with a reason, replaced; when domains pause and the run
cannot go on. Pure; a part of `BrokerCore`."""

from __future__ import annotations

from typing import Literal

from temper.broker.events import Action, Note, RefuseAttempt, Release
from temper.broker.groups import GroupRecord
from temper.broker.leases import LeaseRecord, dead_letter
from temper.broker.state import RunState
from temper.common.schema import Lane

QUARANTINES_IN_A_ROW = 8
"""So many quarantined tasks of a domain without an accepted group between them pause the domain."""


class Fates:
    """Decisions about single leases and groups."""

    def __init__(self, run: RunState) -> None:
        self.run = run

    def complete(self, record: LeaseRecord) -> list[Action]:
        """Every sample is there or given up: the lease is accepted, and its group queued or void."""
        run = self.run
        run.leases.close(record, "accepted")
        if record.have:
            run.quarantine_row.pop(record.domain, None)
        group = run.groups.groups[record.lease_id]
        if not record.have:
            return self.give_up(group, "infra", "broker")
        if record.lane == "eval":
            run.groups.enqueue(group)
            run.reports.append(group.group_id)
            return []
        if record.lane == "train":
            if group.scored < min(2, record.size):
                return self.give_up(group, "infra", "broker")
            if run.pacing.dynamic_sampling and not group.contrast:
                return self.give_up(group, "no contrast", "broker")
        run.groups.enqueue(group)
        if record.lane == "train":
            self.row_ends("broker")
        return []

    def task_failed(self, record: LeaseRecord, error: str) -> list[Action]:
        """An attempt ended because the task or its domain failed."""
        self.run.leases.take_back(record, "returned")
        record.task_failures += 1
        record.error = self.run.trouble = error
        return self._quarantine(record) if record.task_failures >= self.run.pacing.task_attempts else []

    def lost(self, record: LeaseRecord, error: str, how: Literal["returned", "expired"] = "returned") -> list[Action]:
        """An attempt died of infrastructure, which has a budget of its own; when it is spent, samples are given up."""
        self.run.leases.take_back(record, how)
        record.infra_failures += 1
        record.error = self.run.trouble = error
        if record.infra_failures < self.run.pacing.infra_attempts:
            return []
        record.filled = tuple(record.missing)
        self.run.letters.append(dead_letter(record))
        return self.complete(record)

    def _quarantine(self, record: LeaseRecord) -> list[Action]:
        run, domain = self.run, record.domain
        run.leases.close(record, "quarantined")
        run.letters.append(dead_letter(record))
        run.quarantine_row[domain] += 1
        actions: list[Action] = [Note(f"lease {record.lease_id} ({domain}) is quarantined: {record.error}")]
        actions += self.give_up(run.groups.groups[record.lease_id], "quarantined", "broker")
        if run.quarantine_row[domain] >= QUARANTINES_IN_A_ROW and domain not in run.paused:
            why = f"{run.quarantine_row[domain]} quarantined tasks in a row, last: {record.error}"
            run.paused[domain] = why
            actions.append(Note(f"domain {domain} is paused: {why}"))
            if run.phase is not None and run.phase.shares and not run.shares():
                actions += run.fail(f"no domain is left: {'; '.join(f'{d}: {w}' for d, w in run.paused.items())}")
        return actions

    def give_up(self, group: GroupRecord, reason: str, by: Literal["broker", "learner"]) -> list[Action]:
        """The group is void. Evaluation groups are reported all the same."""
        run = self.run
        run.groups.void(group, reason)
        if group.lane == "eval":
            run.reports.append(group.group_id)
            return []
        self.forget(group)
        actions: list[Action] = [Release((group.group_id,))]
        if group.lane == "train":
            run.void_row[by] += 1
            run.void_causes[group.domain, reason] += 1
            limit = run.pacing.max_void_in_a_row or 20 * (run.phase or run.pacing).groups_per_step
            if run.void_row[by] >= limit:
                (domain, why), times = run.void_causes.most_common(1)[0]
                actions += run.fail(
                    f"{run.void_row[by]} groups in a row were void; most often {why!r} in domain {domain} "
                    f"({times} times): make its tasks easier or harder, or raise pacing.max_void_in_a_row ({limit})"
                )
        return actions

    def unsendable(self, group_id: int) -> list[Action]:
        """A group that the learner was to get fits no message."""
        group = self.run.groups.groups.get(group_id)
        if group is None or group.state != "leased":
            return []
        self.run.demand[group.lane] += 1
        return self.give_up(group, "too large", "broker")

    def row_ends(self, by: Literal["broker", "learner"]) -> None:
        """A group that is not void ends the row of voids."""
        self.run.void_row.pop(by, None)
        if not self.run.void_row:
            self.run.void_causes.clear()

    def forget(self, group: GroupRecord) -> None:
        """Nothing can become of the group any more: it stays counted and in the ledger only."""
        self.run.groups.forget(group.group_id)
        self.run.leases.forget(group.group_id)

    def recall(self, reason: str) -> list[Action]:
        """Take every train and demo attempt back; their leases keep their places."""
        actions: list[Action] = []
        for record in list(self.run.leases.leases.values()):
            if record.out and record.lane != "eval":
                actions.append(RefuseAttempt(record.peer, record.lease_id, record.attempt, reason))
                self.run.leases.take_back(record, "returned")
        return actions

    def clear_lane(self, lane: Lane, reason: str) -> list[Action]:
        """Give up every active group of a lane: its leases are cancelled, its groups void(reason)."""
        run = self.run
        actions: list[Action] = []
        ids = list(run.groups.active[lane])
        for group_id in ids:
            record, group = run.leases.leases[group_id], run.groups.groups[group_id]
            if record.out:
                actions.append(RefuseAttempt(record.peer, group_id, record.attempt, reason))
            if record.state == "in flight":
                run.leases.close(record, "cancelled")
            run.groups.void(group, reason)
        if lane == "eval":
            ids = [g.group_id for g in run.groups.groups.values() if g.lane == "eval"]
            run.reports.clear()
        for group_id in ids:
            self.forget(run.groups.groups[group_id])
        if ids:
            actions.append(Release(tuple(ids)))
        return actions
