"""Channel over a network that drops, repeats, delays and reorders: once, in order, within the credit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common.credit import DELIVER, DUPLICATE, GAP, REFRESH_S, RESEND_LIMIT_S, SEND_BYTES, SEND_MESSAGES, Channel
from temper.common.errors import ProtocolError
from temper.common.schema import Ack

WINDOW_MESSAGES = 5
WINDOW_BYTES = 100


@dataclass
class End:
    """One end: a channel, what waits for credit, what the wire holds on its way to the other end."""

    channel: Channel[int] = field(default_factory=lambda: Channel(WINDOW_MESSAGES, WINDOW_BYTES))
    queue: deque[tuple[int, int]] = field(default_factory=deque)  # (value, size)
    wire: list[tuple[int, int, int] | Ack] = field(default_factory=list)  # (sequence, value, size)
    sizes: dict[int, int] = field(default_factory=dict)
    delivered: list[int] = field(default_factory=list)
    unacknowledged: deque[int] = field(default_factory=deque)

    def push(self, now: float) -> None:
        while self.queue and self.channel.may_send(self.queue[0][1]):
            value, size = self.queue.popleft()
            self.sizes[value] = size
            self.transmit(self.channel.send(value, size, now), value)

    def transmit(self, sequence: int, value: int) -> None:
        self.wire.append((sequence, value, self.sizes[value]))

    def take(self, packet: tuple[int, int, int] | Ack, now: float) -> None:
        if isinstance(packet, Ack):
            if self.channel.on_ack(packet, now):
                for sequence, value in self.channel.resend():
                    self.transmit(sequence, value)
            self.push(now)
            return
        sequence, value, size = packet
        if self.channel.arrive(sequence, size) is DELIVER:
            self.delivered.append(value)
            self.unacknowledged.append(sequence)

    def acknowledge(self, now: float) -> None:
        while self.unacknowledged:
            self.channel.acknowledge(self.unacknowledged.popleft())
        if self.channel.ack_due:
            self.wire.append(self.channel.take_ack(now))

    def poll(self, now: float) -> None:
        overdue = self.channel.poll(now)
        if overdue is not None:
            self.transmit(*overdue)
        self.push(now)


def pair() -> tuple[End, End]:
    ends = End(), End()
    for end in ends:
        end.channel.grant(WINDOW_MESSAGES, WINDOW_BYTES)
    return ends


def within_credit(end: End) -> bool:
    return end.channel.unacked <= WINDOW_MESSAGES and end.channel.unacked_bytes <= WINDOW_BYTES


step = st.tuples(
    st.sampled_from(["send", "deliver", "deliver", "drop", "repeat", "acknowledge", "time"]),
    st.integers(0, 1),
    st.integers(0, 1000),
)


@given(st.lists(step, max_size=150))
@settings(max_examples=300, deadline=None)
def test_everything_arrives_once_and_in_order_whatever_the_network_does(steps: list[tuple[str, int, int]]) -> None:
    ends = pair()
    now, sent = 0.0, [0, 0]
    for action, who, number in steps:
        here, there = ends[who], ends[1 - who]
        if action == "send":
            sent[who] += 1
            here.queue.append((sent[who], number % (WINDOW_BYTES + 1)))
            here.push(now)
        elif action == "acknowledge":
            here.acknowledge(now)
        elif action == "time":
            now += number / 100
            here.poll(now)
        elif here.wire:
            index = number % len(here.wire)
            packet = here.wire[index] if action == "repeat" else here.wire.pop(index)
            if action != "drop":
                there.take(packet, now)
        assert within_credit(here)
    for _ in range(40):  # from here on the network is kind
        now += RESEND_LIMIT_S
        for who in (0, 1):
            ends[who].poll(now)
        for _ in range(4):
            for who in (0, 1):
                while ends[who].wire:
                    ends[1 - who].take(ends[who].wire.pop(0), now)
                ends[1 - who].acknowledge(now)
        if all(not end.queue and not end.channel.unacked for end in ends):
            break
    assert [end.delivered for end in ends] == [list(range(1, sent[1] + 1)), list(range(1, sent[0] + 1))]
    assert all(end.channel.unacked == 0 and not end.queue for end in ends)


@given(st.lists(st.integers(0, WINDOW_BYTES), min_size=1, max_size=40), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_after_a_restart_of_the_peer_what_it_did_not_acknowledge_goes_out_again(sizes: list[int], taken: int) -> None:
    here, there = pair()
    for value, size in enumerate(sizes):
        here.queue.append((value, size))
    here.push(0.0)
    for packet in here.wire[:taken]:
        there.take(packet, 0.0)
    there.acknowledge(0.0)
    for packet in there.wire:
        here.take(packet, 0.0)
    acknowledged = list(there.delivered)
    here.wire.clear()
    fresh = End()
    fresh.channel.grant(WINDOW_MESSAGES, WINDOW_BYTES)
    kept = here.channel.restart(WINDOW_MESSAGES, WINDOW_BYTES)
    here.queue.extendleft((value, here.sizes[value]) for value in reversed(kept))
    here.push(1.0)
    while here.wire or fresh.wire:
        while here.wire:
            fresh.take(here.wire.pop(0), 1.0)
        fresh.acknowledge(1.0)
        while fresh.wire:
            here.take(fresh.wire.pop(0), 1.0)
    assert acknowledged + fresh.delivered == list(range(len(sizes)))


def test_credit_is_counted_in_messages_and_in_bytes() -> None:
    channel: Channel[str] = Channel()
    channel.grant(2, 10)
    assert channel.may_send(10) and not channel.may_send(11)
    channel.send("a", 6, 0.0)
    assert channel.may_send(4) and not channel.may_send(5)
    channel.send("b", 0, 0.0)
    assert not channel.may_send(0)
    channel.on_ack(Ack(1, 3, 12), 0.0)
    assert channel.may_send(6) and not channel.may_send(7)


def test_however_much_a_peer_allows_only_so_much_is_kept_for_it() -> None:
    channel: Channel[str] = Channel()
    channel.grant(2**60, 2**60)
    while channel.send("x", 0, 0.0):
        pass
    assert channel.unacked == SEND_MESSAGES
    channel.on_ack(Ack(10, 2**60, 2**60), 0.0)
    assert all(channel.send("y", 16, 0.0) for _ in range(10)) and not channel.send("z", 0, 0.0)
    assert (channel.unacked, channel.unacked_bytes) == (SEND_MESSAGES, 160)
    large: Channel[str] = Channel()
    large.grant(2**60, 2**60)
    assert large.send("x", SEND_BYTES, 0.0) and not large.send("y", 1, 0.0)


def test_credit_kept_back_stops_the_sender_until_it_is_released() -> None:
    channel: Channel[str] = Channel(window_messages=2, window_bytes=100)
    channel.arrive(1, 60)
    channel.acknowledge(1, release=False)
    ack = channel.take_ack(0.0)
    assert (ack.received, ack.limit_messages, ack.limit_bytes) == (1, 2, 100)
    channel.release(1, 60)
    ack = channel.take_ack(0.0)
    assert (ack.received, ack.limit_messages, ack.limit_bytes) == (1, 3, 160)


def test_a_message_beyond_the_credit_is_a_violation() -> None:
    channel: Channel[str] = Channel(window_messages=1, window_bytes=100)
    channel.arrive(1, 1)
    with pytest.raises(ProtocolError, match="exceeds the credit"):
        channel.arrive(2, 1)
    with pytest.raises(ProtocolError, match="exceeds the credit"):
        Channel[str](window_messages=9, window_bytes=100).arrive(1, 101)


def test_an_acknowledgement_of_what_was_never_sent_is_a_violation() -> None:
    channel: Channel[str] = Channel()
    channel.grant(5, 100)
    channel.send("a", 1, 0.0)
    with pytest.raises(ProtocolError, match="acknowledged message 2, but 1 were sent"):
        channel.on_ack(Ack(2, 9, 100), 0.0)


def test_an_old_acknowledgement_changes_nothing() -> None:
    channel: Channel[str] = Channel()
    channel.grant(5, 100)
    for name in "abc":
        channel.send(name, 1, 0.0)
    channel.on_ack(Ack(2, 8, 200), 0.0)
    assert not channel.on_ack(Ack(1, 6, 150, gap=True), 9.0)
    assert (channel.acked, channel.unacked, channel.limit_messages, channel.limit_bytes) == (2, 1, 8, 200)


def test_a_gap_is_answered_once_until_the_answer_is_overdue() -> None:
    channel: Channel[str] = Channel()
    channel.grant(5, 100)
    for name in "abc":
        channel.send(name, 1, 0.0)
    assert channel.on_ack(Ack(0, 5, 100, gap=True), 0.1)
    assert list(channel.resend()) == [(1, "a"), (2, "b"), (3, "c")]
    assert not channel.on_ack(Ack(0, 5, 100, gap=True), 0.2)
    assert channel.on_ack(Ack(0, 5, 100, gap=True), 5.0)


def test_an_overdue_acknowledgement_is_asked_for_with_the_last_message_ever_more_slowly() -> None:
    channel: Channel[str] = Channel()
    channel.grant(5, 100)
    for name in "ab":
        channel.send(name, 1, 0.0)
    asked = [t / 2 for t in range(40) if channel.poll(t / 2) == (2, "b")]
    assert asked == [1.0, 3.0, 7.0, 15.0]
    channel.on_ack(Ack(2, 7, 102), 20.0)
    assert channel.poll(1000.0) is None


def test_acknowledgements_are_repeated_so_that_a_lost_one_cannot_stop_the_sender() -> None:
    channel: Channel[str] = Channel()
    channel.arrive(1, 1)
    channel.acknowledge(1)
    channel.take_ack(0.0)
    channel.poll(REFRESH_S - 0.1)
    assert not channel.ack_due
    channel.poll(REFRESH_S)
    assert channel.ack_due


def test_repeats_and_holes_are_told_apart_and_answered() -> None:
    channel: Channel[str] = Channel()
    assert channel.arrive(1, 1) is DELIVER
    channel.acknowledge(1)
    channel.take_ack(0.0)
    assert channel.arrive(1, 1) is DUPLICATE and channel.ack_due
    assert not channel.take_ack(0.0).gap
    assert channel.arrive(3, 1) is GAP
    assert channel.take_ack(0.0).gap
