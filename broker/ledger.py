"""The ledger: what was leased, accepted, trained and given up, durable before anybody is told.

SQLite (WAL, synchronous=FULL) holds leases, attempts, groups, sample indices and the core's state; the samples' arrays
lie in segment files, synced before the transaction that names them. `accept` and `record` collect, `commit` makes one
transaction of it all: the daemon acknowledges and acts only after it. So after kill -9 or a power cut everything
acknowledged is there, and nothing is there in part. With ``durability = "memory"`` nothing is synced and the books are
written about once a second: a crash may cost the last second, a clean end costs nothing.

A full disk is an `EnvironmentFault` (exit code 4); the transaction is then not made, and nothing of it acknowledged.
"""

from __future__ import annotations

import errno
import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from temper.broker import rows
from temper.broker.core import Changes
from temper.broker.groups import GroupRecord
from temper.broker.leases import LeaseRecord
from temper.broker.payloads import Key, Part, Payload, PayloadStore
from temper.broker.segments import Ref
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.schema import SamplePart, Samples

CACHE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Accepted:
    """The samples will be durable with the next `commit`. `part` counts the messages of their lease."""

    part: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """They are there already."""


@dataclass(frozen=True, slots=True)
class Refused:
    """They cannot be taken."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What an earlier process left, for `BrokerCore.load`: its state and the records that still matter."""

    state: dict[str, Any]
    leases: list[LeaseRecord]
    groups: list[GroupRecord]
    letters: list[dict[str, Any]]  # dead letters, the oldest first


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
        self._written: list[tuple[Key, Part]] = []
        self._indices: list[tuple[int, int, int]] = []
        self._released: list[int] = []
        self._leases: dict[int, LeaseRecord] = {}
        self._groups: dict[int, GroupRecord] = {}
        self._ended: list[tuple[int, int, str, str]] = []
        self._state: dict[str, Any] | None = None
        with self._disk():
            folder.mkdir(parents=True, exist_ok=True)
            self.payloads = PayloadStore(folder / "segments", sync=self.durable, cache_bytes=cache_bytes)
            self._db = sqlite3.connect(folder / "ledger.sqlite", isolation_level=None, timeout=10.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if self.durable else 'OFF'}")
            self._db.executescript(rows.TABLES)
            self.run_id = self._check_run(run_id)
            found = self._db.execute(
                "SELECT lease_id, indices, segment, offset, length FROM parts ORDER BY lease_id, part"
            )
            self.payloads.adopt((row[0], tuple(json.loads(row[1])), Ref(*row[2:])) for row in found)

    # ------------------------------------------------------------ taking in

    def accept(
        self, samples: Samples, frames: Sequence[Any], nbytes: int | None = None
    ) -> Accepted | Duplicate | Refused:
        """Take validated samples; durable with the next `commit`, readable at once. `nbytes` of the frames, if known."""
        lease_id = samples.lease_id
        indices = tuple([sample.index for sample in samples.samples])
        have = self.payloads.have.get(lease_id)
        if have is not None and not have.isdisjoint(indices):
            if have.issuperset(indices):
                return Duplicate()
            return Refused(f"samples {list(indices)} of lease {lease_id}: {sorted(have)} are there already")
        if len(indices) > 1 and len(set(indices)) != len(indices):
            return Refused(f"samples {list(indices)} of lease {lease_id}: an index appears twice")
        part = SamplePart(samples.samples, samples.arrays)
        number = self.payloads.add(lease_id, part, indices, frames, nbytes)
        self._indices += [(lease_id, index, number) for index in indices]
        return Accepted(number)

    def record(self, changes: Changes) -> None:
        """Take the core's changes; durable with the next `commit`."""
        for lease in changes.leases:
            self._leases[lease.lease_id] = lease
        for group in changes.groups:
            self._groups[group.group_id] = group
        self._ended += changes.ended
        self._state = changes.state

    def release(self, group_ids: Iterable[int]) -> None:
        """The payloads of these groups are not needed any more, whatever happens."""
        self._released += [group_id for group_id in group_ids if self.payloads.release(group_id)]

    def commit(self, force: bool = True) -> None:
        """Make everything taken in durable, as one transaction.

        In memory mode only `force` writes the books; without it, payloads beyond the cache go to disk.
        """
        everything = self.durable or force
        with self._disk():
            self._written += self.payloads.write(everything)
            if everything:
                self._write_books()
                self.payloads.sweep()
        self.payloads.trim()

    def read(self, group_id: int) -> list[Payload]:
        """The accepted parts of a group in order of arrival: their metas and array frames."""
        with self._disk():
            return self.payloads.read(group_id)

    def close(self) -> None:
        """Commit and close."""
        self.commit()
        with self._disk():
            self.payloads.segments.close()
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
            lease.have = set(self.payloads.have.get(lease.lease_id, ()))
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

    def _write_books(self) -> None:
        if self._state is None and not (self._written or self._indices or self._released):
            return
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany(rows.INSERT_SAMPLE, self._indices)
            db.executemany(rows.INSERT_PART, [rows.part_row(*part) for part in self._written])
            db.executemany(rows.UPSERT_LEASE, [rows.lease_row(lease) for lease in self._leases.values()])
            out = [(r.lease_id, r.attempt, r.peer, "out") for r in self._leases.values() if r.out]
            db.executemany(rows.UPSERT_ATTEMPT, [*self._ended, *out])
            db.executemany(rows.UPSERT_GROUP, [rows.group_row(group) for group in self._groups.values()])
            db.executemany(rows.DELETE_PARTS, [(group_id,) for group_id in self._released])
            if self._state is not None:
                db.execute(rows.UPSERT_META, ("state", json.dumps(self._state)))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        self._written, self._indices, self._released, self._ended, self._state = [], [], [], [], None
        self._leases, self._groups = {}, {}

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
