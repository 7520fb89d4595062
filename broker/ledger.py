"""The ledger: what was leased, accepted, trained and given up, durable before anybody is told.

SQLite (WAL, synchronous=FULL) holds leases, attempts, groups, sample indices and the core's state; the samples themselves
lie in segment files, synced before the transaction that names them. `store` and `record` collect; `begin` makes one
transaction of it all, up to its COMMIT; `Transaction.write`, which waits for the disk and may run in another thread, ends it;
`finish` takes note. The daemon acknowledges only after that. So after kill -9 or a power cut everything
acknowledged is there, and nothing is there in part. With ``durability = "memory"`` nothing is synced and the books are
written every few seconds (``commits``): a crash may cost what came since, a clean end costs nothing.

A full disk is an `EnvironmentFault` (exit code 4); the transaction is then not made, and nothing of it acknowledged.
"""

from __future__ import annotations

import errno
import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, Literal

import msgspec
from temper.broker import rows
from temper.broker.core import Changes
from temper.broker.groups import GroupRecord
from temper.broker.leases import LeaseRecord
from temper.broker.packed import apart
from temper.broker.payloads import PayloadStore, Run
from temper.broker.segments import Message, Ref, SegmentLog
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.schema import Samples
from temper.common.wire import nbytes, pack_meta, unpack_meta

BYTE_CAP = 256 * 1024 * 1024  # of samples in memory: half of it cached, the rest under way to the disk
CACHE_BYTES = BYTE_CAP // 2


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The samples will be durable with the next transaction. `part` counts the messages of their lease."""

    part: int


class Duplicate(msgspec.Struct, frozen=True, gc=False):
    """They are there already."""


class Refused(msgspec.Struct, frozen=True, gc=False):
    """They cannot be taken."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What an earlier process left, for `BrokerCore.load`: its state and the records that still matter."""

    state: dict[str, Any]
    leases: list[LeaseRecord]
    groups: list[GroupRecord]
    letters: list[dict[str, Any]]  # dead letters, the oldest first


@dataclass(frozen=True, slots=True)
class Transaction:
    """Begun, not yet on disk. `write` ends it; nobody may use the ledger's database until it returns. In memory mode, where it
    may hold all that a second brought, its `steps` may be taken one by one before that: each enters some records."""

    runs: list[Run]
    unneeded: list[Ref]
    write: Callable[[], None]
    steps: Iterator[None]


Table = tuple[str, Iterable[tuple[Any, ...]]]


def exhaust(steps: Iterator[None]) -> None:
    """Take all that are left."""
    for _ in steps:
        pass


