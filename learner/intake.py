"""Groups on their way in: parsed, void ones replaced, the others put where training or an evaluation finds them.

Guarantees: a malformed group or one that cannot be trained frees its place at once and another is asked for; nothing
here blocks. Called by the daemon's message handlers, on its loop.
"""

from __future__ import annotations

from collections.abc import Callable

from temper.common.config import Pacing
from temper.common.errors import ProtocolError
from temper.common.log import log
from temper.common.schema import Demand, Group, Holding, Lane, Void
from temper.learner.examiner import Examiner
from temper.learner.inbox import GroupData, Inbox, parse_group, void_reason
from temper.learner.routing_replay import Routing

LANES: tuple[Lane, ...] = ("demo", "train")


class Intake:
    """`inbox`: groups that wait for a step; `training`: ids of those in the step that runs. `vocabulary`: token ids;
    `routing`: the model's, if its experts are replayed."""

    def __init__(
        self,
        vocabulary: int,
        pacing: Pacing,
        examiner: Examiner,
        post: Callable[[Demand | Void], object],
        routing: Routing | None = None,
    ) -> None:
        self.inbox = Inbox()
        self.training: list[int] = []
        self.examiner = examiner
        self._vocabulary = vocabulary
        self._routing = routing
        self._pacing = pacing
        self._post = post

    def take(self, body: Group, frames: list[memoryview]) -> None:
        """One group of any lane."""
        try:
            group = parse_group(body, frames, self._vocabulary, self._routing)
        except ProtocolError as error:
            log(f"group {body.group_id} of {body.domain} is malformed and given up: {error}")
            if body.lane != "eval":
                self._replace(body.lane, body.group_id, "malformed")
                return
            group = GroupData(
                body.group_id, "eval", body.domain, body.level, body.task_seed, (), body.pinned_version, "malformed"
            )
        if group.lane == "eval":
            self.examiner.add(group)
            return
        reason = None
        if group.lane == "train":
            reason = void_reason(group, self._pacing.samples_per_group, self._pacing.dynamic_sampling)
        if reason is None:
            self.inbox.put(group)
        else:
            self._replace(group.lane, group.group_id, reason)

    def _replace(self, lane: Lane, group_id: int, reason: str) -> None:
        """A group that cannot be trained: its place is free at once, another one is asked for."""
        self._post(Void({str(group_id): reason}))
        self._post(Demand(lane, 1))

    def ask(self, lane: Lane, want: int) -> None:
        """See that `want` groups are here or on their way."""
        missing = self.inbox.ask(lane, want)
        if missing:
            self._post(Demand(lane, missing))

    def batch(self, lane: Lane, want: int, ordered: bool) -> list[GroupData]:
        """Take `want` groups that are here for the next step."""
        groups = self.inbox.take(lane, want, ordered)
        self.training = [group.group_id for group in groups]
        return groups

    def holding(self, epoch: int) -> Holding:
        """The groups that are here and not done with, and how many more are asked for."""
        groups = [*self.training, *(i for lane in LANES for i in self.inbox.ids(lane)), *self.examiner.holding()]
        return Holding(epoch, groups=groups, demand={lane: self.inbox.outstanding(lane) for lane in LANES})
