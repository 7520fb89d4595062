"""`Channel`: what makes one direction pair of one socket with one peer reliable. Pure: no socket, no clock of its own.

Guarantees, whatever the transport drops, repeats, delays or reorders, as long as something gets through:
every message sent is delivered once and in order, and no more messages or bytes are under way than the receiver
allowed. It holds values of type `T` (frames, usually) in its resend window until they are acknowledged.

- Sequences start at 1 and count the sender's messages since the handshake.
- Credit is cumulative: an acknowledgement carries how many messages and bytes may have been sent *in all*, so a lost
  one costs nothing. A resend uses the credit of the original. A sender may be allowed more bytes than its window for a
  while (`extend`): that ends as what it sends is acknowledged.
- A receiver that sees a hole asks for everything after its cursor again (go-back-N). Nothing acknowledged for
  `resend_s`: the last message goes out again, which uncovers a hole or a lost acknowledgement; the wait doubles up to
  `RESEND_LIMIT_S`. Acknowledgements are repeated every `REFRESH_S`.

Called by ``pump.Router`` (one for each peer) and ``peer.Peer`` (one for each socket).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Generic, TypeVar

from temper.common.errors import ProtocolError
from temper.common.schema import Ack

T = TypeVar("T")

WINDOW_MESSAGES = 1024
WINDOW_BYTES = 64 * 1024 * 1024
LARGEST_BYTES = 32 * 1024 * 1024
"""Of one message on the broker's control socket."""
URGENT_BYTES = 64 * 1024
IDLE_BYTES = (
    64 * 1024
)  # of room beyond its window that a sender may leave unused: less than that is not worth a message
SEND_MESSAGES = 4096
SEND_BYTES = 256 * 1024 * 1024
RESEND_S = 1.0
RESEND_LIMIT_S = 8.0
REFRESH_S = 5.0


class Arrival(Enum):
    """What to do with a message that arrived: take it, drop a repeat, drop what follows a hole."""

    DELIVER = 1
    DUPLICATE = 2
    GAP = 3


DELIVER, DUPLICATE, GAP = Arrival.DELIVER, Arrival.DUPLICATE, Arrival.GAP


