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
from temper.common.credit import WINDOW_BYTES, WINDOW_MESSAGES
from temper.common.errors import ConfigError, PeerLost, TemperError
from temper.common.keys import PeerKeys
from temper.common.log import log
from temper.common.schema import Body, Goodbye, Heartbeat, Hello, State, Version, Welcome
from temper.common.session import outgoing
from temper.common.side import Side
from temper.common.sockets import new_epoch, parse_address, routing_id
from temper.common.waiting import first, on_the_beat, wait_for
from temper.common.wire import pack_meta

B = TypeVar("B", bound=Body)
Handler = Callable[[Any, list[memoryview]], None]

HELLO_S = 0.1
HEARTBEAT_S = 1.0
SILENCE_S = 30.0
REDIAL_S = 3.0


def new_session() -> str:
    """A random token for `Hello.session`."""
    return secrets.token_hex(16)


class Peer:
    """See the module's text. Make it inside a running loop.

    `lost` completes with the cause when the broker was silent for `silence_s`, or refused this process (then `fault` is
    the error to raise). `on_resync` is called when the broker came back as a new incarnation, `on_bulk_resync` when what
    serves weights and the bundle did: the same broker, or a relay before it. With `hold_bulk` what comes on the bulk socket
    is acknowledged when the application says so (`arrival`, `taken`), which bounds what is under way to it.
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
        hold_bulk: bool = False,
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
        self.on_bulk_resync: Callable[[], None] | None = None
        self.hold_bulk = hold_bulk
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._handlers: dict[type[Body], Handler] = {}
        self._ignored: set[type[Body]] = set()
        self._sides: list[Side] = []
        self._settled: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0
        self._beat = Heartbeat("STARTING")
        self._progress_at = time.monotonic()
        self._broker_beat: Heartbeat | None = None

    # ------------------------------------------------------------ what a daemon calls

    @property
    def broker_epoch(self) -> int:
        """The broker's incarnation that this peer last shook hands with, 0 before the first."""
        return self._sides[0].broker_epoch if self._sides else 0

    def on(self, body: type[B], handler: Callable[[B, list[memoryview]], None]) -> None:
        """Have `handler(body, frames)` called for each message of that type. One handler a type."""
        self._handlers[body] = handler

    async def open(self, timeout_s: float) -> Welcome:
        """Shake hands on both sockets. PeerLost if nobody answers within `timeout_s`; what a refusal says if refused."""
        self._sides = [Side(self, "control"), Side(self, "bulk")]
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

        Frames are kept as they are, to be sent again if need be: don't write to them until they are acknowledged.
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
        settled = self._settled = self._settled or self._loop.create_future()
        await wait_for(f"broker at {self.address}: acknowledgements", first(settled, self.lost), timeout_s)
        if not settled.done():
            raise self.fault or PeerLost("the connection was closed")

    @property
    def arrival(self) -> tuple[int, int]:
        """Names the bulk message that is being handled, for `taken`."""
        return self._sides[True].arrival

    def taken(self, arrival: tuple[int, int]) -> None:
        """With `hold_bulk`: everything up to that bulk message is dealt with."""
        if not self.over:
            self._sides[True].taken(arrival)

    def beat(self, state: State, progress: str = "", waiting_for: str = "", version: Version | None = None) -> None:
        """What the next heartbeats say; a new state is said at once. The age of the progress counts from when `progress`
        last changed."""
        if progress != self._beat.progress:
            self._progress_at = time.monotonic()
        changed = state != self._beat.state
        self._beat = Heartbeat(state, progress, 0.0, waiting_for, version)
        if changed and not self.over and self._sides and all(side.broker_epoch for side in self._sides):
            self._send_beat(time.monotonic())

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

    def welcomed(self, side: Side, welcome: Welcome, again: bool) -> None:
        """The broker let us in on one socket; `again`: it is a new incarnation. `open` returns when both are open."""
        if self.hello.run_id is None:
            self.hello = msgspec.structs.replace(self.hello, run_id=welcome.run_id)
        elif welcome.run_id != self.hello.run_id:
            self.lose(
                ConfigError(
                    f"the broker at {self.address} serves run {welcome.run_id}, this process belongs to run "
                    f"{self.hello.run_id}: start it anew"
                )
            )
            return
        if not self._opened.done() and all(other.welcome is not None for other in self._sides):
            self._opened.set_result(None)
        if all(other.welcome is not None and other.broker_epoch for other in self._sides):
            self._send_beat(time.monotonic())
        if again:
            for other in self._sides:
                if other.broker_epoch != side.broker_epoch:
                    other.greet()
            if side.kind == "control":
                log(f"the broker at {self.address} came back; resuming")
                if self.on_resync is not None:
                    self.on_resync(welcome)
            elif self.on_bulk_resync is not None:
                self.on_bulk_resync()

    def settled(self) -> None:
        """One socket has nothing under way; completes `flush` when none has."""
        if self._settled is not None and all(side.session.settled for side in self._sides):
            self._settled.set_result(None)
            self._settled = None

    def _side(self, body: Body) -> Side:
        if self.over:
            raise PeerLost(f"cannot send {type(body).__name__}: {self.fault or 'the connection was closed'}")
        if not self._sides:
            raise AssertionError("send before open")
        return self._sides[body.BULK]

    def _send_beat(self, now: float) -> None:
        beat = msgspec.structs.replace(self._beat, progress_age_s=now - self._progress_at)
        self._sides[0].session.transient(beat)

    def _tick(self) -> None:
        now = time.monotonic()
        welcomed = all(side.broker_epoch for side in self._sides)
        period = HEARTBEAT_S if welcomed else HELLO_S
        late = now - self._ticked_at - period
        self._ticked_at = now
        if self.over:
            return
        if welcomed:
            self._timer = on_the_beat(self._loop, period, self._tick)
        else:
            self._timer = self._loop.call_later(period, self._tick)
        for side in self._sides:
            if self.keys is not None and now - max(self._sides[0].heard_at, side.dialed_at) > REDIAL_S:
                side.redial()
            if side.greeting or not side.broker_epoch:
                side.greet()
            else:
                side.session.tick(now)
        if not welcomed:
            return
        control = self._sides[0]
        self._send_beat(now)
        if late > HEARTBEAT_S:
            control.heard_at += late  # it was us who did not listen
        if now - control.heard_at > self._silence_s:
            self.lose(PeerLost(f"the broker at {self.address} was silent for {self._silence_s:.0f} s"))
