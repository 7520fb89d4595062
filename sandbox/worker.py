"""Executes jobs in jails. Used by the daemon, by ``temper exec`` and by anything that wants a verdict in its own process.

`execute` always returns a verdict: what goes wrong here is `infra`, which never becomes a reward. Expected answers stay
in this process; the jail gets the program, its files and one test's stdin at a time. When `execute` has returned, or was
cancelled, nothing of the job is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from temper.common.log import log
from temper.common.schema import SandboxJob, Verdict
from temper.sandbox import verdicts
from temper.sandbox.admission import refuse
from temper.sandbox.cell import Cell
from temper.sandbox.cgroups import Hierarchy, discover
from temper.sandbox.jail import Host, Profile
from temper.sandbox.jobs import run_job
from temper.sandbox.languages import LANGUAGES
from temper.sandbox.pool import JOBS_PER_JAIL, Pool
from temper.sandbox.run import JailFailed
from temper.sandbox.sessions import Sessions
from temper.sandbox.spawner import Spawner
from temper.sandbox.state import State

START_ATTEMPTS = 2


class Worker:
    """`async with Worker(host) as worker: verdict = await worker.execute(job)`. At most `slots` jobs run at once."""

    def __init__(self, host: Host, slots: int = 2, attempts: int = START_ATTEMPTS) -> None:
        """`attempts`: how often a jail is tried; a failed attempt that is not the last is logged."""
        self.host = host
        self.attempts = attempts
        self.slots = slots
        self._state = State()
        self._spawner: Spawner | None = None
        self.hierarchy = Hierarchy(0)
        self._slots = asyncio.Semaphore(slots)
        self._cells = self._counted = 0
        self.running: set[Cell] = set()
        self.unjailed = 0  # jobs in a row that no jail could be had for
        self.began = asyncio.Event()  # some job has begun to run
        self.on_test: Callable[[], None] = lambda: None  # some test of some job has ended
        self._pools: dict[tuple[str, str], Pool] = {}
        self.sessions = Sessions(lambda: self._start(self.host.fresh(tuple(self.host.libraries))), self._stop)

    async def __aenter__(self) -> Worker:
        try:
            self._state.sweep()
            self.hierarchy = discover(self._state.name)
            self._spawner = Spawner(self.host, self._state.folder)
        except BaseException:
            self.hierarchy.remove()
            self._state.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sessions.close()
        for pool in self._pools.values():
            await pool.close()
        if self._spawner is not None:
            await self._spawner.call(self.hierarchy.remove)
            self._spawner.close()
        self._state.close()

    def take_started(self) -> int:
        """Jails started since the last call."""
        started, self._counted = self._cells - self._counted, self._cells
        return started

    async def execute(self, job: SandboxJob) -> Verdict:
        """Run `job` and judge it. Cancelling kills what runs; the jail is gone before the cancellation goes on."""
        problem = refuse(job)
        if problem:
            return verdicts.infra(problem)
        async with self._slots:
            try:
                run = self.sessions.run if job.session_id is not None else self._in_jails
                verdict = await run(job)
                self.unjailed = 0
                return verdict
            except (JailFailed, OSError) as error:
                self.unjailed += 1
                if self.attempts > 1:
                    log(f"job {job.job_id}: {error}")
                return verdicts.infra(str(error))

    async def _in_jails(self, job: SandboxJob) -> Verdict:
        """In jails of the job's mode. When one fails before its program began, all is done once more."""
        profile = self._profile(job)
        for _ in range(self.attempts - 1):
            try:
                return await run_job(lambda: self._busy(profile, job.mode), job, self._judges, self.on_test)
            except JailFailed as error:
                log(f"job {job.job_id}: a jail failed, taking another one: {error}")
        return await run_job(lambda: self._busy(profile, job.mode), job, self._judges, self.on_test)

    @asynccontextmanager
    async def _busy(self, profile: Profile, mode: str) -> AsyncIterator[Cell]:
        async with self._lend(profile, mode) as cell:
            self.running.add(cell)
            self.began.set()
            try:
                yield cell
            finally:
                self.running.discard(cell)

    def _profile(self, job: SandboxJob) -> Profile:
        if LANGUAGES[job.language].trusted:
            return self.host.grader()
        return self.host.warm(self._used(job)) if job.mode == "fork" else self.host.fresh(self._used(job))

    def _used(self, job: SandboxJob) -> tuple[str, ...]:
        """The host's libraries that the program seems to use: its jail has them, a warm one has imported them."""
        text = b"".join(job.files.values()) + b"".join(test.suite for test in job.tests if test.weak)
        return tuple(name for name in self.host.libraries if name.encode() in text)

    def _judges(self) -> AbstractAsyncContextManager[Cell]:
        """A jail for a suite or a checker; no program ever runs in it."""
        return self._lend(self.host.judge(), "fork")

    def _lend(self, profile: Profile, mode: str) -> AbstractAsyncContextManager[Cell]:
        pool = self._pools.get((profile.name, mode))
        if pool is None:
            share = JOBS_PER_JAIL if mode == "fork" else 1
            pool = Pool(self.slots, share, lambda: self._start(profile), self._stop, ahead=mode != "fresh")
            self._pools[profile.name, mode] = pool
        return pool.borrow()

    async def _stop(self, cell: Cell) -> None:
        try:
            await cell.stop()
        finally:
            self.running.discard(cell)

    async def _start(self, profile: Profile) -> Cell:
        assert self._spawner is not None, "enter the worker first"
        for attempt in range(1, self.attempts + 1):
            self._cells += 1
            try:
                return await Cell.start(self._spawner, self.hierarchy, f"jail-{self._cells}", profile)
            except JailFailed as error:
                if attempt == self.attempts:
                    raise
                log(f"jail {self._cells} did not start, trying again: {error}")
        raise AssertionError("unreachable")
