"""`Passage`: a relay's control socket: every peer of the site has a line to the parent, and messages pass unchanged.

    passage = Passage("ipc:///site", parent, "relay-1", news=mirror.news, keys=site_keys, parent_keys=my_key)

The two ends of a line are the peer and the run's broker: handshake, sequence numbers, credit, acknowledgements, resends
and incarnations are theirs, so a lease, a sample, a verdict means the same however many relays lie between, and what a
relay's death loses is sent again. A line is one connection to the parent under the peer's own routing id; a relay that
was restarted opens it anew with the next message, and neither end notices more than a gap.

What passes is checked as the broker would (header, sizes, kinds), and bounded (`flow`): a hostile peer is shut out here and
hurts no other. Only handshakes are read and marked (`Hello.via`), heartbeats and new versions only read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from temper.broker.pipe import TURN_BYTES, TURN_MESSAGES, Pipe
from temper.common.admission import Admission
from temper.common.errors import ProtocolError
from temper.common.keys import BrokerKeys, PeerKeys
from temper.common.link import Link
from temper.common.log import log
from temper.common.pump import PeerId
from temper.common.schema import Ack, Body, Goodbye, Heartbeat, Hello, NewVersion, Refused, Version
from temper.common.session import check, check_kind, decode
from temper.common.sockets import Address, bind, new_epoch, parse_address
from temper.common.waiting import on_the_beat
from temper.common.wire import pack_fields, pack_meta

TICK_S = 1.0
ABSENT_S = 5.0  # of a peer, which says something every second: nobody waits for it any more
SILENCE_S = 30.0  # of a peer, after which its line is closed
GRACE_S = 2.0  # for the last acknowledgements after a goodbye or a refusal
LINES = 480  # four descriptors each, and ZeroMQ has 1,023 sockets
DEPTH = 8
REMEMBERED = 1024


class Line:
    """One peer's line to the parent."""

    __slots__ = ("ending_at", "goodbye", "heard_at", "hello", "peer", "pipe", "user", "version")

    def __init__(self, peer: PeerId, now: float, user: str) -> None:
        self.peer = peer
        self.hello: Hello | None = None  # None: it was here before this relay was
        self.version: Version | None = None  # of its last heartbeat
        self.goodbye = 0  # sequence of its goodbye
        self.ending_at = 0.0
        self.user = user
        self.heard_at = now
        self.pipe: Pipe

    @property
    def works(self) -> bool:
        """Neither a status client nor on its way out."""
        return not self.ending_at and (self.hello is None or self.hello.role != "status")


