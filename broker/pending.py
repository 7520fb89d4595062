"""`Pending`: samples that are good and acknowledged, and not decided about yet.

With durability "memory" a sender need not wait for the broker's books, and the books cost less a sample the more come together.
So under load they are done about once in `EVERY_S`, for all that came since; without load, or once `MUCH_MESSAGES` or `MUCH_BYTES`
wait, at once. Pure; called by ``control``, which does them before anything that depends on them.
"""

from __future__ import annotations

from temper.broker import intake
from temper.broker.events import PeerKey
from temper.common.delivery import Arrival, DeliveryRun

EVERY_S = 0.002
MUCH_MESSAGES = 192
MUCH_BYTES = 1024 * 1024


class Pending:
    """Messages in the order in which they came."""

    def __init__(self) -> None:
        self._run = intake.Messages()
        self._nbytes = 0
        self._next_at = 0.0

    def __len__(self) -> int:
        return len(self._run.keys)

    def add(self, key: PeerKey, came: Arrival) -> None:
        """One more delivery, of one message or of several."""
        self._run.add(key, came)
        self._nbytes += sum(came.sizes) if isinstance(came, DeliveryRun) else came.size

    def left_s(self, now: float) -> float:
        """How long they may wait for others: 0 if they are due."""
        if len(self) >= MUCH_MESSAGES or self._nbytes >= MUCH_BYTES:
            return 0.0
        return max(self._next_at - now, 0.0)

    def take(self, now: float) -> intake.Messages:
        """All of them, to be decided about now."""
        found, self._run, self._nbytes = self._run, intake.Messages(), 0
        self._next_at = now + EVERY_S
        return found
