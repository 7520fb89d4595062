"""Two real processes over ipc and over TCP with CURVE; order, credit, restarts, big frames."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from temper.common import keys, pump
from temper.common.errors import PeerLost, ProtocolError
from temper.common.link import KEEP_FROM_BYTES
from temper.common.schema import Chunk, Drain, Fetch, Heartbeat, Lease, Samples, Touch, Version, Welcome
from temper.common.session import decode

MEBIBYTE = 1024 * 1024


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_daemon_in_its_own_process_answers_drains_and_says_goodbye(kit: Any, transport: str) -> None:
    address, broker_keys, arguments = kit.address, None, []
    if transport == "tcp":
        address = kit.tcp()
        broker_keys = keys.new_broker(kit.folder / "keys")
        arguments = [str(keys.new_peer(kit.folder / "keys", "actor-1"))]
    child = kit.start("echo", address, *arguments)  # before the broker: it waits

    async def serve() -> None:
        broker = kit.Broker(address, broker_keys)
        await broker.until(lambda: any(d.body.state == "READY" for d in broker.beats))
        peer = broker.greeted[0]
        hello = broker.control.peers[peer]
        assert (hello.role, hello.name, hello.pid, hello.slots) == ("actor", "actor-1", child.pid, 4)
        payload = os.urandom(100_000)
        for lease_id in range(2000):
            broker.control.send(peer, kit.lease(lease_id), [payload] if lease_id % 500 == 0 else [])
        await broker.until(lambda: len(broker.bodies(Touch)) == 2000)
        touches = [d for d in broker.got if d.type is Touch]
        assert [d.body.lease_id for d in touches] == list(range(2000))
        assert [bytes(f) for d in touches for f in d.frames] == [payload] * 4
        await broker.until(lambda: broker.beats[-1].body.progress == "2000 leases")
        broker.control.send(peer, Drain("run over", 5.0))
        goodbye = await broker.goodbye()
        assert (goodbye.exit_code, goodbye.reason) == (0, "run over")
        broker.close()

    asyncio.run(serve())
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert out == f"READY actor-1 pid={child.pid}\n"
    assert "drained after 2000 leases" in err and "stopped: run over" in err


def test_five_thousand_sends_both_ways_before_anybody_reads_do_not_deadlock(kit: Any) -> None:
    async def both() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer()
        leases: list[int] = []
        arrived = asyncio.Event()

        def on_lease(lease: Lease, frames: list[memoryview]) -> None:
            leases.append(lease.lease_id)
            if len(leases) == 5000:
                arrived.set()

        peer.on(Lease, on_lease)
        await peer.open(60)
        for number in range(5000):
            broker.control.send(broker.greeted[0], kit.lease(number))
            peer.post(Touch(number, 1))
        assert broker.control.backlog(broker.greeted[0])[0] > 3000
        async with asyncio.timeout(60):
            await arrived.wait()
        await broker.until(lambda: len(broker.got) == 5000)
        await peer.flush(60)
        assert leases == list(range(5000)) == [touch.lease_id for touch in broker.bodies(Touch)]
        assert broker.control.backlog(broker.greeted[0]) == (0, 0)
        await peer.close("done", 0)
        broker.close()

    asyncio.run(both())


def test_send_waits_while_the_broker_holds_its_credit_and_heartbeats_keep_coming(kit: Any) -> None:
    async def slow_consumer() -> None:
        broker = kit.Broker(kit.address, window_messages=10)
        broker.hold = True
        peer = kit.peer()
        await peer.open(60)
        for number in range(10):
            await peer.send(Touch(number, 1))
        blocked = asyncio.ensure_future(peer.send(Touch(10, 1)))
        beats = len(broker.beats)
        await broker.until(lambda: len(broker.beats) >= beats + 3)
        assert not blocked.done() and len(broker.got) == 10
        broker.acknowledge(broker.got[0])
        await blocked
        await broker.until(lambda: len(broker.got) == 11)
        await peer.close("done", 0, timeout_s=0.1)
        broker.close()

    asyncio.run(slow_consumer())


def test_a_stopped_consumer_takes_no_more_bytes_than_its_window(kit: Any) -> None:
    async def stopped() -> None:
        broker = kit.Broker(kit.address, window_bytes=4 * MEBIBYTE)
        broker.hold = True
        peer = kit.peer()
        await peer.open(60)
        payload = bytes(MEBIBYTE - 100)
        sending = [asyncio.ensure_future(peer.send(Touch(n, 1), [payload])) for n in range(16)]
        await broker.until(lambda: len(broker.got) == 4)
        beats = len(broker.beats)
        await broker.until(lambda: len(broker.beats) > beats)
        assert (len(broker.got), sum(task.done() for task in sending)) == (4, 4)
        broker.hold = False
        broker.acknowledge(broker.got[-1])
        await asyncio.gather(*sending)
        await broker.until(lambda: len(broker.got) == 16)
        with pytest.raises(ProtocolError, match="split it"):
            await peer.send(Touch(1, 1), [payload] * 5)
        await peer.close("done", 0)
        broker.close()

    asyncio.run(stopped())


def test_a_cancelled_send_is_not_sent_and_the_others_keep_their_order(kit: Any) -> None:
    async def cancelled() -> None:
        broker = kit.Broker(kit.address, window_messages=1)
        broker.hold = True
        peer = kit.peer()
        await peer.open(60)
        sends = [asyncio.ensure_future(peer.send(Touch(n, 1))) for n in range(4)]
        await broker.until(lambda: broker.got)
        sends[1].cancel()
        broker.hold = False
        broker.acknowledge(broker.got[0])
        await asyncio.gather(*sends, return_exceptions=True)
        await broker.until(lambda: len(broker.got) == 3)
        assert [touch.lease_id for touch in broker.bodies(Touch)] == [0, 2, 3]
        await peer.close("done", 0)
        broker.close()

    asyncio.run(cancelled())


def test_weights_on_the_bulk_socket_do_not_delay_control(kit: Any) -> None:
    async def bulk() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer(window_bytes=8 * MEBIBYTE)
        order: list[str] = []
        chunks: list[bytes] = []
        finished = asyncio.Event()

        def on_chunk(chunk: Chunk, frames: list[memoryview]) -> None:
            order.append("chunk")
            chunks.append(bytes(frames[0][:4]))
            if len(chunks) == 60:
                finished.set()

        peer.on(Chunk, on_chunk)
        peer.on(Lease, lambda lease, frames: order.append("lease"))
        await peer.open(60)
        await broker.until(lambda: len(broker.bulk.peers) == 1)
        who = broker.greeted[0]
        for index in range(60):
            broker.bulk.send(who, Chunk(1, True, index, ""), [index.to_bytes(4, "little") + bytes(MEBIBYTE)])
        broker.control.send(who, kit.lease(1))
        async with asyncio.timeout(60):
            await finished.wait()
        assert chunks == [index.to_bytes(4, "little") for index in range(60)]
        assert order.index("lease") < 30
        assert broker.roomy == [who]
        await peer.close("done", 0)
        broker.close()

    asyncio.run(bulk())


def test_large_frames_are_forwarded_as_they_came_and_small_ones_pin_nothing(kit: Any) -> None:
    async def forward() -> None:
        broker = kit.Broker(kit.address, lazy=frozenset({Samples.KIND}))
        actor, learner = kit.peer(), kit.peer()
        got: list[tuple[Samples, list[bytes]]] = []
        arrived = asyncio.Event()

        def on_samples(samples: Samples, frames: list[memoryview]) -> None:
            got.append((samples, [bytes(f) for f in frames]))
            arrived.set()

        learner.on(Samples, on_samples)
        await actor.open(60)
        await learner.open(60)
        to = next(p for p, hello in broker.control.peers.items() if hello.session == learner.hello.session)
        large, own, small = os.urandom(2 * MEBIBYTE), os.urandom(KEEP_FROM_BYTES), os.urandom(KEEP_FROM_BYTES - 1)
        body = Samples(5, 1, 7, [], [])
        await actor.send(body, [large, own, small, b""])
        await broker.until(lambda: broker.bodies(Samples))
        delivery = broker.got[0]
        assert [type(frame).__name__ for frame in delivery.frames] == ["Frame", "Frame", "bytes", "bytes"]
        assert type(delivery.raw_meta) is bytes
        assert broker.control.forward(to, delivery.kind, delivery.raw_meta, delivery.frames)
        async with asyncio.timeout(60):
            await arrived.wait()
        assert got == [(body, [large, own, small, b""])]
        await actor.close("done", 0)
        await learner.close("done", 0)
        broker.close()

    asyncio.run(forward())


def test_a_restarted_broker_gets_what_the_old_one_had_not_acknowledged(kit: Any) -> None:
    async def restart() -> None:
        old = kit.Broker(kit.address)
        peer = kit.peer()
        resumed = asyncio.Event()
        peer.on_resync = lambda welcome: resumed.set()
        await peer.open(60)
        await peer.send(Touch(0, 1))
        await peer.flush(60)
        old.hold = True
        for number in range(1, 6):
            await peer.send(Touch(number, 1))
        await peer.send(Fetch(None, None))
        await old.until(lambda: len(old.got) == 7)
        old.close()
        new = kit.Broker(kit.address)
        async with asyncio.timeout(60):
            await resumed.wait()
        await new.until(lambda: len(new.got) == 6)
        assert [touch.lease_id for touch in new.bodies(Touch)] == [1, 2, 3, 4, 5]
        assert len(new.bodies(Fetch)) == 1
        await peer.send(Touch(6, 1))
        await peer.flush(60)
        assert new.bodies(Touch)[-1].lease_id == 6 and not peer.over
        await peer.close("done", 0)
        new.close()

    asyncio.run(restart())


def test_heartbeats_carry_state_progress_its_age_and_the_version(kit: Any) -> None:
    async def beat() -> None:
        broker = kit.Broker(kit.address)
        broker.control.beat("READY", "serving")
        peer = kit.peer()
        heard: list[Heartbeat] = []
        peer.on(Heartbeat, lambda heartbeat, frames: heard.append(heartbeat))
        await peer.open(60)
        version = Version(3, 7, "ab" * 16)
        peer.beat("READY", "step 1", "learner: groups", version)
        await broker.until(lambda: heard and len([d for d in broker.beats if d.body.version == version]) >= 2)
        first, second = [d.body for d in broker.beats if d.body.version == version][:2]
        assert (second.state, second.progress, second.waiting_for) == ("READY", "step 1", "learner: groups")
        assert second.progress_age_s > first.progress_age_s
        assert heard and heard[0].progress == "serving"
        await peer.close("done", 0)
        broker.close()

    asyncio.run(beat())


def test_what_is_sent_after_the_end_is_an_error_not_a_hang(kit: Any) -> None:
    async def after() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer()
        await peer.open(60)
        await peer.close("done", 0)
        with pytest.raises(PeerLost, match="cannot send Touch"):
            await peer.send(Touch(1, 1))
        assert not broker.control.send(b"nobody", kit.lease(1))
        broker.close()

    asyncio.run(after())


def test_a_killed_daemon_is_noticed_and_named(kit: Any) -> None:
    child = kit.start("echo", kit.address)

    async def serve() -> None:
        broker = kit.Broker(kit.address, silence_s=2.5)
        await broker.until(lambda: any(d.body.state == "READY" for d in broker.beats))
        os.kill(child.pid, signal.SIGKILL)
        await broker.until(lambda: broker.closed)
        assert broker.closed[0] == (broker.greeted[0], "silent for 2 s")
        assert broker.control.peers == {}
        broker.close()

    asyncio.run(serve())


def test_a_recipe_with_hundreds_of_domains_arrives(kit: Any) -> None:
    async def large() -> None:
        broker = kit.Broker(kit.address)
        recipe = "{" + "é" * 200_000 + "}"
        broker.answer = lambda hello: Welcome("run-1", recipe, 7, 1.0)
        peer = kit.peer()
        assert (await peer.open(60)).recipe == recipe
        await peer.close("done", 0)
        broker.close()

    asyncio.run(large())


def test_samples_that_came_together_are_handed_on_together(kit: Any) -> None:
    async def together() -> None:
        broker = kit.Broker(kit.address, lazy=frozenset({Samples.KIND}))
        peer = kit.peer()
        await peer.open(10)
        sent = [(Samples(number, 1, 7, [], []), os.urandom(number % 3 * 100)) for number in range(300)]
        for body, payload in sent:
            peer.post(body, [payload] if payload else [])
        peer.post(Touch(1, 1))
        await peer.flush(10)
        assert sum(len(run.metas) for run in broker.runs) == 300 and len(broker.runs) < 10
        metas = [meta for run in broker.runs for meta in run.metas]
        frames = [frame for run in broker.runs for frame in run.frames]
        assert [(decode(Samples, meta), b"".join(parts)) for meta, parts in zip(metas, frames, strict=True)] == sent
        assert [run.sequence for run in broker.runs][-1] == 300 and broker.bodies(Touch) == [Touch(1, 1)]
        await peer.close("done", 0)
        broker.close()

    asyncio.run(together())


def test_what_has_nothing_to_do_is_woken_by_messages_alone(kit: Any) -> None:
    """Heartbeats pass both ways: a Router looks at its sockets a few times for each, and not once more."""

    async def idle() -> None:
        broker = kit.Broker(kit.address)
        looks = {"messages": 0, "nothing": 0, "looked": 0}
        links = (broker.control._link, broker.bulk._link)
        peers = [kit.peer() for _ in range(4)]
        for peer in peers:
            await peer.open(10)
        for link in links:
            receive = link.receive

            def counted(receive: Any = receive) -> Any:
                parts = receive()
                looks["messages" if parts is not None else "nothing"] += 1
                return parts

            def looked(link: Any = link, looked: Any = link._looked) -> None:
                looks["looked"] += time.perf_counter() > link._awake_until
                looked()

            link.receive, link._looked = counted, looked  # type: ignore[method-assign]
        beats = len(broker.beats)
        await broker.until(lambda: len(broker.beats) >= beats + 4 * 4)
        assert looks["messages"] >= 4 * 4
        assert looks["nothing"] <= 2 * looks["messages"], looks  # a turn ends when it finds nothing
        assert looks["looked"] <= 16, (
            looks
        )  # after the beats of a tick; a turn, and a link that is awake, look for themselves
        for peer in peers:
            await peer.close("done", 0)
        broker.close()

    asyncio.run(idle())


def test_a_router_that_is_awake_finds_what_comes_without_being_woken(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "AWAKE_S", 60.0)
    monkeypatch.setattr("temper.common.link.YIELDED_S", 60.0)

    async def awake() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer()
        await peer.open(10)
        link = broker.control._link
        assert link._awake_until > time.perf_counter()  # the handshake took several turns
        asyncio.get_running_loop().remove_reader(link._descriptor)
        broker.control._timer.cancel()  # nothing is sent but in turns: a send outside of them looks as well
        for number in range(3):
            peer.post(Touch(number, 1))
            await broker.until(lambda: len(broker.bodies(Touch)) == number + 1)  # noqa: B023
        link._awake_until = link._awake_s = 0.0
        await peer.close("done", 0, timeout_s=0.1)
        broker.close()

    asyncio.run(awake())


def test_a_router_stays_awake_only_while_turns_are_close_and_nobody_else_is_ready(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def turns() -> None:
        broker = kit.Broker(kit.address)
        router = broker.control._link
        router._awake_s = 60.0
        monkeypatch.setattr("temper.common.link.YIELDED_S", 60.0)
        for before_s, stays in ((61, False), (1, True)):
            router._scheduled = False
            router._turned_at = time.perf_counter() - before_s
            router._turn()
            assert router._scheduled is stays and (router._awake_until > time.perf_counter()) is stays
        router._looked()
        assert router._scheduled
        monkeypatch.setattr("temper.common.link.YIELDED_S", -1.0)  # to give way always takes longer than that
        router._looked()
        assert router._scheduled and not router._awake_until  # it looks once more
        router._looked()
        assert not router._scheduled
        broker.close()

    asyncio.run(turns())


def test_answers_that_are_sent_within_a_turn_know_how_much_it_brought(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability "memory" the broker answers before it decides about what came: the answer to much waits for others there
    too."""

    async def answers() -> None:
        broker = kit.Broker(kit.address)
        brought: list[int] = []
        turn_over = broker.control._debts.turn_over

        def counted(size: int = 0, behind: Any = None) -> None:
            brought.append(size)
            turn_over(size, behind)

        monkeypatch.setattr(broker.control._debts, "turn_over", counted)
        broker.answer_at_once = True
        peer = kit.peer()
        await peer.open(10)
        brought.clear()
        peer.post(Touch(1, 1), [bytes(MEBIBYTE)])
        await broker.until(lambda: broker.bodies(Touch))
        assert sum(size > MEBIBYTE for size in brought) == 2, "within the turn, and at its end"
        broker.control.answer()
        assert brought[-1] == 0  # between turns there is nothing to wait for
        await peer.close("done", 0)
        broker.close()

    asyncio.run(answers())
