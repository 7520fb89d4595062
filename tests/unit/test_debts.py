"""When acknowledgements leave: with the turn that owes them, one a peer, unless many peers are owed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from temper.common.credit import Channel
from temper.common.debts import FEW, HELD_TURNS, LATEST_S, MUCH_BYTES, SOON_S, Debts
from temper.common.schema import Ack
from temper.common.session import Session
from temper.common.wire import header_fields, unpack_meta

WINDOW = 64


class Loop:
    """A clock that a test puts forward, and what is to be called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, what: Callable[[], None]) -> None:
        self.soon.append(what)

    def call_later(self, delay_s: float, what: Callable[[], None]) -> Any:
        self.later.append((delay_s, what))
        return self.later[-1]

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for what in soon:
            what()


class Wire:
    """In place of a Link: keeps who was told that how many of its messages arrived."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes, int]] = []

    def send(self, peer: bytes, header: bytes, meta: bytes, frames: Any) -> bool:
        assert header_fields(header, 5)[0] == Ack.KIND
        self.told.append((peer, unpack_meta(meta, Ack).received))
        return True


class Stage:
    def __init__(self, peers: int) -> None:
        self.loop, self.wire = Loop(), Wire()
        self.debts = Debts(self.loop)  # type: ignore[arg-type]
        names = [b"%d" % i for i in range(peers)]
        self.sessions = [Session(self.wire, name, 1, Channel(WINDOW)) for name in names]  # type: ignore[arg-type]
        for session in self.sessions:
            session.channel.take_ack(0.0)  # the peers know their window

    def take(self, number: int, messages: int = 1) -> None:
        """Messages of a peer come and are taken, one after another."""
        session = self.sessions[number]
        for _ in range(messages):
            session.channel.arrive(session.channel.received + 1, 1)
            session.channel.acknowledge(session.channel.received)
            self.debts.owe(session, len(self.sessions))


def test_a_turn_answers_each_of_a_few_peers_once_and_waits_for_nothing() -> None:
    stage = Stage(3)
    for _ in range(5):
        stage.take(0)
        stage.take(2)
    assert not stage.wire.told
    stage.loop.turn()
    assert sorted(stage.wire.told) == [(b"0", 5), (b"2", 5)]
    assert not stage.loop.soon and not stage.loop.later
    stage.take(0)
    stage.debts.turn_over()  # the turn is over before the loop says so
    assert stage.wire.told[2:] == [(b"0", 6)]
    stage.loop.turn()
    assert len(stage.wire.told) == 3


def test_many_peers_are_answered_for_several_turns_at_once_unless_a_window_hangs_on_it() -> None:
    stage = Stage(FEW + 1)
    for number in range(FEW + 1):
        stage.take(number)
    stage.loop.turn()
    assert not stage.wire.told
    ((delay_s, pay),) = stage.loop.later
    assert SOON_S <= delay_s <= LATEST_S
    stage.take(3, WINDOW // 8)
    stage.take(4)
    stage.loop.turn()
    assert stage.wire.told == [(b"3", 1 + WINDOW // 8)]
    pay()
    assert sorted(stage.wire.told[1:]) == sorted((b"%d" % i, 1 + (i == 4)) for i in range(FEW + 1) if i != 3)
    assert len(stage.loop.later) == 1  # one timer for all of them
    stage.loop.turn()
    assert len(stage.wire.told) == FEW + 1


def test_many_peers_are_many_however_few_of_them_a_turn_answers() -> None:
    stage = Stage(2 * FEW)
    for number in range(FEW):
        stage.take(number)
        stage.loop.turn()
        stage.take(number // 2)  # one of those that were answered just now
        stage.loop.turn()
    assert len(stage.wire.told) == 2 * FEW and not stage.loop.later
    stage.take(FEW)
    stage.loop.turn()
    assert len(stage.wire.told) == 2 * FEW and len(stage.loop.later) == 1
    stage.loop.later.pop()[1]()
    assert stage.wire.told[-1] == (b"%d" % FEW, 1)
    stage.loop.now = SOON_S  # it was a while ago
    stage.take(FEW)
    stage.loop.turn()
    assert stage.wire.told[-1] == (b"%d" % FEW, 2) and not stage.loop.later


def test_answers_wait_for_a_few_turns_while_messages_wait_to_be_read() -> None:
    stage = Stage(2)
    for turn in range(2 * HELD_TURNS + 2):
        stage.take(0)
        stage.debts.turn_over(1, behind=lambda: True)
        assert len(stage.wire.told) == (turn + 1) // (HELD_TURNS + 1)
    stage.take(1)
    stage.debts.turn_over(1, behind=lambda: False)  # nothing waits any more
    assert stage.wire.told[2:] == [(b"1", 1)]
    stage.take(1, WINDOW // 8)
    stage.debts.turn_over(1, behind=lambda: True)  # a window hangs on it
    assert stage.wire.told[3:] == [(b"1", 1 + WINDOW // 8)]
    stage.loop.turn()
    assert len(stage.wire.told) == 4 and not stage.loop.later


def test_a_turn_that_brought_much_is_answered_a_little_later_with_those_after_it() -> None:
    stage = Stage(1)
    stage.debts.in_turn = True
    for _ in range(3):
        stage.take(0)
        stage.debts.turn_over(MUCH_BYTES)
    assert not stage.wire.told and not stage.loop.soon  # within a turn the loop need not be asked
    ((delay_s, pay),) = stage.loop.later
    assert delay_s == SOON_S
    pay()
    assert stage.wire.told == [(b"0", 3)]


def test_what_is_owed_at_the_end_is_paid() -> None:
    stage = Stage(FEW + 1)
    for number in range(FEW + 1):
        stage.take(number)
    stage.debts.close()
    assert len(stage.wire.told) == FEW + 1


def test_the_answer_to_much_waits_its_time_whatever_little_comes_meanwhile() -> None:
    stage = Stage(3)
    stage.take(0)
    stage.debts.turn_over(MUCH_BYTES)
    ((delay_s, pay),) = stage.loop.later
    assert delay_s == SOON_S and not stage.wire.told
    stage.take(1)
    stage.debts.turn_over(10)
    assert stage.wire.told == [(b"1", 1)]
    stage.take(0)  # little more, from the same peer: one answer for both
    stage.debts.turn_over(10)
    assert len(stage.wire.told) == 1 and len(stage.loop.later) == 1
    pay()
    assert stage.wire.told == [(b"1", 1), (b"0", 2)]
    stage.take(0)
    stage.debts.turn_over(10)
    assert stage.wire.told[2:] == [(b"0", 3)]


def test_closing_answers_much_too() -> None:
    stage = Stage(1)
    stage.take(0)
    stage.debts.turn_over(MUCH_BYTES)
    stage.loop.later.clear()
    stage.debts._timer = None
    stage.debts.close()
    assert stage.wire.told == [(b"0", 1)]
