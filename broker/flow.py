"""`Flow`: how much a relay has passed on for one peer in one direction and cannot know to be out of memory yet.

Pure. Credit is agreed between the two ends of a line; an honest sender keeps within it, resends included. What a relay
passes on may still lie in its sockets until the receiving end acknowledges it or `FORGET_S` have passed (a connection
that takes nothing for that long is about to be cut). Beyond the bounds a message is not passed on: an honest sender sends
it again, a hostile one fills nobody's memory. Used by `passage`.
"""

from __future__ import annotations

from collections import deque

LIMIT_MESSAGES = 8192
LIMIT_BYTES = (
    128 * 1024 * 1024
)  # twice the window that peers grant; and one message of any size when nothing else is there
FORGET_S = 10.0


class Flow:
    """One direction of one line."""

    __slots__ = ("_passed", "dropped", "nbytes")

    def __init__(self) -> None:
        self._passed: deque[tuple[int, int, float]] = deque()  # sequence (0: transient), bytes, when
        self.nbytes = 0
        self.dropped = 0

    def admit(self, sequence: int, size: int, now: float) -> bool:
        """Whether a message may be passed on now; it is counted then."""
        passed = self._passed
        while passed and passed[0][2] < now - FORGET_S:
            self._forget()
        if passed and (len(passed) >= LIMIT_MESSAGES or self.nbytes + size > LIMIT_BYTES):
            self.dropped += 1
            return False
        passed.append((sequence, size, now))
        self.nbytes += size
        return True

    def acknowledged(self, received: int) -> None:
        """The other end has everything up to that sequence."""
        passed = self._passed
        while passed and passed[0][0] <= received:
            self._forget()

    def _forget(self) -> None:
        self.nbytes -= self._passed.popleft()[1]
