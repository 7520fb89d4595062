"""`Session`: one conversation over one socket with one peer: what is queued, what is under way, what is owed.

Joins the pure `credit.Channel` to a `link.Link`. Sends never block: beyond the peer's credit messages queue here, in
order, bounded by `QUEUE_MESSAGES` and `QUEUE_BYTES`. Used by ``pump.Router`` (one for each peer) and ``peer.Peer``
(one for each of its two sockets).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from temper.common.credit import DELIVER, Channel
from temper.common.errors import ProtocolError, TemperError
from temper.common.link import Link
from temper.common.schema import BODIES, Ack, Body
from temper.common.wire import (
    FRAME_LIMIT,
    FRAME_LIMIT_BYTES,
    HEADER_BYTES,
    META_LIMIT_BYTES,
    Header,
    nbytes,
    pack_header,
    pack_meta,
    unpack_header,
    unpack_meta,
)

QUEUE_MESSAGES = 65_536
QUEUE_BYTES = 256 * 1024 * 1024


class Backlogged(TemperError):
    """A peer takes so little that its queue is full."""

    exit_code = 3


class Outgoing:
    """A message on its way; `waiter` is completed when it enters the resend window."""

    __slots__ = ("frames", "kind", "meta", "size", "version", "waiter")

    def __init__(self, kind: int, meta: bytes, frames: Sequence[Any], version: int) -> None:
        if len(meta) > META_LIMIT_BYTES:
            raise ProtocolError(f"meta of {len(meta)} bytes, at most {META_LIMIT_BYTES}: put large values into frames")
        if len(frames) > FRAME_LIMIT:
            raise ProtocolError(f"{len(frames)} frames, at most {FRAME_LIMIT}")
        size = len(meta)
        for frame in frames:
            n = nbytes(frame)
            if n > FRAME_LIMIT_BYTES:
                raise ProtocolError(f"frame of {n} bytes, at most {FRAME_LIMIT_BYTES}: split it")
            size += n
        self.kind = kind
        self.meta = meta
        self.frames = frames
        self.size = size
        self.version = version
        self.waiter: asyncio.Future[None] | None = None


class Session:
    """`peer` is the routing id on a ROUTER, empty on a DEALER; `epoch` this process's incarnation."""

    __slots__ = ("_link", "_prefix", "_queue", "channel", "epoch", "peer", "queued_bytes")

    def __init__(self, link: Link, peer: bytes, epoch: int, channel: Channel[Outgoing]) -> None:
        self._link = link
        self.peer = peer
        self._prefix = (peer,) if peer else ()
        self.epoch = epoch
        self.channel = channel
        self._queue: deque[Outgoing] = deque()
        self.queued_bytes = 0

    def relink(self, link: Link) -> None:
        """Go on over a new socket to the same peer; what the old one lost is resent."""
        self._link = link

    @property
    def queued(self) -> int:
        """Messages that wait for credit."""
        return len(self._queue)

    @property
    def settled(self) -> bool:
        """True when nothing is queued and everything sent is acknowledged."""
        return not self._queue and not self.channel.unacked

    def transient(self, body: Body, frames: Sequence[Any] = (), version: int = 0) -> bool:
        """Send once, unreliably (sequence 0); False if it could not leave now."""
        return self._transmit(0, Outgoing(body.KIND, pack_meta(body), frames, version))

    def reliable(self, message: Outgoing, now: float, *, bounded: bool = True) -> bool:
        """Send `message`, or queue it behind what waits for credit. True if it is in the window already.

        Backlogged if the queue is full and `bounded`; ProtocolError if no credit could ever cover the message.
        """
        channel = self.channel
        if message.size > channel.largest_bytes:
            raise ProtocolError(
                f"message of {message.size} bytes, but the peer takes at most {channel.largest_bytes} at once: split it"
            )
        if not self._queue and channel.may_send(message.size):
            self._transmit(channel.send(message, message.size, now), message)
            return True
        if bounded and (len(self._queue) >= QUEUE_MESSAGES or self.queued_bytes + message.size > QUEUE_BYTES):
            raise Backlogged(
                f"{len(self._queue)} messages ({self.queued_bytes} bytes) wait for a peer that takes none: "
                f"at most {QUEUE_MESSAGES} or {QUEUE_BYTES} bytes may"
            )
        self._queue.append(message)
        self.queued_bytes += message.size
        return False

    def push(self, now: float) -> bool:
        """Send what the credit covers now; True if that emptied the queue."""
        queue, channel = self._queue, self.channel
        if not queue:
            return False
        while queue:
            message = queue[0]
            waiter = message.waiter
            if waiter is not None and waiter.done():  # its sender gave up
                self._drop_first()
                continue
            if not channel.may_send(message.size):
                return False
            self._drop_first()
            self._transmit(channel.send(message, message.size, now), message)
            if waiter is not None:
                message.waiter = None
                waiter.set_result(None)
        return True

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
        self.push(now)
        self.acknowledge(now)

    def acknowledge(self, now: float) -> None:
        """Send the acknowledgement that is due, if one is."""
        if self.channel.ack_due:
            self.transient(self.channel.take_ack(now))

    def restart(self, limit_messages: int, limit_bytes: int, now: float) -> None:
        """The peer came back as a new incarnation: start over with what it has not acknowledged."""
        for sequence, message in self.channel.restart(limit_messages, limit_bytes, now):
            self._transmit(sequence, message)
        self.push(now)

    def abandon(self, error: Exception) -> None:
        """The peer is gone: nothing waits for it any longer."""
        for message in self._queue:
            if message.waiter is not None and not message.waiter.done():
                message.waiter.set_exception(error)
        self._queue.clear()
        self.queued_bytes = 0

    def _transmit(self, sequence: int, message: Outgoing) -> bool:
        header = pack_header(Header(message.kind, 0, message.version, self.epoch, sequence, message.size))
        return self._link.send((*self._prefix, header, message.meta, *message.frames))


