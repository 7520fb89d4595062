"""Estimates of held-out accuracy against their closed forms, and what must hold for any verdicts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.common.estimators import bootstrap, mean_at_k, pass_at, pass_at_k, wilson

VERDICTS = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(VERDICTS, st.data())
def test_pass_at_k_is_one_minus_the_share_of_subsets_without_a_right_one(verdict: tuple[int, int], data: st.DataObject):
    n, c = verdict
    k = data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_of_impossible_counts_is_an_error(n: int, c: int, k: int):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


@given(st.lists(VERDICTS, min_size=1, max_size=30))
def test_an_estimate_lies_in_its_interval_and_pass_at_one_is_the_mean(tasks: list[tuple[int, int]]):
    mean, one = mean_at_k(tasks), pass_at(tasks, 1)
    assert mean is not None and one is not None
    assert one.value == pytest.approx(mean.value, abs=1e-12)
    assert mean.value == pytest.approx(float(sum((Fraction(c, n) for n, c in tasks), Fraction()) / len(tasks)))
    for estimate in (mean, one):
        assert 0 <= estimate.low <= estimate.value + 1e-9 and estimate.value <= estimate.high + 1e-9 <= 1 + 2e-9


@given(st.lists(st.tuples(st.just(8), st.integers(0, 8)), min_size=1, max_size=20))
def test_more_tries_never_pass_less(tasks: list[tuple[int, int]]):
    found = [pass_at(tasks, k) for k in range(1, 9)]
    values = [estimate.value for estimate in found if estimate is not None]
    assert len(values) == 8 and values == sorted(values)
    assert values[-1] == pytest.approx(sum(c > 0 for _, c in tasks) / len(tasks))


def test_single_verdicts_have_wilson_s_interval_and_several_a_bootstrap_over_tasks():
    single = mean_at_k([(1, 1)] * 30 + [(1, 0)] * 70)
    assert single is not None and single.interval == "wilson"
    assert (single.low, single.high) == wilson(0.3, 100)
    several = mean_at_k([(4, 4)] * 30 + [(4, 0)] * 70)
    assert several is not None and several.interval == "bootstrap"
    normal = 1.96 * math.sqrt(0.3 * 0.7 / 100)  # what a mean of 100 such tasks has
    assert several.high - several.value == pytest.approx(normal, rel=0.15)
    assert several.value - several.low == pytest.approx(normal, rel=0.15)


def test_tasks_that_all_agree_are_not_certain():
    nothing = mean_at_k([(4, 0)] * 164)
    assert nothing is not None and (nothing.value, nothing.low, nothing.interval) == (0.0, 0.0, "wilson")
    assert nothing.high == pytest.approx(0.0229, abs=1e-4)


def test_tasks_without_enough_verdicts_are_left_out():
    assert mean_at_k([(0, 0)]) is None and mean_at_k([]) is None
    assert pass_at([(3, 1)], 4) is None
    found = pass_at([(3, 3), (4, 0)], 4)
    assert found is not None and (found.value, found.tasks) == (0.0, 1)


def test_a_bootstrap_is_the_same_every_time():
    values = [0.0, 0.25, 1.0, 0.5]
    assert bootstrap(values, 1) == bootstrap(values, 1)
