"""What is told comes after what is written, in order; a disk that fails tells nobody anything."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from temper.broker import commits
from temper.broker import events as ev
from temper.broker.commits import Commits, Turn
from temper.broker.core import BrokerCore
from temper.broker.ledger import Accepted, Ledger
from temper.broker.rows import ROWS_A_STEP
from temper.common import schema
from temper.common.config import Pacing, Recipe
from temper.common.errors import EnvironmentFault
from temper.common.metrics import Meter

ROLES: dict[str, schema.Role] = {"learner": "learner", "actor": "actor", "other": "actor"}


class Stage:
    """Commits over a real ledger whose disk waits for `disk` to be set, or fails once `full` is."""

    def __init__(self, folder: Path, durability: Literal["full", "memory"] = "full", cache_bytes: int = 1000) -> None:
        self.core = BrokerCore(Recipe(pacing=Pacing(groups_per_step=4, samples_per_group=2, max_staleness=1)))
        self.ledger = Ledger(folder, None, durability, cache_bytes=cache_bytes)
        self.told: list[Turn] = []
        self.broken: list[BaseException] = []
        self.disk, self.full, self.begun = threading.Event(), threading.Event(), threading.Event()
        self.commits = Commits(self.core, self.ledger, Meter("broker"), self.told.append, self.broken.append)
        write = self.ledger.segments.write

        def slow(chunks: Any) -> None:
            self.begun.set()
            assert self.disk.wait(20.0)
            if self.full.is_set():
                raise OSError(28, "No space left on device")
            write(chunks)

        self.ledger.segments.write = slow  # type: ignore[method-assign]

    def take(self, event: ev.Event) -> None:
        self.commits.turn.actions += self.core.on(event, 0.0)

    def begin(self) -> None:
        """A lease goes out: the books change."""
        self.take(ev.Joined("learner", "learner", "learner"))
        self.take(ev.Received("learner", schema.LearnerReady(1, None, 0, 0)))
        self.take(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, 4, 2)))
        self.take(ev.Joined("actor", "actor", "actor", 1))


def test_nothing_is_told_before_the_disk_has_it_and_turns_keep_their_order(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path)
        stage.begin()
        stage.commits.settle()
        await asyncio.to_thread(stage.begun.wait, 20.0)
        for number in range(3):  # nothing of these touches the books: they wait all the same
            stage.commits.turn.actions.append(ev.Note(str(number)))
            stage.commits.settle()
        assert stage.told == []
        stage.disk.set()
        await asyncio.wait_for(stage.commits.settled(), 60.0)
        first, rest = stage.told
        assert any(isinstance(action, ev.SendLease) for action in first.actions)
        assert rest.actions == [ev.Note("0"), ev.Note("1"), ev.Note("2")]
        stage.commits.close()

    asyncio.run(play())


def test_a_disk_that_is_full_ends_the_broker_and_tells_nobody(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path)
        stage.full.set()
        stage.disk.set()
        stage.begin()
        stage.commits.turn.taken[b"peer"] = 1
        await asyncio.wait_for(stage.commits.settled(), 60.0)
        (error,) = stage.broken
        assert isinstance(error, EnvironmentFault) and "disk full" in str(error)
        stage.commits.turn.taken[b"peer"] = 2
        stage.commits.settle()
        assert stage.told == []
        stage.commits.close()
        stage.ledger._db.close()

    asyncio.run(play())


def test_while_the_disk_works_new_leases_and_queued_groups_go_out_and_a_kill_then_forgets_no_more_than_these(
    tmp_path: Path,
) -> None:
    async def play() -> None:
        folder = tmp_path / "ledger"
        stage = Stage(folder)
        commits = stage.commits

        def told(kind: type[ev.Action]) -> list[Any]:
            return [action for turn in stage.told for action in turn.actions if isinstance(action, kind)]

        def answer(lease: schema.Lease) -> None:
            for index in lease.indices:
                meta = schema.SampleMeta(index, "stop", 1.0, True, {}, "ok", [])
                arrived = ev.SamplesArrived("actor", lease.lease_id, lease.attempt, (meta,), 1)
                stage.take(ev.SamplesBatch([arrived]))
                assert isinstance(stage.ledger.store(lease.lease_id, (index,), b"", [bytes(1)], 1), Accepted)

        stage.disk.set()
        stage.begin()
        await asyncio.wait_for(commits.settled(), 60.0)
        (first,) = told(ev.SendLease)
        answer(first.lease)  # its group is queued
        await asyncio.wait_for(commits.settled(), 60.0)
        second = told(ev.SendLease)[1]
        stage.disk.clear()
        stage.begun.clear()
        stage.take(ev.Joined("other", "actor", "other", 1))
        commits._hurry = True  # nothing is put off
        commits.settle()
        await asyncio.to_thread(stage.begun.wait, 20.0)
        third = told(ev.SendLease)[2]  # to "other", while the disk works
        answer(second.lease)
        commits.turn.taken[b"actor"] = 7
        stage.take(ev.Received("learner", schema.Demand("train", 2)))
        commits.settle()
        assert [action.group_id for action in told(ev.Deliver)] == [first.lease.lease_id]  # the second is not on disk
        fourth = told(ev.SendLease)[3]
        assert not any(turn.taken for turn in stage.told)

        shutil.copytree(folder, tmp_path / "after")  # killed now
        again = Ledger(tmp_path / "after", None)
        restored = again.restore()
        assert restored is not None
        core = BrokerCore(Recipe(pacing=stage.core.pacing))
        core.load(restored.state, restored.leases, restored.groups, 0.0)
        known = {lease.lease_id for lease in restored.leases}
        assert known == {first.lease.lease_id, second.lease.lease_id}
        assert core.leases.leases[second.lease.lease_id].out
        actions = [core.on(ev.Joined(name, role, name, 4, returning=True), 0.0) for name, role in ROLES.items()]
        actions.append(core.on(ev.Received("learner", schema.Holding(1, groups=[first.lease.lease_id])), 0.0))
        assert not any(isinstance(action, ev.Deliver) for found in actions for action in found)
        forgotten = [(each.lease.lease_id, 1) for each in (second, fourth)]
        refused = core.on(ev.Received("actor", schema.Holding(1, attempts=forgotten)), 0.0)
        assert [a.lease_id for a in refused if isinstance(a, ev.RefuseAttempt)] == [fourth.lease.lease_id]
        new = [action.lease for action in refused if isinstance(action, ev.SendLease)]
        assert new and min(lease.lease_id for lease in new) > max(each.lease.lease_id for each in (third, fourth))
        again.close()

        stage.disk.set()
        await asyncio.wait_for(commits.settled(), 60.0)
        assert [turn.taken for turn in stage.told if turn.taken] == [{b"actor": 7}]
        assert len(told(ev.Deliver)) == 2
        commits.close()

    asyncio.run(play())


def test_memory_mode_waits_for_nothing(tmp_path: Path) -> None:
    core = BrokerCore(Recipe())
    told: list[Turn] = []
    own = Commits(core, Ledger(tmp_path, None, "memory"), Meter("broker"), told.append, lambda error: None)
    own.turn.taken[b"peer"] = 7
    own.settle()
    assert [turn.taken for turn in told] == [{b"peer": 7}]
    own.close()


def test_memory_mode_tells_while_the_disk_writes_but_no_more_than_a_cache_ahead_of_it(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path, "memory", cache_bytes=1000)
        ledger, own = stage.ledger, stage.commits

        def turn(lease_id: int, size: int) -> list[int]:
            """Samples of `size` bytes come; the leases that were told of so far."""
            ledger.store(lease_id, (0,), b"", [bytes([lease_id]) * size], size)
            own.turn.actions.append(ev.Note(str(lease_id)))
            own.settle()
            notes = [action for told in stage.told for action in told.actions if isinstance(action, ev.Note)]
            return [int(note.text) for note in notes if note.text.isdecimal()]

        assert turn(1, 900) == [1]
        assert not stage.begun.is_set()
        assert turn(2, 600) == [1, 2]  # there is no room for both: the first is being written
        await asyncio.to_thread(stage.begun.wait, 20.0)
        stage.begin()
        own.settle(force=True)  # the books are due, and wait for the thread
        assert turn(3, 500) == [1, 2, 3]
        assert turn(4, 100) == [1, 2, 3]
        assert turn(5, 100) == [1, 2, 3]
        stage.disk.set()
        await asyncio.wait_for(own.settled(), 60.0)
        assert turn(6, 1) == [1, 2, 3, 4, 5, 6]
        await asyncio.wait_for(own.settled(), 60.0)
        assert ledger.payloads.cached_bytes <= 1000
        for lease_id, size in ((1, 900), (2, 600), (3, 500), (4, 100), (5, 100), (6, 1)):
            ((_, frames),) = ledger.messages(lease_id)
            assert bytes(frames[0]) == bytes([lease_id]) * size
        books = sqlite3.connect(tmp_path / "ledger.sqlite")
        assert books.execute("SELECT COUNT(*) FROM leases").fetchone() == (1,)
        books.close()
        own.close()
        again = Ledger(tmp_path, None, "memory")
        assert sorted(again.payloads.shelves) == [1, 2, 3, 4, 5, 6]
        again.close()

    asyncio.run(play())


def test_memory_mode_ends_the_broker_too_when_the_disk_is_full(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path, "memory", cache_bytes=10)
        stage.full.set()
        stage.disk.set()
        stage.ledger.store(1, (0,), b"", [bytes(100)], 100)
        stage.commits.settle()
        await asyncio.wait_for(stage.commits.settled(), 60.0)
        (error,) = stage.broken
        assert isinstance(error, EnvironmentFault) and "disk full" in str(error)
        told = len(stage.told)
        stage.commits.turn.taken[b"peer"] = 2
        stage.commits.settle()
        assert len(stage.told) == told
        stage.commits.close()
        stage.ledger._db.close()

    asyncio.run(play())


@pytest.mark.parametrize(("took_s", "apart_s"), [(0.0, 0.0), (0.05, 2.5), (0.3, 5.0)])
def test_books_that_take_long_are_written_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, apart_s: float
) -> None:
    async def play() -> None:
        clock = [100.0]
        monkeypatch.setattr(
            commits, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter)
        )
        stage = Stage(tmp_path, "memory")
        assert stage.commits.books_due
        stage.begin()
        stage.commits.settle(force=True)
        clock[0] += took_s
        stage.disk.set()
        await asyncio.wait_for(stage.commits.settled(), 60.0)
        clock[0] = 100.0 + apart_s - 0.01
        assert not stage.commits.books_due
        clock[0] += 0.02
        assert stage.commits.books_due
        stage.commits.close()

    asyncio.run(play())


def _many(stage: Stage) -> None:
    """The books of several hundred leases are due."""
    stage.disk.set()
    stage.core.pacing = Pacing(groups_per_step=4 * ROWS_A_STEP, samples_per_group=2, max_staleness=0)
    stage.begin()
    phase = schema.Phase("train", {"a": (0, 1.0)}, 4 * ROWS_A_STEP, 2)
    stage.take(ev.Received("learner", phase))
    stage.take(ev.Joined("many", "actor", "many", 4 * ROWS_A_STEP))
    stage.commits.settle(force=True)


def test_memory_mode_tells_between_the_steps_of_its_books(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path, "memory")
        _many(stage)
        told = 0
        while stage.commits._entering is not None:
            stage.commits.turn.actions.append(ev.Note("meanwhile"))
            stage.commits.settle()
            told += 1
            assert len(stage.told) == 1 + told
            await asyncio.sleep(0)
        assert told > 8
        await asyncio.wait_for(stage.commits.settled(), 60.0)
        books = sqlite3.connect(tmp_path / "ledger.sqlite")
        assert books.execute("SELECT COUNT(*) FROM leases").fetchone() == (4 * ROWS_A_STEP,)
        books.close()
        stage.commits.close()

    asyncio.run(play())


def test_books_that_were_half_entered_at_the_end_are_whole(tmp_path: Path) -> None:
    async def play() -> None:
        stage = Stage(tmp_path, "memory")
        _many(stage)
        await asyncio.sleep(0)
        assert stage.commits._entering is not None
        stage.commits.close()

    asyncio.run(play())
    again = Ledger(tmp_path, None, "memory")
    restored = again.restore()
    assert restored is not None and len(restored.leases) == 4 * ROWS_A_STEP
    again.close()
