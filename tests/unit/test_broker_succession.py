"""The learner's place when another one asks: never taken from one that speaks, always free after one that was killed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from temper.broker.succession import FORGOTTEN_S, LATE_S, SILENT_S, Succession

HELLO_S = 0.1
BEAT_S = 1.0
BOUND_S = SILENT_S + LATE_S + BEAT_S


def ask_until_answered(place: Succession, peer: bytes, start: float, heard_at: list[float]) -> tuple[str, float]:
    """Ask every HELLO_S from `start` on; `heard_at`: when the present learner was heard. The answer and how long it took."""
    now = start
    while now < start + BOUND_S + HELLO_S:
        answer = place.ask(peer, now, max((t for t in heard_at if t <= now), default=0.0))
        assert (answer == "asked") == (now == start) or answer in ("taken", "free")
        if answer in ("taken", "free"):
            return answer, now - start
        now += HELLO_S
    return "wait", now - start


@given(st.floats(0.0, 10.0), st.floats(0.0, BEAT_S))
def test_a_learner_that_speaks_keeps_its_place(start: float, phase: float) -> None:
    beats = [phase + i * BEAT_S for i in range(-2, 30)]
    answer, took_s = ask_until_answered(Succession(), b"new", 10.0 + start, beats)
    assert answer == "taken" and took_s <= LATE_S + BEAT_S + HELLO_S


@given(st.floats(0.0, 10.0), st.floats(0.0, LATE_S))
def test_a_killed_learner_s_place_is_free_however_early_its_successor_asks(
    asked_after: float, read_after: float
) -> None:
    """What it sent before it died at 100 may be read a little later."""
    heard = [100.0 + read_after]
    answer, took_s = ask_until_answered(Succession(), b"new", 100.0 + asked_after, heard)
    assert answer == "free" and took_s <= SILENT_S + LATE_S + HELLO_S


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=6))
def test_the_last_of_a_row_of_killed_learners_gets_the_place(lives_s: list[float]) -> None:
    """Each is killed while it asks, after so many seconds at most, and the next asks at once."""
    place, now = Succession(), 100.0
    for number, life_s in enumerate(lives_s):
        end, answer = now + life_s, "wait"
        while now < end and answer not in ("free", "taken"):
            answer = place.ask(b"%d" % number, now, 100.0)
            now += HELLO_S
        assert answer != "taken"
        if answer == "free":
            return
    answer = "wait"
    end = now + FORGOTTEN_S + BOUND_S
    while now < end and answer not in ("free", "taken"):
        answer = place.ask(b"last", now, 100.0)
        now += HELLO_S
    assert answer == "free"


def test_one_asks_at_a_time_and_one_that_stopped_asking_is_forgotten() -> None:
    place = Succession()
    assert place.ask(b"one", 10.0, 9.9) == "asked"
    assert place.ask(b"one", 10.05, 9.9) == "wait"
    assert place.ask(b"two", 10.1, 9.9) == "wait"
    assert place.ask(b"two", 10.1 + FORGOTTEN_S, 10.2) == "asked"
    assert place.ask(b"one", 10.2 + FORGOTTEN_S, 10.2) == "wait"
    assert place.ask(b"two", 10.3 + FORGOTTEN_S, 10.2 + FORGOTTEN_S) == "wait"
    assert place.ask(b"two", 10.4 + FORGOTTEN_S, 10.4 + FORGOTTEN_S) == "wait"
    assert place.ask(b"two", 11.3 + FORGOTTEN_S, 11.2 + FORGOTTEN_S) == "taken"