class Passage:
    """See the module. Make it inside a running loop; `close` it. `news(version)` is called for every announced version that
    passes, `left(peer)` when a line ends or begins to."""

    def __init__(
        self,
        address: str,
        parent: Address,
        name: str,
        *,
        news: Callable[[Version], None],
        left: Callable[[PeerId], None],
        keys: BrokerKeys | None = None,
        parent_keys: PeerKeys | None = None,
    ) -> None:
        self.lines: dict[PeerId, Line] = {}
        self._passed = self._dropped = 0  # on lines that ended
        self._parent, self._parent_keys, self._name = parent, parent_keys, name
        self._news, self._left = news, left
        self._epoch = new_epoch()
        self._loop = asyncio.get_running_loop()
        self._closed: OrderedDict[PeerId, Refused] = OrderedDict()
        self._answered: set[PeerId] = set()
        self._keys = keys
        self._admission = Admission.of(keys) if keys is not None else None
        try:
            self._bound = bind(parse_address(address), "control", keys)
        except BaseException:
            self._leave()
            raise
        self._site = Link(self._bound.socket, self._from_site)
        self._ticked_at = self._loop.time()
        self._timer = on_the_beat(self._loop, TICK_S, self._tick)

    def working(self) -> list[str]:
        """Names of the peers that are there and whose work is not over."""
        now = self._loop.time()
        return [_name(line) for line in self.lines.values() if line.works and now - line.heard_at < ABSENT_S]

    def dropped(self) -> int:
        """Messages that were too many to be passed on."""
        return self._dropped + sum(line.pipe.dropped for line in self.lines.values())

    def passed(self) -> int:
        """Messages passed on, both ways."""
        return self._passed + sum(line.pipe.passed for line in self.lines.values())

    def roles(self) -> Counter[str]:
        """Peers by role; "relay" for a relay, "unknown" for those that were here before this relay was."""
        roles = (line.hello.role if line.hello is not None else "unknown" for line in self.lines.values())
        return Counter("relay" if role == "broker" else role for role in roles)

    def versions(self) -> list[Version]:
        """What the peers here hold, by their heartbeats."""
        return [line.version for line in self.lines.values() if line.version is not None]

    def close(self) -> None:
        """End every line; the peers stay where they are and find the relay again when it comes back."""
        self._timer.cancel()
        for line in list(self.lines.values()):
            self._end(line)
        self._site.close()
        self._bound.close(200)
        self._leave()

    def _leave(self) -> None:
        if self._admission is not None:
            self._admission.leave()
            self._admission = None

    # ------------------------------------------------------------ up: from the site to the parent

    def _from_site(self) -> None:
        count = size = 0
        now = self._loop.time()
        while count < TURN_MESSAGES and size < TURN_BYTES:
            parts = self._site.receive()
            if parts is None:
                break
            count += 1
            try:
                size += self._up(parts, now)
            except ProtocolError as error:
                self.refuse(parts[0], "malformed", str(error))

    def _up(self, parts: list[Any], now: float) -> int:
        peer: PeerId = parts[0]
        if peer in self._closed:
            self._answer(peer, self._closed[peer])
            return 0
        number, flags, version, epoch, sequence, size = check(parts, 1)
        kind = check_kind(number, sequence, False)
        if not sequence and len(parts) > 3:
            raise ProtocolError(f"{kind.__name__} with {len(parts) - 3} array frames, expected none")
        header, meta = parts[1], parts[2]
        body = decode(kind, bytes(meta)) if kind in _READ else None
        line = self.lines.get(peer) or self._open(peer, now)
        if line is None:
            return size
        line.heard_at = now
        if isinstance(body, Hello):
            meta = pack_meta(self._marked(line, body))
            header = pack_fields(number, flags, version, epoch, 0, len(meta))
        elif isinstance(body, Ack):
            line.pipe.acknowledged(body.received)
        elif isinstance(body, Heartbeat):
            line.version = body.version
        elif isinstance(body, Goodbye):
            line.goodbye = sequence
        line.pipe.send(header, meta, parts[3:], sequence, size)
        return size

    def _open(self, peer: PeerId, now: float) -> Line | None:
        if len(self.lines) >= LINES:
            self._answer(peer, Refused("overflow", f"this relay serves {LINES} peers already: start another one"))
            return None
        line = self.lines[peer] = Line(peer, now, self._site.user() if self._keys else "")
        line.pipe = Pipe(
            self._parent,
            "control",
            peer,
            self._parent_keys,
            site=self._site.send,
            look=lambda kind, meta: self._look(line, kind, meta),
        )
        return line

    def _marked(self, line: Line, hello: Hello) -> Hello:
        if len(hello.via) >= DEPTH:
            raise ProtocolError(f"handshake over {len(hello.via)} relays ({', '.join(hello.via)}): at most {DEPTH}")
        if line.hello is None and hello.role != "status":
            log(f"{hello.role} {hello.name} joined (pid {hello.pid} on {hello.host or 'this host'})")
        line.hello = hello
        return msgspec.structs.replace(hello, via=[*hello.via, self._name])

    # ------------------------------------------------------------ down: from the parent to the site

    def _look(self, line: Line, kind: type[Body], meta: bytes) -> None:
        """What comes from the parent for a peer, before it is passed on."""
        if kind is NewVersion:
            self._news(decode(NewVersion, meta).version)
        elif kind is Ack:
            if line.goodbye and decode(Ack, meta).received >= line.goodbye:
                self._ending(line)
        elif kind is Refused and decode(Refused, meta).code != "hello":
            self._ending(line)

    def _ending(self, line: Line) -> None:
        line.ending_at = line.ending_at or self._loop.time() + GRACE_S
        self._left(line.peer)

    # ------------------------------------------------------------ ends

    def refuse(self, peer: PeerId, code: str, reason: str) -> None:
        """Shut a peer out, telling it why; the run's broker finds it silent."""
        refused = Refused(code, reason)
        self._closed[peer] = refused
        if len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)
        self._answer(peer, refused)
        line = self.lines.get(peer)
        if line is not None:
            log(f"{_name(line)} is shut out: {reason}")
            self._end(line)

    def _answer(self, peer: PeerId, refused: Refused) -> None:
        """Answer in the relay's own name, at most once a tick."""
        if peer in self._answered or len(self._answered) >= REMEMBERED:
            return
        self._answered.add(peer)
        meta = pack_meta(refused)
        self._site.send(peer, pack_fields(Refused.KIND, 0, 0, self._epoch, 0, len(meta)), meta, ())

    def _end(self, line: Line) -> None:
        self.lines.pop(line.peer, None)
        self._dropped += line.pipe.dropped
        self._passed += line.pipe.passed
        line.pipe.close()
        self._left(line.peer)

    def _tick(self) -> None:
        now = self._loop.time()
        late = max(now - self._ticked_at - 2 * TICK_S, 0.0)  # it was us who did not listen
        self._ticked_at = now
        self._timer = on_the_beat(self._loop, TICK_S, self._tick)
        self._answered.clear()
        for line in list(self.lines.values()):
            line.heard_at += late
            line.pipe.tick(late)
            if now - line.heard_at > SILENCE_S or (line.ending_at and now > line.ending_at):
                self._end(line)
            elif self._keys and self._admission and not self._admission.admits(self._keys, line.user):
                self.refuse(line.peer, "key", "the key of this peer was revoked")


_READ: frozenset[type[Body]] = frozenset({Hello, Ack, Heartbeat, Goodbye})


def _name(line: Line) -> str:
    return line.hello.name if line.hello is not None else f"a peer that was here before ({line.peer.hex()[:8]})"
