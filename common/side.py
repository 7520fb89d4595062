"""`Side`: a peer's end of one of its two sockets: the handshake, what arrives, what is acknowledged.

It delivers in order to its `Owner` (``peer.Peer``), answers a new broker that asks for the hello again, and starts over
with what was not acknowledged when the broker is a new incarnation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from temper.common import burst
from temper.common.credit import DELIVER, Channel
from temper.common.errors import ConfigError, PeerLost, ProtocolError, TemperError
from temper.common.keys import PeerKeys
from temper.common.link import Link
from temper.common.schema import Ack, Body, Hello, Refused, Welcome
from temper.common.session import Session, check, check_kind, decode
from temper.common.sockets import Address, SocketKind, connect

ACKNOWLEDGE_S = 0.002
LINGER_MS = 200
TURN_MESSAGES = 256
TURN_BYTES = 32 * 1024 * 1024
CONFIGURATION_CODES = ("run_mismatch", "role_taken", "key", "domain")


class Owner(Protocol):
    """What a Side needs of its peer."""

    address: Address
    hello: Hello
    keys: PeerKeys | None
    identity: bytes
    epoch: int
    window: tuple[int, int]
    hold_bulk: bool
    over: bool

    def handle(self, body: Body, frames: list[memoryview]) -> None:
        """Hand one message to its handler."""

    def lose(self, error: BaseException) -> None:
        """The connection is over because of `error`."""

    def settled(self) -> None:
        """This side has nothing under way."""

    def welcomed(self, side: Side, welcome: Welcome, again: bool) -> None:
        """The broker let us in; `again`: a new incarnation of it."""


def refusal(refused: Refused, address: str) -> TemperError:
    """The error that a broker's refusal is: configuration, or the end of this peer."""
    kind: type[TemperError] = ConfigError if refused.code in CONFIGURATION_CODES else PeerLost
    if refused.code in ("malformed", "protocol"):
        kind = ProtocolError
    return kind(f"the broker at {address} refused this process ({refused.code}): {refused.reason}")


def _with_recipe(welcome: Welcome, frames: list[Any]) -> Welcome:
    try:
        return msgspec.structs.replace(welcome, recipe=b"".join(frames).decode())
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the recipe is no text: {error}") from error


