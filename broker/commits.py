"""Group commit off the event loop: what is acknowledged was written before, and is told in the order in which it was decided.

A `Turn` is what some loop turns brought: acknowledgements owed and actions to carry out. With durability "full" a turn that
changed the books is handed to a thread, which waits for the disk; what comes meanwhile, and within a few milliseconds of the
last transaction's beginning, joins the next turn: a transaction costs about the same however many samples it holds. What
does not have to wait (``ahead``) is told at once: else actors and learner would be idle for as long as the disk works.
`perform` is called, on the loop, once a turn is durable, one turn after another. With durability "memory" it is called at
once, while the same thread writes what memory has no room for, and the books, after some turns of the loop that each entered a few
of their rows: once a second, or up to five seconds apart where they take long (`books_due`): much of what comes is not needed any
more by then, and never written. Only when that thread lags a whole cache behind do turns wait for it.
A ledger that cannot be written stops everything: nothing of the failed turn, nor of a later one, is ever performed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from temper.broker import events as ev
from temper.broker.ahead import SPARE_IDS, Ahead
from temper.broker.core import BrokerCore
from temper.broker.ledger import Ledger, Transaction
from temper.common import metrics
from temper.common.errors import TemperError
from temper.common.metrics import Meter
from temper.common.pump import PeerId

EVERY_S, EVERY_LOADED_S = 0.002, 0.010
LOADED_LEASES = 16  # in the last transaction
BOOKS_S, BOOKS_SHARE = 5.0, 50  # in memory mode the books take a fiftieth of the time, or are five seconds apart


class Turn:
    """What is to be told once the books are written."""

    __slots__ = ("actions", "leaving", "taken", "verdicts")

    def __init__(self) -> None:
        self.taken: dict[PeerId, int] = {}  # peer -> last sequence to acknowledge
        self.actions: list[ev.Action] = []
        self.verdicts: dict[str, Sequence[Any]] = {}  # job -> the frames of its verdict
        self.leaving: list[PeerId] = []  # said goodbye: to be forgotten

    def __bool__(self) -> bool:
        return bool(self.taken or self.actions or self.leaving)


class Commits:
    """`perform(turn)` tells it; `broken(error)` ends the process. `steered`: something beside records has changed."""

    def __init__(
        self,
        core: BrokerCore,
        ledger: Ledger,
        meter: Meter,
        perform: Callable[[Turn], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.turn = Turn()
        self.steered = False
        self.is_broken = False
        self._core, self._ledger, self._meter = core, ledger, meter
        self._perform, self._broken = perform, broken
        self._ahead = Ahead()
        self._writing: tuple[Transaction, Turn | None, float] | None = None  # and what to perform once it is written
        self._entering: asyncio.Handle | None = None  # the next step of what is being written
        self._forced = False
        self._idle: asyncio.Future[None] | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_at = self._books_at = 0.0
        self._books_begun: float | None = None  # in memory mode, while the books are being written
        self._timer: asyncio.TimerHandle | None = None
        self._hurry = False

    @property
    def at_once(self) -> bool:
        """Whether what is decided now is told with this turn, written or not."""
        return not (self.is_broken or self._ledger.durable or (self._writing is not None and self._ledger.crowded))

    @property
    def books_due(self) -> bool:
        """Whether it is time for the books in memory mode (``settle``'s `force`)."""
        return time.monotonic() >= self._books_at

    def settle(self, force: bool = False) -> None:
        """Write what the open turn brought, then perform it; in memory mode perform it, and write what there is no room for.
        `force`: also write the books in memory mode, as soon as nothing else is being written."""
        durable = self._ledger.durable
        self._forced = self._forced or force
        if not (durable or self.turn or self._forced or self._ledger.full):
            return
        if durable and not self.is_broken:
            self._tell_ahead()
        if self.is_broken or (self._writing is not None and (durable or self._ledger.crowded)):
            return
        if not force and self._put_off():
            return
        turn, self.turn = self.turn, Turn()
        try:
            transaction = self._begin(turn)
        except TemperError as error:
            self.fail(error)
            return
        if transaction is not None:
            self._writing = transaction, turn if durable else None, time.perf_counter()
            if durable:
                loaded = len(transaction.runs) >= LOADED_LEASES
                self._next_at = time.monotonic() + (EVERY_LOADED_S if loaded else EVERY_S)
            self._enter(transaction)
        if transaction is None or not durable:
            self._perform(turn)

    def _tell_ahead(self) -> None:
        """Perform what of the open turn need not wait."""
        ahead = Turn()
        ahead.actions, self.turn.actions = self._ahead.divide(self.turn.actions, self._core)
        if ahead:
            self._perform(ahead)

    def _put_off(self) -> bool:
        """Whether the open turn had better wait for others; it is settled in time then."""
        if self._hurry or not self._ledger.durable or not (self.steered or self._core.dirty):
            return False
        early_s = self._next_at - time.monotonic()
        if early_s <= 0:
            return False
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(early_s, self._due)
        return True

    def _due(self) -> None:
        self._timer = None
        self.settle()

    def _begin(self, turn: Turn) -> Transaction | None:
        """The transaction to write, if there is one."""
        ledger = self._ledger
        for action in turn.actions:
            if isinstance(action, ev.Release):
                ledger.release(action.group_ids)
        if self._writing is not None:
            return None
        if not ledger.durable and not self._forced:
            return ledger.spill()
        self._forced = False
        if not self.steered and not self._core.dirty:
            return None
        changes = self._core.changes(0 if self._core.deterministic or not ledger.durable else SPARE_IDS)
        ledger.record(changes)
        self._ahead.begun(changes)
        self.steered = False
        transaction = ledger.begin()
        if transaction is not None and not ledger.durable:
            self._books_begun = time.monotonic()
        return transaction

    def _enter(self, transaction: Transaction) -> None:
        """Take one step of it, and the next with the loop's next turn: nobody waits for all of them. Then have it written."""
        self._entering = None
        try:
            for _ in transaction.steps:
                self._entering = asyncio.get_running_loop().call_soon(self._enter, transaction)
                return
        except TemperError as error:
            self.fail(error)
            return
        self._submit(transaction.write)

    def _submit(self, write: Callable[[], None]) -> None:
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
            self._thread.start()
        self._jobs.put(write)

    def _run(self) -> None:
        assert self._loop is not None
        while (write := self._jobs.get()) is not None:
            error: BaseException | None = None
            try:
                write()
            except BaseException as caught:  # whatever it is, the loop decides what becomes of it
                error = caught
            self._loop.call_soon_threadsafe(self._written, error)

    def _written(self, error: BaseException | None) -> None:
        assert self._writing is not None
        (transaction, turn, begun), self._writing = self._writing, None
        if error is not None:
            self.fail(error)
            return
        self._ledger.finish(transaction)
        if self._books_begun is not None:
            took_s = time.monotonic() - self._books_begun
            self._books_at, self._books_begun = self._books_begun + min(BOOKS_SHARE * took_s, BOOKS_S), None
        self._ahead.written()
        self._count(begun)
        if turn is not None:
            self._perform(turn)
        changed = self.steered or self._core.dirty
        if self.turn or self._forced or (changed if self._ledger.durable else self._ledger.full):
            self.settle()
        if self._writing is None:
            self._wake()

    def _count(self, begun: float) -> None:
        self._meter.add(metrics.BROKER_COMMIT, time.perf_counter() - begun)
        self._meter.add(metrics.BROKER_COMMITS)

    def fail(self, error: BaseException) -> None:
        """The books cannot be written or read: nothing is told any more."""
        if not self.is_broken:
            self.is_broken = True
            self._broken(error)
        self._wake()

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def settled(self) -> None:
        """Until everything that came so far is written and told (or nothing ever will be)."""
        self._hurry = True
        self.settle()
        while self._writing is not None and not self.is_broken:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        self._hurry = False

    def close(self) -> None:
        """Write what is left, close the books, end the thread. What was not told by now never is."""
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        if self._writing is not None and not self.is_broken:
            if self._entering is not None:
                self._entering.cancel()
                self._writing[0].write()
            self._ledger.finish(self._writing[0])
        if not self.is_broken:
            self._ledger.record(self._core.changes())
            self._ledger.close()