class Ledger:
    """The ledger of one run directory. One process at a time: the broker's sockets hold the lock."""

    def __init__(
        self,
        folder: Path,
        run_id: str | None,
        durability: Literal["full", "memory"] = "full",
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Opens or creates; `run_id` None takes the id that is there, or draws one.

        ConfigError if it belongs to another run; EnvironmentFault if the disk does not serve."""
        self.folder = folder
        self.durable = durability == "full"
        self._released: list[int] = []
        self._spilled: list[Run] = []  # in memory mode: on disk, not in the books yet
        self._leases: dict[int, LeaseRecord] = {}
        self._groups: dict[int, GroupRecord] = {}
        self._attempts: dict[tuple[int, int], tuple[str, str]] = {}
        self._state: dict[str, Any] | None = None
        with self._disk():
            folder.mkdir(parents=True, exist_ok=True)
            self.segments = SegmentLog(folder / "segments", sync=self.durable)
            self.payloads = PayloadStore(self.segments, cache_bytes=cache_bytes)
            path = folder / "ledger.sqlite"
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if self.durable else 'OFF'}")
            self._check_format()
            self._db.executescript(rows.TABLES)
            self.run_id = self._check_run(run_id)
            self.payloads.adopt(map(rows.parts_of, self._db.execute(rows.KEPT_PARTS)))

    # ------------------------------------------------------------ taking in

    def accept(self, samples: Samples, frames: Sequence[Any]) -> Accepted | Duplicate | Refused:
        """`store` of a typed message."""
        indices = tuple(sample.index for sample in samples.samples)
        return self.store(samples.lease_id, indices, pack_meta(samples), frames, sum(map(nbytes, frames)))

    def store(
        self, lease_id: int, indices: tuple[int, ...], meta: bytes, frames: Sequence[Any], size: int
    ) -> Accepted | Duplicate | Refused:
        """Take a validated Samples message as it came, its frames `size` bytes; durable with the next transaction, readable
        at once."""
        shelf = self.payloads.shelves.get(lease_id)
        if shelf is not None and not shelf.have.isdisjoint(indices):
            if shelf.have.issuperset(indices):
                return Duplicate()
            return Refused(f"samples {list(indices)} of lease {lease_id}: {sorted(shelf.have)} are there already")
        if len(indices) > 1 and len(set(indices)) != len(indices):
            return Refused(f"samples {list(indices)} of lease {lease_id}: an index appears twice")
        return Accepted(self.payloads.add(lease_id, indices, meta, frames, size))

    def store_run(
        self,
        lease_id: int,
        indices: list[tuple[int, ...]],
        messages: Sequence[Message],
        nbytes: int,
        flat: Sequence[int],
    ) -> Accepted | Refused:
        """`store` of several messages of a lease, all of them new; their frames take `nbytes`; `flat` are all of their indices."""
        shelf, distinct = self.payloads.shelves.get(lease_id), set(flat)
        if len(distinct) != len(flat) or (shelf is not None and not shelf.have.isdisjoint(distinct)):
            have = sorted(shelf.have) if shelf is not None else []
            return Refused(f"samples {list(flat)} of lease {lease_id}: {have} are there already, or one comes twice")
        return Accepted(self.payloads.add_run(lease_id, indices, messages, nbytes, distinct))

    def record(self, changes: Changes) -> None:
        """Take the core's changes; durable with the next transaction."""
        for lease in changes.leases:
            self._leases[lease.lease_id] = lease
        for group in changes.groups:
            self._groups[group.group_id] = group
        self._attempts.update(changes.attempts)
        self._state = changes.state

    def release(self, group_ids: Iterable[int]) -> None:
        """The payloads of these groups are not needed any more, whatever happens."""
        self._released += [group_id for group_id in group_ids if self.payloads.release(group_id)]

    def begin(self) -> Transaction | None:
        """Everything taken in, as a transaction that lacks only its COMMIT; None if there is nothing. One at a time."""
        with self._disk():
            runs = self.payloads.place(everything=True)
            dropped, self.payloads.dropped = self.payloads.dropped, []
            if self._state is None and not (runs or dropped or self._spilled or self._released):
                return None
            steps = self._enter(self._books(runs, dropped))
            if self.durable:
                exhaust(steps)
        unneeded, chunks = self.payloads.unneeded(), self.segments.take()

        def write() -> None:
            with self._disk():
                try:
                    exhaust(steps)
                    self.segments.write(chunks)
                    self._db.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise

        return Transaction(runs, unneeded, write, steps)

    def spill(self) -> Transaction | None:
        """Payloads beyond the cache, to be written into their segments; the books follow. None if there are none."""
        if not self.full:
            return None
        with self._disk():
            runs = self.payloads.place(everything=False)
        if not runs:
            return None
        self._spilled += runs
        chunks = self.segments.take()

        def write() -> None:
            with self._disk():
                self.segments.write(chunks)

        return Transaction(runs, [], write, iter(()))

    @property
    def full(self) -> bool:
        """More is in memory than the cache takes."""
        return self.payloads.cached_bytes > self.payloads.cache_bytes

    @property
    def crowded(self) -> bool:
        """The cache is full and as much again is under way to the disk."""
        return self.payloads.cached_bytes > 2 * self.payloads.cache_bytes

    def finish(self, transaction: Transaction) -> None:
        """The transaction is on disk."""
        with self._disk():
            self.payloads.written(transaction.runs)
            self.segments.release(transaction.unneeded)

    def commit(self, force: bool = True) -> None:
        """`begin`, `write` and `finish`, here and now. In memory mode only `force` writes the books; without it, payloads
        beyond the cache go to disk (`spill`)."""
        transaction = self.begin() if self.durable or force else self.spill()
        if transaction is not None:
            transaction.write()
            self.finish(transaction)

    def read(self, group_id: int) -> list[tuple[Samples, Sequence[Any]]]:
        """The accepted messages of a group in order of arrival."""
        return [(unpack_meta(meta, Samples), frames) for meta, frames in apart(self.messages(group_id))]

    def messages(self, group_id: int) -> list[Message]:
        """`read`, with the metas still encoded and arrays that are kept together still together (``packed``)."""
        cached = self.payloads.cached(group_id)
        if cached is not None:
            return cached
        with self._disk():
            return self.payloads.read(group_id)

    def close(self) -> None:
        """Commit and close."""
        self.commit()
        with self._disk():
            self.segments.close()
            self._db.close()

    # ------------------------------------------------------------ coming back

    def restore(self) -> Restored | None:
        """What an earlier process left; None for a new ledger."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()
        if row is None:
            return None
        state = json.loads(row[0])
        oldest = state["oldest_checkpoint"] or 0
        groups = {values[0]: rows.group_of(values) for values in self._db.execute(rows.LIVE_GROUPS, (oldest,))}
        leases = []
        for values in self._db.execute(rows.LIVE_LEASES, (oldest,)):
            lease = rows.lease_of(values)
            shelf = self.payloads.shelves.get(lease.lease_id)
            lease.have = set(shelf.have) if shelf is not None else set()
            leases.append(lease)
        letters = [rows.letter_of(values) for values in self._db.execute(rows.DEAD_LETTERS)]
        return Restored(state, leases, list(groups.values()), letters[::-1])

    def _check_run(self, run_id: str | None) -> str:
        found = self._db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        if found is None:
            run_id = run_id or secrets.token_hex(8)
            self._db.execute("INSERT INTO meta VALUES ('run_id', ?)", (run_id,))
            return run_id
        if run_id not in (None, found[0]):
            raise ConfigError(
                f"{self.folder} holds the ledger of run {found[0]}, this is run {run_id}: choose another --run folder"
            )
        return str(found[0])

    # ------------------------------------------------------------ writing

    def _books(self, runs: list[Run], dropped: list[tuple[int, int, list[tuple[int, ...]]]]) -> list[Table]:
        """Statements, and the rows for them: everything recorded so far, as it is now."""
        books: list[Table] = [
            (rows.INSERT_PARTS, map(rows.parts_row, [*self._spilled, *runs])),
            (rows.INSERT_PARTS, starmap(rows.dropped_row, dropped)),
            (rows.UPSERT_LEASE, list(map(rows.lease_row, self._leases.values()))),
            (rows.UPSERT_ATTEMPT, [(*which, *how) for which, how in self._attempts.items()]),
            (rows.UPSERT_GROUP, list(map(rows.group_row, self._groups.values()))),
            (rows.RELEASE_PARTS, [(group_id,) for group_id in self._released]),
        ]
        if self._state is not None:
            books.append((rows.UPSERT_META, [("state", json.dumps(self._state))]))
        self._spilled, self._released, self._state = [], [], None
        self._leases, self._groups, self._attempts = {}, {}, {}
        return books

    def _enter(self, books: list[Table]) -> Iterator[None]:
        """Begin a transaction and enter the books, some rows a step."""
        with self._disk():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, table in books:
                    yield from rows.enter(self._db, statement, table)
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _check_format(self) -> None:
        (tables,) = self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if tables and found != rows.FORMAT:
            raise ConfigError(
                f"{self.folder} holds a ledger of format {found or 1}, this version writes format {rows.FORMAT}: finish that run "
                "with the version that began it, or choose another --run folder"
            )
        if not tables:
            self._db.execute(f"PRAGMA user_version = {rows.FORMAT}")

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """What the disk refuses becomes one message."""
        try:
            yield
        except OSError as error:
            raise self._fault(error.errno == errno.ENOSPC, error.strerror or str(error)) from error
        except sqlite3.OperationalError as error:
            raise self._fault("full" in str(error), str(error)) from error
        except sqlite3.DatabaseError as error:
            raise EnvironmentFault(f"{self.folder / 'ledger.sqlite'} is damaged: {error}") from error

    def _fault(self, full: bool, text: str) -> EnvironmentFault:
        if full:
            return EnvironmentFault(
                f"disk full in {self.folder}: nothing of the last batch was acknowledged; free space, then resume the run"
            )
        return EnvironmentFault(f"the ledger in {self.folder} cannot be written or read: {text}")