class Side:
    """One of the two sockets."""

    def __init__(self, owner: Owner, kind: SocketKind) -> None:
        self._owner = owner
        self.kind: SocketKind = kind
        self.dialed_at = time.monotonic()
        self.socket = connect(owner.address, kind, owner.identity, owner.keys)
        self.link = Link(self.socket, self._drain)
        self.session = Session(self.link, b"", owner.epoch, Channel(*owner.window))
        self.welcome: Welcome | None = None
        self.broker_epoch = 0
        self.arrival = (0, 0)  # broker's incarnation and sequence of the message being handled
        self.greeting = False  # a hello is not answered yet
        self._acknowledging = False
        self.heard_at = time.monotonic()

    def redial(self) -> None:
        """Connect anew: ZeroMQ does not try again by itself once a key was refused."""
        self.dialed_at = time.monotonic()
        self.close()
        self.socket = connect(self._owner.address, self.kind, self._owner.identity, self._owner.keys)
        self.link = Link(self.socket, self._drain)
        self.session.relink(self.link)

    def greet(self) -> None:
        """Say hello (again). Nothing else is said until it is answered: what counts from then on, the answer says."""
        self.greeting = True
        self.session.hold()
        channel = self.session.channel
        self.session.transient(
            msgspec.structs.replace(
                self._owner.hello,
                received=channel.received,
                known_epoch=self.broker_epoch,
                limit_messages=channel.allowed_messages,
                limit_bytes=channel.allowed_bytes,
            )
        )

    def taken(self, arrival: tuple[int, int]) -> None:
        """Acknowledge what was held up to `arrival`; of a broker that is gone nothing is owed."""
        epoch, sequence = arrival
        if epoch == self.broker_epoch and sequence > self.session.channel.acknowledged:
            self.session.channel.acknowledge(sequence)
            self._acknowledge_soon()

    def close(self) -> None:
        """End the connection; what was sent has `LINGER_MS` to leave, in the background. None at all may end the process: ZeroMQ
        4.3.5 aborts (session_base.cpp:233) when the other end goes while a message is half sent."""
        self.link.close()
        self.socket.close(linger=LINGER_MS)

    def _drain(self) -> None:
        count = size = 0
        while count < TURN_MESSAGES and size < TURN_BYTES and not self._owner.over:
            parts = self.link.receive()
            if parts is None:
                break
            count += 1
            try:
                size += self._take(parts)
            except ProtocolError as error:
                self._owner.lose(
                    ProtocolError(f"the broker at {self._owner.address} sent something malformed: {error}")
                )
            except Exception as error:
                self._owner.lose(error)
        if self.broker_epoch and self.session.channel.ack_due:
            self._acknowledge_soon()
        if self.session.settled:
            self._owner.settled()

    def _acknowledge_soon(self) -> None:
        """Acknowledge now if that is urgent, else within `ACKNOWLEDGE_S`, so that one answers for many messages."""
        if self.greeting:
            return
        if self.session.channel.ack_urgent:
            self.session.acknowledge(time.monotonic())
        elif not self._acknowledging:
            self._acknowledging = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledging = False
        if not (self._owner.over or self.greeting):
            self.session.acknowledge(time.monotonic())

    def _take(self, parts: list[Any]) -> int:
        number, flags, _, epoch, sequence, size = check(parts, 0)
        kind = check_kind(number, sequence, self.kind == "bulk")
        now = time.monotonic()
        if kind is Welcome:
            self._welcomed(_with_recipe(decode(Welcome, parts[1]), parts[2:]), epoch, now)
        elif kind is Refused:
            self._refused(decode(Refused, parts[1]))
        elif epoch != self.broker_epoch or (kind is Ack and self.greeting):
            return size  # left over from a broker that is gone
        elif kind is Ack:
            self.session.on_ack(decode(Ack, parts[1]), now)
        elif flags and sequence:
            for at, (part, meta, frames) in enumerate(zip(*burst.divide(flags, number, parts[1:]), strict=True)):
                if self._owner.over:
                    break
                self._handle(kind, sequence - flags + 1 + at, part, meta, frames)
        else:
            self._handle(kind, sequence, size, parts[1], parts[2:])
        self.heard_at = now
        return size

    def _handle(self, kind: type[Body], sequence: int, size: int, meta: bytes, frames: Sequence[Any]) -> None:
        if sequence and self.session.channel.arrive(sequence, size) is not DELIVER:
            return
        self.arrival = (self.broker_epoch, sequence)
        self._owner.handle(decode(kind, meta), [memoryview(frame) for frame in frames])
        if sequence and not (self._owner.hold_bulk and self.kind == "bulk"):
            self.session.channel.acknowledge(sequence)

    def _welcomed(self, welcome: Welcome, epoch: int, now: float) -> None:
        again = self.broker_epoch not in (0, epoch)
        self.greeting = False
        if epoch == self.broker_epoch:  # an answer to a repeated hello
            self.session.go_on(welcome.largest_bytes)
            self.session.on_ack(Ack(welcome.received, welcome.limit_messages, welcome.limit_bytes), now)
        else:
            self.broker_epoch = epoch
            self.session.restart(welcome.limit_messages, welcome.limit_bytes, welcome.largest_bytes, now)
        self.session.channel.ack_due = True
        self.welcome = welcome
        self._owner.welcomed(self, welcome, again)

    def _refused(self, refused: Refused) -> None:
        if refused.code == "hello":
            self.greet()  # a new broker, which does not know us
        else:
            self._owner.lose(refusal(refused, str(self._owner.address)))
