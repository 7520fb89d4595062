"""Executes jobs in jails. Used by the daemon, by ``temper exec`` and by anything that wants a verdict in its own process.

`execute` always returns a verdict: what goes wrong here is `infra`, which never becomes a reward. Expected answers stay
in this process; the jail gets the program, its files and one test's stdin at a time. When `execute` has returned, or was
cancelled, nothing of the job is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

from temper.common.log import log
from temper.common.schema import SandboxJob, TestCase, Verdict
from temper.sandbox import verdicts
from temper.sandbox.cell import Cell, JailFailed, Request, pack_bundle, sealed
from temper.sandbox.cgroups import Hierarchy, discover
from temper.sandbox.jail import Host
from temper.sandbox.languages import LANGUAGES, Language
from temper.sandbox.pool import JOBS_PER_JAIL, Pool
from temper.sandbox.spawner import Spawner
from temper.sandbox.state import State

FILES_LIMIT = 256
FILES_LIMIT_BYTES = 32 * 1024 * 1024
OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
START_ATTEMPTS = 2


class Worker:
    """`async with Worker(host) as worker: verdict = await worker.execute(job)`. At most `slots` jobs run at once."""

    def __init__(self, host: Host, slots: int = 2) -> None:
        self.host = host
        self.slots = slots
        self._state = State()
        self._spawner: Spawner | None = None
        self.hierarchy = Hierarchy(0)
        self._slots = asyncio.Semaphore(slots)
        self._cells = self._counted = 0
        self.running: set[Cell] = set()
        self.began = asyncio.Event()  # some job has begun to run
        self._background: set[asyncio.Task[None]] = set()
        self._pools = {
            "pool": Pool(slots, 1, self._start, self._stop),
            "fork": Pool(slots, JOBS_PER_JAIL, lambda: self._start(warm=True), self._stop),
        }

    async def __aenter__(self) -> Worker:
        self._state.sweep()
        self.hierarchy = discover(self._state.name)
        self._spawner = Spawner(self.host, self._state.folder)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self._pools.values():
            await pool.close()
        if self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
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
                run = self._fresh if job.mode == "fresh" else self._pooled
                return await run(job, LANGUAGES[job.language])
            except (JailFailed, OSError) as error:
                log(f"job {job.job_id}: {error}")
                return verdicts.infra(str(error))

    async def _fresh(self, job: SandboxJob, language: Language) -> Verdict:
        cell = await self._start()
        self._use(cell)
        try:
            return await run_tests(cell, job, language)
        finally:
            await self._finish(self._stop(cell))

    async def _pooled(self, job: SandboxJob, language: Language) -> Verdict:
        """In a jail that was started ahead. One that fails before the program began is replaced, once."""
        for _ in range(START_ATTEMPTS - 1):
            try:
                return await self._in_pool(job, language)
            except JailFailed as error:
                log(f"job {job.job_id}: a warm jail failed, taking another one: {error}")
        return await self._in_pool(job, language)

    async def _in_pool(self, job: SandboxJob, language: Language) -> Verdict:
        async with self._pools[job.mode].borrow() as cell:
            self._use(cell)
            try:
                return await run_tests(cell, job, language)
            finally:
                self.running.discard(cell)

    def _use(self, cell: Cell) -> None:
        self.running.add(cell)
        self.began.set()

    async def _stop(self, cell: Cell) -> None:
        try:
            await cell.stop()
        finally:
            self.running.discard(cell)

    async def _start(self, warm: bool = False) -> Cell:
        assert self._spawner is not None, "enter the worker first"
        for attempt in range(1, START_ATTEMPTS + 1):
            self._cells += 1
            try:
                return await Cell.start(self._spawner, self.hierarchy, f"jail-{self._cells}", warm)
            except JailFailed as error:
                if attempt == START_ATTEMPTS:
                    raise
                log(f"jail {self._cells} did not start, trying again: {error}")
        raise AssertionError("unreachable")

    async def _finish(self, ending: Coroutine[Any, Any, None]) -> None:
        """Await `ending` to its end even when this task is cancelled meanwhile."""
        task = asyncio.ensure_future(ending)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.shield(task)


async def run_tests(cell: Cell, job: SandboxJob, language: Language) -> Verdict:
    """Run every test of `job` in `cell`, each in a fresh process and an emptied workspace."""
    tests = job.tests or [TestCase()]
    bundle = sealed("program", pack_bundle([*(language.run or (language.entry,))], dict(job.files)))
    runs = []
    try:
        for test in tests:
            request = Request(language.kind, bundle, test.stdin, 0, language.reserves_memory)
            runs.append(await cell.run(request, job.limits))
    finally:
        os.close(bundle)
    return verdicts.combine(tests, runs, job.limits)


def refuse(job: SandboxJob) -> str:
    """Why a job cannot be run at all, "" if it can."""
    language = LANGUAGES.get(job.language)
    if language is None:
        return f"language {job.language!r} is unknown; known: {', '.join(sorted(LANGUAGES))}"
    if missing := language.missing():
        return f"language {job.language} needs {missing}, which is not on this host"
    if language.entry not in job.files:
        return (
            f"a {job.language} job needs the file {language.entry}; it has {', '.join(sorted(job.files)[:8]) or 'none'}"
        )
    if len(job.files) > FILES_LIMIT:
        return f"{len(job.files)} files, at most {FILES_LIMIT}"
    size = sum(map(len, job.files.values()))
    if size > FILES_LIMIT_BYTES:
        return f"files of {size} bytes together, at most {FILES_LIMIT_BYTES}"
    for name in job.files:
        parts = name.split("/")
        if not name or "\0" in name or len(name) > 255 or any(part in ("", ".", "..") for part in parts):
            return f"file name {name[:80]!r}: names are relative, without empty, . or .. parts"
    limits = job.limits
    for what, value, least, most in (
        ("wall_s", limits.wall_s, 0.01, 3600.0),
        ("cpu_s", limits.cpu_s, 0.01, 3600.0),
        ("memory_bytes", limits.memory_bytes, 8 << 20, 1 << 40),
        ("pids", limits.pids, 1, 4096),
        ("output_bytes", limits.output_bytes, 0, OUTPUT_LIMIT_BYTES),
    ):
        if not least <= value <= most:
            return f"limit {what} = {value}, allowed {least:g} to {most:g}"
    return ""
