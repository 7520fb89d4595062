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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from temper.common import metrics as names
from temper.common.errors import EnvironmentFault
from temper.common.log import log
from temper.common.peer import Peer
from temper.common.peer_daemon import PeerDaemon
from temper.common.schema import (
    Group,
    Holding,
    LearnerReady,
    Metrics,
    NewVersion,
    RunOver,
    Trouble,
    Welcome,
)
from temper.common.schema import RunFailed as RunFailedMessage
from temper.learner import checkpoint, models
from temper.learner.boards import Board
from temper.learner.bundle import bundle_of
from temper.learner.examiner import Examiner
from temper.learner.intake import LANES, Intake
from temper.learner.loop import Drained, Loop
from temper.learner.patience import Patience
from temper.learner.publisher import Published, Publisher
from temper.learner.records import Records
from temper.learner.session import Session

T = TypeVar("T")


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
        self.checkpoint_path = ""
        self.loop = Loop(self)
        self.patience = Patience()
        self._run_dir = run_dir
        self._resume = resume
        self._finished = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._summarised = False
        self._board: Board | None = None
        self._records: Records | None = None
        self._session: Session | None = None
        self._publisher: Publisher | None = None
        self._examiner: Examiner | None = None
        self._intake: Intake | None = None

    # ------------------------------------------------------------ messages

    def subscribe(self, peer: Peer) -> None:
        """Handlers: they only put things down and wake the loop."""
        peer.on(Group, self._on_group)
        peer.on(Metrics, self._on_metrics)
        peer.on(RunFailedMessage, self._on_run_failed)
        peer.on(Trouble, self._on_trouble)
        peer.on(NewVersion, lambda body, frames: None)  # the publisher's `Stored` says the same
        self._publisher = Publisher(peer, self.lineage)
        self._publisher.on_published = self._on_published

    def _on_group(self, body: Group, frames: list[memoryview]) -> None:
        self.intake.take(body, frames)
        self.loop.arrived.set()

    def holding(self) -> Holding:
        """The groups that are here and not done with, and how many more are asked for."""
        epoch = self.peer.broker_epoch
        return (
            Holding(epoch, groups=[], demand=dict.fromkeys(LANES, 0))
            if self._intake is None
            else self._intake.holding(epoch)
        )

    def resynced(self, welcome: Welcome) -> None:
        """Say what is here; a version on its way is published anew."""
        super().resynced(welcome)
        if self._publisher is not None:
            self._publisher.resynced()

    def _on_metrics(self, body: Metrics, frames: list[memoryview]) -> None:
        self.patience.heard(body, time.monotonic())
        if self._session is not None:
            self._session.totals.relayed(body)
        if self._board is not None:
            self._board.ticks(body, time.time())

    def _on_trouble(self, body: Trouble, frames: list[memoryview]) -> None:
        self.patience.troubled(body)

    def _on_run_failed(self, body: RunFailedMessage, frames: list[memoryview]) -> None:
        self.loop.broker_failure = body.reason
        self.loop.arrived.set()

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
    def examiner(self) -> Examiner:
        """Held-out evaluations."""
        assert self._examiner is not None
        return self._examiner

    @property
    def intake(self) -> Intake:
        """Groups in."""
        assert self._intake is not None
        return self._intake

    @property
    def publisher(self) -> Publisher:
        """Weights out."""
        assert self._publisher is not None
        return self._publisher

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.records.run_dir / "checkpoints"

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
        session = self._session
        self._examiner = Examiner(session, recipe, self.records, self.board, self.peer.post)
        policy = session.trainer.policy
        self._intake = Intake(policy.head.shape[0], recipe.pacing, self.examiner, self.peer.post, policy.routing)
        resumed = await self.off_loop(self._restore) if self._resume else None
        self.publisher.threads = threads
        self.spawn(self.publisher.run(), "publisher")
        await self.peer.send(*bundle_of(loaded.name, loaded.bundle_files))
        await self.loop.publish(keep=True)
        trained = list(session.trained)
        await self.peer.send(LearnerReady(self.lineage, resumed, session.steps_done, session.ordinal, trained))

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

    # ------------------------------------------------------------ the run

    async def main(self) -> None:
        """Warm start, training, evaluation, the end."""
        reason, code = "finished", 0
        try:
            try:
                await self.loop.run()
                await self.peer.send(RunOver(reason, code))
            except Drained:
                reason = f"interrupted after {self.session.steps_done} steps"
                if self.loop.trains:
                    await self.loop.save()
            await self.peer.flush(self.recipe.run.drain_timeout_s)
            self._summarise(code, reason)
        finally:
            self._finished.set()

    async def drain(self, reason: str) -> None:
        """End between two steps, with a checkpoint. A step that takes too long is given up: its groups stay queued."""
        self.loop.draining = True
        self.loop.arrived.set()
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
