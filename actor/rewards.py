"""Sandbox verdicts for domains: one execution for identical jobs, a bounded memory of verdicts.

Same program + same seed = same outcome, so jobs of equal content share one execution, under way or remembered; an infra
verdict is never remembered. When everybody who waited for a job has gone, it is cancelled. Lives on the daemon's event
loop; `bound` gives the `Grader` that a domain sees, callable from any thread's loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from temper.actor.loops import on_loop
from temper.common import config
from temper.common.errors import ProtocolError
from temper.common.log import log
from temper.common.schema import Job, JobCancel, JobDone, Limits, SandboxJob, Verdict, pack_frames, unpack_frames

REMEMBERED = 8192  # verdicts
REMEMBERED_BYTES = 32 * 1024 * 1024
WAIT_FADES = 0.9  # a wait that was measured counts so much less with each verdict that came sooner


class Link(Protocol):
    """What is needed of a `Peer`."""

    async def send(self, body: Any, frames: Any = ()) -> None: ...

    def post(self, body: Any, frames: Any = ()) -> bool: ...


@dataclass(slots=True)
class _Execution:
    job_id: str
    verdict: asyncio.Future[Verdict]
    body: Job
    frames: list[memoryview]
    began: float
    waiting: int = 0
    sending: asyncio.Task[None] | None = None


@dataclass(slots=True)
class GraderCounts:
    """Since the start."""

    jobs: int = 0
    shared: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)


class SandboxGrader:
    """Sends `Job`s and awaits their `JobDone` by id."""

    def __init__(self, link: Link, sandbox: config.Sandbox) -> None:
        self._link = link
        self._sandbox = sandbox
        self._loop = asyncio.get_running_loop()
        self._by_key: dict[bytes, _Execution] = {}
        self._by_id: dict[str, _Execution] = {}
        self._known: OrderedDict[bytes, tuple[Verdict, int]] = OrderedDict()
        self._known_bytes = 0
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(6)
        self._waited_s = 0.0  # how long jobs waited for their turn lately
        self.queue_s = 0.0
        """How long a job may wait for its turn: as others did lately, or as the oldest one has already. From any thread."""
        self.counts = GraderCounts()

    @property
    def waiting(self) -> int:
        """Executions that have no verdict yet."""
        return len(self._by_id)

    def bound(self, lease_id: int, domain: str) -> BoundGrader:
        """A `domains.Grader` whose jobs are ordered by `lease_id`."""
        return BoundGrader(self, lease_id, domain)

    async def run(self, job: SandboxJob, lease_id: int, domain: str) -> Verdict:
        """The verdict of `job` under the recipe's limits and mode. Never raises for what a program does."""
        job = limited(job, self._sandbox)
        if job.session_id is not None:
            return await self._await(self._start(job, lease_id, domain), None)
        key = content_key(job)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self.counts.shared += 1
            return known[0]
        execution = self._by_key.get(key)
        if execution is None:
            execution = self._by_key[key] = self._start(job, lease_id, domain)
        else:
            self.counts.shared += 1
        return await self._await(execution, key)

    def on_done(self, done: JobDone, frames: list[memoryview]) -> None:
        """Handler of `JobDone`."""
        execution = self._by_id.pop(done.job_id, None)
        if execution is None:
            return  # cancelled meanwhile
        self._waited_s = max(self._loop.time() - execution.began - max(done.wall_s, 0.0), self._waited_s * WAIT_FADES)
        self._measure()
        try:
            verdict: Verdict = unpack_frames(frames, Verdict)
        except ProtocolError as error:
            log(f"job {done.job_id}: {error}")
            verdict = Verdict("infra", detail=str(error))
        self.counts.outcomes[verdict.outcome] = self.counts.outcomes.get(verdict.outcome, 0) + 1
        if not execution.verdict.done():
            execution.verdict.set_result(verdict)

    def _start(self, job: SandboxJob, lease_id: int, domain: str) -> _Execution:
        job = msgspec.structs.replace(job, job_id=f"{self._prefix}-{next(self._numbers)}")
        body = Job(job.job_id, lease_id, domain, job.session_id, job.close_session)
        execution = _Execution(job.job_id, self._loop.create_future(), body, pack_frames(job), self._loop.time())
        self._by_id[job.job_id] = execution
        self._measure()
        self.counts.jobs += 1
        execution.sending = self._loop.create_task(self._send(execution))
        return execution

    def _measure(self) -> None:
        oldest = next(iter(self._by_id.values()), None)
        self.queue_s = max(0.0, self._waited_s, self._loop.time() - oldest.began if oldest is not None else 0.0)

    def end_session(self, name: str) -> None:
        """The episode of a session is over."""
        self._link.post(JobCancel(name, session=True))

    def resend(self) -> None:
        """The broker restarted, and jobs live in its memory only: hand in again what has no verdict. One that it knows, or
        that a worker still runs, is not run twice at once."""
        for execution in self._by_id.values():
            if execution.sending is not None and execution.sending.done():
                execution.sending = self._loop.create_task(self._send(execution))

    async def _send(self, execution: _Execution) -> None:
        try:
            await self._link.send(execution.body, execution.frames)
        except Exception as error:  # whoever waits for the verdict gets the error
            if not execution.verdict.done():
                execution.verdict.set_exception(error)

    async def _await(self, execution: _Execution, key: bytes | None) -> Verdict:
        execution.waiting += 1
        try:
            verdict = await asyncio.shield(execution.verdict)
        finally:
            execution.waiting -= 1
            if execution.waiting == 0:
                self._leave(execution, key)
        if key is not None and verdict.outcome != "infra":
            self._remember(key, verdict)
        return verdict

    def _leave(self, execution: _Execution, key: bytes | None) -> None:
        """Nobody waits any longer: forget the execution, cancel it if it still runs."""
        if key is not None and self._by_key.get(key) is execution:
            del self._by_key[key]
        if execution.verdict.done():
            return
        self._by_id.pop(execution.job_id, None)
        if execution.sending is not None and not execution.sending.done():
            execution.sending.cancel()
        else:
            self._link.post(JobCancel(execution.job_id))

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        if key in self._known:
            return
        size = len(verdict.stdout) + len(verdict.stderr) + sum(len(test.stdout) for test in verdict.tests) + 512
        self._known[key] = (verdict, size)
        self._known_bytes += size
        while len(self._known) > REMEMBERED or self._known_bytes > REMEMBERED_BYTES:
            self._known_bytes -= self._known.popitem(last=False)[1][1]


