"""`Peer`: a daemon's connection to the broker: one handshake over two sockets, delivery in order, heartbeats.

    peer = Peer("ipc:///run/temper", Hello("actor", "actor-1", new_session()))
    peer.on(Lease, lambda lease, frames: queue.put_nowait(lease))    # before open
    welcome = await peer.open(timeout_s=300)                         # waits for a late broker, saying so
    await peer.send(Samples(...), frames)                            # waits for credit, never blocks the loop
    peer.post(Touch(...))                                            # queues instead of waiting
    cause = await peer.lost                                          # the broker is gone or refused us
    await peer.close("done", 0)

Guarantees: reliable messages arrive once and in order, both ways, also over a reconnect and (what was acknowledged is
the broker's to remember) over a restart of the broker. Handlers run in the loop, in order, and must be quick: they put
into queues; a message is acknowledged, and its credit given back, when its handler returned. An exception from a handler
ends the peer: `lost` raises it. Heartbeats leave every second from the loop's timer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from temper.common.credit import DELIVER, WINDOW_BYTES, WINDOW_MESSAGES, Channel
from temper.common.errors import ConfigError, PeerLost, ProtocolError, TemperError
from temper.common.keys import PeerKeys
from temper.common.link import Link
from temper.common.log import log
from temper.common.schema import Ack, Body, Goodbye, Heartbeat, Hello, Refused, State, Version, Welcome
from temper.common.session import Session, check, check_kind, decode, outgoing
from temper.common.sockets import SocketKind, connect, new_epoch, parse_address, routing_id
from temper.common.waiting import first, wait_for
from temper.common.wire import pack_meta

B = TypeVar("B", bound=Body)
Handler = Callable[[Any, list[memoryview]], None]

HELLO_S = 0.1
HEARTBEAT_S = 1.0
SILENCE_S = 30.0
ACKNOWLEDGE_S = 0.002
REDIAL_S = 3.0
TURN_MESSAGES = 256
TURN_BYTES = 32 * 1024 * 1024
CONFIGURATION_CODES = ("run_mismatch", "role_taken", "key", "domain")


def new_session() -> str:
    """A random token for `Hello.session`."""
    return secrets.token_hex(16)


def refusal(refused: Refused, address: str) -> TemperError:
    """The error that a broker's refusal is: configuration, or the end of this peer."""
    kind: type[TemperError] = ConfigError if refused.code in CONFIGURATION_CODES else PeerLost
    if refused.code in ("malformed", "protocol"):
        kind = ProtocolError
    return kind(f"the broker at {address} refused this process ({refused.code}): {refused.reason}")


class _Side:
    """One of the two sockets."""

    def __init__(self, peer: Peer, kind: SocketKind) -> None:
        self._peer = peer
        self.kind: SocketKind = kind
        self.dialed_at = time.monotonic()
        self.socket = connect(peer.address, kind, peer.identity, peer.keys)
        self.link = Link(self.socket, self._drain)
        self.session = Session(self.link, b"", peer.epoch, Channel(*peer.window))
        self.welcome: Welcome | None = None
        self.broker_epoch = 0
        self._acknowledging = False
        self.heard_at = time.monotonic()

    def redial(self) -> None:
        """Connect anew: ZeroMQ does not try again by itself once a key was refused."""
        self.dialed_at = time.monotonic()
        self.link.close()
        self.socket.close(linger=0)
        self.socket = connect(self._peer.address, self.kind, self._peer.identity, self._peer.keys)
        self.link = Link(self.socket, self._drain)
        self.session.relink(self.link)

    def greet(self) -> None:
        """Say hello (again)."""
        channel = self.session.channel
        self.session.transient(
            msgspec.structs.replace(
                self._peer.hello,
                received=channel.received,
                limit_messages=channel.allowed_messages,
                limit_bytes=channel.allowed_bytes,
            )
        )

    def close(self) -> None:
        self.link.close()
        self.socket.close(linger=200)

    def _drain(self) -> None:
        count = size = 0
        while count < TURN_MESSAGES and size < TURN_BYTES and not self._peer.over:
            parts = self.link.receive()
            if parts is None:
                break
            count += 1
            try:
                size += self._take(parts)
            except ProtocolError as error:
                self._peer.lose(ProtocolError(f"the broker at {self._peer.address} sent something malformed: {error}"))
            except Exception as error:
                self._peer.lose(error)
        if self.broker_epoch and self.session.channel.ack_due:
            self._acknowledge_soon()
        if self.session.settled:
            self._peer.settled()

    def _acknowledge_soon(self) -> None:
        """Acknowledge now if that is urgent, else within `ACKNOWLEDGE_S`, so that one answers for many messages."""
        if self.session.channel.ack_urgent:
            self.session.acknowledge(time.monotonic())
        elif not self._acknowledging:
            self._acknowledging = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._acknowledging = False
        if not self._peer.over:
            self.session.acknowledge(time.monotonic())

    def _take(self, parts: list[Any]) -> int:
        number, _, _, epoch, sequence, size = check(parts, 0)
        kind = check_kind(number, sequence, self.kind == "bulk")
        now = time.monotonic()
        if kind is Welcome:
            self._welcomed(decode(Welcome, parts[1]), epoch, now)
        elif kind is Refused:
            self._refused(decode(Refused, parts[1]))
        elif epoch != self.broker_epoch:
            return size  # left over from a broker that is gone
        elif kind is Ack:
            self.session.on_ack(decode(Ack, parts[1]), now)
        elif sequence == 0 or self.session.channel.arrive(sequence, size) is DELIVER:
            self._peer.handle(decode(kind, parts[1]), [memoryview(part) for part in parts[2:]])
            if sequence:
                self.session.channel.acknowledge(sequence)
        self.heard_at = now
        return size

    def _welcomed(self, welcome: Welcome, epoch: int, now: float) -> None:
        channel = self.session.channel
        if epoch == self.broker_epoch:  # an answer to a repeated hello
            self.session.on_ack(Ack(welcome.received, welcome.limit_messages, welcome.limit_bytes), now)
        else:
            again = self.broker_epoch != 0
            self.broker_epoch = epoch
            self.session.restart(welcome.limit_messages, welcome.limit_bytes, now)
            if again:
                self._peer.resynced(self, welcome)
        channel.ack_due = True
        self.welcome = welcome
        self._peer.welcomed()

    def _refused(self, refused: Refused) -> None:
        if refused.code == "hello":
            self.greet()  # a new broker, which does not know us
        else:
            self._peer.lose(refusal(refused, str(self._peer.address)))


