"""What broken and hostile peers send hurts them alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from temper.common import burst
from temper.common.credit import WINDOW_MESSAGES
from temper.common.errors import ConfigError, PeerLost, ProtocolError
from temper.common.link import Link
from temper.common.schema import BODIES, Ack, Goodbye, Heartbeat, Hello, Metrics, Refused, Touch, Welcome
from temper.common.sockets import connect, parse_address, routing_id
from temper.common.wire import HEADER_BYTES, Header, encode, pack_header, pack_meta, unpack_meta


class Raw:
    """A DEALER that sends whatever it likes."""

    def __init__(self, address: str, kind: Any = "control") -> None:
        self.socket = connect(parse_address(address), kind, routing_id())
        self.got: list[tuple[int, bytes]] = []
        self._changed = asyncio.Event()
        self.sequence = 0

    def _drain(self) -> None:
        while (parts := self.link.receive()) is not None:
            self.got.append((parts[0][5], bytes(parts[1])))
        self._changed.set()

    async def connected(self) -> None:
        assert await asyncio.to_thread(self.socket.poll, 10_000, zmq.POLLOUT)
        self.link = Link(self.socket, self._drain)

    def send(self, *parts: bytes) -> None:
        assert self.try_to_send(parts)

    def try_to_send(self, parts: Sequence[bytes]) -> bool:
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.link.look()  # the send may have swallowed the edge
        return True

    def body(self, body: Any, epoch: int = 9, sequence: int | None = None) -> None:
        if sequence is None and body.RELIABLE:
            self.sequence += 1
            sequence = self.sequence
        self.send(*encode(body.KIND, pack_meta(body), epoch=epoch, sequence=sequence or 0))

    async def answer(self, kind: Any) -> Any:
        async with asyncio.timeout(60):
            while True:
                for number, meta in self.got:
                    if number == kind.KIND:
                        return unpack_meta(meta, kind)
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        self.link.close()
        self.socket.close(linger=200)  # at 0 ZeroMQ 4.3.5 aborts if the other end goes while a message is half sent


def hello(**changes: Any) -> Hello:
    return Hello("actor", "raw", "token", limit_messages=10_000, limit_bytes=2**30, **changes)


GOOD = pack_meta(Touch(1, 1))
VIOLATIONS = {
    "no meta": ([pack_header(Header(17, epoch=9, sequence=1))], "1 frames, expected 2"),
    "short header": ([b"x" * 31, GOOD], "header of 31 bytes"),
    "magic": ([b"HTTP" + bytes(28), GOOD], "does not speak Temper"),
    "protocol": ([b"TMPR\x63" + bytes(27), GOOD], "protocol 99"),
    "size": ([pack_header(Header(17, epoch=9, sequence=1, size=99)), GOOD], "announced 99"),
    "unknown kind": (encode(250, GOOD, epoch=9, sequence=1), "unknown kind 250"),
    "no sequence": (encode(17, GOOD, epoch=9), "without a sequence number"),
    "sequence": (encode(4, pack_meta(Heartbeat("READY")), epoch=9, sequence=3), "expected 0"),
    "wrong socket": (encode(65, b"\x90", epoch=9, sequence=1), "came on the control socket"),
    "wrong epoch": (encode(17, GOOD, epoch=8, sequence=1), "epoch 8"),
    "no msgpack": (encode(17, b"\xc1\xc1", epoch=9, sequence=1), "malformed Touch"),
    "wrong type": (encode(17, b"\x92\xa1x\x01", epoch=9, sequence=1), "malformed Touch"),
    "deep": (encode(17, b"\x91" * 60_000 + b"\x01", epoch=9, sequence=1), "malformed Touch"),
    "many frames": (
        [pack_header(Header(17, epoch=9, sequence=1, size=len(GOOD))), GOOD, *[b""] * 65],
        "67 frames, expected",
    ),
    "very many frames": (
        [pack_header(Header(17, epoch=9, sequence=1, size=len(GOOD))), GOOD, *[b"x"] * 5000],
        "frames, expected",
    ),
    "large meta": ([pack_header(Header(17, epoch=9, sequence=1, size=70_000)), bytes(70_000)], "meta of 70000 bytes"),
    "flags": (encode(5, pack_meta(Goodbye(0, "")), flags=2, epoch=9, sequence=2), "flags 2 on a Goodbye"),
    "burst": (encode(17, GOOD, flags=2, epoch=9, sequence=2), "a burst of 2 messages"),
    "burst from before the first": (
        encode(17, burst.join([(GOOD, ()), (GOOD, ())])[0], flags=2, epoch=9, sequence=1),
        "ends with message 1",
    ),
    "acknowledged too much": (encode(6, pack_meta(Ack(5, 1, 1)), epoch=9), "acknowledged message 5"),
    "acknowledged less than nothing": (encode(6, pack_meta(Ack(-1, 1, 1)), epoch=9), "acknowledged message -1"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_closes_its_peer_with_the_reason_and_no_other(kit: Any, name: str) -> None:
    parts, reason = VIOLATIONS[name]

    async def violate() -> None:
        broker = kit.Broker(kit.address)
        good, bad = kit.peer(), Raw(kit.address)
        await good.open(60)
        await bad.connected()
        bad.body(hello())
        await bad.answer(Welcome)
        bad.send(*parts)
        refused = await bad.answer(Refused)
        assert refused.code == "malformed" and reason in refused.reason
        await broker.until(lambda: broker.closed)
        assert len(broker.closed) == 1 and reason in broker.closed[0][1]
        bad.body(Touch(7, 7), sequence=1)  # it is not listened to any more
        await good.send(Touch(1, 1))
        await good.flush(60)
        assert [touch.lease_id for touch in broker.bodies(Touch)] == [1]
        bad.close()
        await good.close("done", 0)
        broker.close()

    asyncio.run(violate())


def test_a_refused_peer_that_goes_on_sending_is_not_read_any_more(kit: Any) -> None:
    """Its connection would else cost the broker a reading of every message for ever."""

    async def flood() -> None:
        broker = kit.Broker(kit.address)
        good, bad = kit.peer(), Raw(kit.address)
        await good.open(60)
        await bad.connected()
        bad.body(hello())
        await bad.answer(Welcome)
        bad.send(*VIOLATIONS["wrong type"][0])
        await bad.answer(Refused)
        read: list[bytes] = []
        receive = broker.control._link.receive

        def counted() -> list[Any] | None:
            parts = receive()
            if parts is not None and parts[0] == bad.socket.getsockopt(zmq.ROUTING_ID):
                read.append(parts[0])
            return parts

        broker.control._link.receive = counted
        message = encode(17, GOOD, epoch=9, sequence=1)
        sent = 0
        while sent < 20_000 and bad.try_to_send(message):  # until its connection is full, or much got through
            sent += 1
            if sent % 50 == 0:
                await good.send(Touch(sent, 1))
        await good.flush(60)
        assert len(broker.bodies(Touch)) == sent // 50
        assert sent > 500
        assert len(read) < 200
        bad.close()
        await good.close("done", 0)
        broker.close()

    asyncio.run(flood())


def test_what_is_kept_for_all_peers_together_is_bounded(kit: Any) -> None:
    """None of them exceeds its own queue; the one for which most is kept is closed, the others go on."""

    async def pile_up() -> None:
        broker = kit.Broker(kit.address, sent_bytes=64 * 2**20)
        takers = [Raw(kit.address) for _ in range(4)]
        for taker in takers:
            await taker.connected()
            taker.body(hello())
            await taker.answer(Welcome)
        await broker.until(lambda: len(broker.control.peers) == 4)
        peers = [taker.socket.getsockopt(zmq.ROUTING_ID) for taker in takers]
        frame = os.urandom(2**20)
        for number in range(60):
            for peer in peers[: 1 + number % 2]:  # the first gets most; nobody acknowledges anything
                broker.control.send(peer, Touch(number, 1), [frame])
            for peer in peers[2:]:
                broker.control.send(peer, Touch(number, 1), [frame[: 2**14]])
        await broker.until(lambda: broker.closed)
        assert [peer for peer, _ in broker.closed] == [peers[0]]
        assert "at most 67108864 may for all" in broker.closed[0][1]
        kept = sum(remote.session.kept_bytes for remote in broker.control._peers.values())
        assert kept < 64 * 2**20 * 17 // 16
        for taker in takers:
            taker.close()
        broker.close()

    asyncio.run(pile_up())


def test_a_frame_beyond_the_limit_ends_its_connection_alone(kit: Any) -> None:
    async def oversized() -> None:
        broker = kit.Broker(kit.address)
        good, bad = kit.peer(), Raw(kit.address)
        await good.open(60)
        await bad.connected()
        bad.body(hello())
        await bad.answer(Welcome)
        bad.send(*encode(17, GOOD, epoch=9, sequence=1)[:2], bytes(17 * 1024 * 1024))
        for number in range(50):
            await good.send(Touch(number, 1))
        await good.flush(60)
        assert [touch.lease_id for touch in broker.bodies(Touch)] == list(range(50))
        bad.close()
        await good.close("done", 0)
        broker.close()

    asyncio.run(oversized())


def test_more_than_the_credit_closes_the_peer(kit: Any) -> None:
    async def greedy() -> None:
        broker = kit.Broker(kit.address)
        broker.hold = True
        bad = Raw(kit.address)
        await bad.connected()
        bad.body(hello())
        await bad.answer(Welcome)
        for number in range(WINDOW_MESSAGES + 1):
            bad.body(Touch(number, 1))
        refused = await bad.answer(Refused)
        assert refused.code == "malformed" and "exceeds the credit" in refused.reason
        assert len(broker.got) == WINDOW_MESSAGES
        await broker.until(lambda: broker.closed)
        bad.close()
        broker.close()

    asyncio.run(greedy())


def test_a_peer_that_takes_nothing_is_closed_once_its_queue_is_full(kit: Any) -> None:
    async def mute() -> None:
        broker = kit.Broker(kit.address)
        bad = Raw(kit.address)
        await bad.connected()
        bad.body(Hello("actor", "mute", "token", limit_messages=2, limit_bytes=2**40))
        await bad.answer(Welcome)
        frame = bytes(16 * 1024 * 1024)
        who = broker.greeted[0]
        sent = 0
        while broker.control.send(who, kit.lease(sent), [frame]):
            sent += 1
            assert broker.control.backlog(who)[1] <= 256 * 1024 * 1024
        assert sent == 2 + 15
        assert (await bad.answer(Refused)).code == "overflow"
        assert broker.closed[0][0] == who
        bad.close()
        broker.close()

    asyncio.run(mute())


def test_a_peer_with_a_window_smaller_than_a_message_is_closed_after_the_sender_s_loop(kit: Any) -> None:
    async def narrow() -> None:
        broker = kit.Broker(kit.address)
        bad = Raw(kit.address)
        await bad.connected()
        bad.body(Hello("actor", "narrow", "token", limit_messages=9, limit_bytes=3))
        await bad.answer(Welcome)
        assert not broker.control.send(broker.greeted[0], kit.lease(1))
        assert broker.closed == [] and broker.control.peers == {}
        refused = await bad.answer(Refused)
        assert refused.code == "overflow" and "the peer takes at most 3 at once" in refused.reason
        await broker.until(lambda: broker.closed)
        bad.close()
        broker.close()

    asyncio.run(narrow())


def test_a_repeated_hello_is_answered_again_and_starts_nothing_anew(kit: Any) -> None:
    async def repeat() -> None:
        broker = kit.Broker(kit.address)
        bad = Raw(kit.address)
        await bad.connected()
        bad.body(hello())
        await bad.answer(Welcome)
        bad.body(Touch(1, 1))
        await broker.until(lambda: broker.got)
        bad.got.clear()
        for _ in range(3):
            bad.body(hello())
        assert (await bad.answer(Welcome)).received == 1
        bad.body(Touch(1, 1), sequence=1)  # a resend of what arrived
        bad.body(Touch(2, 1))
        await broker.until(lambda: len(broker.got) == 2)
        assert [touch.lease_id for touch in broker.bodies(Touch)] == [1, 2]
        assert len(broker.greeted) == 1
        bad.body(hello(), epoch=10)
        assert "hello with epoch 10" in (await bad.answer(Refused)).reason
        bad.close()
        broker.close()

    asyncio.run(repeat())


def test_a_stranger_is_asked_for_its_hello(kit: Any) -> None:
    async def stranger() -> None:
        broker = kit.Broker(kit.address)
        bad = Raw(kit.address)
        await bad.connected()
        for _ in range(100):
            bad.body(Touch(1, 1))
        assert (await bad.answer(Refused)).code == "hello"
        assert broker.got == [] and len(bad.got) == 1
        bad.close()
        broker.close()

    asyncio.run(stranger())


@pytest.mark.parametrize(
    ("code", "error"), [("run_mismatch", ConfigError), ("malformed", ProtocolError), ("overflow", PeerLost)]
)
def test_a_refusal_is_an_error_of_its_kind_with_the_broker_s_reason(
    kit: Any, code: str, error: type[Exception]
) -> None:
    async def refuse() -> None:
        broker = kit.Broker(kit.address)
        broker.answer = lambda hello: Refused(code, f"run {hello.run_id} is not run-1")
        peer = kit.peer()
        with pytest.raises(error, match=rf"refused this process \({code}\): run None is not run-1"):
            await peer.open(60)
        await peer.close("refused", 2)
        broker.close()

    asyncio.run(refuse())


def test_a_handler_that_raises_ends_its_own_process_not_in_silence(kit: Any) -> None:
    async def handler() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer()
        peer.on(type(kit.lease(1)), lambda lease, frames: [].pop())
        await peer.open(60)
        broker.control.send(broker.greeted[0], kit.lease(1))
        async with asyncio.timeout(60):
            with pytest.raises(IndexError):
                await peer.lost
        assert broker.control.unacknowledged(broker.greeted[0]) == 1
        await peer.close("bug", 1)
        broker.close()

    asyncio.run(handler())


def test_a_malformed_message_from_the_broker_ends_the_peer(kit: Any) -> None:
    async def malformed() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer()
        await peer.open(60)
        broker.control.forward(broker.greeted[0], 16, b"\xc1", [])
        async with asyncio.timeout(60):
            assert "sent something malformed: malformed Lease" in await peer.lost
        assert isinstance(peer.fault, ProtocolError)
        await peer.close("bug", 1)
        broker.close()

    asyncio.run(malformed())


header = st.one_of(
    st.binary(max_size=40),
    st.binary(min_size=HEADER_BYTES - 4, max_size=HEADER_BYTES - 4).map(lambda tail: b"TMPR" + tail),
    st.builds(
        Header,
        st.sampled_from([*BODIES, 0, 255]),
        st.integers(0, 65535),
        st.integers(0, 2**32 - 1),
        st.sampled_from([9, 0]),
        st.sampled_from([0, 1, 2, 3, 2**63, 2**64 - 1]),
        st.sampled_from([0, 1, 4, 2**64 - 1]),
    ).map(pack_header),
)
meta = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            GOOD,
            pack_meta(Ack(0, 2**63, 2**63, True)),
            pack_meta(Ack(0, 0, 0, True)),
            pack_meta(Heartbeat("READY")),
            pack_meta(Goodbye(0, "")),
            pack_meta(Metrics("x", {}, {})),
            pack_meta(hello()),
            b"\xdd\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ]
    ),
)


def announced(parts: list[bytes]) -> list[bytes]:
    """The same message with the right size in its header, so that it is looked at more deeply."""
    if len(parts) < 2 or len(parts[0]) != HEADER_BYTES:
        return parts
    return [parts[0][:24] + sum(map(len, parts[1:])).to_bytes(8, "little"), *parts[1:]]


messages = st.lists(st.builds(lambda h, rest: [h, *rest], header, st.lists(meta, max_size=5)), max_size=20)


def test_no_sequence_of_messages_hurts_the_broker_or_another_peer(kit: Any) -> None:
    async def fuzz() -> None:
        broker = kit.Broker(kit.address)
        good = kit.peer()
        await good.open(60)
        loop_errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: loop_errors.append(context))
        sent = 0

        async def attack(flood: list[list[bytes]], greet: bool) -> None:
            nonlocal sent
            bad = Raw(kit.address)
            await bad.connected()
            if greet:
                bad.body(hello())
            for parts in flood:
                bad.try_to_send(announced(parts))
                bad.try_to_send(parts)
            sent += 1
            await good.send(Touch(sent, 1))
            await good.flush(60)
            bad.close()

        runner = asyncio.get_running_loop()

        @given(messages, st.booleans())
        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        def attacks(flood: list[list[bytes]], greet: bool) -> None:
            asyncio.run_coroutine_threadsafe(attack(flood, greet), runner).result(30)

        await asyncio.to_thread(attacks)
        own = [d.body.lease_id for d in broker.got if d.type is Touch and d.peer == broker.greeted[0]]
        assert own == list(range(1, sent + 1))
        assert loop_errors == []
        await good.close("done", 0)
        broker.close()

    asyncio.run(fuzz())


def test_a_flood_of_garbage_does_not_delay_the_others_heartbeats(kit: Any) -> None:
    async def flood() -> None:
        broker = kit.Broker(kit.address)
        good = kit.peer()
        await good.open(60)
        bad = Raw(kit.address)
        await bad.connected()
        stop = asyncio.Event()

        async def shout() -> None:
            garbage = os.urandom(100)
            while not stop.is_set():
                for _ in range(200):
                    bad.try_to_send([garbage, garbage])
                await asyncio.sleep(0)

        shouting = asyncio.ensure_future(shout())
        beats = len(broker.beats)
        await broker.until(lambda: len(broker.beats) >= beats + 3)
        await good.send(Touch(1, 1))
        await good.flush(60)
        stop.set()
        await shouting
        bad.close()
        await good.close("done", 0)
        broker.close()

    asyncio.run(flood())
