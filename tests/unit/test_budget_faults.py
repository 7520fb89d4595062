"""Budget over a network that loses, repeats and delays, between processes that are born again: whatever happened, it stays within
its bound, and once nothing more is lost everything arrives and all room is free again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common import burst
from temper.common.budget import Budget
from temper.common.credit import DELIVER, IDLE_BYTES, Channel
from temper.common.errors import ProtocolError
from temper.common.schema import Ack, Blocked, Goodbye, Touch, Unneeded
from temper.common.session import Outgoing, Session
from temper.common.wire import header_fields, unpack_meta

KIBIBYTE, MEBIBYTE = 1024, 1024 * 1024
TOTAL, LARGEST = 8 * MEBIBYTE, 3 * MEBIBYTE
WINDOW = 64
FEW = ((4, 128 * KIBIBYTE), (2, 32 * KIBIBYTE), (1, 8 * KIBIBYTE))
Packet = tuple[int, int, list[int], list[bytes]]  # kind, sequence of the last, sizes, metas


class Waiter:
    """In place of a Future."""

    def __init__(self) -> None:
        self.left = self.cancelled = False

    def done(self) -> bool:
        return self.left or self.cancelled

    def set_result(self, result: None) -> None:
        self.left = True


class Wire:
    """In place of a Link: what a sender put on it."""

    def __init__(self) -> None:
        self.packets: deque[Packet] = deque()
        self.asked: deque[Blocked] = deque()
        self.flushes: list[Callable[[], None]] = []

    def flush_later(self, flush: Callable[[], None]) -> None:
        self.flushes.append(flush)

    def flush(self) -> None:
        flushes, self.flushes = self.flushes, []
        for flush in flushes:
            flush()

    def send(self, peer: bytes, header: bytes, meta: bytes, frames: Any) -> bool:
        kind, flags, _, _, sequence, size = header_fields(header, 5)
        if kind == Blocked.KIND:
            self.asked.append(unpack_meta(meta, Blocked))
        elif flags:
            sizes, metas, _ = burst.divide(flags, kind, [meta, *frames])
            self.packets.append((kind, sequence, sizes, metas))
        else:
            self.packets.append((kind, sequence, [size], [meta]))
        return True


class Pair:
    """A real Session at one end; at the other its channel in the budget, and what came of this incarnation."""

    def __init__(self, budget: Budget) -> None:
        self.wire = Wire()
        self.session = Session(self.wire, b"", 1, Channel(WINDOW))  # type: ignore[arg-type]
        self.posted: list[bytes] = []
        self.waiters: dict[bytes, Waiter] = {}
        self.came: set[bytes] = set()
        self.budget, self.there = budget, budget.join(WINDOW)
        self.acks: deque[Ack] = deque()
        self.last = b""
        self.session.restart(WINDOW, self.there.allowed_bytes, budget.largest_bytes, 0.0)

    def post(self, size: int, now: float) -> None:
        """A small one of a kind that travels in bursts, or a large one that does not."""
        name = b"%06d" % len(self.posted)
        self.posted.append(name)
        kind = Touch.KIND if size < KIBIBYTE else Goodbye.KIND
        message = Outgoing(kind, name, [], 0, len(name) if kind == Touch.KIND else size)
        if not self.session.reliable(message, now, bounded=False):
            message.waiter = self.waiters[name] = Waiter()  # type: ignore[assignment]

    def cancel(self, which: int) -> None:
        """Whoever waits for one of the messages to leave gives up."""
        waiting = [name for name, waiter in self.waiters.items() if not waiter.done()]
        if waiting:
            name = waiting[which % len(waiting)]
            self.waiters[name].cancelled = True
            self.posted[self.posted.index(name)] = b""

    def arrive(self) -> None:
        """The first of what is on the wire reaches the other end."""
        if not self.wire.packets:
            return
        kind, last, sizes, metas = self.wire.packets.popleft()
        for sequence, size, meta in zip(range(last - len(sizes) + 1, last + 1), sizes, metas, strict=True):
            if self.there.arrive(sequence, size) is not DELIVER:
                continue
            if kind == Unneeded.KIND:
                self.budget.give_back(self.there)
            else:
                assert meta not in self.came and meta > self.last, "twice, or out of order"
                self.came.add(meta)
                self.last = meta

    def ask(self) -> None:
        if self.wire.asked:
            self.budget.ask(self.there, self.wire.asked.popleft())

    def acknowledge(self, count: int) -> None:
        pending = self.there.received - self.there.acknowledged
        self.there.acknowledge(self.there.acknowledged + min(count, pending))
        self.budget.acknowledged(self.there)

    def say(self, now: float) -> None:
        if self.there.ack_due:
            self.acks.append(self.there.take_ack(now))

    def hear(self, which: int, now: float) -> None:
        """One of the acknowledgements on their way, not always the oldest."""
        if self.acks:
            ack = self.acks[which % len(self.acks)]
            del self.acks[which % len(self.acks)]
            self.session.on_ack(ack, now)

    def welcome(self, now: float) -> None:
        """The same process answers a hello."""
        self.session.go_on(self.budget.largest_bytes)
        there = self.there
        self.session.on_ack(Ack(there.acknowledged, there.allowed_messages, there.allowed_bytes), now)

    def born_again(self, budget: Budget, now: float) -> None:
        """The other end is a new process: what was on its way is lost, and what the old one did not acknowledge comes again."""
        self.wire.flush()
        self.wire.packets.clear()
        self.wire.asked.clear()
        self.acks.clear()
        self.session.hold()
        self.budget, self.there, self.last, self.came = budget, budget.join(WINDOW), b"", set()
        self.session.restart(WINDOW, self.there.allowed_bytes, budget.largest_bytes, now)

    @property
    def under_way(self) -> int:
        """Bytes that may still come, and those that came and are not acknowledged."""
        return self.there.allowed_bytes - self.there.arrived_bytes + sum(self.there._pending)


CALM = "post ask serve arrive acknowledge say hear cancel tick"
FAULTS = "flush lose lose_ask lose_ack hold welcome leave join look reborn"
sizes = st.one_of(st.integers(1, LARGEST), st.sampled_from([3, LARGEST]))


def told_to(actions: str, peers: int) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(
        st.tuples(st.sampled_from(actions.split()), st.integers(0, peers - 1), sizes), min_size=30, max_size=200
    )


steps = st.one_of(
    st.tuples(told_to(CALM, 1), st.just(1)),
    st.tuples(told_to(CALM, 3), st.just(3)),
    st.tuples(told_to(f"{CALM} {CALM} {FAULTS}", 4), st.integers(1, 4)),
)


@given(steps)
@settings(max_examples=300, deadline=None)
def test_whatever_is_lost_or_born_again_the_bound_holds_and_everything_arrives(
    told: tuple[list[tuple[str, int, int]], int],
) -> None:
    budget, now = Budget(TOTAL, LARGEST, FEW), 0.0
    actions, count = told
    pairs = [Pair(budget) for _ in range(count)]
    taken: dict[Pair, set[bytes]] = {pair: set() for pair in pairs}  # acknowledged by an earlier process
    held: set[Pair] = set()
    for action, who, size in actions:
        pair = pairs[who % len(pairs)]
        wire = pair.wire
        match action:
            case "post":
                pair.post(size if size % 3 else size % KIBIBYTE, now)
            case "flush":
                wire.flush()
            case "arrive":
                pair.arrive()
            case "ask":
                pair.ask()
            case "serve":
                budget.serve()
            case "acknowledge":
                pair.acknowledge(1 + size % 5)
            case "say":
                pair.say(now)
            case "hear" if pair not in held:
                pair.hear(size, now)
            case "lose" if wire.packets:
                wire.packets.popleft()
            case "lose_ask" if wire.asked:
                wire.asked.popleft()
            case "lose_ack" if pair.acks:
                pair.acks.popleft()
            case "hold":
                pair.session.hold()
                held.add(pair)
            case "welcome":
                held.discard(pair)
                pair.welcome(now)
            case "cancel":
                pair.cancel(size)
            case "tick":
                now += 1.0 + size % 9
                if pair not in held:
                    pair.session.tick(now)
                pair.there.poll(now)
            case "leave":
                budget.leave(pair.there)
                held.discard(pair)
                pairs[who % len(pairs)] = Pair(budget)
                taken[pairs[who % len(pairs)]] = set()
            case "join":
                pairs.append(Pair(budget))
                taken[pairs[-1]] = set()
            case "look":
                budget.unused()
            case "reborn":
                budget = Budget(TOTAL, LARGEST, FEW)
                held.clear()
                for one in pairs:
                    taken[one] |= one.came
                    one.born_again(budget, now)
        assert sum(one.under_way for one in pairs) <= TOTAL and budget.free_bytes >= 0
    still = 0
    for one in held:
        one.welcome(now)
    while not all(one.session.settled for one in pairs):
        before = [(one.there.received, one.there.acknowledged) for one in pairs]
        now += 9.0  # whatever is overdue goes out again
        for one in pairs:
            one.session.tick(now)
            one.wire.flush()
            one.there.poll(now)
            while one.wire.asked:
                one.ask()
            while one.wire.packets:
                one.arrive()
            one.acknowledge(WINDOW)
        budget.serve()
        for one in pairs:
            one.say(now)
            while one.acks:
                one.hear(0, now)
        moved = [(one.there.received, one.there.acknowledged) for one in pairs] != before
        still = 0 if moved else still + 1
        assert still < 4, f"{budget.waiting} wait, {budget.free_bytes} bytes are free, and nothing moves"
        assert sum(one.under_way for one in pairs) <= TOTAL and budget.free_bytes >= 0
    for _ in range(3):  # and what was asked for in vain is given back
        now += 9.0
        budget.serve()
        for one in pairs:
            one.session.tick(now)
            one.wire.flush()
            while one.wire.packets:
                one.arrive()
            while one.wire.asked:
                one.ask()
            one.acknowledge(WINDOW)
            one.say(now)
            while one.acks:
                one.hear(0, now)
    for one in pairs:
        assert {name for name in one.posted if name} <= one.came | taken[one]
    assert not budget.waiting and sum(one.there.extra_bytes for one in pairs) <= IDLE_BYTES * len(pairs)


def test_a_sender_beyond_its_room_is_the_only_one_that_ends() -> None:
    budget = Budget(TOTAL, LARGEST, FEW)
    honest, greedy = Pair(budget), Pair(budget)
    free = budget.free_bytes
    greedy.wire.packets.append((Goodbye.KIND, 1, [greedy.there.allowed_bytes + 1], [b"x"]))
    try:
        greedy.arrive()
    except ProtocolError:
        budget.leave(greedy.there)
    honest.post(LARGEST, 0.0)
    honest.ask()
    assert budget.serve() == [honest.there] and honest.there.extra_bytes <= LARGEST <= free
