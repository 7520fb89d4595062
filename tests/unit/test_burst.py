"""Bursts: joined messages come apart as they were, and what is no burst is an offence, never a crash."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common import burst
from temper.common.errors import ProtocolError
from temper.common.schema import Heartbeat, Samples
from temper.common.wire import JOINED_BYTES

MESSAGES = st.lists(
    st.tuples(st.binary(max_size=60), st.one_of(st.just([]), st.lists(st.binary(max_size=90), min_size=1, max_size=1))),
    min_size=2,
    max_size=30,
)


@given(MESSAGES)
def test_joined_messages_come_apart_as_they_were(messages: list[tuple[bytes, list[bytes]]]) -> None:
    meta, frames = burst.join(messages)
    sizes, metas, arrays = burst.divide(len(messages), Samples.KIND, [meta, *frames])
    assert [(meta, list(own)) for meta, own in zip(metas, arrays, strict=True)] == messages
    assert sizes == [len(meta) + sum(map(len, frames)) for meta, frames in messages]


@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_what_was_changed_is_another_burst_or_an_offence(
    messages: list[tuple[bytes, list[bytes]]], data: st.DataObject
) -> None:
    meta, frames = burst.join(messages)
    at = data.draw(st.integers(0, len(meta)))
    broken = meta[:at] + data.draw(st.binary(max_size=9)) + meta[at + data.draw(st.integers(0, 9)) :]
    count = data.draw(st.sampled_from([len(messages), 0, 1, 2, burst.MESSAGES, 65535]))
    try:
        sizes, metas, arrays = burst.divide(count, Samples.KIND, [broken, *frames])
    except ProtocolError:
        return
    assert count == len(sizes) == len(metas) == len(arrays)
    given, taken = (
        len(broken) + sum(map(len, frames)),
        sum(map(len, metas)) + sum(len(f) for each in arrays for f in each),
    )
    assert sum(sizes) == taken == given - count * burst.LENGTH_BYTES


@pytest.mark.parametrize(
    ("count", "kind", "parts", "message"),
    [
        (2, Heartbeat.KIND, [bytes(16)], "flags 2 on a Heartbeat: expected 0"),
        (2, 250, [bytes(16)], "flags 2 on a 250"),
        (2, Samples.KIND, [bytes(16), b"", b""], "in 3 parts"),
        (burst.MESSAGES + 1, Samples.KIND, [bytes(8 * burst.MESSAGES + 8)], "expected 2 to 256 messages"),
        (2, Samples.KIND, [bytes(16), bytes(burst.BYTES + 1)], "bytes"),
        (2, Samples.KIND, [bytes(16), b"abc"], "add up to 16 and 0"),
        (2, Samples.KIND, [b"\xff" * 16], "a message of -1 and -1 bytes"),
        (
            2,
            Samples.KIND,
            [struct.pack("<4i", 0, 1, 0, JOINED_BYTES + 1), bytes(JOINED_BYTES + 2)],
            f"a message of 0 and {JOINED_BYTES + 1} bytes in a burst, its frame may have {JOINED_BYTES}",
        ),
    ],
)
def test_what_is_no_burst_is_refused_with_the_reason(count: int, kind: int, parts: list[bytes], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        burst.divide(count, kind, parts)


def test_what_is_joined_nowhere_else_leaves_alone() -> None:
    small, large = bytes(JOINED_BYTES), memoryview(bytes(JOINED_BYTES + 1))
    assert burst.joinable(Samples.KIND, JOINED_BYTES + 300, [small])
    assert not burst.joinable(Samples.KIND, JOINED_BYTES + 300, [large])
    assert burst.joinable(Samples.KIND, JOINED_BYTES + 300, [])
    assert not burst.joinable(Samples.KIND, 2, [b"a", b"b"]) and not burst.joinable(Heartbeat.KIND, 9, [])
