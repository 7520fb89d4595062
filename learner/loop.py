"""The order in which a learner does things: warm start, steps, evaluations, checkpoints, the end.

Guarantees: publishing never holds up the next step; a checkpoint holds the state between two steps; every wait ends by a
message, its deadline, the broker's word that the run failed, or `Drained`. Called by the daemon, which owns the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from temper.common import metrics as names
from temper.common.errors import PeerLost, RunFailed
from temper.common.log import log
from temper.common.schema import Covered, Done, Lane, Phase
from temper.learner import checkpoint
from temper.learner.inbox import GroupData
from temper.learner.step import Interrupted

if TYPE_CHECKING:
    from temper.learner.daemon import LearnerDaemon

T = TypeVar("T")

LAGS = (names.LEARNER_LAG_MEAN, names.LEARNER_LAG_P99, names.LEARNER_LAG_MAX)
SHARES = names.LEARNER_LAG_SHARE.removesuffix("*")
LENGTHS = names.LEARNER_LAG_LENGTH.removesuffix("*")


class Drained(Exception):
    """The daemon was told to drain while it waited: the loop ends between two steps."""


async def _whole(step: Awaitable[T]) -> T:
    """A step's result; `Drained` if it was given up."""
    try:
        return await step
    except Interrupted:
        raise Drained from None


