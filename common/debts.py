"""`Debts`: which peers an acknowledgement is owed to, and when it goes out.

At the end of the turn where a peer's window hangs on it (``Channel.ack_urgent``); else within milliseconds, so that one
acknowledgement answers for many messages. With many peers the delay grows, so that acknowledging costs about the same
however many there are. Used by ``pump.Router``.
"""

from __future__ import annotations

import asyncio

from temper.common.session import Session

SOON_S = 0.002
LATEST_S = 0.4  # well below the sender's RESEND_S
PER_S = 1000  # acknowledgements, about, in all


class Debts:
    """Owes acknowledgements on behalf of one socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._soon: set[Session] = set()
        self._urgent: set[Session] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False

    def owe(self, session: Session, peers: int) -> None:
        """`session`, one of `peers`, has something to acknowledge."""
        if session.channel.ack_urgent:
            self._urgent.add(session)
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self.pay_urgent)
        elif session not in self._soon:
            self._soon.add(session)
            if self._timer is None:
                delay_s = min(max(SOON_S, peers / PER_S), LATEST_S)
                self._timer = self._loop.call_later(delay_s, self._pay_soon)

    def pay_urgent(self) -> None:
        """Send what is urgent now."""
        self._scheduled = False
        if self._urgent:
            self._pay(self._urgent)

    def _pay_soon(self) -> None:
        self._timer = None
        self._pay(self._soon)

    def _pay(self, sessions: set[Session]) -> None:
        now = self._loop.time()
        for session in sessions:
            session.acknowledge(now)
        sessions.clear()

    def close(self) -> None:
        """Send everything that is owed; nothing afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        self._pay(self._urgent | self._soon)
