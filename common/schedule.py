"""Which task a lease is: from the order of leases to domain, level and task seed.

Pure and deterministic, so that the broker and the in-process reference loop make the same leases. Each lane counts its
leases by itself, in an id range of its own: neither a pending evaluation nor surplus demonstrations shift the tasks
(or the sampling seeds, which derive from the lease id) of the train lane.

Domains take turns by smooth weighted round robin: at every point each has had its share, within one lease or so, and
never in bursts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from temper.common.domains import derive_seed
from temper.common.schema import Lane

FIRST_LEASE_ID: Mapping[str, int] = {"train": 0, "demo": 1 << 60, "eval": 1 << 61}
"""Lease ids of a lane count up from here; within a lane the id is the order of creation."""


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """What a new lease is about."""

    lease_id: int
    domain: str
    level: int
    task_seed: int


def lane_of(lease_id: int) -> Lane:
    """The lane whose id range holds `lease_id`."""
    lanes: tuple[Lane, ...] = ("eval", "demo", "train")
    return next(lane for lane in lanes if FIRST_LEASE_ID[lane] <= lease_id)


def pick(credit: Mapping[str, float], shares: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """One turn of smooth weighted round robin.

    Returns the chosen name and the new credit. Shares need not sum to one; names with a share of 0 are never chosen.
    ValueError when no share is positive and finite.
    """
    return _turn(credit, _portions(shares))


def _portions(shares: Mapping[str, float]) -> dict[str, float]:
    """What each usable share is of all of them, in name order."""
    usable = {name: share for name, share in sorted(shares.items()) if math.isfinite(share) and share > 0}
    total = sum(usable.values())
    if not usable:
        raise ValueError(f"no domain has a positive share: {dict(shares)}")
    return {name: share / total for name, share in usable.items()}


def _turn(credit: Mapping[str, float], portions: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    after = {name: credit.get(name, 0.0) + portion for name, portion in portions.items()}
    chosen = max(after, key=after.__getitem__)  # the first in name order wins a tie
    after[chosen] -= 1.0
    return chosen, after


class Schedule:
    """Makes assignments lane by lane; its state is small and restorable."""

    def __init__(self, run_seed: int) -> None:
        self.run_seed = run_seed
        self._next: dict[str, int] = dict(FIRST_LEASE_ID)
        self._credit: dict[str, dict[str, float]] = {}
        self._shares: Mapping[str, tuple[int, float]] = {}  # of the last lease, and what they come to
        self._portions: dict[str, float] = {}

    def next(self, lane: Lane, shares: Mapping[str, tuple[int, float]]) -> Assignment:
        """The next lease of the train or demo lane; `shares` as in `Phase`: domain -> (level, share)."""
        if shares != self._shares or not self._portions:
            self._portions = _portions({name: share for name, (_, share) in shares.items()})
            self._shares = dict(shares)
        domain, self._credit[lane] = _turn(self._credit.get(lane, {}), self._portions)
        lease_id = self._take(lane)
        return Assignment(lease_id, domain, shares[domain][0], derive_seed(self.run_seed, lane, domain, lease_id))

    def held_out(self, domain: str, level: int, index: int) -> Assignment:
        """The eval lane's lease for held-out task `index` of `domain` (its task_seed): the same task in every evaluation."""
        return Assignment(self._take("eval"), domain, level, index)

    def _take(self, lane: Lane) -> int:
        lease_id = self._next[lane]
        self._next[lane] += 1
        return lease_id

    def fresh(self, lane: Lane, count: int) -> range:
        """The ids of the next `count` leases of a lane."""
        return range(self._next[lane], self._next[lane] + count)

    def state(self) -> dict[str, Any]:
        """Everything that `load` needs, as plain values."""
        return {"next": dict(self._next), "credit": {lane: dict(credit) for lane, credit in self._credit.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of an earlier process."""
        self._next = {**FIRST_LEASE_ID, **state["next"]}
        self._credit = {lane: dict(credit) for lane, credit in state["credit"].items()}
