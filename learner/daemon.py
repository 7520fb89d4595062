"""The learner's process: bundle and weights out, groups in, steps in a thread, evaluations beside training.

Guarantees: heartbeats never wait for a step (training runs in a thread of its own); publishing never holds up the next
step; a checkpoint holds the state between two steps; the run ends by itself after `max_steps`, on the broker's word, or
when nothing comes for `stall_timeout_s`, with a summary in every case. Everything that is decided is decided in `session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from temper.common import metrics as names
from temper.common.errors import EnvironmentFault, PeerLost, ProtocolError, RunFailed
from temper.common.log import log
from temper.common.peer import Peer
from temper.common.peer_daemon import PeerDaemon
from temper.common.recipe_derived import domain_sampling
from temper.common.schema import (
    Covered,
    Demand,
    Done,
    Evaluate,
    Group,
    Holding,
    Lane,
    LearnerReady,
    Metrics,
    NewVersion,
    Phase,
    RunOver,
    Void,
    Welcome,
)
from temper.common.schema import RunFailed as RunFailedMessage
from temper.learner import checkpoint, models
from temper.learner.boards import Board
from temper.learner.bundle import bundle_of
from temper.learner.evaluation import Evaluation, When
from temper.learner.inbox import GroupData, Inbox, parse_group, void_reason
from temper.learner.patience import Patience
from temper.learner.publisher import Published, Publisher
from temper.learner.records import Records
from temper.learner.report import member
from temper.learner.session import Session
from temper.learner.step import Interrupted

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


class LearnerDaemon(PeerDaemon):
    """See the module. `run_dir` None: runs/NAME of the recipe. `resume`: a run directory or checkpoint folder."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        run_dir: Path | None,
        resume: Path | None,
        cache_dir: Path,
        key_file: str | None,
    ) -> None:
        super().__init__("learner", name, address, key_file=key_file)
        self.lineage = secrets.randbits(32)
        self.cache_dir = cache_dir
        self.inbox = Inbox()
        self.evaluations: list[Evaluation] = []
        self._requests = 0  # evaluations asked for
        self._training: list[int] = []  # groups of the step that runs
        self.checkpoint_path = ""
        self._run_dir = run_dir
        self._resume = resume
        self._patience = Patience()
        self._arrived = asyncio.Event()
        self._draining = asyncio.Event()
        self._finished = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._summarised = False
        self._board: Board | None = None
        self._records: Records | None = None
        self._session: Session | None = None
        self._publisher: Publisher | None = None
        self._broker_failure: RunFailedMessage | None = None

    # ------------------------------------------------------------ messages

    def subscribe(self, peer: Peer) -> None:
        """Handlers: they only put things down and wake the loop."""
        peer.on(Group, self._on_group)
        peer.on(Metrics, self._on_metrics)
        peer.on(RunFailedMessage, self._on_run_failed)
        peer.on(NewVersion, lambda body, frames: None)  # the publisher's `Stored` says the same
        self._publisher = Publisher(peer, self.lineage)
        self._publisher.on_published = self._on_published

    def _on_group(self, body: Group, frames: list[memoryview]) -> None:
        try:
            group = parse_group(body, frames, self.session.trainer.policy.head.shape[0])
        except ProtocolError as error:
            log(f"group {body.group_id} of {body.domain} is malformed and given up: {error}")
            if body.lane != "eval":
                self._replace(body.lane, body.group_id, "malformed")
                return
            group = GroupData(
                body.group_id, "eval", body.domain, body.level, body.task_seed, (), body.pinned_version, "malformed"
            )
        if group.lane == "eval":
            for evaluation in self.evaluations:
                if evaluation.version == group.pinned_version:
                    evaluation.add(group)
        else:
            pacing = self.recipe.pacing
            reason = (
                void_reason(group, pacing.samples_per_group, pacing.dynamic_sampling) if group.lane == "train" else None
            )
            if reason is None:
                self.inbox.put(group)
            else:
                self._replace(group.lane, group.group_id, reason)
        self._arrived.set()

    def holding(self) -> Holding:
        """The groups that are here and not done with, and how many more are asked for."""
        lanes: tuple[Lane, ...] = ("demo", "train")
        groups = [*self._training, *(i for lane in lanes for i in self.inbox.ids(lane))]
        for evaluation in self.evaluations:
            groups += [group_id for taken in evaluation.groups.values() for group_id in taken]
        epoch = self.peer.broker_epoch
        return Holding(epoch, groups=groups, demand={lane: self.inbox.outstanding(lane) for lane in lanes})

    def resynced(self, welcome: Welcome) -> None:
        """Say what is here; a version on its way is published anew."""
        super().resynced(welcome)
        if self._publisher is not None:
            self._publisher.resynced()

    def _replace(self, lane: Lane, group_id: int, reason: str) -> None:
        """A group that cannot be trained: its place is free at once, another one is asked for."""
        self.peer.post(Void({str(group_id): reason}))
        self.peer.post(Demand(lane, 1))

    def _on_metrics(self, body: Metrics, frames: list[memoryview]) -> None:
        self._patience.heard(body, time.monotonic())
        if self._session is not None:
            self._session.totals.relayed(body)
        if self._board is not None:
            self._board.ticks(body, time.time())

    def _on_run_failed(self, body: RunFailedMessage, frames: list[memoryview]) -> None:
        self._broker_failure = body
        self._arrived.set()

    def _on_published(self, published: Published) -> None:
        self.version = published.version
        values = {
            names.LEARNER_ENCODE_TIME: published.encode_s,
            names.LEARNER_PUBLISH_TIME: published.encode_s + published.transfer_s,
            names.LEARNER_DELTA_BYTES: float(published.nbytes),
            names.LEARNER_DELTA_SHARE: published.nbytes / published.full_nbytes,
            names.LEARNER_DELTA_DENSITY: published.density,
        }
        for name, value in values.items():
            self.meter.set(name, value)
        if self._board is not None and not self.session.warm:
            self._board.scalars(values, self.session.steps_done)

    # ------------------------------------------------------------ parts that are there from setup() on

    @property
    def session(self) -> Session:
        """The learning state."""
        assert self._session is not None
        return self._session

    @property
    def records(self) -> Records:
        """progress.jsonl and summary.json."""
        assert self._records is not None
        return self._records

    @property
    def board(self) -> Board:
        """TensorBoard."""
        assert self._board is not None
        return self._board

    @property
    def publisher(self) -> Publisher:
        """Weights out."""
        assert self._publisher is not None
        return self._publisher

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.records.run_dir / "checkpoints"

    @property
    def _trains(self) -> bool:
        """False for a run that only evaluates: it has nothing to save."""
        return self.recipe.run.max_steps > 0 or self.session.ordinal > 0

    async def off_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` in the training thread; one thing at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # ------------------------------------------------------------ start

    async def setup(self) -> None:
        """Model, state, bundle, first version: afterwards the broker can lease."""
        recipe = self.recipe
        threads = recipe.daemons.threads_per_process
        torch.set_num_threads(threads)
        self._thread = ThreadPoolExecutor(1, "train", torch.set_num_threads, (threads,))
        run_dir = self._run_dir or Path("runs") / recipe.run.name
        self._records = Records(run_dir)
        self._board = Board(run_dir / "tensorboard", self.name)
        loaded = await self.off_loop(models.load, recipe.model, recipe.run.seed, self.cache_dir)
        self._session = await self.off_loop(Session, loaded.model, recipe)
        resumed = await self.off_loop(self._restore) if self._resume else None
        self.publisher.threads = threads
        self.spawn(self.publisher.run(), "publisher")
        await self.peer.send(*bundle_of(loaded.name, loaded.bundle_files))
        await self._publish(keep=True)
        session = self.session
        await self.peer.send(LearnerReady(self.lineage, resumed, session.steps_done, session.ordinal))

    def _restore(self) -> int | None:
        """Continue from the newest whole checkpoint; its version, None when the run has none yet."""
        assert self._resume is not None
        root = checkpoint.below(self._resume)
        if root is None:
            log(f"no checkpoints below {self._resume} yet: starting from the beginning")
            return None
        found = checkpoint.load_newest(root)
        self.session.restore(found, self.welcome.run_id)
        self.checkpoint_path = str(root)
        log(f"resumed from the checkpoint of version {found.version}, {self.session.steps_done} steps done")
        return found.version

    async def _publish(self, keep: bool = False) -> None:
        tensors = await self.off_loop(self.session.serving_tensors)
        await self.publisher.publish(self.session.ordinal, tensors, keep=keep)

    # ------------------------------------------------------------ the run

    async def main(self) -> None:
        """Warm start, training, evaluation, the end."""
        reason, code = "finished", 0
        try:
            try:
                await self._learn()
                await self._conclude()
                await self.peer.send(RunOver(reason, code))
            except Drained:
                reason = f"interrupted after {self.session.steps_done} steps"
                if self._trains:
                    await self._save()
            await self.peer.flush(self.recipe.run.drain_timeout_s)
            self._summarise(code, reason)
        finally:
            self._finished.set()

    async def drain(self, reason: str) -> None:
        """End between two steps, with a checkpoint. A step that takes too long is given up: its groups stay queued."""
        self._draining.set()
        self._arrived.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.drain_timeout_s / 4):
                await self._finished.wait()
        if not self._finished.is_set() and self._session is not None:
            self._session.trainer.interrupt.set()
            await self._finished.wait()

    async def close(self, exit_code: int, reason: str) -> None:
        """Close the files; a summary is there whatever happened."""
        self._summarise(exit_code, reason)
        if self._board is not None:
            self._board.close()
        if self._records is not None:
            self._records.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        await super().close(exit_code, reason)

    def _summarise(self, code: int, reason: str) -> None:
        if self._records is None or self._session is None or self._summarised:
            return
        self._summarised = True
        try:
            self._records.summary(self.session, code, reason, self.checkpoint_path, str(self.board.folder))
        except OSError as error:
            raise EnvironmentFault(f"cannot write the summary in {self._records.run_dir}: {error}") from error

    async def _learn(self) -> None:
        session, recipe = self.session, self.recipe
        if session.warm:
            await self._warm_start()
        begun = session.steps_done == 0 and "before" not in session.evaluations
        if begun:
            self._evaluate("before")
        if recipe.run.max_steps > 0:
            self._enter("train", recipe.pacing.groups_per_step, recipe.pacing.samples_per_group)
        every = recipe.run.checkpoint_every_steps
        while session.steps_done < recipe.run.max_steps:
            await self._step()
            if every and session.steps_done % every == 0 and session.steps_done < recipe.run.max_steps:
                await self._save()

    def _enter(self, phase: Any, groups: int, samples: int, reason: str = "") -> None:
        lanes = {"warm": "demo", "train": "train"}
        shares = self.session.curriculum.shares(lanes[phase]) if phase in lanes else {}  # type: ignore[arg-type]
        self.peer.post(Phase(phase, shares, groups, samples, reason))

    async def _warm_start(self) -> None:
        warm, session = self.recipe.warm_start, self.session
        self._enter("warm", warm.groups_per_step, warm.samples_per_group)
        while session.warm:
            groups, wait_s = await self._batch("demo", warm.groups_per_step)
            report = await _whole(self.off_loop(session.warm_step, groups))
            self.peer.post(Done(session.ordinal - 1, report.trained, {}, counted=False))
            self._training = []
            self.records.warm(session, report, wait_s)
            self.board.step(report.metrics, session.trainer.warm_steps_done, warm=True)
            self._count(report.metrics, wait_s)
            self.progress(f"warm step {session.trainer.warm_steps_done}, likelihood {session.likelihood or 0.0:.3f}")
        self.inbox.clear("demo")
        await self._publish(keep=True)
        log(
            f"warm start over after {session.trainer.warm_steps_done} steps: mean likelihood of a demonstration "
            f"{session.likelihood or 0.0:.3f}"
        )

    async def _step(self) -> None:
        """One RL step: batch, update, Done, publish."""
        session, recipe = self.session, self.recipe
        groups, wait_s = await self._batch("train", recipe.pacing.groups_per_step)
        begun = time.perf_counter()
        after = session.steps_done + 1
        if after < recipe.run.max_steps:  # the next batch fills while this one trains
            self._ask("train", recipe.pacing.groups_per_step)
        report, alarms = await _whole(self.off_loop(session.train_step, groups))
        void = {str(group_id): reason for group_id, reason in report.void.items()}
        self.peer.post(Done(session.ordinal - 1, report.trained, void, counted=True))
        self._training = []
        last = after == recipe.run.max_steps
        evaluate = bool(recipe.eval.every_steps) and after % recipe.eval.every_steps == 0 and not last
        await self._publish(keep=evaluate or last)
        if evaluate:
            self._evaluate("step")
        session.totals.train_s += wait_s + time.perf_counter() - begun
        self.records.step(session, report, wait_s)
        report.metrics[names.LEARNER_STEP_TIME] = (report.seconds, 1.0)
        report.metrics[names.LEARNER_WAIT] = (wait_s, 1.0)
        report.metrics[names.LEARNER_ALARMS] = (float(len(alarms)), 1.0)
        self.board.step(report.metrics, session.steps_done)
        self._count(report.metrics, wait_s)
        for alarm in alarms:
            log(f"ALARM {alarm}")
        self.progress(f"step {session.steps_done} of {recipe.run.max_steps}")
        self._reap()

    def _count(self, metrics: dict[str, tuple[float, float]], wait_s: float) -> None:
        """What `temper status` shows of the learner."""
        for name in (names.LEARNER_TOKENS, names.LEARNER_PACKED, names.LEARNER_ROW_TOKENS, names.LEARNER_STEPS):
            self.meter.add(name, metrics.get(name, (0.0, 0.0))[0])
        self.meter.add(names.LEARNER_WAIT, wait_s)
        lags = {name: total / count for name, (total, count) in metrics.items() if name in LAGS and count}
        shares = {
            name: total / count
            for name, (total, count) in metrics.items()
            if count and name.startswith((SHARES, LENGTHS))
        }
        gone = {name: 0.0 for name in self.meter.gauges if name.startswith((SHARES, LENGTHS))}
        for name, value in (gone | lags | shares).items():
            self.meter.set(name, value)

    # ------------------------------------------------------------ groups

    def _ask(self, lane: Lane, want: int) -> None:
        missing = self.inbox.ask(lane, want)
        if missing:
            self.peer.post(Demand(lane, missing))

    async def _batch(self, lane: Lane, want: int) -> tuple[list[GroupData], float]:
        """`want` groups as they become ready, and how long that took. `Drained` when told to end meanwhile."""
        begun = time.perf_counter()
        self._ask(lane, want)
        while self.inbox.held(lane) < want:
            what = f"actors: groups (lane {lane}, {self.inbox.held(lane)} of {want} there)"
            try:
                await self._something(what, self.recipe.run.stall_timeout_s)
            except PeerLost:
                starting = self._patience.starting(time.monotonic())
                if not starting:
                    raise
                log(f"waiting: the engine of {', '.join(starting)} is still starting")
        self._check()
        pacing = self.recipe.pacing
        ordered = pacing.batch_order == "lease" or pacing.max_staleness == 0 or self.recipe.run.deterministic
        groups = self.inbox.take(lane, want, ordered)
        self._training = [group.group_id for group in groups]
        return groups, time.perf_counter() - begun

    async def _something(self, what: str, deadline_s: float) -> None:
        """Wait until a message comes; raises what the broker said went wrong, or `Drained`. What came before this call
        is the caller's to have looked at."""
        self._check()
        self._arrived.clear()
        await self.wait_for(what, self._arrived.wait(), deadline_s)
        self._check()
        self._reap()

    def _check(self) -> None:
        if self._broker_failure is not None:
            raise RunFailed(self._broker_failure.reason)
        if self._draining.is_set():
            raise Drained

    # ------------------------------------------------------------ evaluations

    def _evaluate(self, when: When) -> None:
        """Ask for an evaluation of the present version; training goes on."""
        session, recipe = self.session, self.recipe
        expected: dict[str, int] = {}
        by_samples: dict[int, list[tuple[str, int, int]]] = {}
        for name, domain in session.curriculum.domains.items():
            if domain.floor and when == "step":
                continue
            own = domain_sampling(recipe, domain)
            expected[name] = own.eval_tasks
            by_samples.setdefault(own.eval_samples, []).append((name, domain.level, own.eval_tasks))
        if not expected:
            return
        deadline = time.monotonic() + recipe.eval.timeout_s
        self.evaluations.append(Evaluation(session.ordinal, session.steps_done, when, expected, deadline))
        for samples, tasks in by_samples.items():
            self._requests += 1
            self.peer.post(Evaluate(session.ordinal, tasks, samples, self._requests))

    def _reap(self) -> None:
        """Record evaluations that are complete or out of time."""
        for evaluation in list(self.evaluations):
            late = time.monotonic() >= evaluation.deadline_at
            if evaluation.complete or late:
                self.evaluations.remove(evaluation)
                self._evaluated(evaluation)

    def _evaluated(self, evaluation: Evaluation) -> None:
        results = evaluation.results()
        if evaluation.when != "step":
            self.session.evaluations[evaluation.when] = results
        self.records.evaluation(evaluation, results, self.session.curriculum.floors)
        values: dict[str, float] = {}
        floors = self.session.curriculum.floors
        for domain, result in results.items():
            if result.accuracy is not None and result.solved is not None:
                values[member(names.LEARNER_FLOOR if domain in floors else names.LEARNER_EVAL, domain)] = (
                    result.accuracy
                )
                values[member(names.LEARNER_EVAL_PASS, domain)] = result.solved
        self.board.scalars(values, evaluation.step)
        shown = ", ".join(
            f"{domain} {result.accuracy:.3f}" if result.accuracy is not None else f"{domain} unknown ({result.reason})"
            for domain, result in results.items()
        )
        log(f"evaluation of version {evaluation.version} ({evaluation.when}, step {evaluation.step}): {shown}")
        watched = {domain: result.accuracy for domain, result in results.items() if domain not in floors}
        for alarm in self.session.oversight.evaluation(watched):
            log(f"ALARM {alarm}")

    # ------------------------------------------------------------ the end

    async def _save(self) -> None:
        """A checkpoint of the present state; the broker may forget what it covers."""
        begun = time.perf_counter()
        session, kept = self.session, self.recipe.run.checkpoints_kept

        def write() -> tuple[Path, int]:
            return checkpoint.write(self.checkpoints, session.checkpoint(self.welcome.run_id, self.lineage), kept)

        path, oldest = await self.off_loop(write)
        self.checkpoint_path = str(path)
        self.meter.set(names.LEARNER_CHECKPOINT_TIME, time.perf_counter() - begun)
        self.peer.post(Covered(session.ordinal, oldest, str(path)))

    async def _conclude(self) -> None:
        """After the last step: last version out, its evaluation, checkpoint."""
        self._enter("eval", 0, 0, "all steps are done")
        if self.recipe.run.max_steps > 0:
            self._evaluate("after")
        if self._trains:
            await self._save()
        if self.evaluations:
            self.progress("evaluating the last version")
        self._reap()
        while self.evaluations:
            left = max(e.deadline_at for e in self.evaluations) - time.monotonic()
            with contextlib.suppress(PeerLost):  # the deadline: an accuracy is null then, the run still ends well
                await self._something("evaluator: held-out tasks", max(left, 0.1))
            self._reap()
        if self.recipe.run.max_steps == 0 and "before" in self.session.evaluations:  # nothing was trained in between
            self.session.evaluations["after"] = self.session.evaluations["before"]
        await self.publisher.flush(self.recipe.run.stall_timeout_s)