class Peer:
    """See the module's text. Make it inside a running loop.

    `lost` completes with the cause when the broker was silent for `silence_s`, or refused this process (then `fault` is
    the error to raise). `on_resync` is called when the broker came back as a new incarnation.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        keys: PeerKeys | None = None,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.address = parse_address(address)
        self.hello = hello
        self.keys = keys
        self.window = (window_messages, window_bytes)
        self.identity = routing_id()
        self.epoch = new_epoch()
        self.fault: BaseException | None = None
        self.over = False  # lost or closed: nothing can be sent any more
        self.on_resync: Callable[[Welcome], None] | None = None
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._handlers: dict[type[Body], Handler] = {}
        self._ignored: set[type[Body]] = set()
        self._sides: list[_Side] = []
        self._settled: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0
        self._beat = Heartbeat("STARTING")
        self._progress_at = time.monotonic()
        self._broker_beat: Heartbeat | None = None

    # ------------------------------------------------------------ what a daemon calls

    def on(self, body: type[B], handler: Callable[[B, list[memoryview]], None]) -> None:
        """Have `handler(body, frames)` called for each message of that type. One handler a type."""
        self._handlers[body] = handler

    async def open(self, timeout_s: float) -> Welcome:
        """Shake hands on both sockets. PeerLost if nobody answers within `timeout_s`; what a refusal says if refused."""
        self._sides = [_Side(self, "control"), _Side(self, "bulk")]
        self._ticked_at = time.monotonic()
        self._tick()
        try:
            await wait_for(f"broker at {self.address}", first(self._opened, self.lost), timeout_s)
        except PeerLost as error:
            raise PeerLost(
                f"no broker answered at {self.address} within {timeout_s:.0f} s: is it running, is the address right"
                + (", is the key allowed?" if self.keys else "?")
            ) from error
        welcome = self._sides[0].welcome
        if self.over or welcome is None:
            raise self.fault or PeerLost("the connection was closed")
        return welcome

    async def send(self, body: Body, frames: Sequence[Any] = (), version: int = 0) -> None:
        """Send; for a reliable message wait until the broker's credit covers it. PeerLost if the broker is gone.

        Frames from 64 KiB on are not copied: don't write to them afterwards.
        """
        side = self._side(body)
        if not body.RELIABLE:
            side.session.transient(body, frames, version)
            return
        message = outgoing(body.KIND, pack_meta(body), frames, version)
        if side.session.reliable(message, time.monotonic(), bounded=False):
            return
        message.waiter = self._loop.create_future()
        await message.waiter

    def post(self, body: Body, frames: Sequence[Any] = (), version: int = 0) -> bool:
        """Send without waiting; a reliable message queues when there is no credit. False if a transient one was dropped.

        Backlogged (a TemperError) if the queue is full; PeerLost if the broker is gone.
        """
        side = self._side(body)
        if not body.RELIABLE:
            return side.session.transient(body, frames, version)
        side.session.reliable(outgoing(body.KIND, pack_meta(body), frames, version), time.monotonic())
        return True

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything reliable is acknowledged. PeerLost after `timeout_s`, or when the broker is lost."""
        if all(side.session.settled for side in self._sides):
            return
        if self._settled is None:
            self._settled = self._loop.create_future()
        done = first(self._settled, self.lost)
        await wait_for(f"broker at {self.address}: acknowledgements", done, timeout_s)
        if not self._settled.done():
            raise self.fault or PeerLost("the connection was closed")
        self._settled = None

    def beat(self, state: State, progress: str = "", waiting_for: str = "", version: Version | None = None) -> None:
        """What the next heartbeats say. The age of the progress counts from when `progress` last changed."""
        if progress != self._beat.progress:
            self._progress_at = time.monotonic()
        self._beat = Heartbeat(state, progress, 0.0, waiting_for, version)

    async def close(self, reason: str, exit_code: int, timeout_s: float = 2.0) -> None:
        """Say goodbye, give what is under way `timeout_s` to arrive, close. Never raises for a lost broker."""
        if self._sides and not self.over and self._sides[0].broker_epoch:
            try:
                self.post(Goodbye(exit_code, reason))
                await self.flush(timeout_s)
            except TemperError as error:
                log(f"closing without the broker's last acknowledgement: {error}")
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        for side in self._sides:
            side.session.abandon(PeerLost("the connection was closed"))
            side.close()
        if not self.lost.done():
            self.lost.cancel()

    # ------------------------------------------------------------ what the sockets call

    def handle(self, body: Body, frames: list[memoryview]) -> None:
        """Hand one message to its handler."""
        handler = self._handlers.get(type(body))
        if handler is not None:
            handler(body, frames)
        elif not isinstance(body, Heartbeat) and type(body) not in self._ignored:
            self._ignored.add(type(body))
            log(f"messages of type {type(body).__name__} are not for this daemon; ignoring them")

    def lose(self, error: BaseException) -> None:
        """The connection is over because of `error`."""
        if self.over:
            return
        self.over = True
        self.fault = error
        if self.lost.done():  # cancelled with a task that awaited it
            pass
        elif isinstance(error, TemperError):
            self.lost.set_result(str(error))
        else:
            self.lost.set_exception(error)
        for side in self._sides:
            side.link.close()
            side.session.abandon(PeerLost(str(error)))

    def welcomed(self) -> None:
        """The broker let us in on one socket; `open` returns when both are."""
        if not self._opened.done() and all(side.welcome is not None for side in self._sides):
            self._opened.set_result(None)

    def resynced(self, side: _Side, welcome: Welcome) -> None:
        """The broker restarted: shake hands on the other socket too, tell the daemon."""
        for other in self._sides:
            if other is not side and other.broker_epoch != side.broker_epoch:
                other.greet()
        if side.kind == "control":
            log(f"the broker at {self.address} came back; resuming")
            if self.on_resync is not None:
                self.on_resync(welcome)

    def settled(self) -> None:
        """One socket has nothing under way; completes `flush` when none has."""
        if self._settled is not None and not self._settled.done() and all(s.session.settled for s in self._sides):
            self._settled.set_result(None)

    def _side(self, body: Body) -> _Side:
        if self.over:
            raise PeerLost(f"cannot send {type(body).__name__}: {self.fault or 'the connection was closed'}")
        if not self._sides:
            raise AssertionError("send before open")
        return self._sides[body.BULK]

    def _tick(self) -> None:
        now = time.monotonic()
        welcomed = all(side.broker_epoch for side in self._sides)
        period = HEARTBEAT_S if welcomed else HELLO_S
        late = now - self._ticked_at - period
        self._ticked_at = now
        if self.over:
            return
        self._timer = self._loop.call_later(period, self._tick)
        for side in self._sides:
            if self.keys is not None and now - max(self._sides[0].heard_at, side.dialed_at) > REDIAL_S:
                side.redial()
            if not side.broker_epoch:
                side.greet()
            else:
                side.session.tick(now)
        if not welcomed:
            return
        control = self._sides[0]
        control.session.transient(msgspec.structs.replace(self._beat, progress_age_s=now - self._progress_at))
        if late > HEARTBEAT_S:
            control.heard_at += late  # it was us who did not listen
        if now - control.heard_at > self._silence_s:
            self.lose(PeerLost(f"the broker at {self.address} was silent for {self._silence_s:.0f} s"))
