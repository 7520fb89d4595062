"""One plain ZeroMQ socket on the event loop: drained from the loop's reader, never blocked on, never cancelled.

ZeroMQ's descriptor is edge-triggered: it becomes readable once for any number of messages, and a send may swallow the
edge. So a turn drains what is there (up to a bound, so that timers keep their time) and looks once more after its last
send; after a send outside of a turn the loop looks too. Used by ``pump.Router`` and ``peer.Peer``.

A link may stay awake for some microseconds after a turn (`awake_s`), if this turn came within so many of the one before: what
comes next is then found by looking, rather than by being woken up. It stops once the processor was given to somebody else
meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from temper.common.sockets import Socket
from temper.common.wire import FRAME_LIMIT, JOINED_BYTES
from zmq.backend import Socket as BackendSocket

NOBLOCK = int(zmq.NOBLOCK)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
COPY_BELOW_BYTES = 64 * 1024  # smaller bytes are copied when they are sent: ZeroMQ gives uncopied ones back at a cost
KEEP_FROM_BYTES = JOINED_BYTES + 1
"""Smaller frames are copied when they come: they may be joined with others, and ZeroMQ may leave them in the buffer of 8 KiB that
it received them in, which keeping one would pin."""

# Without pyzmq's Python layer above them: half the cost of a part.
_receive: Callable[[Any, int, bool], Any] = BackendSocket.recv
_send: Callable[[Any, Any, int, bool], Any] = BackendSocket.send
_get: Callable[[Any, int], Any] = BackendSocket.get

PARTS_KEPT = FRAME_LIMIT + 4
YIELDED_S = 30e-6  # longer than it takes to find that nobody else is ready to run

Part = Any  # bytes or zmq.Frame


class Link:
    """`drain` is called when messages may wait; it calls `receive` until None or for a bounded while."""

    def __init__(self, socket: Socket, drain: Callable[[], None], awake_s: float = 0.0) -> None:
        self.socket = socket
        self._drain = drain
        self._routed = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._loop = asyncio.get_running_loop()
        self._awake_s = awake_s
        self._awake_until = self._turned_at = 0.0  # time.perf_counter()
        self._scheduled = False
        self._in_turn = False
        self._more = False  # messages wait, and nobody was told of them yet
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._open = True
        self._last: Any = None
        self._flushes: list[Callable[[], None]] = []
        self._loop.add_reader(self._descriptor, self._turn)
        self.look()

    def look(self) -> None:
        """Look for messages soon, whatever the descriptor says: also after a send past this link."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._looked)

    def _looked(self) -> None:
        self._scheduled = False
        if not self._open:
            return
        if self._more or self.behind():
            self._turn()
        elif (now := time.perf_counter()) < self._awake_until:
            os.sched_yield()
            if time.perf_counter() - now > YIELDED_S:
                self._awake_until = 0.0  # others need the processor
            self.look()

    def _turn(self) -> None:
        if not self._open:
            return
        self._in_turn, self._more = True, False
        awake = time.perf_counter() - self._turned_at <= self._awake_s
        try:
            self._drain()
        finally:
            self.flush()
            self._in_turn = False
            self._turned_at = time.perf_counter()
            if awake:
                self._awake_until = self._turned_at + self._awake_s
            if self._open and (awake or self._more or self.behind()):
                self.look()

    def waiting(self) -> bool:
        """Whether messages wait now: a third of what it costs to find none by `receive`."""
        return bool(_get(self.socket, EVENTS) & POLLIN)

    def behind(self) -> bool:
        """`waiting`, at the end of a turn. If so, `drain` is called once more, whatever becomes of the messages."""
        self._more = self.waiting()
        return self._more

    def flush_later(self, flush: Callable[[], None]) -> None:
        """Have `flush` called at the end of this turn, or else with the loop's next one."""
        if not self._flushes and not self._in_turn:
            self._loop.call_soon(self.flush)
        self._flushes.append(flush)

    def flush(self) -> None:
        """Have everything leave now that waits for the end of the turn."""
        while self._flushes:
            flushes, self._flushes = self._flushes, []
            for flush in flushes:
                flush()

    def receive(self) -> list[Part] | None:
        """The parts of the next message, or None. Too many parts (a violation) are cut to a few beyond the limit.

        Array frames over 16 KiB are zmq.Frames that own their memory; all else is bytes.
        """
        socket = self.socket
        first = 3 if self._routed else 2  # array frame
        parts: list[Part] = []
        try:
            if self._routed:
                parts.append(_receive(socket, NOBLOCK, True))  # a routing id, which another part always follows
            while True:
                frame = _receive(socket, NOBLOCK, False)
                if len(parts) < PARTS_KEPT:
                    parts.append(frame if len(frame) >= KEEP_FROM_BYTES and len(parts) >= first else frame.bytes)
                if not frame.more:
                    break
        except zmq.Again:
            return None
        self._last = frame
        return parts

    def user(self) -> str:
        """The public key (Z85) that the last received message's connection was admitted with; empty without CURVE."""
        try:
            return str(self._last.get("User-Id"))
        except zmq.ZMQError:
            return ""

    def send(self, peer: bytes, header: bytes, meta: bytes, frames: Sequence[Part]) -> bool:
        """Send one message without blocking; False if the peer is not there or its pipe is full.

        `peer` is a routing id, empty on a DEALER. Bytes of 64 KiB and more, and zmq.Frames, are not copied.
        """
        if not self._open:
            return False
        if not self._in_turn and not self._scheduled:
            self.look()  # a send may swallow the edge
        socket = self.socket
        try:
            if peer:
                _send(socket, peer, MORE, True)
            _send(socket, header, MORE, True)
            if not frames:
                _send(socket, meta, NOBLOCK, True)
                return True
            _send(socket, meta, MORE, True)
            last = len(frames) - 1
            for index, frame in enumerate(frames):
                copy = type(frame) is bytes and len(frame) < COPY_BELOW_BYTES
                _send(socket, frame, MORE if index < last else NOBLOCK, copy)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        """Stop reading, and sending. The socket stays open for its owner to close."""
        if self._open:
            self.flush()
            self._open = False
            self._loop.remove_reader(self._descriptor)