def check(parts: Sequence[Any]) -> Header:
    """The header of a received message (routing id removed), every size checked; ProtocolError if anything is off."""
    if not 2 <= len(parts) <= 2 + FRAME_LIMIT:
        raise ProtocolError(f"{len(parts)} frames, expected 2 to {2 + FRAME_LIMIT}")
    if len(parts[0]) != HEADER_BYTES:
        raise ProtocolError(f"header of {len(parts[0])} bytes, expected {HEADER_BYTES}")
    header = unpack_header(parts[0])
    if len(parts[1]) > META_LIMIT_BYTES:
        raise ProtocolError(f"meta of {len(parts[1])} bytes, at most {META_LIMIT_BYTES}")
    size = 0
    for part in parts[1:]:
        size += len(part)
    if size != header.size:
        raise ProtocolError(f"{size} bytes after the header, which announced {header.size}")
    return header


def check_kind(header: Header, bulk: bool) -> type[Body]:
    """The body type of a message; ProtocolError for an unknown kind, the wrong socket or a sequence where none belongs."""
    kind = BODIES.get(header.kind)
    if kind is None:
        raise ProtocolError(f"message of unknown kind {header.kind}: are both sides of the same version?")
    if kind.RELIABLE:
        if bulk != kind.BULK:
            raise ProtocolError(f"{kind.__name__} came on the {'bulk' if bulk else 'control'} socket")
        if header.sequence == 0:
            raise ProtocolError(f"{kind.__name__} without a sequence number")
    elif header.sequence != 0:
        raise ProtocolError(f"{kind.__name__} with sequence number {header.sequence}, expected 0")
    return kind


def decode(kind: type[Body], meta: Any) -> Body:
    """The validated body in `meta`."""
    return unpack_meta(meta if isinstance(meta, bytes) else bytes(meta), kind)


__all__ = ["DELIVER", "Backlogged", "Outgoing", "Session", "check", "check_kind", "decode"]
