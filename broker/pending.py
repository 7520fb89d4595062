"""`Pending`: samples that are good and acknowledged, and not decided about yet.

With durability "memory" a sender need not wait for the broker's books, and the books cost less a sample the more come together.
So under load they are done about once in `EVERY_S`, for all that came since, `STEP_MESSAGES` at a time, between which others are
acknowledged; without load, or once `MUCH_MESSAGES` or `MUCH_BYTES` wait, at once. Pure; called by ``control``, which does them
before anything that depends on them.
"""

from __future__ import annotations

from collections import deque

from temper.broker.events import PeerKey
from temper.broker.messages import Messages
from temper.common.delivery import Arrival, DeliveryRun

EVERY_S = 0.002
STEP_MESSAGES = 32
MUCH_MESSAGES = 256
MUCH_BYTES = 4 * 1024 * 1024


class Pending:
    """Deliveries of samples in the order in which they came."""

    def __init__(self) -> None:
        self._came: deque[tuple[PeerKey, Arrival]] = deque()
        self._messages = self._nbytes = 0
        self._next_at = 0.0

    def __len__(self) -> int:
        """How many messages they are."""
        return self._messages

    def add(self, key: PeerKey, came: Arrival) -> None:
        """One more delivery, of one message or of several."""
        self._came.append((key, came))
        self._count(came, 1)

    def _count(self, came: Arrival, sign: int) -> None:
        if isinstance(came, DeliveryRun):
            self._messages += sign * len(came.sizes)
            self._nbytes += sign * sum(came.sizes)
        else:
            self._messages += sign
            self._nbytes += sign * came.size

    @property
    def much(self) -> bool:
        """Whether too much waits for any of it to wait longer: nothing else bounds it."""
        return self._messages >= MUCH_MESSAGES or self._nbytes >= MUCH_BYTES

    def left_s(self, now: float) -> float:
        """How long they may wait for others: 0 if they are due."""
        return 0.0 if self.much else max(self._next_at - now, 0.0)

    def take(self, now: float, most: int | None = None) -> Messages:
        """The oldest of them, to be decided about now: whole deliveries, up to that with which they are `most` messages; all of
        them without it."""
        found = Messages()
        while self._came and (most is None or len(found.keys) < most):
            key, came = self._came.popleft()
            found.add(key, came)
            self._count(came, -1)
        self._next_at = now + EVERY_S
        return found
