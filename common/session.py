"""`Session`: one conversation over one socket with one peer: what is queued, what is under way, what is owed.

Joins the pure `credit.Channel` to a `link.Link`. Sends never block: beyond the peer's credit messages queue here, in
order, bounded by `QUEUE_MESSAGES` and `QUEUE_BYTES`. Small messages of the kinds that come in numbers leave at the end of the
loop's turn, joined (``burst``). Used by ``pump.Router`` (one for each peer) and ``peer.Peer``
(one for each of its two sockets).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from temper.common import burst
from temper.common.credit import IDLE_BYTES, Channel
from temper.common.errors import ProtocolError
from temper.common.link import Link
from temper.common.schema import BODIES, Ack, Blocked, Body, Unneeded
from temper.common.wire import (
    FRAME_LIMIT,
    FRAME_LIMIT_BYTES,
    META_LIMIT_BYTES,
    nbytes,
    pack_fields,
    pack_meta,
    unpack_fields,
    unpack_meta,
)

B = TypeVar("B", bound=Body)

QUEUE_MESSAGES = 65_536
QUEUE_BYTES = 256 * 1024 * 1024
ASK_BYTES = 16 * 1024 * 1024  # room that is asked for at once, unless the first message needs more


class Backlogged(ProtocolError):
    """A peer takes too little: its queue is full, or its whole window is smaller than a message."""


class Outgoing(msgspec.Struct, eq=False, gc=False):
    """A message on its way; `waiter` is completed when it enters the resend window."""

    kind: int
    meta: bytes
    frames: Sequence[Any]
    version: int
    size: int
    waiter: asyncio.Future[None] | None = None


def outgoing(kind: int, meta: bytes, frames: Sequence[Any], version: int) -> Outgoing:
    """A message within the protocol's limits; ProtocolError if it exceeds them."""
    size = len(meta)
    if size > META_LIMIT_BYTES:
        raise ProtocolError(f"meta of {size} bytes, at most {META_LIMIT_BYTES}: put large values into frames")
    if len(frames) > FRAME_LIMIT:
        raise ProtocolError(f"{len(frames)} frames, at most {FRAME_LIMIT}")
    for frame in frames:
        n = len(frame) if type(frame) is bytes else nbytes(frame)
        if n > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"frame of {n} bytes, at most {FRAME_LIMIT_BYTES}: split it")
        size += n
    return Outgoing(kind, meta, frames, version, size)


