"""Budget over a network that loses what is not sent again: all senders together stay within it, and everything arrives."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common.budget import FLOORS, UNUSED_TICKS, Budget
from temper.common.credit import DELIVER, IDLE_BYTES, Channel
from temper.common.schema import Ack, Blocked, Goodbye, Unneeded
from temper.common.session import ASK_BYTES, Outgoing, Session
from temper.common.wire import header_fields, unpack_meta

KIBIBYTE, MEBIBYTE = 1024, 1024 * 1024
TOTAL, LARGEST = 8 * MEBIBYTE, 3 * MEBIBYTE
FLOOR_BYTES = 128 * KIBIBYTE
FEW = ((4, FLOOR_BYTES), (2, 32 * KIBIBYTE), (1, 8 * KIBIBYTE))


@dataclass
class Wire:
    """In place of a Link: what a sender put on it, and does not get back by itself."""

    messages: deque[tuple[int, int, int]] = field(default_factory=deque)  # kind, sequence, size
    asked: list[Blocked] = field(default_factory=list)

    def send(self, peer: bytes, header: bytes, meta: bytes, frames: Any) -> bool:
        kind, _, _, _, sequence, size = header_fields(header, 5)
        if kind == Blocked.KIND:
            self.asked.append(unpack_meta(meta, Blocked))
        else:
            self.messages.append((kind, sequence, size))
        return True


@dataclass
class Waiter:
    """In place of a Future."""

    left: bool = False
    cancelled: bool = False

    def done(self) -> bool:
        return self.left or self.cancelled

    def set_result(self, result: None) -> None:
        self.left = True


class Sender:
    """A real Session at one end, its channel in the budget at the other."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.wire = Wire()
        self.there: Channel[Any] = budget.join(1024)
        self.session = Session(self.wire, b"", 1, Channel())  # type: ignore[arg-type]
        self.session.restart(1024, self.there.allowed_bytes, budget.largest_bytes, 0.0)
        self.sent = self.came = 0
        self.waiters: list[Any] = []
        self.sizes: deque[int] = deque()  # of what arrived and is not acknowledged

    def post(self, size: int) -> None:
        self.sent += 1
        message = Outgoing(Goodbye.KIND, b"", [bytes(0)], 0, size)
        if not self.session.reliable(message, 0.0, bounded=False):
            message.waiter = Waiter()  # type: ignore[assignment]
            self.waiters.append(message.waiter)

    def cancel(self) -> None:
        """Whoever has waited longest for a message to leave gives up."""
        waiting = [waiter for waiter in self.waiters if not waiter.done()]
        if waiting:
            waiting[0].cancelled = True
            self.sent -= 1

    def arrive(self) -> None:
        """What it has put on the wire reaches the other end."""
        while self.wire.messages:
            kind, sequence, size = self.wire.messages.popleft()
            if self.there.arrive(sequence, size) is DELIVER:
                self.sizes.append(size)
                if kind == Unneeded.KIND:
                    self.budget.give_back(self.there)
                else:
                    self.came += 1

    def asks(self, lost: bool = False) -> None:
        asked, self.wire.asked = self.wire.asked, []
        for blocked in asked if not lost else ():
            self.budget.ask(self.there, blocked)

    def acknowledge(self) -> None:
        self.sizes.clear()
        self.there.acknowledge(self.there.received)
        self.budget.acknowledged(self.there)

    def hear(self) -> None:
        """The other end's acknowledgement reaches it."""
        ack = Ack(self.there.acknowledged, self.there.allowed_messages, self.there.allowed_bytes)
        self.session.on_ack(ack, 0.0)


def settle(budget: Budget, senders: list[Sender]) -> None:
    """From here on nothing is lost, and what comes is acknowledged: everything arrives, and all room is free again."""
    still = 0
    while not all(sender.session.settled for sender in senders):
        before = sum(sender.there.received for sender in senders)
        for sender in senders:
            sender.session.tick(0.0)
            sender.asks()
            sender.arrive()
            sender.acknowledge()
        budget.serve()
        for sender in senders:
            sender.hear()
            sender.arrive()
        still = 0 if sum(sender.there.received for sender in senders) > before else still + 1
        assert still < 3, f"{budget.waiting} wait, {budget.free_bytes} bytes are free, and nothing moves"
    for _ in range(3):
        for sender in senders:
            sender.session.tick(0.0)
            sender.arrive()
            sender.asks()
            sender.acknowledge()
            sender.hear()
    assert [sender.came for sender in senders] == [sender.sent for sender in senders]
    assert not budget.waiting and sum(sender.there.extra_bytes for sender in senders) <= IDLE_BYTES * len(senders)


