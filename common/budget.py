"""`Budget`: the bytes that all senders on one socket together may have under way to this process. Pure.

Every sender may have a little under way at any time, its floor: enough for messages that are small. One that has more waiting
asks for room (``schema.Blocked``, which is QUIC's DATA_BLOCKED, RFC 9000 section 19.12) and is given it out of what is left, first
come, first served. The room comes back as what was sent in it is acknowledged, so that memory has one bound however many senders
there are, one alone may use most of it, and one message of `largest_bytes` always finds room in the end:

- whoever asks is given what its first message needs, or what whole messages need; so nothing lies idle with those that wait;
- more than the first message's is only given while the largest message still fits beside it, so that whatever lies idle
  nevertheless (a sender that changed its mind says so, `give_back`; one that does not is named, `unused`) cannot use up its room.

Used by ``sharing.Sharing``.
"""

from __future__ import annotations

from typing import Any

from temper.common.credit import IDLE_BYTES, Channel
from temper.common.schema import Blocked

Floors = tuple[tuple[int, int], ...]
FLOORS: Floors = ((6, 1024 * 1024), (3, 128 * 1024), (2, 32 * 1024), (1, 8 * 1024))
"""Each sender's: so many bytes while all floors take less than that part (a sixth, ...) of the total. Where senders are few, all
small messages that one of them has ready; where they are hundreds, a message or two."""
LATE_FLOOR_BYTES = 32 * 1024  # at most, of a sender for whose floor there was no room when it came
KEPT = 4  # this part of the total is kept for the floors of those that are to come
UNUSED_TICKS = 30  # as long as a silent peer is kept
LIMITS = 32  # of one question are heeded
USED = 8  # who uses less than this part of its room meanwhile leaves it unused


class Budget:
    """`total_bytes` for all; no message may have more than `largest_bytes`, which three quarters of the total must hold."""

    def __init__(self, total_bytes: int, largest_bytes: int, floors: Floors = FLOORS) -> None:
        self.total_bytes = total_bytes
        self.largest_bytes = largest_bytes
        self._floor_bytes = floors
        self._floors = 0
        self._extras = 0
        self._extra: dict[Channel[Any], int] = {}  # room beyond the floor, when it was last looked at
        self._changed: set[Channel[Any]] = set()  # whose room may be less now
        self._asked: dict[Channel[Any], Blocked] = {}  # who waits for room, the longest first
        self._short = False  # the first of them waits for room that others have
        self._idle: dict[Channel[Any], tuple[int, int]] = {}  # who has room: (bytes that came, ticks since then)

    @property
    def waiting(self) -> int:
        """How many senders wait for room."""
        return len(self._asked)

    @property
    def free_bytes(self) -> int:
        """What nobody has been allowed to send, and is not kept for floors."""
        self._look()
        return self.total_bytes - max(self._floors, self.total_bytes // KEPT) - self._extras

    def _look(self) -> None:
        for channel in self._changed:
            self._set(channel, channel.extra_bytes)
        self._changed.clear()

    def _set(self, channel: Channel[Any], extra: int) -> None:
        self._extras += extra - self._extra.pop(channel, 0)
        if extra:
            self._extra[channel] = extra
        else:
            self._idle.pop(channel, None)

    def join(self, window_messages: int) -> Channel[Any]:
        """The channel of a new sender, with the floor that there is room for beside what others have, or the largest message."""
        floor = self._next_floor()
        self._floors += floor
        return Channel(window_messages, floor)

    def _next_floor(self) -> int:
        self._look()
        usual = next(floor for part, floor in self._floor_bytes if part * self._floors < self.total_bytes)
        left = self.total_bytes - self._floors - max(self.largest_bytes, self._extras)
        return usual if left >= usual else 0

    def leave(self, channel: Channel[Any]) -> None:
        """A sender is gone, and what it had is free."""
        self._floors -= channel.window_bytes
        self._set(channel, 0)
        self._changed.discard(channel)
        self._asked.pop(channel, None)

    def acknowledged(self, channel: Channel[Any]) -> None:
        """Something of what came from a sender is acknowledged: it may have less room now."""
        if channel in self._extra:
            self._changed.add(channel)

    def ask(self, channel: Channel[Any], blocked: Blocked) -> None:
        """A sender has more than it may send; `serve` grants it. What no message can need is not heeded: it is meant for a broker
        before this one, or not honest."""
        if blocked.least <= channel.allowed_bytes:
            channel.ack_due = True  # it has not heard so
            self._asked.pop(channel, None)  # or needs less than it did
        elif blocked.least - channel.allowed_bytes <= self.largest_bytes:
            self._asked[channel] = blocked

    def give_back(self, channel: Channel[Any]) -> None:
        """A sender does not need what it may send beyond what has come from it."""
        self._asked.pop(channel, None)
        channel.withdraw()
        self._set(channel, channel.extra_bytes)

    def blocked(self, channel: Channel[Any]) -> int:
        """Bytes beyond what a sender may send that it waits for."""
        blocked = self._asked.get(channel)
        if blocked is None:
            return 0
        return max(min(max([blocked.least, *blocked.more[-1:]]) - channel.allowed_bytes, self.largest_bytes), 0)

    def serve(self) -> list[Channel[Any]]:
        """Give those that wait what there is room for, in their order; who may send more now. One that has too much under way
        itself lets others pass."""
        served: list[Channel[Any]] = []
        self._short = False
        for channel, blocked in list(self._asked.items()):
            if not channel.window_bytes:  # there was no room for it when it came
                channel.window_bytes = min(self._next_floor(), LATE_FLOOR_BYTES)
                self._floors += channel.window_bytes
            room = self.largest_bytes - channel.extra_bytes  # that it may have beyond what it has
            needed = blocked.least - channel.allowed_bytes
            if needed > room:
                continue
            free = self.free_bytes
            if needed > free:
                self._short = True
                break
            most = channel.allowed_bytes + min(room, free - self.largest_bytes)
            channel.extend(
                max([limit for limit in blocked.more[:LIMITS] if blocked.least < limit <= most], default=blocked.least)
            )
            self._set(channel, channel.extra_bytes)
            if channel in self._extra:  # else what it had under way was acknowledged meanwhile
                self._idle[channel] = (channel.arrived_bytes, 0)
            del self._asked[channel]
            served.append(channel)
        return served

    def unused(self) -> Channel[Any] | None:
        """Call every second: one that had room for `UNUSED_TICKS` and has used hardly any of it, while others waited for it."""
        self._look()
        found = None
        for channel, (arrived, ticks) in self._idle.items():
            extra = self._extra[channel]
            used = extra <= IDLE_BYTES or channel.pending or (channel.arrived_bytes - arrived) * USED >= extra
            if used or not self._short or (channel in self._asked and self._within(channel)):
                self._idle[channel] = (channel.arrived_bytes, 0)
            else:
                self._idle[channel] = (arrived, ticks + 1)
                found = channel if ticks + 1 > UNUSED_TICKS else found
        return found

    def _within(self, channel: Channel[Any]) -> bool:
        """Whether what a sender waits for is room, and not that it uses what it has."""
        return self._asked[channel].least - channel.allowed_bytes <= self.largest_bytes - channel.extra_bytes
