"""`Sharing`: the peers of one Router that share budgets: who is given room when, and who is told.

Room is looked for at the end of the turn in which somebody asked or something was acknowledged, so that one acknowledgement says
both. Used by ``pump.Router``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from temper.common.budget import Budget
from temper.common.credit import Channel
from temper.common.debts import Debts
from temper.common.schema import Blocked, Hello
from temper.common.session import Session


class Sharing:
    """`budget_of(hello)` says what a peer shares; None: nobody shares anything."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, debts: Debts, budget_of: Callable[[Hello], Budget] | None
    ) -> None:
        self._loop, self._debts, self._budget_of = loop, debts, budget_of
        self._budgets: set[Budget] = set()
        self._of: dict[Channel[Any], tuple[Budget, Session]] = {}
        self._due = False

    def channel(self, hello: Hello, window_messages: int, window_bytes: int) -> tuple[Channel[Any], int]:
        """A new peer's channel, and the bytes of the largest message for which it may ask (0: it has a window of its own)."""
        if self._budget_of is None:
            return Channel(window_messages, window_bytes), 0
        budget = self._budget_of(hello)
        return budget.join(window_messages), budget.largest_bytes

    def join(self, session: Session, hello: Hello) -> None:
        """The peer whose channel that is comes in."""
        if self._budget_of is not None:
            budget = self._budget_of(hello)
            self._budgets.add(budget)
            self._of[session.channel] = budget, session

    def leave(self, session: Session) -> None:
        """A peer is gone: others have its room."""
        shared = self._of.pop(session.channel, None)
        if shared is not None:
            shared[0].leave(session.channel)
            self.look()

    def ask(self, session: Session, blocked: Blocked) -> None:
        """A peer waits for room. One that shares nothing has no reason to."""
        shared = self._of.get(session.channel)
        if shared is not None:
            shared[0].ask(session.channel, blocked)
            if session.channel.ack_due:
                self._owe(session)
            self.look()

    def blocked(self, session: Session) -> int:
        """Bytes beyond what the peer may send that it waits for."""
        shared = self._of.get(session.channel)
        return shared[0].blocked(session.channel) if shared is not None else 0

    def acknowledged(self, session: Session) -> None:
        """Something of what came from a peer is acknowledged: it may have given room back to others."""
        shared = self._of.get(session.channel)
        if shared is not None:
            shared[0].acknowledged(session.channel)
            if shared[0].waiting:
                self.look()

    def give_back(self, session: Session) -> None:
        """A peer gives back what it was given and has not used."""
        shared = self._of.get(session.channel)
        if shared is not None:
            shared[0].give_back(session.channel)
            self.look()

    def look(self) -> None:
        """Something may have become free: see at the end of this turn, or else with the loop's next one."""
        if not self._due:
            self._due = True
            if not self._debts.in_turn:
                self._loop.call_soon(self.serve)

    def serve(self) -> None:
        """Give those that wait what there is room for, if it is time to look."""
        if self._due:
            self._due = False
            for budget in self._budgets:
                for channel in budget.serve():
                    self._owe(self._of[channel][1])

    def unused(self) -> Iterator[tuple[Session, str]]:
        """Call every second: who keeps room from others without using it, and what to say to it."""
        for budget in self._budgets:
            channel = budget.unused()
            if channel is not None:
                text = f"was given room for {channel.extra_bytes} bytes that it asked for and sent hardly any, while others wait"
                yield self._of[channel][1], text

    def _owe(self, session: Session) -> None:
        self._debts.owe(session, len(self._of))
