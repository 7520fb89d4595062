"""The grading time of one lease: what its samples' jobs may take comes on top of the lease's own deadline.

With one deadline for sampling and grading, the programs of the longest samples would be judged on borrowed time: a job with
many tests, or one that waits for a busy worker, would end its lease as a failure of the machinery. So a job that is handed in
moves the deadline, where that ends sooner, by the budget of the lease's unfinished jobs (all of their tests, on a loaded
host) and by the wait that other jobs met lately. Made by `episodes`, one a lease, on the domain's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from temper.actor.rewards import limited
from temper.common import config
from temper.common.domains import Grader
from temper.common.grading import MOST_GRADING_S, QUEUE_FACTOR, job_budget_s
from temper.common.schema import SandboxJob, Verdict

MARGIN = 1.1  # so that not every job of a lease moves its deadline again


@runtime_checkable
class MeasuresQueue(Protocol):
    """A grader that knows how long jobs wait for their turn, in seconds."""

    @property
    def queue_s(self) -> float: ...


class GradingTime:
    """A `domains.Grader` that moves `limit`. `aside_s`: what follows a verdict and is not the sandbox's; `on_prolonged` hears
    how many seconds from now the lease needs."""

    def __init__(
        self,
        grader: Grader,
        sandbox: config.Sandbox,
        limit: asyncio.Timeout,
        aside_s: float,
        on_prolonged: Callable[[float], None] | None = None,
    ) -> None:
        self._grader, self._sandbox, self._limit = grader, sandbox, limit
        self._aside_s = aside_s
        self._on_prolonged = on_prolonged
        self._open: dict[int, float] = {}  # budgets of unfinished jobs
        self._handed_in = 0

    async def run(self, job: SandboxJob) -> Verdict:
        """See `domains.Grader.run`."""
        number = self._handed_in = self._handed_in + 1
        self._open[number] = job_budget_s(limited(job, self._sandbox))
        self._prolong()
        try:
            return await self._grader.run(job)
        finally:
            del self._open[number]
            if self._open:
                self._prolong()  # the wait may have grown since the others were handed in

    def _prolong(self) -> None:
        when = self._limit.when()
        if when is None or self._limit.expired():
            return
        queue_s = self._grader.queue_s if isinstance(self._grader, MeasuresQueue) else 0.0
        needed_s = min(sum(self._open.values()) + QUEUE_FACTOR * queue_s + self._aside_s, MOST_GRADING_S)
        now = asyncio.get_running_loop().time()
        if now + needed_s > when:
            more_s = min(needed_s * MARGIN, MOST_GRADING_S)
            self._limit.reschedule(now + more_s)
            if self._on_prolonged is not None:
                self._on_prolonged(more_s)
