"""The ledger's tables, and records to rows and back. Called by `Ledger`; tests and tools may read the tables.

`parts` has a row for the messages of a lease that came within one transaction, from number `part` on; its place is NULL
once nothing can need them again, the sample indices stay. `samples` shows it sample by sample.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import msgspec
from temper.broker.groups import GroupRecord
from temper.broker.leases import LeaseRecord, dead_letter
from temper.broker.payloads import Run
from temper.broker.segments import Ref

FORMAT = 3  # PRAGMA user_version
ROWS_A_STEP = 64  # few enough that the loop does not stand still for them
TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    lease_id INTEGER PRIMARY KEY, lane TEXT NOT NULL, domain TEXT NOT NULL, level INTEGER NOT NULL,
    task_seed INTEGER NOT NULL, size INTEGER NOT NULL, pinned_version INTEGER, state TEXT NOT NULL,
    attempt INTEGER NOT NULL, attempt_state TEXT NOT NULL, peer TEXT NOT NULL, last_peer TEXT NOT NULL,
    min_version INTEGER NOT NULL, touched INTEGER NOT NULL, filled TEXT NOT NULL,
    task_failures INTEGER NOT NULL, infra_failures INTEGER NOT NULL, error TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (
    lease_id INTEGER NOT NULL, attempt INTEGER NOT NULL, peer TEXT NOT NULL, state TEXT NOT NULL,
    PRIMARY KEY (lease_id, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY, lane TEXT NOT NULL, domain TEXT NOT NULL, state TEXT NOT NULL, version INTEGER,
    reason TEXT NOT NULL, place INTEGER NOT NULL, bytes INTEGER NOT NULL, samples INTEGER NOT NULL,
    scored INTEGER NOT NULL, right INTEGER NOT NULL, wrong INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS parts (
    lease_id INTEGER NOT NULL, part INTEGER NOT NULL, indices TEXT NOT NULL, segment INTEGER, offset INTEGER,
    length INTEGER, PRIMARY KEY (lease_id, part)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kept_parts ON parts (lease_id) WHERE segment IS NOT NULL;
CREATE VIEW IF NOT EXISTS samples AS
    SELECT lease_id, sample.value AS sample_index, part + message.key AS part
    FROM parts, json_each(parts.indices) AS message, json_each(message.value) AS sample;
"""

INSERT_PARTS = "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?)"
RELEASE_PARTS = "UPDATE parts SET segment = NULL, offset = NULL, length = NULL WHERE lease_id = ?"
KEPT_PARTS = "SELECT * FROM parts WHERE segment IS NOT NULL ORDER BY lease_id, part"
UPSERT_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
UPSERT_ATTEMPT = "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?)"
UPSERT_LEASE = f"INSERT OR REPLACE INTO leases VALUES ({', '.join('?' * 18)})"
_LIVE = "state IN ('assembling', 'queued', 'leased') OR (state = 'trained' AND version >= ?)"
LIVE_GROUPS = f"SELECT * FROM groups WHERE {_LIVE}"
LIVE_LEASES = f"SELECT * FROM leases WHERE lease_id IN (SELECT group_id FROM groups WHERE {_LIVE})"
DEAD_LETTERS = "SELECT * FROM leases WHERE state = 'quarantined' OR filled != '[]' ORDER BY rowid DESC LIMIT 200"
UPSERT_GROUP = f"INSERT OR REPLACE INTO groups VALUES ({', '.join('?' * 12)})"


_indices = msgspec.json.Decoder(list[tuple[int, ...]]).decode
_filled = msgspec.json.Decoder(tuple[int, ...]).decode


def _text(value: Sequence[Any]) -> str:
    return msgspec.json.encode(value).decode()


def enter(db: sqlite3.Connection, statement: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """`executemany`, `ROWS_A_STEP` rows a step; those of an INSERT in one statement, if SQLite takes so many values in one."""
    head, insert, values = statement.partition(" VALUES ")
    whole = insert and ROWS_A_STEP * values.count("?") <= db.getlimit(
        sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER
    )  # 999 before 3.32
    left = iter(rows)
    while some := list(islice(left, ROWS_A_STEP)):
        if len(some) < ROWS_A_STEP or not whole:
            db.executemany(statement, some)
        else:
            db.execute(f"{head} VALUES {', '.join([values] * ROWS_A_STEP)}", [*chain.from_iterable(some)])
        yield


def parts_row(run: Run) -> tuple[Any, ...]:
    """A row of `parts`: some messages of a lease, the sample indices of each, and the record that holds them."""
    return (run.lease_id, run.first, _text(run.indices), *run.ref)


def dropped_row(lease_id: int, first: int, indices: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    """A row of `parts` that were given up before they had a place."""
    return (lease_id, first, _text(indices), None, None, None)


def parts_of(row: tuple[Any, ...]) -> Run:
    """The inverse of `parts_row`."""
    return Run(row[0], row[1], _indices(row[2]), Ref(*row[3:]))


def lease_row(r: LeaseRecord) -> tuple[Any, ...]:
    """A row of `leases`."""
    return (
        r.lease_id,
        r.lane,
        r.domain,
        r.level,
        r.task_seed,
        r.size,
        r.pinned_version,
        r.state,
        r.attempt,
        r.attempt_state,
        r.peer,
        r.last_peer,
        r.min_version,
        int(r.touched),
        _text(r.filled) if r.filled else "[]",
        r.task_failures,
        r.infra_failures,
        r.error,
    )


def lease_of(row: tuple[Any, ...]) -> LeaseRecord:
    """The inverse of `lease_row`, without the indices that samples are there for."""
    record = LeaseRecord(*row[:7])
    record.state, record.attempt, record.attempt_state, record.peer, record.last_peer = row[7:12]
    record.min_version, record.touched, record.filled = row[12], bool(row[13]), _filled(row[14])
    record.task_failures, record.infra_failures, record.error = row[15:18]
    return record


def group_row(r: GroupRecord) -> tuple[Any, ...]:
    """A row of `groups`."""
    counts = (r.nbytes, r.samples, r.scored, r.right, r.wrong)
    return (r.group_id, r.lane, r.domain, r.state, r.version, r.reason, r.order, *counts)


def group_of(row: tuple[Any, ...]) -> GroupRecord:
    """The inverse of `group_row`."""
    return GroupRecord(*row)


def letter_of(row: tuple[Any, ...]) -> dict[str, Any]:
    """The dead letter that a lease of `DEAD_LETTERS` is."""
    return dead_letter(lease_of(row))
