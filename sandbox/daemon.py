"""The sandbox worker as a daemon: takes jobs from the broker up to its slots, answers each with a verdict.

Every job is answered, unless it was cancelled or the process dies (then the broker gives it to another worker). A job that
cannot even be read is answered with `infra` and the reason. Draining finishes what runs; what is not finished within the
deadline is killed and goes back to the broker with the goodbye.
"""

from __future__ import annotations

import asyncio
import time

from temper.common import metrics
from temper.common.domains import content_digest
from temper.common.errors import ProtocolError, TemperError
from temper.common.log import log
from temper.common.peer import Peer
from temper.common.peer_daemon import PeerDaemon
from temper.common.schema import Holding, Job, JobCancel, JobDone, SandboxJob, Verdict, pack_frames, unpack_frames
from temper.sandbox import verdicts
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker

UNJAILED_ALLOWED = 5
"""Jobs in a row that no jail could be had for before the worker ends: a new one, with a folder and groups of its own, may do
better, and a run whose workers all end so says why."""
FLUSH_S = 5.0


def read_job(frames: list[memoryview]) -> SandboxJob | Verdict:
    """The job in `frames`, or the verdict on one that cannot be read."""
    try:
        job: SandboxJob = unpack_frames(frames, SandboxJob)
    except ProtocolError as error:
        log(f"a job that cannot be read: {error}")
        return verdicts.infra(str(error))
    return job


def sampled(job: SandboxJob, share: float) -> bool:
    """Whether a job is among the share that is run twice: by its id, so that no program can tell. Sessions never are."""
    return job.session_id is None and content_digest(job.job_id) % 10_000 < share * 10_000


def outcomes(verdict: Verdict) -> list[str]:
    """What must be the same in every run."""
    return [verdict.outcome, *(test.outcome for test in verdict.tests)]


class SandboxDaemon(PeerDaemon):
    """`slots` jobs at once, on `host`, whose ability to jail has been checked."""

    def __init__(self, name: str, address: str, host: Host, *, slots: int, key_file: str | None = None) -> None:
        super().__init__("sandbox", name, address, slots=slots, key_file=key_file)
        self.host = host
        self.slots = slots
        self._worker: Worker | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}

    def subscribe(self, peer: Peer) -> None:
        peer.on(Job, self._on_job)
        peer.on(JobCancel, self._on_cancel)

    async def start(self) -> None:
        """The worker first: jobs may arrive as soon as the broker knows us."""
        self._worker = Worker(self.host, self.slots)
        self._worker.on_test = lambda: self.progress("a test ended")  # a job of many tests is no stall
        await self._worker.__aenter__()
        limits = ", ".join(self._worker.hierarchy.names) or "none: rlimits only"
        log(f"jails by {self.host.nsjail}; limits that the kernel enforces for whole program trees: {limits}")
        await super().start()

    async def drain(self, reason: str) -> None:
        """Finish what runs."""
        if self._jobs:
            await asyncio.wait(self._jobs.values())
        await self.peer.flush(self.drain_timeout_s)

    async def close(self, exit_code: int, reason: str) -> None:
        """Kill what runs, say goodbye, leave nothing on the host."""
        running = list(self._jobs.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=3.0)
        await super().close(exit_code, reason)
        if self._worker is not None:
            await self._worker.__aexit__()

    def holding(self) -> Holding:
        """The jobs that run here, the sessions that live here."""
        sessions = self._worker.sessions.names() if self._worker is not None else []
        return Holding(self.peer.broker_epoch, jobs=list(self._jobs), sessions=sessions)

    def idle(self) -> bool:
        """No job is here."""
        return not self._jobs

    def tick(self) -> None:
        self.meter.set(metrics.SANDBOX_RUNNING, len(self._jobs))
        if self._worker is not None:
            self.meter.set(metrics.SANDBOX_SESSIONS, len(self._worker.sessions))
            self.meter.add(metrics.SANDBOX_JAILS, self._worker.take_started())
        super().tick()

    def _on_job(self, job: Job, frames: list[memoryview]) -> None:
        if job.job_id in self._jobs:
            return  # handed out again before its answer arrived
        data = [memoryview(bytes(frame)) for frame in frames]
        if self.idle():
            self.progress(f"job {job.job_id} begun")
        task = self.spawn(self._answer(job, data), f"job {job.job_id}")
        self._jobs[job.job_id] = task
        task.add_done_callback(lambda _: self._jobs.pop(job.job_id, None))

    def _on_cancel(self, cancel: JobCancel, frames: list[memoryview]) -> None:
        if cancel.session:
            if self._worker is not None:
                self._worker.sessions.end(cancel.job_id)
        elif (task := self._jobs.get(cancel.job_id)) is not None:
            self.meter.add(metrics.SANDBOX_CANCELLED)
            task.cancel()

    async def _answer(self, job: Job, frames: list[memoryview]) -> None:
        started = time.monotonic()
        request = read_job(frames)
        verdict = request if isinstance(request, Verdict) else await self._execute(request)
        wall_s = time.monotonic() - started
        self._count(verdict, wall_s)
        await self.peer.send(JobDone(job.job_id, verdict.outcome, wall_s), pack_frames(verdict))
        if self._worker is not None and self._worker.unjailed >= UNJAILED_ALLOWED:
            await self.peer.flush(FLUSH_S)
            self.fail(TemperError(f"no jail for {self._worker.unjailed} jobs in a row, the last: {verdict.detail}"))
        if isinstance(request, SandboxJob) and verdict.outcome != "infra" and sampled(request, self.host.rerun_share):
            self.spawn(self._run_again(request, verdict), f"second run of {job.job_id}")

    async def _execute(self, request: SandboxJob) -> Verdict:
        assert self._worker is not None
        return await self._worker.execute(request)

    async def _run_again(self, request: SandboxJob, first: Verdict) -> None:
        """Same program, same seed: the same outcomes. What differs is counted, and logged for whoever must find out why."""
        second = await self._execute(request)
        if second.outcome == "infra":
            return
        self.meter.add(metrics.SANDBOX_RERUNS)
        if outcomes(first) != outcomes(second):
            self.meter.add(metrics.SANDBOX_FLAKY)
            found = f"{outcomes(first)} ({first.detail}), then {outcomes(second)} ({second.detail})"
            log(f"job {request.job_id} is flaky: {found}")

    def _count(self, verdict: Verdict, wall_s: float) -> None:
        self.meter.add(metrics.SANDBOX_JOBS)
        self.meter.add(metrics.SANDBOX_OUTCOMES.replace("*", verdict.outcome))
        self.meter.add(metrics.SANDBOX_PROGRAMS, len(verdict.tests))
        self.meter.add(metrics.SANDBOX_WALL, wall_s)
        self.meter.add(metrics.SANDBOX_CPU, verdict.cpu_s)
        self.progress(f"{verdict.outcome} in {wall_s:.3f} s")