step = st.tuples(
    st.sampled_from(
        [
            "post",
            "post",
            "arrive",
            "ask",
            "lose",
            "acknowledge",
            "hear",
            "leave",
            "join",
            "cancel",
            "tick",
            "serve",
            "look",
        ]
    ),
    st.integers(0, 11),
    st.integers(1, LARGEST),
)


@given(st.lists(step, max_size=120), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_all_senders_together_stay_within_the_budget_and_everything_arrives(
    steps: list[tuple[str, int, int]], count: int
) -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    senders = [Sender(budget) for _ in range(count)]
    for action, who, size in steps:
        sender = senders[who % len(senders)]
        if action == "post":
            sender.post(size if who % 3 else size % KIBIBYTE)
        elif action == "arrive":
            sender.arrive()
        elif action in ("ask", "lose"):
            sender.asks(action == "lose")
        elif action == "acknowledge":
            sender.acknowledge()
        elif action == "hear":
            sender.hear()
        elif action == "tick":
            sender.session.tick(0.0)
        elif action == "cancel":
            sender.cancel()
        elif action == "join":
            senders.append(Sender(budget))
        elif action == "leave":
            budget.leave(sender.there)
            senders[who % len(senders)] = Sender(budget)
        elif action == "look":
            budget.unused()
        else:
            budget.serve()
        allowed = [one.there.allowed_bytes - one.there.arrived_bytes + sum(one.sizes) for one in senders]
        assert sum(allowed) <= TOTAL and budget.free_bytes >= 0
    settle(budget, senders)


def test_one_sender_alone_may_use_most_of_it_and_gets_it_in_few_pieces() -> None:
    budget = Budget(128 * MEBIBYTE, 32 * MEBIBYTE)
    sender = Sender(budget)
    for _ in range(24):
        sender.post(MEBIBYTE)
    asks = 0
    while sender.session.queued:
        asks += len(sender.wire.asked)
        sender.asks()
        budget.serve()
        sender.hear()
    assert asks == 3 and sender.session.channel.unacked_bytes == 24 * MEBIBYTE > ASK_BYTES


def test_room_is_given_in_the_order_of_asking_also_for_a_message_that_needs_much() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    holder, other, large, *small = [Sender(budget) for _ in range(6)]
    for sender in (holder, other):
        sender.post(LARGEST)
        sender.asks()
        budget.serve()
        sender.hear()
        sender.arrive()
    large.post(LARGEST)
    large.asks()
    for sender in small:
        sender.post(256 * KIBIBYTE)
        sender.asks()
    assert budget.free_bytes >= 128 * KIBIBYTE and budget.serve() == []
    holder.acknowledge()
    assert budget.serve()[0] is large.there and large.there.allowed_bytes >= LARGEST


def test_who_has_too_much_under_way_itself_lets_others_pass() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    first, second = Sender(budget), Sender(budget)
    first.post(LARGEST)
    first.post(LARGEST)
    first.asks()
    budget.serve()
    first.hear()
    first.asks()  # for the second message, while nothing of the first is acknowledged
    second.post(MEBIBYTE)
    second.asks()
    assert budget.serve() == [second.there] and budget.waiting == 1
    first.arrive()
    first.acknowledge()
    assert budget.serve() == [first.there]


def test_a_lost_answer_is_given_again_and_an_absurd_question_is_not_heeded() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    sender = Sender(budget)
    sender.there.take_ack(0.0)
    budget.ask(sender.there, Blocked(FLOOR_BYTES))
    assert sender.there.ack_due and not budget.waiting
    for least, most in ((2**62, 2**62), (FLOOR_BYTES + LARGEST + 1, 2**62)):
        budget.ask(sender.there, Blocked(least, [most]))
        assert not budget.waiting
    budget.ask(sender.there, Blocked(MEBIBYTE, [-5]))
    assert budget.serve() == [sender.there] and sender.there.allowed_bytes == MEBIBYTE
    budget.ask(sender.there, Blocked(2 * MEBIBYTE, [2**62] * 99))
    assert budget.serve() == [sender.there] and sender.there.extra_bytes <= LARGEST


def test_however_many_join_the_largest_message_finds_room() -> None:
    for total in (64 * MEBIBYTE, 128 * MEBIBYTE):
        budget = Budget(total, 32 * MEBIBYTE)
        senders = [Sender(budget) for _ in range(4096)]
        floors = [sender.there.window_bytes for sender in senders]
        assert floors == sorted(floors, reverse=True) and floors[0] == FLOORS[0][1]
        senders[-1].post(32 * MEBIBYTE)
        senders[-1].asks()
        assert budget.serve() == [senders[-1].there]
        for sender in senders:
            budget.leave(sender.there)
        assert budget.free_bytes == total * 3 // 4


def test_who_leaves_room_unused_while_others_wait_for_it_is_named_after_a_while() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    idle, busy, waiting = Sender(budget), Sender(budget), Sender(budget)
    for sender in (idle, busy):
        budget.ask(sender.there, Blocked(LARGEST))
        budget.serve()
    assert [budget.unused() for _ in range(2 * UNUSED_TICKS)] == [None] * 2 * UNUSED_TICKS  # nobody waits
    waiting.post(LARGEST)
    waiting.asks()
    assert budget.serve() == []
    found = None
    for tick in range(UNUSED_TICKS + 1):
        assert found is None
        busy.there.arrive(tick + 1, 20 * KIBIBYTE)  # slow, but at work
        busy.there.acknowledge(tick + 1)
        found = budget.unused()
    assert found is idle.there
    budget.leave(idle.there)
    assert budget.serve() == [waiting.there]


def test_room_that_is_too_little_for_their_next_messages_never_holds_all_up() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    senders = [Sender(budget) for _ in range(8)]
    for sender in senders:
        sender.post(MEBIBYTE)
        sender.post(LARGEST)
        sender.wire.asked.clear()
        sender.session.tick(0.0)  # asks for both at once
        sender.asks()
        assert budget.serve() == [sender.there]
        sender.hear()
        sender.arrive()
        sender.acknowledge()
    for sender in reversed(senders):
        sender.hear()
        sender.session.tick(0.0)
        sender.asks()
    settle(budget, senders)


@pytest.mark.parametrize("seed", range(6))
def test_dozens_of_actors_with_large_messages_and_a_slow_disk_never_stand_still(seed: int) -> None:
    chosen = random.Random(seed)
    budget = Budget(128 * MEBIBYTE, 32 * MEBIBYTE)
    senders = [Sender(budget) for _ in range(chosen.choice([16, 64, 256]))]
    least = chosen.choice([1, 6])
    for sender in senders:
        for _ in range(8):
            sender.post(chosen.randint(least * MEBIBYTE, (least + 3) * MEBIBYTE))
    senders[-1].post(32 * MEBIBYTE)
    for _ in range(20):
        chosen.shuffle(order := senders[:])
        for sender in order:
            sender.session.tick(0.0)
            sender.asks()
            sender.arrive()
            if chosen.random() < 0.3:
                sender.cancel()
            if chosen.random() < 0.7:
                sender.acknowledge()
        budget.serve()
        for sender in senders:
            sender.hear()
            sender.arrive()
    settle(budget, senders)


def test_the_bound_holds_when_hundreds_join_while_room_is_out_and_they_have_a_floor_later() -> None:
    budget = Budget(128 * MEBIBYTE, 32 * MEBIBYTE)
    early = [Sender(budget) for _ in range(8)]
    for sender in early:
        sender.post(15 * MEBIBYTE)
        sender.asks()
    budget.serve()
    late = [Sender(budget) for _ in range(1200)]
    assert (
        sum(sender.there.allowed_bytes for sender in (*early, *late)) <= budget.total_bytes and budget.free_bytes >= 0
    )
    bare = [sender for sender in late if not sender.there.window_bytes]
    assert bare
    for sender in early:
        sender.hear()
        sender.arrive()
        sender.acknowledge()
    bare[0].post(KIBIBYTE)
    bare[0].asks()
    assert bare[0].there in budget.serve() and bare[0].there.window_bytes > 0


def test_who_has_just_sent_or_waits_itself_is_not_named() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    first, second, waiting = Sender(budget), Sender(budget), Sender(budget)
    for sender in (first, second):
        budget.ask(sender.there, Blocked(LARGEST))
        budget.serve()
    waiting.post(LARGEST)
    waiting.asks()
    assert budget.serve() == []
    assert [budget.unused() for _ in range(UNUSED_TICKS)] == [None] * UNUSED_TICKS
    for sender in (first, second):
        sender.there.arrive(1, MEBIBYTE)  # at last, and nothing of it is acknowledged yet
    assert budget.unused() is None
    for sender in (first, second):
        sender.there.acknowledge(1)
        budget.acknowledged(sender.there)
        budget.ask(sender.there, Blocked(LARGEST + MEBIBYTE // 2))
        assert not budget.serve()
    assert [budget.unused() for _ in range(2 * UNUSED_TICKS)] == [None] * 2 * UNUSED_TICKS


def test_a_trickle_does_not_keep_room_for_ever() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    hogs = [Sender(budget) for _ in range(2)]
    for hog in hogs:
        budget.ask(hog.there, Blocked(LARGEST))
        budget.serve()
    waiting = Sender(budget)
    waiting.post(LARGEST)
    waiting.asks()
    assert budget.serve() == []
    named: set[Channel[Any]] = set()
    for tick in range(3 * UNUSED_TICKS):
        if tick % (UNUSED_TICKS - 1) == 0:
            for hog in hogs:
                hog.there.arrive(hog.there.received + 1, 1)
                hog.there.acknowledge(hog.there.received)
                budget.acknowledged(hog.there)
        named |= {budget.unused()} - {None}  # type: ignore[operator]
        budget.serve()
    assert named <= {hog.there for hog in hogs} and named


def test_what_was_asked_for_and_cancelled_is_given_back_without_being_asked() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    first, second, third = Sender(budget), Sender(budget), Sender(budget)
    for sender in (first, second):
        sender.post(LARGEST)
        sender.asks()
        budget.serve()
        sender.cancel()
        sender.hear()
        sender.session.tick(0.0)
    third.post(LARGEST)
    third.asks()
    assert budget.serve() == []
    for sender in (first, second):
        sender.arrive()  # that it does not need it
    assert budget.serve() == [third.there] and first.there.extra_bytes == second.there.extra_bytes == 0
    first.post(KIBIBYTE)  # counts as beyond what it may send until it hears that this has come
    assert first.session.queued == 1
    first.acknowledge()
    first.hear()
    assert first.session.queued == 0
    third.hear()
    settle(budget, [first, second, third])


def test_a_question_is_forgotten_when_its_sender_needs_less() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    sender = Sender(budget)
    budget.ask(sender.there, Blocked(LARGEST))
    budget.ask(sender.there, Blocked(1000))
    assert budget.waiting == 0 and budget.blocked(sender.there) == 0
    budget.ask(sender.there, Blocked(LARGEST, [-5]))
    assert budget.waiting == 1 and budget.blocked(sender.there) == LARGEST - FLOOR_BYTES


def test_what_an_acknowledgement_has_made_room_for_needs_none_and_is_answered() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    sender, others = Sender(budget), [Sender(budget) for _ in range(3)]
    for _ in range(2):
        sender.post(100 * KIBIBYTE)
    sender.asks()
    sender.arrive()
    sender.acknowledge()  # before it was looked who may send more
    assert budget.serve() == [sender.there] and sender.there.extra_bytes == 0
    for other in others:
        budget.ask(other.there, Blocked(LARGEST))
    budget.serve()
    assert budget.waiting == 1 and budget.unused() is None
    sender.hear()
    assert sender.session.queued == 0
