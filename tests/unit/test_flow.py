"""What a relay lets pass of one line: honest senders with windows and resends always get on, memory stays bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from temper.broker.flow import FORGET_S, LIMIT_BYTES, LIMIT_MESSAGES, Flow


def test_a_window_and_its_resend_pass_and_a_flood_does_not() -> None:
    flow = Flow()
    size = LIMIT_BYTES // 128
    window = [flow.admit(sequence, size, 0.0) for sequence in range(1, 65)]
    assert all(window + [flow.admit(sequence, size, 1.0) for sequence in range(1, 65)])
    assert not flow.admit(65, size, 1.0)
    assert flow.dropped == 1
    flow.acknowledged(64)
    assert flow.nbytes == 0
    assert flow.admit(65, size, 1.0)


def test_small_messages_are_bounded_too_and_what_is_old_is_forgotten() -> None:
    flow = Flow()
    assert all(flow.admit(0, 1, 0.0) for _ in range(LIMIT_MESSAGES))
    assert not flow.admit(0, 1, FORGET_S)
    assert flow.admit(0, 1, FORGET_S + 0.1)
    assert flow.nbytes == 1


def test_one_message_larger_than_the_limit_passes_when_nothing_is_under_way() -> None:
    flow = Flow()
    assert flow.admit(1, LIMIT_BYTES + 1, 0.0)
    assert not flow.admit(2, 1, 0.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "transient", "resend", "ack", "wait"]), st.integers(1, LIMIT_BYTES // 4))
    )
)
def test_whatever_happens_what_is_counted_is_what_was_passed_and_bounded(steps: list[tuple[str, int]]) -> None:
    flow, now, sequence, acked = Flow(), 0.0, 0, 0
    for what, number in steps:
        if what == "wait":
            now += number % 13
        elif what == "ack":
            acked = min(sequence, acked + number % 5)
            flow.acknowledged(acked)
        elif what == "send":
            sequence += 1
            flow.admit(sequence, number, now)
        else:
            flow.admit(0 if what == "transient" else max(sequence, 1), number, now)
        assert 0 <= flow.nbytes <= LIMIT_BYTES
    flow.acknowledged(sequence)
    assert flow.admit(sequence + 1, LIMIT_BYTES, now + FORGET_S + 1)