class Session:
    """`peer` is the routing id on a ROUTER, empty on a DEALER; `epoch` this process's incarnation."""

    __slots__ = (
        "_asked",
        "_asks",
        "_burst",
        "_burst_bytes",
        "_burst_last",
        "_floor",
        "_link",
        "_queue",
        "channel",
        "epoch",
        "peer",
        "queued_bytes",
    )

    def __init__(self, link: Link, peer: bytes, epoch: int, channel: Channel[Outgoing]) -> None:
        self._link = link
        self.peer = peer
        self.epoch = epoch
        self.channel = channel
        self._queue: deque[Outgoing] = deque()
        self.queued_bytes = 0
        self._asks = False  # the peer gives room to who asks for it
        self._asked = 0  # the limit that the first message waits for
        self._floor = 0  # the window that the peer keeps for us without being asked
        self._burst: list[Outgoing] = []  # sent as far as the channel knows; leaves with this turn
        self._burst_bytes = self._burst_last = 0

    def relink(self, link: Link) -> None:
        """Go on over a new socket to the same peer; what the old one lost is resent."""
        self._link = link

    @property
    def queued(self) -> int:
        """Messages that wait for credit."""
        return len(self._queue)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the peer: queued, or sent and not acknowledged."""
        return self.queued_bytes + self.channel.unacked_bytes

    @property
    def settled(self) -> bool:
        """True when nothing is queued and everything sent is acknowledged."""
        return not self._queue and not self.channel.unacked

    def transient(self, body: Body, frames: Sequence[Any] = (), version: int = 0) -> bool:
        """Send once, unreliably (sequence 0); False if it could not leave now."""
        return self._transmit(0, outgoing(body.KIND, pack_meta(body), frames, version))

    def announce(self, message: Outgoing) -> bool:
        """`transient` for a message that many peers get."""
        return self._transmit(0, message)

    def reliable(self, message: Outgoing, now: float, *, bounded: bool = True) -> bool:
        """Send `message`, or queue it behind what waits for credit. True if it is in the window already.

        Backlogged if the queue is full and `bounded`, or if no credit could ever cover the message.
        """
        channel = self.channel
        if message.size > channel.largest_bytes:
            raise Backlogged(
                f"message of {message.size} bytes, but the peer takes at most {channel.largest_bytes} at once: split it"
            )
        self._drop_cancelled()
        if not self._queue and (sequence := channel.send(message, message.size, now)):
            self._transmit(sequence, message)
            return True
        if bounded and (len(self._queue) >= QUEUE_MESSAGES or self.queued_bytes + message.size > QUEUE_BYTES):
            raise Backlogged(
                f"{len(self._queue)} messages ({self.queued_bytes} bytes) wait for a peer that takes none: "
                f"at most {QUEUE_MESSAGES} or {QUEUE_BYTES} bytes may"
            )
        self._queue.append(message)
        self.queued_bytes += message.size
        self._ask()
        return False

    def push(self, now: float) -> bool:
        """Send what the credit covers now; True if that emptied the queue."""
        queue, channel = self._queue, self.channel
        if not queue:
            return False
        self._drop_cancelled()
        self._ask()  # before what can leave now, so that the answer comes while that is on its way
        while queue:
            message = queue[0]
            sequence = channel.send(message, message.size, now)
            if not sequence:
                return False
            self._drop_first()
            self._transmit(sequence, message)
            if message.waiter is not None:
                message.waiter.set_result(None)
                message.waiter = None
            self._drop_cancelled()
        return True

    def _drop_cancelled(self) -> None:
        """Drop what stands first and whose sender gave up."""
        while self._queue and (waiter := self._queue[0].waiter) is not None and waiter.done():
            self._drop_first()

    def _ask(self) -> None:
        """Tell the peer, once, what room is needed for what there is no credit for in the queue."""
        channel = self.channel
        limit, whole = channel.limit_bytes, channel.sent_bytes
        if not self._asks or whole + self.queued_bytes <= limit or self._asked > limit:
            return
        limits: list[int] = []  # ends of messages, ever further apart
        for message in self._queue:
            if limits and whole + message.size > limit + ASK_BYTES:
                break
            whole += message.size
            if whole > limit and (not limits or whole - limit >= 2 * (limits[-1] - limit)):
                limits.append(whole)
        if whole > limits[-1]:
            limits.append(whole)
        self._asked = limits[0]
        self.transient(Blocked(limits[0], limits[1:]))

    def _give_back(self, now: float) -> None:
        """Tell the peer that room is not needed which it gave for what was cancelled since."""
        channel = self.channel
        if (
            self._asks
            and not self._queue
            and channel.sent < channel.limit_messages
            and channel.unneeded_bytes(self._floor) > IDLE_BYTES
        ):
            self.reliable(outgoing(Unneeded.KIND, pack_meta(Unneeded()), (), 0), now)
            channel.give_back()
            self._asked = 0

    def hold(self) -> None:
        """Keep what is to be sent in the queue, and ask for nothing, until a Welcome says what the peer allows."""
        self.channel.limit_messages = self.channel.sent
        self._asks = False

    def go_on(self, largest_bytes: int) -> None:
        """The peer is the one it was, and takes messages of up to `largest_bytes` on request (0: of its window)."""
        self._asks = largest_bytes > 0

    def _drop_first(self) -> None:
        self.queued_bytes -= self._queue.popleft().size

    def on_ack(self, ack: Ack, now: float) -> bool:
        """Take the peer's acknowledgement, resend what it misses, send what it makes room for. True if that emptied
        the queue."""
        if self.channel.on_ack(ack, now):
            for sequence, message in self.channel.resend():
                self._transmit(sequence, message)
        return self.push(now)

    def tick(self, now: float) -> None:
        """About every second: resend what is overdue, repeat acknowledgements."""
        overdue = self.channel.poll(now)
        if overdue is not None:
            self._transmit(*overdue)
        self._asked = 0  # what was asked for may have been lost
        self.push(now)
        self._give_back(now)
        self.acknowledge(now)

    def acknowledge(self, now: float) -> None:
        """Send the acknowledgement that is due, if one is."""
        if self.channel.ack_due:
            meta = pack_meta(self.channel.take_ack(now))
            self._link.send(self.peer, pack_fields(Ack.KIND, 0, 0, self.epoch, 0, len(meta)), meta, ())

    def restart(self, limit_messages: int, limit_bytes: int, largest_bytes: int, now: float) -> None:
        """The peer came back as a new incarnation: start over with what it has not acknowledged, within its new credit."""
        self._burst.clear()  # the numbers are different now
        kept = self.channel.restart(limit_messages, limit_bytes, largest_bytes)
        kept = [message for message in kept if message.kind != Unneeded.KIND]  # it meant what the old one allowed
        self._queue.extendleft(reversed(kept))
        self.queued_bytes += sum([message.size for message in kept])
        self._asks, self._asked, self._floor = largest_bytes > 0, 0, limit_bytes
        self.push(now)

    def abandon(self, error: Exception) -> None:
        """The peer is gone: nothing waits for it any longer."""
        for message in self._queue:
            if message.waiter is not None and not message.waiter.done():
                message.waiter.set_exception(error)
        self._queue.clear()
        self._burst.clear()
        self.queued_bytes = 0

    def _transmit(self, sequence: int, message: Outgoing) -> bool:
        if sequence and burst.joinable(message.kind, message.size, message.frames):
            self._join(sequence, message)
            return True
        if self._burst:
            self._flush()
        return self._send(sequence, message)

    def _join(self, sequence: int, message: Outgoing) -> None:
        """Let `message` leave together with those before it, if they belong to one burst."""
        waiting = self._burst
        if waiting and (
            sequence != self._burst_last + 1
            or message.kind != waiting[0].kind
            or message.version != waiting[0].version
            or self._burst_bytes + message.size > burst.BYTES
            or len(waiting) == burst.MESSAGES
        ):
            self._flush()
        if not self._burst:
            self._burst_bytes = 0
            self._link.flush_later(self._flush)
        self._burst.append(message)
        self._burst_bytes += message.size
        self._burst_last = sequence

    def _flush(self) -> None:
        messages, self._burst = self._burst, []
        if len(messages) == 1:
            self._send(self._burst_last, messages[0])
        elif messages:
            meta, frames = burst.join([(message.meta, message.frames) for message in messages])
            size, first = len(meta) + sum(map(len, frames)), messages[0]
            count, version = len(messages), first.version
            header = pack_fields(first.kind, count, version, self.epoch, self._burst_last, size)
            self._link.send(self.peer, header, meta, frames)

    def _send(self, sequence: int, message: Outgoing) -> bool:
        header = pack_fields(message.kind, 0, message.version, self.epoch, sequence, message.size)
        return self._link.send(self.peer, header, message.meta, message.frames)


Fields = tuple[int, int, int, int, int, int]  # kind, flags, version, epoch, sequence, size


def check(parts: Sequence[Any], start: int) -> Fields:
    """The header's fields of a received message, which begins at part `start`, every size checked; ProtocolError if
    anything is off."""
    count = len(parts) - start
    if not 2 <= count <= 2 + FRAME_LIMIT:
        raise ProtocolError(f"{count} frames, expected 2 to {2 + FRAME_LIMIT}")
    fields = unpack_fields(parts[start])
    size = len(parts[start + 1])
    if size > META_LIMIT_BYTES:
        raise ProtocolError(f"meta of {size} bytes, at most {META_LIMIT_BYTES}")
    if count > 2:
        size += sum(map(len, parts[start + 2 :]))
    if size != fields[5]:
        raise ProtocolError(f"{size} bytes after the header, which announced {fields[5]}")
    return fields


def check_kind(number: int, sequence: int, bulk: bool) -> type[Body]:
    """The body type of a message; ProtocolError for an unknown kind, the wrong socket or a sequence where none belongs."""
    kind = BODIES.get(number)
    if kind is None:
        raise ProtocolError(f"message of unknown kind {number}: are both sides of the same version?")
    if kind.RELIABLE:
        if bulk != kind.BULK:
            raise ProtocolError(f"{kind.__name__} came on the {'bulk' if bulk else 'control'} socket")
        if sequence == 0:
            raise ProtocolError(f"{kind.__name__} without a sequence number")
    elif sequence != 0:
        raise ProtocolError(f"{kind.__name__} with sequence number {sequence}, expected 0")
    return kind


def decode(kind: type[B], meta: bytes) -> B:
    """The validated body in `meta`."""
    return unpack_meta(meta, kind)