class Loop:
    """`arrived` is set by whatever came in; `draining` and `broker_failure` end the loop between two steps."""

    def __init__(self, daemon: LearnerDaemon) -> None:
        self.daemon = daemon
        self.arrived = asyncio.Event()
        self.draining = False
        self.broker_failure: str | None = None

    @property
    def trains(self) -> bool:
        """False for a run that only evaluates: it has nothing to save."""
        return self.daemon.recipe.run.max_steps > 0 or self.daemon.session.ordinal > 0

    async def run(self) -> None:
        """All of it; `Drained` when told to end before."""
        await self._learn()
        await self._conclude()

    async def publish(self, keep: bool = False) -> None:
        """Send the present weights on their way; `keep`: this version is asked for later, by its number."""
        tensors = await self.daemon.off_loop(self.daemon.session.serving_tensors)
        await self.daemon.publisher.publish(self.daemon.session.ordinal, tensors, keep=keep)

    async def _learn(self) -> None:
        session, recipe = self.daemon.session, self.daemon.recipe
        if session.warm:
            await self._warm_start()
        begun = session.steps_done == 0 and "before" not in session.evaluations
        if begun:
            self.daemon.examiner.ask("before")
        if recipe.run.max_steps > 0:
            self._enter("train", recipe.pacing.groups_per_step, recipe.pacing.samples_per_group)
        every = recipe.run.checkpoint_every_steps
        while session.steps_done < recipe.run.max_steps:
            await self._step()
            if every and session.steps_done % every == 0 and session.steps_done < recipe.run.max_steps:
                await self.save()

    def _enter(self, phase: Any, groups: int, samples: int, reason: str = "") -> None:
        lanes = {"warm": "demo", "train": "train"}
        shares = self.daemon.session.curriculum.shares(lanes[phase]) if phase in lanes else {}  # type: ignore[arg-type]
        self.daemon.peer.post(Phase(phase, shares, groups, samples, reason))

    async def _warm_start(self) -> None:
        warm, session = self.daemon.recipe.warm_start, self.daemon.session
        self._enter("warm", warm.groups_per_step, warm.samples_per_group)
        while session.warm:
            groups, wait_s = await self._batch("demo", warm.groups_per_step)
            report = await _whole(self.daemon.off_loop(session.warm_step, groups))
            self.daemon.peer.post(Done(session.ordinal - 1, report.trained, {}, counted=False))
            self.daemon.intake.training = []
            self.daemon.records.warm(session, report, wait_s)
            self.daemon.board.step(report.metrics, session.trainer.warm_steps_done, warm=True)
            self._count(report.metrics, wait_s)
            self.daemon.progress(
                f"warm step {session.trainer.warm_steps_done}, likelihood {session.likelihood or 0.0:.3f}"
            )
        self.daemon.intake.inbox.clear("demo")
        await self.publish(keep=True)
        log(
            f"warm start over after {session.trainer.warm_steps_done} steps: mean likelihood of a demonstration "
            f"{session.likelihood or 0.0:.3f}"
        )

    async def _step(self) -> None:
        """One RL step: batch, update, Done, publish."""
        session, recipe = self.daemon.session, self.daemon.recipe
        groups, wait_s = await self._batch("train", recipe.pacing.groups_per_step)
        begun = time.perf_counter()
        after = session.steps_done + 1
        if after < recipe.run.max_steps:  # the next batch fills while this one trains
            self.daemon.intake.ask("train", recipe.pacing.groups_per_step)
        report, alarms = await _whole(self.daemon.off_loop(session.train_step, groups))
        void = {str(group_id): reason for group_id, reason in report.void.items()}
        self.daemon.peer.post(Done(session.ordinal - 1, report.trained, void, counted=True))
        self.daemon.intake.training = []
        last = after == recipe.run.max_steps
        evaluate = bool(recipe.eval.every_steps) and after % recipe.eval.every_steps == 0 and not last
        await self.publish(keep=evaluate or last)
        if evaluate:
            self.daemon.examiner.ask("step")
        session.totals.train_s += wait_s + time.perf_counter() - begun
        self.daemon.records.step(session, report, wait_s)
        report.metrics[names.LEARNER_STEP_TIME] = (report.seconds, 1.0)
        report.metrics[names.LEARNER_WAIT] = (wait_s, 1.0)
        report.metrics[names.LEARNER_ALARMS] = (float(len(alarms)), 1.0)
        self.daemon.board.step(report.metrics, session.steps_done)
        self._count(report.metrics, wait_s)
        for alarm in alarms:
            log(f"ALARM {alarm}")
        self.daemon.progress(f"step {session.steps_done} of {recipe.run.max_steps}")
        self.daemon.examiner.reap()

    def _count(self, metrics: dict[str, tuple[float, float]], wait_s: float) -> None:
        """What `temper status` shows of the learner."""
        for name in (names.LEARNER_TOKENS, names.LEARNER_PACKED, names.LEARNER_ROW_TOKENS, names.LEARNER_STEPS):
            self.daemon.meter.add(name, metrics.get(name, (0.0, 0.0))[0])
        self.daemon.meter.add(names.LEARNER_WAIT, wait_s)
        lags = {name: total / count for name, (total, count) in metrics.items() if name in LAGS and count}
        shares = {
            name: total / count
            for name, (total, count) in metrics.items()
            if count and name.startswith((SHARES, LENGTHS))
        }
        gone = {name: 0.0 for name in self.daemon.meter.gauges if name.startswith((SHARES, LENGTHS))}
        for name, value in (gone | lags | shares).items():
            self.daemon.meter.set(name, value)

    # ------------------------------------------------------------ groups

    async def _batch(self, lane: Lane, want: int) -> tuple[list[GroupData], float]:
        """`want` groups as they become ready, and how long that took. `Drained` when told to end meanwhile."""
        begun = time.perf_counter()
        self.daemon.intake.ask(lane, want)
        while self.daemon.intake.inbox.held(lane) < want:
            what = f"actors: groups (lane {lane}, {self.daemon.intake.inbox.held(lane)} of {want} there)"
            try:
                await self._something(what, self.daemon.recipe.run.stall_timeout_s)
            except PeerLost as error:
                starting = self.daemon.patience.starting(time.monotonic())
                if not starting:
                    trouble = self.daemon.patience.trouble
                    raise PeerLost(f"{error}; the last trouble there: {trouble}" if trouble else str(error)) from error
                log(f"waiting: the engine of {', '.join(starting)} is still starting")
        self._check()
        pacing = self.daemon.recipe.pacing
        ordered = pacing.batch_order == "lease" or pacing.max_staleness == 0 or self.daemon.recipe.run.deterministic
        return self.daemon.intake.batch(lane, want, ordered), time.perf_counter() - begun

    async def _something(self, what: str, deadline_s: float) -> None:
        """Wait until a message comes; raises what the broker said went wrong, or `Drained`. What came before this call
        is the caller's to have looked at."""
        self._check()
        self.arrived.clear()
        await self.daemon.wait_for(what, self.arrived.wait(), deadline_s)
        self._check()
        self.daemon.examiner.reap()

    def _check(self) -> None:
        if self.broker_failure is not None:
            raise RunFailed(self.broker_failure)
        if self.draining:
            raise Drained

    # ------------------------------------------------------------ the end

    async def save(self) -> None:
        """A checkpoint of the present state; the broker may forget what it covers."""
        begun = time.perf_counter()
        session, kept = self.daemon.session, self.daemon.recipe.run.checkpoints_kept

        def write() -> tuple[Path, int]:
            return checkpoint.write(
                self.daemon.checkpoints, session.checkpoint(self.daemon.welcome.run_id, self.daemon.lineage), kept
            )

        path, oldest = await self.daemon.off_loop(write)
        self.daemon.checkpoint_path = str(path)
        self.daemon.meter.set(names.LEARNER_CHECKPOINT_TIME, time.perf_counter() - begun)
        self.daemon.peer.post(Covered(session.ordinal, oldest, str(path), self.daemon.examiner.examined()))

    async def _conclude(self) -> None:
        """After the last step: last version out, its evaluation, checkpoint."""
        self._enter("eval", 0, 0, "all steps are done")
        if self.daemon.recipe.run.max_steps > 0:
            self.daemon.examiner.ask("after")
        if self.trains:
            await self.save()
        if self.daemon.examiner.pending:
            self.daemon.progress("evaluating the last version")
        self.daemon.examiner.reap()
        while self.daemon.examiner.pending:
            with contextlib.suppress(PeerLost):  # the deadline: an accuracy is null then, the run still ends well
                await self._something("evaluator: held-out tasks", max(self.daemon.examiner.left_s(), 0.1))
            self.daemon.examiner.reap()
        results = self.daemon.session.evaluations
        if self.daemon.recipe.run.max_steps == 0 and "before" in results:  # nothing was trained in between
            results["after"] = results["before"]
        await self.daemon.publisher.flush(self.daemon.recipe.run.stall_timeout_s)
