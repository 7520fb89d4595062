"""What is periodic happens together, in every process of a host."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from temper.common.waiting import EARLY, on_the_beat


class Clock:
    """A loop's clock, and when something is to be called."""

    def __init__(self, now: float) -> None:
        self.now, self.due = now, 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, what: Callable[[], object]) -> None:
        self.due = when


@given(st.floats(0, 1e6), st.sampled_from((0.5, 1.0, 5.0)))
def test_a_beat_is_a_multiple_of_its_period_and_comes_once_a_period(now: float, period_s: float) -> None:
    clock = Clock(now)
    on_the_beat(clock, period_s, lambda: None)  # type: ignore[arg-type]
    first = clock.due
    assert math.isclose(first / period_s, round(first / period_s), abs_tol=1e-6)
    assert 0 < first - now <= (1 + EARLY) * period_s + 1e-6
    for late_s in (-0.04 * period_s, 0.0, 0.9 * period_s):  # timers fire a little early or late
        clock.now = first + late_s
        on_the_beat(clock, period_s, lambda: None)  # type: ignore[arg-type]
        assert math.isclose(clock.due, first + period_s, abs_tol=1e-6)


@given(st.integers(0, 10**6), st.lists(st.floats(0, 0.94), min_size=2, max_size=5))
def test_whatever_begins_within_a_period_comes_at_its_end(number: int, begun: list[float]) -> None:
    clocks = [Clock(number + fraction) for fraction in begun]
    for clock in clocks:
        on_the_beat(clock, 1.0, lambda: None)  # type: ignore[arg-type]
    assert {clock.due for clock in clocks} == {number + 1.0}
