"""`Router`: the broker's end of one socket: handshakes, delivery in order, credit, heartbeats, and nobody hurt by others.

    router = Router("ipc:///run/temper", "control", on_batch, on_closed, welcome=welcome)

    def welcome(peer, hello):          # a new peer: let it in (recipe etc.; the Router fills limits in), say why not, or
                                       # None: it has to say hello again, which peers do every .1 s until they are answered
        return Welcome(run_id, recipe, lineage=0, heartbeat_s=1.0)
    def on_batch(deliveries):          # everything one loop turn brought, in order within a peer
        for d in deliveries:           # d.peer, d.body, d.frames, d.kind, d.sequence, d.header, d.raw_meta
            ...                        # of a `lazy` kind there may also be a DeliveryRun: d.kind, d.sequence, d.metas, d.frames
        ledger.commit()                # then, now or later:
        for d in deliveries:
            router.acknowledge(d.peer, d.sequence)
    def on_closed(peer, reason): ...   # refused, silent or shut out: it will not come back under this id

    router.send(peer, Lease(...)); router.forward(peer, d.kind, d.raw_meta, d.frames)   # the latter uncopied, undecoded

Guarantees: a reliable message reaches `on_batch` once and in order; no call here blocks; what a peer sends malformed
closes that peer alone with a typed `Refused`; a peer that takes nothing is closed once its queue is full (`backlog`);
memory for each peer is bounded. Peer ids are routing ids: random, the same on both sockets of a process.
An exception from a callback is a bug and goes to the loop's exception handler.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from temper.common import burst
from temper.common.admission import Admission
from temper.common.budget import Budget
from temper.common.credit import DELIVER, WINDOW_BYTES, WINDOW_MESSAGES, Channel
from temper.common.debts import Debts
from temper.common.delivery import Arrival, Delivery, DeliveryRun, PeerId
from temper.common.errors import ProtocolError
from temper.common.keys import BrokerKeys
from temper.common.link import Link
from temper.common.schema import (
    BODIES,
    Ack,
    Blocked,
    Body,
    Heartbeat,
    Hello,
    Refused,
    State,
    Unneeded,
    Version,
    Welcome,
)
from temper.common.session import Backlogged, Fields, Session, check, check_kind, decode, outgoing
from temper.common.sharing import Sharing
from temper.common.sockets import SocketKind, bind, new_epoch, parse_address
from temper.common.waiting import on_the_beat
from temper.common.wire import FRAME_LIMIT, META_LIMIT_BYTES, header_fields, is_header, pack_meta

__all__ = ["Arrival", "Delivery", "DeliveryRun", "PeerId", "Router"]

HEARTBEAT_S = 1.0
AWAKE_S = 200e-6  # while messages come that close
SILENCE_S = 30.0
RELAYED_SILENCE_S = 30.0  # of peers behind a relay: as long as they bear the relay's absence themselves
TURN_MESSAGES = 512
TURN_BYTES = 32 * 1024 * 1024
PEERS = 4096
CLOSED_REMEMBERED = 4096
CLOSED_MESSAGES = 16  # a tick, from a peer that was shut out: then nothing is read from its connection any more
STRANGER_MESSAGES = 8192  # the same for one that has not said hello; honest ones send what they had under way
SENT_BYTES = 512 * 1024 * 1024  # queued and unacknowledged, all peers together; shared frames count each time


class _Remote:
    """What a Router knows of one peer."""

    __slots__ = ("epoch", "heard_at", "hello", "id", "session", "user", "welcome")

    def __init__(self, session: Session, epoch: int, hello: Hello, welcome: Welcome, user: str) -> None:
        self.id = session.peer
        self.epoch = epoch
        self.hello = hello
        self.welcome = welcome
        self.session = session
        self.user = user
        self.heard_at = 0.0


class Router:
    """One bound ROUTER socket. Make it inside a running loop; `close` it. See the module's text for its use."""

    def __init__(
        self,
        address: str,
        kind: SocketKind,
        on_batch: Callable[[list[Any]], None],
        on_closed: Callable[[PeerId, str], None],
        *,
        welcome: Callable[[PeerId, Hello], Welcome | Refused | None],
        on_room: Callable[[PeerId], None] | None = None,
        keys: BrokerKeys | None = None,
        lazy: frozenset[int] = frozenset(),
        epoch: int = 0,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
        budget_of: Callable[[Hello], Budget] | None = None,
        silence_s: float = SILENCE_S,
        sent_bytes: int = SENT_BYTES,
    ) -> None:
        """`on_room(peer)`: what had to queue for that peer has all been sent. `lazy`: kinds delivered undecoded, and those that
        came together as one `DeliveryRun`.
        `budget_of(hello)`: what a peer shares with others instead of having a window of `window_bytes` of its own.
        `sent_bytes`: what all peers together may have queued or unacknowledged, about; beyond it the one with the most is
        closed. It does not hold on the bulk socket, whose frames are views of mapped files.

        EnvironmentFault if the place is taken, ConfigError for TCP without keys.
        """
        self.kind = kind
        self._bulk = kind == "bulk"
        self._reliable_kinds = {n: b for n, b in BODIES.items() if b.RELIABLE and self._bulk == b.BULK}
        self.epoch = epoch or new_epoch()
        self._on_batch = on_batch
        self._on_closed = on_closed
        self._on_room = on_room
        self._welcome = welcome
        self._lazy = {number: BODIES[number] for number in lazy if BODIES[number].RELIABLE}
        self._window = (window_messages, window_bytes)
        self._sent_bytes = sent_bytes
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._peers: dict[PeerId, _Remote] = {}
        self._closed: OrderedDict[PeerId, Refused] = OrderedDict()
        self._answered: set[PeerId] = set()  # strangers that got their answer since the last tick
        self._debts = Debts(self._loop)
        self._sharing = Sharing(self._loop, self._debts, budget_of)
        self._receiving = False
        self._knocks: dict[PeerId, int] = {}  # messages of peers without a session since the last tick
        self._unweighed = 0  # bytes sent since it was last looked at what all peers together have outstanding
        self._burst_messages = self._turn_bytes = 0  # of this turn
        self._closures: list[tuple[PeerId, str]] = []
        self._beat = Heartbeat("STARTING")
        self._keys = keys
        self._admission = Admission.of(keys) if keys is not None else None
        try:
            self._bound = bind(parse_address(address), kind, keys)
        except BaseException:
            self._leave()
            raise
        self._link = Link(self._bound.socket, self._drain, AWAKE_S)
        self._ticked_at = self._loop.time()
        self._timer = on_the_beat(self._loop, HEARTBEAT_S, self._tick)

    # ------------------------------------------------------------ what the broker calls

    @property
    def peers(self) -> dict[PeerId, Hello]:
        """Everybody connected now."""
        return {peer: remote.hello for peer, remote in self._peers.items()}

    def send(self, peer: PeerId, body: Body, frames: Sequence[Any] = (), version: int = 0) -> bool:
        """Send within the peer's credit, queue beyond it. False if the peer is gone (it was reported closed) or if a
        transient message could not leave now. A peer whose queue is full is closed.

        `frames` are kept as they are, to be sent again if need be: don't write to them afterwards.
        """
        remote = self._peers.get(peer)
        if remote is None:
            return False
        if not body.RELIABLE:
            return remote.session.transient(body, frames, version)
        return self.forward(peer, body.KIND, pack_meta(body), frames, version)

    def forward(self, peer: PeerId, kind: int, raw_meta: bytes, frames: Sequence[Any], version: int = 0) -> bool:
        """`send` for a reliable message that is encoded already, for example one just delivered."""
        remote = self._peers.get(peer)
        if remote is None:
            return False
        message = outgoing(kind, raw_meta, frames, version)
        try:
            remote.session.reliable(message, self._loop.time())
        except Backlogged as error:
            self._overflow(peer, str(error))
            return False
        self._unweighed += message.size
        if self._unweighed > self._sent_bytes // 16:
            self._weigh()
        return peer in self._peers

    def _weigh(self) -> None:
        """Hold what is kept for all peers together to its bound: the one that takes least ends."""
        self._unweighed = 0
        if self._bulk:
            return
        kept = {remote.id: remote.session.kept_bytes for remote in self._peers.values()}
        total = sum(kept.values())
        if total > self._sent_bytes:
            worst = max(kept, key=kept.__getitem__)
            self._overflow(
                worst, f"{kept[worst]} of {total} bytes wait for this peer: at most {self._sent_bytes} may for all"
            )

    def _overflow(self, peer: PeerId, reason: str) -> None:
        self._shut(peer, Refused("overflow", reason))
        self._loop.call_soon(self._report_closures)  # not from within the caller's loop over peers

    def acknowledge(self, peer: PeerId, sequence: int, release: bool = True) -> None:
        """Everything from `peer` up to `sequence` is taken and as durable as it must be. Sent with this turn, or within
        milliseconds if many peers are to be answered.

        With `release` False the peer's credit stays used until `release` gives it back: that is how a full queue stops
        its producers.
        """
        remote = self._peers.get(peer)
        if remote is None:
            return
        remote.session.channel.acknowledge(sequence, release)
        self._debts.owe(remote.session, len(self._peers))
        self._sharing.acknowledged(remote.session)

    def answer(self) -> None:
        """Send the acknowledgements now that would leave with this turn."""
        self._sharing.serve()
        self._debts.turn_over(self._turn_bytes)

    def release(self, peer: PeerId, messages: int, size: int) -> None:
        """Give credit back for `messages` acknowledged with ``release=False``, `size` bytes in all (header.size each)."""
        remote = self._peers.get(peer)
        if remote is not None:
            remote.session.channel.release(messages, size)
            self._debts.owe(remote.session, len(self._peers))
            self._sharing.acknowledged(remote.session)

    def backlog(self, peer: PeerId) -> tuple[int, int]:
        """(messages, bytes) that wait for the peer's credit; (0, 0) for one that is gone."""
        remote = self._peers.get(peer)
        return (remote.session.queued, remote.session.queued_bytes) if remote is not None else (0, 0)

    def blocked(self, peer: PeerId) -> int:
        """Bytes that the peer has to send and has asked for room for (`budget_of`)."""
        remote = self._peers.get(peer)
        return self._sharing.blocked(remote.session) if remote is not None else 0

    def unacknowledged(self, peer: PeerId) -> int:
        """Messages sent to the peer that it has not acknowledged."""
        remote = self._peers.get(peer)
        return remote.session.channel.unacked if remote is not None else 0

    def credit(self, peer: PeerId) -> tuple[int, int]:
        """(messages, bytes) that the peer still allows; (0, 0) for one that is gone."""
        remote = self._peers.get(peer)
        if remote is None:
            return 0, 0
        channel = remote.session.channel
        return max(channel.limit_messages - channel.sent, 0), max(channel.limit_bytes - channel.sent_bytes, 0)

    def heard(self, peer: PeerId) -> float:
        """Seconds since the peer was last heard; 0 for one that is gone."""
        remote = self._peers.get(peer)
        return self._loop.time() - remote.heard_at if remote is not None else 0.0

    def beat(self, state: State, progress: str = "", waiting_for: str = "", version: Version | None = None) -> None:
        """What the next heartbeats to all peers say."""
        self._beat = Heartbeat(state, progress, 0.0, waiting_for, version)

    def refuse(self, peer: PeerId, code: str, reason: str) -> None:
        """Tell the peer why, then forget it; `on_closed` is called if it was let in."""
        self._shut(peer, Refused(code, reason))
        if not self._receiving:  # else after what it sent before
            self._report_closures()

    def forget(self, peer: PeerId, reason: str = "the session was closed") -> None:
        """Drop a peer that said goodbye, or whose other socket was closed; `on_closed` is not called."""
        remote = self._part(peer)
        if remote is not None:
            remote.session.acknowledge(self._loop.time())
            self._remember(peer, Refused("closed", reason))

    def close(self, linger_ms: int = 200) -> None:
        """Stop; what was sent gets `linger_ms` to leave."""
        self._timer.cancel()
        self._debts.close()
        self._link.close()
        self._bound.close(linger_ms)
        self._leave()

    def _leave(self) -> None:
        if self._admission is not None:
            self._admission.leave()
            self._admission = None

    # ------------------------------------------------------------ receiving

    def _drain(self) -> None:
        batch: list[Arrival] = []
        now = self._loop.time()
        count = size = self._burst_messages = 0
        receive, waiting, take, usual = self._link.receive, self._link.waiting, self._take, self._usual
        quiet = False
        self._receiving = self._debts.in_turn = True
        try:
            while count + self._burst_messages < TURN_MESSAGES and size < TURN_BYTES:
                parts = receive()
                if parts is None:
                    break
                count += 1
                size += usual(parts, batch, now) or take(parts, batch, now)
                if count == 1 and not waiting():  # as it is mostly, unless much is to be done
                    quiet = True
                    break
            self._receiving, self._turn_bytes = False, size
            if batch:
                self._on_batch(batch)
            self._report_closures()
        finally:
            self._receiving, self._turn_bytes = False, 0
            self._link.flush()  # what was passed on goes before the answers
            self._sharing.serve()
            self._debts.in_turn = False
            self._debts.turn_over(size, None if quiet else self._link.behind)

    def _usual(self, parts: list[Any], batch: list[Arrival], now: float) -> int:
        """The short way for what comes most: the next message in order, of a lazy kind, within every limit. Its bytes after
        the header; 0 if it is anything else, which `_take` then looks at."""
        remote = self._peers.get(parts[0])
        if remote is None or not 3 <= len(parts) <= 3 + FRAME_LIMIT or not is_header(parts[1]):
            return 0
        fields = header_fields(parts[1], 5)
        number, flags, _, epoch, sequence, size = fields
        channel = remote.session.channel
        if flags or number not in self._lazy or epoch != remote.epoch or sequence != channel.received + 1:
            return 0
        meta, frames = parts[2], parts[3:]
        if len(meta) > META_LIMIT_BYTES or len(meta) + sum(map(len, frames)) != size or not channel.accept_next(size):
            return 0
        remote.heard_at = now
        batch.append(Delivery(parts[0], self._lazy[number], fields, number, sequence, size, meta, frames))
        return size

    def _take(self, parts: list[Any], batch: list[Arrival], now: float) -> int:
        peer: PeerId = parts[0]
        remote = self._peers.get(peer)
        if remote is None and peer in self._closed:
            self._knock(peer, self._closed[peer], CLOSED_MESSAGES)
            return 0
        try:
            fields = check(parts, 1)
            number, flags, _, epoch, sequence, size = fields
            kind = self._reliable_kinds.get(number) if sequence else None
            if kind is None:
                kind = check_kind(number, sequence, self._bulk)
            if kind is Hello:
                self._greet(peer, remote, epoch, decode(Hello, parts[2]), now)
            elif remote is None:
                self._knock(peer, Refused("hello", "unknown peer: say hello first"), STRANGER_MESSAGES)
            elif epoch != remote.epoch:
                raise ProtocolError(f"epoch {epoch}, but this peer said hello with {remote.epoch}")
            else:
                remote.heard_at = now
                if kind is Ack:
                    if remote.session.on_ack(decode(Ack, parts[2]), now) and self._on_room is not None:
                        self._on_room(peer)
                    return size
                if kind is Blocked:
                    self._sharing.ask(remote.session, decode(Blocked, parts[2]))
                    return size
                if flags:
                    self._take_burst(remote, kind, fields, parts, batch)
                    return size
                delivery = Delivery(peer, kind, fields, number, sequence, size, parts[2], parts[3:])
                if number not in self._lazy:
                    _ = delivery.body  # malformed bodies end here
                if sequence and remote.session.channel.arrive(sequence, size) is not DELIVER:
                    self._debts.owe(remote.session, len(self._peers))
                else:
                    batch.append(delivery)
                    if kind is Unneeded:
                        self._sharing.give_back(remote.session)
            return size
        except ProtocolError as error:
            self.refuse(peer, "malformed", str(error))
            return 0

    def _take_burst(
        self, remote: _Remote, kind: type[Body], fields: Fields, parts: list[Any], batch: list[Arrival]
    ) -> None:
        """What one peer sent together: each message is taken as if it had come alone."""
        number, count, _, _, last, _ = fields
        sizes, metas, joined, lengths = burst.outline(count, number, parts[2:])
        first, channel, peer = last - count + 1, remote.session.channel, parts[0]
        if first < 1:
            raise ProtocolError(f"a burst of {count} messages that ends with message {last}")
        self._burst_messages += count
        lazy = number in self._lazy
        if lazy and first == channel.received + 1 and channel.accept_run(sizes):
            batch.append(DeliveryRun(peer, number, last, sizes, metas, joined, lengths))
            return
        found = [
            Delivery(peer, kind, fields, number, sequence, size, meta, arrays)
            for sequence, size, meta, arrays in zip(
                range(first, last + 1), sizes, metas, burst.frames_of(joined, lengths), strict=True
            )
        ]
        if not lazy:
            for delivery in found:
                _ = delivery.body
        if first == channel.received + 1 and channel.accept_run(sizes):
            batch += found
            return
        for delivery in found:
            if channel.arrive(delivery.sequence, delivery.size) is DELIVER:
                batch.append(delivery)
        if channel.ack_due:
            self._debts.owe(remote.session, len(self._peers))

    def _greet(self, peer: PeerId, known: _Remote | None, epoch: int, hello: Hello, now: float) -> None:
        if known is not None and known.epoch == epoch:
            known.heard_at = now
            self._let_in(known)
            return
        if known is not None:
            raise ProtocolError(f"hello with epoch {epoch} on a connection that has epoch {known.epoch}")
        if len(self._peers) >= PEERS:
            self.refuse(peer, "overflow", f"the broker serves {PEERS} peers already")
            return
        answer = self._welcome(peer, hello)
        if answer is None:
            return
        if isinstance(answer, Refused):
            self.refuse(peer, answer.code, answer.reason)
            return
        channel, largest_bytes = self._sharing.channel(hello, *self._window)
        channel.grant(hello.limit_messages, hello.limit_bytes)
        session = Session(self._link, peer, self.epoch, channel)
        answer = msgspec.structs.replace(answer, largest_bytes=largest_bytes)
        remote = _Remote(session, epoch, hello, answer, self._link.user() if self._keys else "")
        remote.heard_at = now
        self._peers[peer] = remote
        self._sharing.join(session, hello)
        self._let_in(remote)

    def _let_in(self, remote: _Remote) -> None:
        """Send the Welcome, the recipe in a frame: with hundreds of domains it is larger than a meta may be."""
        channel = remote.session.channel
        welcome = msgspec.structs.replace(
            remote.welcome,
            recipe="",
            received=channel.acknowledged,
            limit_messages=channel.allowed_messages,
            limit_bytes=channel.allowed_bytes,
        )
        remote.session.transient(welcome, [remote.welcome.recipe.encode()])

    # ------------------------------------------------------------ sending

    def _answer(self, peer: PeerId, refused: Refused) -> None:
        """Answer somebody without a session, at most once a tick."""
        if peer not in self._answered and len(self._answered) < CLOSED_REMEMBERED:
            self._answered.add(peer)
            Session(self._link, peer, self.epoch, Channel()).transient(refused)

    def _knock(self, peer: PeerId, refused: Refused, most: int) -> None:
        """A message of somebody without a session: the answer, and after too many of them the end of the connection."""
        knocks = self._knocks.get(peer, 0) + 1
        if knocks > most:
            self._bound.drop(peer)
            knocks = 0
        self._knocks[peer] = knocks
        self._answer(peer, refused)

    def _shut(self, peer: PeerId, answer: Refused) -> None:
        self._remember(peer, answer)
        self._answer(peer, answer)
        if self._part(peer) is not None:
            self._closures.append((peer, answer.reason))

    def _part(self, peer: PeerId) -> _Remote | None:
        remote = self._peers.pop(peer, None)
        if remote is not None:
            self._sharing.leave(remote.session)
        return remote

    def _report_closures(self) -> None:
        while self._closures:
            self._on_closed(*self._closures.pop(0))

    def _tick(self) -> None:
        now = self._loop.time()
        late = now - self._ticked_at - HEARTBEAT_S
        self._ticked_at = now
        self._timer = on_the_beat(self._loop, HEARTBEAT_S, self._tick)
        self._answered.clear()
        self._knocks.clear()
        for session, text in list(self._sharing.unused()):
            self.refuse(session.peer, "overflow", text)
        beat = outgoing(Heartbeat.KIND, pack_meta(self._beat), (), 0)
        for remote in list(self._peers.values()):
            if late > HEARTBEAT_S:
                remote.heard_at += late  # it was us who did not listen
            remote.session.tick(now)
            if self.kind == "control":
                remote.session.announce(beat)
                silence_s = max(self._silence_s, RELAYED_SILENCE_S) if remote.hello.via else self._silence_s
                if now - remote.heard_at > silence_s:
                    self.refuse(remote.id, "silent", f"silent for {silence_s:.0f} s")
            if self._keys and self._admission and not self._admission.admits(self._keys, remote.user):
                self.refuse(remote.id, "key", "the key of this peer was revoked")

    def _remember(self, peer: PeerId, refused: Refused) -> None:
        self._closed[peer] = refused
        self._closed.move_to_end(peer)
        if len(self._closed) > CLOSED_REMEMBERED:
            self._closed.popitem(last=False)