class Channel(Generic[T]):
    """Both directions with one peer. `window_messages` and `window_bytes` are what it lets the other side have under
    way; the other side's limits arrive with its handshake (`grant`) and its acknowledgements."""

    __slots__ = (
        "_acked_bytes",
        "_extended_bytes",
        "_gap",
        "_gap_answered",
        "_given_back_at",
        "_granted_bytes",
        "_granted_messages",
        "_pending",
        "_refresh_at",
        "_released_bytes",
        "_released_messages",
        "_resend_at",
        "_resend_s",
        "_told",
        "_told_bytes",
        "_wait_s",
        "_window",
        "ack_due",
        "acked",
        "acknowledged",
        "arrived_bytes",
        "largest_bytes",
        "limit_bytes",
        "limit_messages",
        "received",
        "sent",
        "sent_bytes",
        "window_bytes",
        "window_messages",
    )

    def __init__(
        self,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
        resend_s: float = RESEND_S,
    ) -> None:
        self.window_messages = window_messages
        self.window_bytes = window_bytes
        self._resend_s = resend_s
        self._window: deque[tuple[T, int]] = deque()
        self._reset()

    def _reset(self) -> None:
        self.sent = 0  # last sequence given out
        self.sent_bytes = 0
        self.acked = 0  # last of ours the peer acknowledged
        self._acked_bytes = 0
        self._granted_messages = 0  # what the peer allowed
        self._granted_bytes = 0
        self._given_back_at = 0  # the message that gave the rest back
        self.limit_messages = 0  # what it allowed, within our own bounds
        self.limit_bytes = 0
        self.largest_bytes = 0  # no message may exceed it: what the peer says, or its whole window
        self._wait_s = self._resend_s
        self._resend_at = float("inf")
        self._gap_answered = (-1, 0.0)  # cursor and time of the last go-back
        self.received = 0  # last of the peer's that arrived in order
        self.acknowledged = 0  # last of the peer's that we acknowledged
        self.arrived_bytes = 0
        self._pending: deque[int] = deque()  # sizes of what arrived and is not acknowledged
        self._released_messages = 0
        self._released_bytes = 0
        self._extended_bytes = 0  # what the peer may have sent in all beyond its window
        self._gap = False
        self.ack_due = False
        self._refresh_at = float("inf")
        self._told = 0  # limits in our last acknowledgement
        self._told_bytes = 0

    # ------------------------------------------------------------ sending

    @property
    def unacked(self) -> int:
        """How many messages are in the resend window."""
        return len(self._window)

    @property
    def unacked_bytes(self) -> int:
        """How many bytes the resend window holds."""
        return self.sent_bytes - self._acked_bytes

    def grant(self, limit_messages: int, limit_bytes: int) -> None:
        """Take the peer's cumulative limits; they never shrink. The first ones are its window.

        However much a peer allows, no more than `SEND_MESSAGES` and `SEND_BYTES` are kept for it.
        """
        self.largest_bytes = self.largest_bytes or min(limit_bytes, SEND_BYTES)
        self._granted_messages = max(self._granted_messages, limit_messages)
        self._granted_bytes = max(self._granted_bytes, limit_bytes)
        self.limit_messages = min(self._granted_messages, self.acked + SEND_MESSAGES)
        self.limit_bytes = min(self._granted_bytes, self._acked_bytes + SEND_BYTES)

    def unneeded_bytes(self, window_bytes: int) -> int:
        """What the peer, which keeps a window of `window_bytes` for us, has allowed beyond it and nothing was sent in."""
        return self.limit_bytes - max(self.sent_bytes, self._acked_bytes + window_bytes)

    def give_back(self) -> None:
        """The message just sent says that what is allowed beyond it is not needed: it counts as not allowed until the peer has
        that message."""
        self._granted_bytes = self.limit_bytes = self.sent_bytes
        self._given_back_at = self.sent

    def may_send(self, size: int) -> bool:
        """True if a message of `size` bytes is within the peer's credit."""
        return self.sent < self.limit_messages and self.sent_bytes + size <= self.limit_bytes

    def send(self, message: T, size: int, now: float) -> int:
        """Take `message` into the window; its sequence, for the caller to transmit. 0 if there is no credit for it."""
        sequence, total = self.sent + 1, self.sent_bytes + size
        if sequence > self.limit_messages or total > self.limit_bytes:
            return 0
        window = self._window
        if not window:
            self._wait_s = self._resend_s
            self._resend_at = now + self._wait_s
        self.sent, self.sent_bytes = sequence, total
        window.append((message, size))
        return sequence

    def on_ack(self, ack: Ack, now: float) -> bool:
        """Take an acknowledgement; True if everything in the window must go out again (`resend`).

        ProtocolError if it acknowledges what was never sent.
        """
        if ack.received > self.sent or ack.received < 0:
            raise ProtocolError(f"acknowledged message {ack.received}, but {self.sent} were sent")
        if ack.received > self.acked:
            for _ in range(ack.received - self.acked):
                self._acked_bytes += self._window.popleft()[1]
            self.acked = ack.received
            self._wait_s = self._resend_s
            self._resend_at = now + self._wait_s if self._window else float("inf")
        self.grant(ack.limit_messages, ack.limit_bytes if ack.received >= self._given_back_at else 0)
        if not ack.gap or ack.received != self.acked or not self._window:
            return False
        cursor, at = self._gap_answered
        if cursor == self.acked and now < at + self._resend_s:
            return False  # the answer to this hole is already under way
        self._gap_answered = (self.acked, now)
        return True

    def resend(self) -> Iterator[tuple[int, T]]:
        """(sequence, message) of everything in the window, oldest first."""
        for offset, (message, _) in enumerate(self._window, 1):
            yield self.acked + offset, message

    def poll(self, now: float) -> tuple[int, T] | None:
        """Call about every second. What to transmit again, if an acknowledgement is overdue; may set `ack_due`."""
        if now >= self._refresh_at:
            self.ack_due = True
        if not self._window or now < self._resend_at:
            return None
        self._wait_s = min(self._wait_s * 2, max(RESEND_LIMIT_S, self._resend_s))
        self._resend_at = now + self._wait_s
        return self.sent, self._window[-1][0]

    def restart(self, limit_messages: int, limit_bytes: int, largest_bytes: int = 0) -> list[T]:
        """The peer is a new incarnation that knows nothing of us, and takes messages of up to `largest_bytes` (0: of its window):
        number from 1 again, forget the receive cursor, and return what was not acknowledged, to be sent before anything else."""
        kept = [message for message, _ in self._window]
        self._window.clear()
        self._reset()
        self.largest_bytes = largest_bytes
        self.grant(limit_messages, limit_bytes)
        return kept

    # ------------------------------------------------------------ receiving

    @property
    def allowed_messages(self) -> int:
        """How many messages the peer may have sent in all."""
        return self._released_messages + self.window_messages

    @property
    def allowed_bytes(self) -> int:
        """How many bytes the peer may have sent in all."""
        return max(self._released_bytes + self.window_bytes, self._extended_bytes)

    @property
    def extra_bytes(self) -> int:
        """How many of them are beyond its window."""
        return max(self._extended_bytes - self._released_bytes - self.window_bytes, 0)

    def extend(self, limit_bytes: int) -> None:
        """Allow the peer to have sent that much in all, whatever its window."""
        self._extended_bytes = max(self._extended_bytes, limit_bytes)
        self.ack_due = True

    def withdraw(self) -> None:
        """The peer has given back (`give_back`) what it was allowed beyond what has come and beyond its window."""
        self._extended_bytes = min(self._extended_bytes, self.arrived_bytes)
        self.ack_due = True

    @property
    def pending(self) -> int:
        """How many delivered messages are not acknowledged yet."""
        return len(self._pending)

    def arrive(self, sequence: int, size: int) -> Arrival:
        """What to do with a message that arrived. ProtocolError if it exceeds the credit it had."""
        if sequence != self.received + 1:
            self.ack_due = True
            if sequence <= self.received:
                return DUPLICATE
            self._gap = True
            return GAP
        if sequence > self.allowed_messages or self.arrived_bytes + size > self.allowed_bytes:
            raise ProtocolError(
                f"message {sequence} ({self.arrived_bytes + size} bytes in all) exceeds the credit of "
                f"{self.allowed_messages} messages, {self.allowed_bytes} bytes"
            )
        self.received = sequence
        self.arrived_bytes += size
        self._pending.append(size)
        self._gap = False
        return DELIVER

    def accept_next(self, size: int) -> bool:
        """`arrive` for the message that is next in order; False, and nothing is done, if it exceeds the credit."""
        sequence = self.received + 1
        total = self.arrived_bytes + size
        if sequence > self._released_messages + self.window_messages or (
            total > self._released_bytes + self.window_bytes and total > self._extended_bytes
        ):
            return False
        self.received = sequence
        self.arrived_bytes = total
        self._pending.append(size)
        self._gap = False
        return True

    def accept_run(self, sizes: Sequence[int]) -> bool:
        """`accept_next` for messages that follow one another: all of them or none."""
        sequence, total = self.received + len(sizes), self.arrived_bytes + sum(sizes)
        if sequence > self._released_messages + self.window_messages or (
            total > self._released_bytes + self.window_bytes and total > self._extended_bytes
        ):
            return False
        self.received = sequence
        self.arrived_bytes = total
        self._pending.extend(sizes)
        self._gap = False
        return True

    def acknowledge(self, sequence: int, release: bool = True) -> None:
        """Everything up to `sequence` is taken (and durable, where that is promised). `release` gives its credit back at
        once; else the caller does so later with `release`."""
        if sequence > self.received:
            raise AssertionError(f"acknowledge({sequence}), but {self.received} arrived")
        count = sequence - self.acknowledged
        if count <= 0:
            return
        take = self._pending.popleft
        size = sum([take() for _ in range(count)])
        self.acknowledged = sequence
        if release:
            self._released_messages += count
            self._released_bytes += size
        self.ack_due = True

    def release(self, messages: int, size: int) -> None:
        """Give credit back that `acknowledge(..., release=False)` kept."""
        self._released_messages += messages
        self._released_bytes += size
        self.ack_due = True

    @property
    def ack_urgent(self) -> bool:
        """True if an acknowledgement is due that should not wait for more to join it: it answers a hole, or an eighth of
        the window hangs on it (of a small one: half of it, or 64 KiB)."""
        window = self.window_bytes
        return self.ack_due and (
            self._gap
            or (self.allowed_messages - self._told) * 8 >= self.window_messages
            or self.allowed_bytes - self._told_bytes >= max(window // 8, min(window // 2, URGENT_BYTES))
        )

    def take_ack(self, now: float) -> Ack:
        """The acknowledgement to send now; clears `ack_due`."""
        gap, self._gap = self._gap, False
        self.ack_due = False
        self._refresh_at = now + REFRESH_S
        self._told, self._told_bytes = self.allowed_messages, self.allowed_bytes
        return Ack(self.acknowledged, self._told, self._told_bytes, gap)
