"""All sessions of one worker: opened by their first job, ended by their last one, their deadline, a cancel or the worker's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from temper.common.log import log
from temper.common.schema import SandboxJob, Verdict
from temper.sandbox import verdicts
from temper.sandbox.cell import Cell
from temper.sandbox.outlast import outlast
from temper.sandbox.session import LANGUAGES, Session

SESSIONS_LIMIT = 64


@dataclass
class _Entry:
    cell: Cell
    session: Session
    timer: asyncio.TimerHandle
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """`start` makes a jail, `stop` ends one and leaves nothing."""

    def __init__(self, start: Callable[[], Awaitable[Cell]], stop: Callable[[Cell], Coroutine[Any, Any, None]]) -> None:
        self._start = start
        self._stop = stop
        self._entries: dict[str, _Entry] = {}
        self._opening: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> list[str]:
        """The sessions that live."""
        return list(self._entries)

    async def run(self, job: SandboxJob) -> Verdict:
        """The job's steps in its session. Cancelling ends the session."""
        name = job.session_id or ""
        if job.language not in LANGUAGES:
            return verdicts.infra(f"a session in {job.language}; there are sessions in {' and '.join(LANGUAGES)}")
        if name in self._opening:
            return verdicts.infra(f"session {name!r} is being opened by another job")
        entry = self._entries.get(name)
        if entry is None:
            if job.resume:
                return verdicts.infra(
                    f"session {name!r} is not there any more: its deadline has come, or its worker's end"
                )
            if len(self._entries) + len(self._opening) >= SESSIONS_LIMIT:
                return verdicts.infra(f"{SESSIONS_LIMIT} sessions are open on this worker")
            entry = await self._open(name, job)
        try:
            async with entry.lock:
                verdict = await entry.session.run(job)
                if job.close_session:
                    files = await entry.session.close(snapshot=True)
                    verdict = msgspec.structs.replace(verdict, files=files)
        except BaseException:
            await outlast(self.end(name))
            raise
        if job.close_session:
            await outlast(self.end(name))
        return verdict

    async def _open(self, name: str, job: SandboxJob) -> _Entry:
        self._opening.add(name)
        try:
            cell = await self._start()
            try:
                session = await Session.open(cell, job)
            except BaseException:
                await outlast(self._stop(cell))
                raise
        finally:
            self._opening.discard(name)
        timer = asyncio.get_running_loop().call_later(job.session_s, self._expire, name)
        self._entries[name] = _Entry(cell, session, timer)
        return self._entries[name]

    def _expire(self, name: str) -> None:
        log(f"session {name}: its deadline has come")
        self.end(name)

    def end(self, name: str) -> asyncio.Future[None]:
        """End a session, whatever it does; done when nothing of it is left."""
        entry = self._entries.pop(name, None)
        task = asyncio.ensure_future(self._end(entry))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _end(self, entry: _Entry | None) -> None:
        if entry is not None:
            entry.timer.cancel()
            entry.cell.kill()
            await entry.session.close()
            await self._stop(entry.cell)

    async def close(self) -> None:
        """End them all."""
        for name in list(self._entries):
            self.end(name)
        if self._ending:
            await asyncio.wait(self._ending)
