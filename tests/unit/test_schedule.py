"""From lease order to task: shares are kept at every point, and every process derives the same tasks."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common.domains import derive_seed
from temper.common.schedule import FIRST_LEASE_ID, Schedule, lane_of, pick

shares_of = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=1)


@settings(max_examples=50, deadline=None)
@given(shares_of)
def test_every_domain_has_had_its_share_at_every_point(shares: dict[str, float]) -> None:
    credit: dict[str, float] = {}
    count: Counter[str] = Counter()
    total = sum(shares.values())
    for n in range(1, 200):
        name, credit = pick(credit, shares)
        count[name] += 1
        for domain, share in shares.items():
            assert abs(count[domain] - n * share / total) < len(shares)


def test_two_equal_domains_alternate() -> None:
    schedule = Schedule(1)
    domains = [schedule.next("train", {"b": (0, 1.0), "a": (3, 1.0)}).domain for _ in range(6)]
    assert domains == ["a", "b"] * 3


def test_a_restored_schedule_continues_as_if_never_stopped() -> None:
    shares = {"a": (0, 0.3), "b": (1, 0.5), "c": (0, 0.2)}
    one, two = Schedule(5), Schedule(5)
    for _ in range(7):
        one.next("train", shares)
        one.next("demo", shares)
    two.load(json.loads(json.dumps(one.state())))
    assert [one.next("train", shares) for _ in range(20)] == [two.next("train", shares) for _ in range(20)]


def test_other_lanes_do_not_shift_the_train_lane() -> None:
    shares = {"a": (0, 1.0), "b": (0, 2.0)}
    alone, busy = Schedule(5), Schedule(5)
    for i in range(20):
        busy.next("demo", shares)
        busy.held_out("a", 0, i)
        assert alone.next("train", shares) == busy.next("train", shares)


def test_seeds_are_the_documented_ones() -> None:
    schedule = Schedule(42)
    train = schedule.next("train", {"a": (2, 1.0)})
    assert (train.lease_id, train.level) == (0, 2)
    assert train.task_seed == derive_seed(42, "train", "a", 0)
    held_out = schedule.held_out("a", 1, 9)
    assert held_out.task_seed == 9
    assert [lane_of(i) for i in (0, FIRST_LEASE_ID["demo"] - 1, FIRST_LEASE_ID["demo"], held_out.lease_id)] == [
        "train",
        "train",
        "demo",
        "eval",
    ]


def test_a_domain_without_a_share_is_never_chosen() -> None:
    schedule = Schedule(0)
    domains = {schedule.next("train", {"a": (0, 0.0), "b": (0, 1.0), "c": (0, float("nan"))}).domain for _ in range(9)}
    assert domains == {"b"}
    with pytest.raises(ValueError, match="no domain has a positive share"):
        schedule.next("train", {"a": (0, 0.0)})
