"""`Pipe`: one peer's connection to a relay's parent, under the peer's own routing id, on one of the two sockets.

Messages pass both ways as they are, checked and bounded (`flow`). Used by ``passage`` (control, everybody) and ``site``
(bulk, a learner).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from temper.broker.flow import Flow
from temper.common.errors import ProtocolError
from temper.common.keys import PeerKeys
from temper.common.link import Link
from temper.common.log import log
from temper.common.schema import Ack, Body
from temper.common.session import check, check_kind, decode
from temper.common.sockets import Address, SocketKind, connect

QUIET_S = 3.0  # of the parent, after which a connection with keys is made anew: ZeroMQ gives a refused key up
TURN_MESSAGES = 256
TURN_BYTES = 32 * 1024 * 1024

Send = Callable[[bytes, bytes, bytes, Sequence[Any]], bool]


class Pipe:
    """Make it inside a running loop; `close` it. `site(peer, header, meta, frames)` sends to the peer; `look(type, meta)`
    sees what comes from the parent first."""

    def __init__(
        self,
        parent: Address,
        kind: SocketKind,
        peer: bytes,
        keys: PeerKeys | None,
        *,
        site: Send,
        look: Callable[[type[Body], bytes], None] = lambda body, meta: None,
    ) -> None:
        self.peer = peer
        self.passed = 0
        self._parent, self._kind, self._keys, self._site, self._look = parent, kind, keys, site, look
        self._up, self._down = Flow(), Flow()
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._dial()

    @property
    def dropped(self) -> int:
        """Messages that were too many to be passed on."""
        return self._up.dropped + self._down.dropped

    def send(self, header: bytes, meta: bytes, frames: Sequence[Any], sequence: int, size: int) -> None:
        """Pass a message of the peer on to the parent, unless too much is under way; an honest peer sends it again."""
        if self._up.admit(sequence, size, self._loop.time()) and self._link.send(b"", header, meta, frames):
            self.passed += 1

    def acknowledged(self, received: int) -> None:
        """The peer has everything up to that sequence."""
        self._down.acknowledged(received)

    def tick(self, late_s: float) -> None:
        """About every second; `late_s`: for so long this process did not listen."""
        self.heard_at += late_s
        now = self._loop.time()
        if self._keys is not None and now - max(self.heard_at, self._dialed_at) > QUIET_S:
            self.close(0)
            self._dial()

    def close(self, linger_ms: int = 200) -> None:
        """End the connection; what was sent gets `linger_ms` to leave."""
        self._link.close()
        self._socket.close(linger=linger_ms)

    def _dial(self) -> None:
        self._dialed_at = self._loop.time()
        self._socket = connect(self._parent, self._kind, self.peer, self._keys)
        self._link = Link(self._socket, self._drain)

    def _drain(self) -> None:
        count = size = 0
        while count < TURN_MESSAGES and size < TURN_BYTES:
            parts = self._link.receive()
            if parts is None:
                break
            count += 1
            try:
                size += self._take(parts)
            except ProtocolError as error:
                log(f"the parent sent something malformed, which is not passed on: {error}")

    def _take(self, parts: list[Any]) -> int:
        number, _, _, _, sequence, size = check(parts, 0)
        kind = check_kind(number, sequence, self._kind == "bulk")
        self.heard_at = now = self._loop.time()
        if kind is Ack:
            self._up.acknowledged(decode(Ack, bytes(parts[1])).received)
        self._look(kind, bytes(parts[1]))
        if self._down.admit(sequence, size, now) and self._site(self.peer, parts[0], parts[1], parts[2:]):
            self.passed += 1
        return size
