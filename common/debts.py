"""`Debts`: which peers an acknowledgement is owed to, and when it goes out.

At the end of the loop's turn: one for each peer, however many of its messages the turn brought, so that acknowledgements are few
under load and at once without. Only the urgent ones (``Channel.ack_urgent``: a window hangs on it) leave then if

- more messages wait to be read: they come first, and the end of their turn answers for both, or that of the `HELD_TURNS`-th;
- the turn brought much (`MUCH_BYTES`), which took longer to come than its answer may wait: it leaves within `SOON_S`, whatever
  other turns bring meanwhile;
- more than `FEW` peers are to be answered within `SOON_S` (hundreds are connected, each sends little): the others within
  milliseconds, so that one answers for several turns. With many peers that delay grows, and acknowledging costs about the same
  however many there are.

Used by ``pump.Router``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temper.common.session import Session

FEW = 16
SOON_S = 0.002
LATEST_S = 0.4  # well below the sender's RESEND_S
PER_S = 1000  # acknowledgements, about, in all
MUCH_BYTES = 256 * 1024
HELD_TURNS = 4


class Debts:
    """Owes acknowledgements on behalf of one socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owed: set[Session] = set()
        self._urgent: set[Session] = set()
        self._late: set[Session] = set()  # whose turn brought much
        self._peers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._held = 0  # turns in a row that left answers to the next
        self._recent: set[Session] = set()  # who was answered with a turn, for `SOON_S`
        self._forget_at = 0.0
        self.in_turn = False  # of the owner's, which calls `turn_over` at its end

    def owe(self, session: Session, peers: int) -> None:
        """`session`, one of `peers`, has something to acknowledge."""
        self._peers = peers
        (self._urgent if session.channel.ack_urgent else self._owed).add(session)
        if not (self._scheduled or self.in_turn):
            self._scheduled = True
            self._loop.call_soon(self.turn_over)

    def turn_over(self, size: int = 0, behind: Callable[[], bool] | None = None) -> None:
        """Send what need not wait for another turn. This one brought `size` bytes; `behind` says whether another follows at
        once (None: hardly)."""
        self._scheduled = False
        if self._urgent:
            self._pay(self._urgent)
        if not self._owed:
            return
        if size >= MUCH_BYTES:
            self._late |= self._owed
        self._owed -= self._late
        few = self._few()
        if few and self._owed:
            if behind is not None and self._held < HELD_TURNS and behind():
                self._held += 1
            else:
                self._recent |= self._owed
                self._pay_owed()
        if (self._late or not few) and self._timer is None:
            delay_s = SOON_S if few else min(max(SOON_S, self._peers / PER_S), LATEST_S)
            self._timer = self._loop.call_later(delay_s, self._pay_late)

    def _few(self) -> bool:
        if len(self._owed) > FEW:
            return False
        now = self._loop.time()
        if now >= self._forget_at:
            self._recent.clear()
            self._forget_at = now + SOON_S
        return len(self._recent) + len(self._owed) <= FEW or len(self._recent | self._owed) <= FEW

    def _pay_late(self) -> None:
        self._timer = None
        self._owed |= self._late
        self._late.clear()
        self._pay_owed()

    def _pay_owed(self) -> None:
        self._held = 0
        self._pay(self._owed)

    def _pay(self, sessions: set[Session]) -> None:
        now = self._loop.time()
        for session in sessions:
            session.acknowledge(now)
        sessions.clear()

    def close(self) -> None:
        """Send everything that is owed; nothing afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        self._pay(self._urgent | self._owed | self._late)
