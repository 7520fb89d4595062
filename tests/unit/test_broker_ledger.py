"""The ledger: durable before acknowledged, whole after any cut, bounded in memory, one message for a full disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from temper.broker import events as ev
from temper.broker import rows
from temper.broker.core import BrokerCore
from temper.broker.leases import LeaseRecord
from temper.broker.ledger import Accepted, Duplicate, Ledger, Refused
from temper.broker.rows import ROWS_A_STEP
from temper.broker.segments import SegmentLog
from temper.common import schema
from temper.common.config import Pacing, Recipe
from temper.common.errors import ConfigError, EnvironmentFault


def message(lease: int, *indices: int) -> schema.Samples:
    metas = [schema.SampleMeta(i, "stop", 1.0, True, {"outcome": 1.0}, "ok", [(1, 0, 4)]) for i in indices]
    return schema.Samples(lease, 1, 1, metas, [schema.ArraySpec("tokens", "int32", (4,))])


def payload(lease: int, nbytes: int = 64) -> list[bytes]:
    return [random.Random(lease).randbytes(nbytes), b"", b"\1" * 3]


def core() -> BrokerCore:
    """A core with four leases out."""
    core = BrokerCore(Recipe(pacing=Pacing(groups_per_step=4, samples_per_group=2, max_staleness=0)))
    core.on(ev.Joined("actor", "actor", "actor", 8), 0.0)
    core.on(ev.Joined("learner", "learner", "learner"), 0.0)
    core.on(ev.Received("learner", schema.LearnerReady(1, None, 0, 0)), 0.0)
    core.on(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, 4, 2)), 0.0)
    return core


def test_what_was_accepted_is_read_back_by_another_process(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "run")
    assert ledger.accept(message(5, 0), payload(5)) == Accepted(0)
    assert ledger.accept(message(5, 1), payload(6)) == Accepted(1)
    ledger.commit()
    again = Ledger(tmp_path, "run")  # the first one was never closed
    parts = again.read(5)
    assert [[meta.index for meta in part.samples] for part, _ in parts] == [[0], [1]]
    assert parts[0][0].arrays == message(5, 0).arrays
    assert [[bytes(frame) for frame in frames] for _, frames in parts] == [payload(5), payload(6)]


def test_a_sample_is_accepted_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "run")
    ledger.accept(message(1, 0, 1), payload(1))
    assert ledger.accept(message(1, 1, 0), payload(1)) == Duplicate()
    ledger.commit()
    again = Ledger(tmp_path, "run")
    assert again.accept(message(1, 0, 1), payload(1)) == Duplicate()
    partly = again.accept(message(1, 1, 2), payload(1))
    assert isinstance(partly, Refused)
    assert "[0, 1] are there already" in partly.reason


def test_nothing_of_an_uncommitted_batch_is_there_after_a_crash(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "run")
    ledger.accept(message(1, 0), payload(1))
    ledger.commit()
    ledger.accept(message(2, 0), payload(2))
    ledger.payloads.place(everything=True)
    ledger.segments.flush()  # as far as the segments, not the transaction
    again = Ledger(tmp_path, "run")
    assert [len(again.read(lease)) for lease in (1, 2)] == [1, 0]


@pytest.mark.parametrize("cut", [0, 1, 7, 40, 90, 120])
def test_a_torn_segment_tail_is_never_read(tmp_path: Path, cut: int) -> None:
    ledger = Ledger(tmp_path, "run")
    ledger.accept(message(1, 0), payload(1))
    ledger.commit()
    (segment,) = (tmp_path / "segments").glob("*.seg")
    whole = segment.stat().st_size
    ledger.accept(message(2, 0), payload(2))
    ledger.payloads.place(everything=True)
    ledger.segments.flush()
    os.truncate(segment, whole + cut)
    again = Ledger(tmp_path, "run")
    assert [bytes(frame) for frame in again.read(1)[0][1]] == payload(1)
    again.accept(message(3, 0), payload(3))
    again.commit()
    assert [bytes(frame) for frame in Ledger(tmp_path, "run").read(3)[0][1]] == payload(3)


def test_damage_inside_a_segment_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "run")
    ledger.accept(message(1, 0), payload(1))
    ledger.commit()
    (segment,) = (tmp_path / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-10] ^= 1
    segment.write_bytes(data)
    with pytest.raises(EnvironmentFault, match="damaged at byte 0: its checksum is wrong"):
        Ledger(tmp_path, "run").read(1)


def test_the_synced_segment_precedes_the_transaction_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path, "run")
    calls: list[str] = []
    sync = os.fdatasync

    def traced(fd: int) -> None:
        calls.append("sync")
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", traced)
    ledger._db.set_trace_callback(lambda sql: calls.append(sql.split()[0]))
    ledger.accept(message(1, 0), payload(1))
    ledger.commit()
    assert calls[:2] == ["BEGIN", "INSERT"]
    assert calls[-2:] == ["sync", "COMMIT"]
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_payloads_beyond_the_cache_are_read_from_their_segments(tmp_path: Path) -> None:
    for durability in ("full", "memory"):
        ledger = Ledger(tmp_path / durability, "run", durability, cache_bytes=1000)
        for lease in range(50):
            ledger.accept(message(lease, 0), payload(lease, 400))
            ledger.commit(force=False)
            assert ledger.payloads.cached_bytes <= 1000 + 403
        for lease in range(50):
            assert [bytes(frame) for frame in ledger.read(lease)[0][1]] == payload(lease, 400)
        ledger.close()


def test_released_groups_free_their_segments_but_only_once_that_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("temper.broker.segments.SEGMENT_BYTES", 1000)
    ledger = Ledger(tmp_path, "run")
    ledger.segments.segment_bytes = 1000
    for lease in range(10):
        ledger.accept(message(lease, 0), payload(lease, 600))
        ledger.commit()
    files = sorted((tmp_path / "segments").glob("*.seg"))
    assert len(files) == 5
    ledger.release(range(9))
    assert sorted((tmp_path / "segments").glob("*.seg")) == files
    ledger.record(core().changes())
    ledger.commit()
    assert len(list((tmp_path / "segments").glob("*.seg"))) == 1
    again = Ledger(tmp_path, "run")
    assert [bool(again.read(lease)) for lease in range(10)] == [False] * 9 + [True]


def test_memory_mode_is_whole_after_a_clean_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "run", "memory")
    broker = core()
    ledger.record(broker.changes())
    ledger.accept(message(0, 0, 1), payload(0))
    ledger.commit(force=False)
    assert Ledger(tmp_path, "run", "memory").restore() is None
    ledger.close()
    restored = Ledger(tmp_path, "run", "memory").restore()
    assert restored is not None
    assert sorted(lease.lease_id for lease in restored.leases) == [0, 1, 2, 3]
    assert next(lease for lease in restored.leases if lease.lease_id == 0).have == {0, 1}


def test_books_that_are_entered_step_by_step_hold_what_was_recorded_before_the_first(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "run", "memory")
    broker = BrokerCore(Recipe(pacing=Pacing(groups_per_step=ROWS_A_STEP, samples_per_group=1, max_staleness=2)))
    broker.on(ev.Joined("actor", "actor", "actor", 3 * ROWS_A_STEP), 0.0)
    broker.on(ev.Joined("learner", "learner", "learner"), 0.0)
    broker.on(ev.Received("learner", schema.LearnerReady(1, None, 0, 0)), 0.0)
    broker.on(ev.Received("learner", schema.Phase("train", {"a": (0, 1.0)}, ROWS_A_STEP, 1)), 0.0)
    leases = list(broker.leases.leases)
    assert len(leases) == 3 * ROWS_A_STEP
    ledger.record(broker.changes())
    transaction = ledger.begin()
    assert transaction is not None
    taken = 0
    for lease_id, _ in zip(leases, transaction.steps, strict=False):
        taken += 1
        broker.on(ev.Received("actor", schema.Touch(lease_id, 1)), 1.0)
    assert taken > 6  # three tables
    broker.on(ev.Left("actor", "gone"), 2.0)
    ledger.record(broker.changes())
    transaction.write()
    ledger.finish(transaction)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as books:
        assert books.execute("SELECT DISTINCT attempt_state, touched FROM leases").fetchall() == [("out", 0)]
        assert books.execute("SELECT COUNT(*) FROM attempts WHERE state = 'out'").fetchone() == (len(leases),)
        ledger.commit()
        assert books.execute("SELECT DISTINCT attempt_state FROM leases").fetchall() == [("returned",)]
        assert books.execute("SELECT COUNT(*) FROM leases WHERE touched").fetchone() == (taken,)
    books.close()
    ledger.close()


@pytest.mark.parametrize("most", [999, 32766])
@pytest.mark.parametrize("count", [ROWS_A_STEP - 1, ROWS_A_STEP, 3 * ROWS_A_STEP + 1])
def test_rows_are_entered_whatever_number_of_values_sqlite_takes_in_a_statement(most: int, count: int) -> None:
    """It was 999 before version 3.32; that is less than a step's rows of `leases` have."""
    db = sqlite3.connect(":memory:")
    db.executescript(rows.TABLES)
    db.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, most)
    made = [rows.lease_row(LeaseRecord(lease_id, "train", "a", 0, lease_id, 4)) for lease_id in range(count)]
    steps = sum(1 for _ in rows.enter(db, rows.UPSERT_LEASE, made))
    assert steps == -(-count // ROWS_A_STEP)
    assert db.execute("SELECT * FROM leases ORDER BY lease_id").fetchall() == made
    db.close()


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    Ledger(tmp_path, "one").close()
    assert Ledger(tmp_path, None).run_id == "one"
    with pytest.raises(ConfigError, match="run one, this is run two"):
        Ledger(tmp_path, "two")


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    Ledger(tmp_path, "run").close()
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(EnvironmentFault, match=r"ledger\.sqlite is damaged"):
        Ledger(tmp_path, "run")


FILL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from temper.broker.ledger import Ledger
from temper.common import schema
from temper.common.errors import EnvironmentFault
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger(Path({folder!r}), "run")
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
done = 0
try:
    for lease in range(1000):
        meta = schema.SampleMeta(0, "stop", 1.0, True, {{}}, "ok", [])
        ledger.accept(schema.Samples(lease, 1, 1, [meta], []), [bytes(5000)])
        ledger.commit()
        done += 1
        print(done, flush=True)
except EnvironmentFault as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize("limit", [120_000, 300_000, 701_000])
def test_a_disk_without_room_is_one_message_and_nothing_half_written(tmp_path: Path, limit: int) -> None:
    """The limit on file size stands in for the disk: a write fails after some bytes, in a segment or in the WAL."""
    script = FILL.format(folder=str(tmp_path), limit=limit, tests=str(Path(__file__).parent))
    run = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert run.returncode == 0, run.stderr
    *acknowledged, last = run.stdout.splitlines()
    assert last.startswith("4 the ledger in ") or last.startswith("4 disk full in ")
    assert len(acknowledged) > 3
    again = Ledger(tmp_path, "run")
    for lease in range(len(acknowledged)):
        assert [bytes(frame) for frame in again.read(lease)[0][1]] == [bytes(5000)]
    assert again.read(len(acknowledged) + 1) == []


def test_enospc_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path, "run")
    ledger.accept(message(1, 0), payload(1))

    def full(fd: int, buffers: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(EnvironmentFault, match=r"disk full in .*: nothing of the last batch was acknowledged"):
        ledger.commit()
    monkeypatch.undo()
    assert Ledger(tmp_path, "run").read(1) == []


KILLED = """
import sys
from pathlib import Path
from temper.broker.ledger import Ledger
from temper.common import schema
ledger = Ledger(Path(sys.argv[1]), "run")
for lease in range(100_000):
    meta = schema.SampleMeta(0, "stop", 1.0, True, {}, "ok", [])
    ledger.accept(schema.Samples(lease, 1, 1, [meta], []), [lease.to_bytes(4, "little") * 500])
    ledger.commit()
    print(lease, flush=True)
"""


def test_kill_9_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    for round_number in range(4):
        folder = tmp_path / str(round_number)
        with subprocess.Popen(
            [sys.executable, "-P", "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(20 + 13 * round_number):
                assert child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        acknowledged = int(rest[-1]) if rest else 19 + 13 * round_number
        again = Ledger(folder, "run")
        for lease in range(acknowledged + 1):
            ((_, frames),) = again.read(lease)
            assert bytes(frames[0]) == lease.to_bytes(4, "little") * 500
        books = sqlite3.connect(folder / "ledger.sqlite")
        assert books.execute("SELECT COUNT(*), COUNT(DISTINCT lease_id) FROM samples").fetchone()[0] >= acknowledged + 1
        books.close()


def test_every_prefix_of_a_batch_recovers(tmp_path: Path) -> None:
    """A copy of the files after each write of the segment: the last acknowledged state, never a part of the next one."""
    ledger = Ledger(tmp_path / "live", "run")
    for lease in range(3):
        ledger.accept(message(lease, 0), payload(lease))
        ledger.commit()
        copy = tmp_path / f"copy{lease}"
        shutil.copytree(tmp_path / "live", copy)
        segment = max((copy / "segments").glob("*.seg"))
        with segment.open("ab") as file:
            file.write(b"TSEG torn")
        again = Ledger(copy, "run")
        assert [len(again.read(i)) for i in range(4)] == [1] * (lease + 1) + [0] * (3 - lease)


def test_a_segment_log_writes_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path, sync=False)
    refs = [log.append(i, [(b"m%d" % i, [b"x" * 200 * i] * 3), (b"", [])]) for i in range(400)]
    log.flush()
    for i, ref in enumerate(refs):
        lease, ((meta, frames), nothing) = log.read(ref)
        assert (lease, meta, [bytes(frame) for frame in frames]) == (i, b"m%d" % i, [b"x" * 200 * i] * 3)
        assert nothing == (b"", [])
    log.close()
