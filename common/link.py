"""One plain ZeroMQ socket on the event loop: drained from the loop's reader, never blocked on, never cancelled.

ZeroMQ's descriptor is edge-triggered: it becomes readable once for any number of messages, and a send may swallow the
edge. So a turn drains what is there (up to a bound, so that timers keep their time), and whenever something may be left
another turn is scheduled. Used by ``pump.Router`` and ``peer.Peer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from temper.common.sockets import Socket
from temper.common.wire import FRAME_LIMIT

NOBLOCK = int(zmq.NOBLOCK)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
COPY_BELOW_BYTES = 64 * 1024  # smaller frames are copied: keeping one would pin the buffer that it came in

Part = Any  # bytes or zmq.Frame


class Link:
    """`drain` is called when messages may wait; it calls `receive` until None and returns True if it stopped early."""

    def __init__(self, socket: Socket, drain: Callable[[], bool]) -> None:
        self.socket = socket
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._in_turn = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._open = True
        self._last: Any = None
        self._loop.add_reader(self._descriptor, self._turn)
        self.wake()

    def wake(self) -> None:
        """Have a turn soon, whatever the descriptor says."""
        if self._open and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        if not self._open:
            return
        self._in_turn = True
        try:
            more = self._drain()
        finally:
            self._in_turn = False
            if self._open and (self._pending() or more):
                self.wake()

    def _pending(self) -> bool:
        return bool(int(self.socket.getsockopt(EVENTS)) & POLLIN)

    def receive(self, most: int = FRAME_LIMIT + 3) -> list[Part] | None:
        """The parts of the next message, or None. A message of more than `most` parts is cut to `most` + 1 of them.

        Parts of 64 KiB and more are frames that own their memory, smaller ones bytes.
        """
        receive = self.socket.recv
        try:
            frame: Any = receive(NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts: list[Part] = [frame.bytes if len(frame) < COPY_BELOW_BYTES else frame]
        while frame.more:
            frame = receive(NOBLOCK, copy=False)
            if len(parts) <= most:
                parts.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame)
        self._last = frame
        return parts

    def user(self) -> str:
        """The public key (Z85) that the last received message's connection was admitted with; empty without CURVE."""
        try:
            return str(self._last.get("User-Id"))
        except zmq.ZMQError:
            return ""

    def send(self, parts: Sequence[Part]) -> bool:
        """Send without blocking; False if the peer is not there or its pipe is full. Large parts are not copied."""
        send = self.socket.send
        last = len(parts) - 1
        try:
            for index, part in enumerate(parts):
                flags = MORE if index < last else NOBLOCK
                if isinstance(part, bytes) and len(part) < COPY_BELOW_BYTES:
                    send(part, flags)
                else:
                    send(part, flags, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        finally:
            if not self._in_turn and self._open and self._pending():
                self.wake()
        return True

    def close(self) -> None:
        """Stop reading. The socket stays open for its owner to close."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
