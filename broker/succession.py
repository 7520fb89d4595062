"""Who is the run's learner when another one asks: the one that is there, unless it has fallen silent.

A killed learner says no goodbye, and its successor may ask before its silence proves anything: it is kept waiting (it says
hello again every .1 s) until the present one speaks or has been silent for long enough.
"""

from __future__ import annotations

from typing import Literal

from temper.common.pump import PeerId

SILENT_S = 3.0  # heartbeats come every second
LATE_S = 1.0  # what a process sent before it died may be read so long after its successor's first hello
FORGOTTEN_S = 2.0  # who has not asked for so long does not ask any more


class Succession:
    """Learners that ask for the place, one at a time: others wait until the first was answered, or asks no more."""

    def __init__(self) -> None:
        self._peer: PeerId | None = None
        self._since = 0.0
        self._asked_at = 0.0

    def ask(self, peer: PeerId, now: float, heard_at: float) -> Literal["asked", "wait", "taken", "free"]:
        """May `peer` have the place of a learner that was last heard at `heard_at` (seconds, the clock of `now`)? "asked" is the
        first "wait"."""
        if self._peer is not None and now - self._asked_at > FORGOTTEN_S:
            self._peer = None
        if self._peer not in (None, peer):
            return "wait"  # its turn comes: a learner that asks may be killed, too, and its successor be here already
        new = self._peer is None
        if new:
            self._peer, self._since = peer, now
        self._asked_at = now
        if now - heard_at < SILENT_S and heard_at <= self._since + LATE_S:
            return "asked" if new else "wait"
        self._peer = None
        return "taken" if now - heard_at < SILENT_S else "free"