class BoundGrader:
    """Implements `domains.Grader` for one lease."""

    def __init__(self, grader: SandboxGrader, lease_id: int, domain: str) -> None:
        self._grader, self._lease_id, self._domain = grader, lease_id, domain

    async def run(self, job: SandboxJob) -> Verdict:
        """See `domains.Grader.run`."""
        return await on_loop(self._grader._loop, lambda: self._grader.run(job, self._lease_id, self._domain))

    @property
    def queue_s(self) -> float:
        """See `grading_time.MeasuresQueue`. From any thread."""
        return self._grader.queue_s

    def end_session(self, name: str) -> None:
        """See `tools.EndsSessions`. From any thread."""
        self._grader._loop.call_soon_threadsafe(self._grader.end_session, name)


def content_key(job: SandboxJob) -> bytes:
    """Digest of everything that determines a job's outcome: all but its id."""
    return hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.replace(job, job_id="")), digest_size=16).digest()


def limited(job: SandboxJob, sandbox: config.Sandbox) -> SandboxJob:
    """`job` under the recipe: its limits where the domain names none, else the smaller of both; its mode."""
    bound = Limits(
        wall_s=sandbox.wall_s,
        cpu_s=sandbox.cpu_s,
        memory_bytes=sandbox.memory_mb * 1024 * 1024,
        output_bytes=sandbox.output_kb * 1024,
    )
    own = job.limits
    if own != Limits():
        bound = Limits(
            wall_s=min(own.wall_s, bound.wall_s),
            cpu_s=min(own.cpu_s, bound.cpu_s),
            memory_bytes=min(own.memory_bytes, bound.memory_bytes),
            pids=min(own.pids, bound.pids),
            output_bytes=min(own.output_bytes, bound.output_bytes),
        )
    return msgspec.structs.replace(
        job, limits=bound, mode=sandbox.mode, jail_per_test=job.jail_per_test or sandbox.jail_per_test
    )
