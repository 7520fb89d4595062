"""Many senders on one socket share what may be under way: never more, everything arrives, nobody can keep it from the others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from temper.broker.passage import Passage
from temper.common import budget as budget_module
from temper.common.budget import Budget
from temper.common.credit import Channel
from temper.common.pump import Router
from temper.common.schema import Blocked, Chunk, Touch, Welcome
from temper.common.session import Session
from temper.common.side import Side
from temper.common.sockets import parse_address

MEBIBYTE = 1024 * 1024
TOTAL, LARGEST = 24 * MEBIBYTE, 8 * MEBIBYTE


def share(kit: Any, **options: Any) -> tuple[Any, Budget]:
    """A broker whose control peers share one budget."""
    budget = Budget(TOTAL, LARGEST)
    return kit.Broker(kit.address, budget_of=lambda hello: budget, **options), budget


def held(broker: Any) -> int:
    """Bytes that came and are not acknowledged."""
    return sum(d.size for d in broker.got)


def test_what_is_under_way_from_all_together_stays_within_the_budget_and_all_of_it_arrives(kit: Any) -> None:
    async def scene() -> None:
        broker, budget = share(kit)
        broker.hold = True
        peers = [kit.peer() for _ in range(10)]
        await asyncio.gather(*(peer.open(60) for peer in peers))
        payload = bytes(2 * MEBIBYTE)
        sending = [
            asyncio.ensure_future(peer.send(Touch(n, 1), [payload])) for peer in peers for n in range(4)
        ]  # 80 MiB
        came: list[tuple[bytes, int]] = []
        while len(came) < len(sending):
            await broker.until(lambda: broker.got)
            beats = len(broker.beats)  # so long that whatever they may send has come
            await broker.until(lambda seen=beats: len(broker.beats) > seen + len(peers))
            assert held(broker) <= TOTAL and (budget.waiting or not sum(not task.done() for task in sending))
            for d in broker.got:
                came.append((d.peer, d.body.lease_id))
                broker.acknowledge(d)
            broker.got.clear()
        await asyncio.gather(*sending, *(peer.flush(60) for peer in peers))
        assert sorted(came) == sorted((peer.identity, n) for peer in peers for n in range(4))
        assert budget.waiting == 0 and broker.closed == []
        broker.hold = False
        for peer in peers:
            await peer.close("done", 0)
            for router in (broker.control, broker.bulk):
                router.forget(peer.identity)
        assert budget.free_bytes == TOTAL * 3 // 4
        broker.close()

    asyncio.run(scene())


def test_a_small_message_needs_no_room_and_one_of_the_largest_finds_it_among_many(kit: Any) -> None:
    async def scene() -> None:
        broker, budget = share(kit)
        broker.hold = True
        busy = [kit.peer() for _ in range(6)]
        large, small = kit.peer(), kit.peer()
        await asyncio.gather(*(peer.open(60) for peer in (*busy, large, small)))
        payload = bytes(4 * MEBIBYTE)
        sending = [asyncio.ensure_future(peer.send(Touch(n, 1), [payload])) for peer in busy for n in range(3)]
        await broker.until(lambda: held(broker) > TOTAL - 3 * LARGEST // 2 and budget.waiting)
        most = asyncio.ensure_future(large.send(Touch(99, 1), [bytes(LARGEST - 64)]))
        await small.send(Touch(7, 1), [bytes(1024)])
        await broker.until(lambda: any(touch.lease_id == 7 for touch in broker.bodies(Touch)))
        assert not most.done() and 0 < broker.control.blocked(large.identity) <= LARGEST
        assert broker.control.blocked(small.identity) == 0
        broker.hold = False
        for d in broker.got:
            broker.acknowledge(d)
        await asyncio.gather(most, *sending)
        await broker.until(lambda: len(broker.got) == 20)
        assert broker.closed == []
        for peer in (*busy, large, small):
            await peer.close("done", 0)
        broker.close()

    asyncio.run(scene())


def test_what_a_new_broker_did_not_get_is_sent_again_within_the_little_that_it_allows(kit: Any) -> None:
    async def scene() -> None:
        broker, _ = share(kit)
        broker.hold = True
        peer = kit.peer()
        await peer.open(60)
        payload = bytes(MEBIBYTE)
        sending = [asyncio.ensure_future(peer.send(Touch(n, 1), [payload])) for n in range(7)]
        await asyncio.gather(*sending[:6])
        await broker.until(lambda: len(broker.got) >= 6)
        broker.close()
        again, budget = share(kit)
        await asyncio.gather(*sending, peer.flush(60))
        assert [touch.lease_id for touch in again.bodies(Touch)] == list(range(7))
        assert again.closed == [] and budget.waiting == 0 and not peer.over
        await peer.close("done", 0)
        again.close()

    asyncio.run(scene())


def test_room_that_is_asked_for_and_not_used_is_taken_from_a_peer_with_its_connection(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "UNUSED_TICKS", 2)
    monkeypatch.setattr(Session, "_give_back", lambda session, now: None)

    async def scene() -> None:
        broker, budget = share(kit)
        broker.hold = True
        greedy = [kit.peer() for _ in range(3)]
        honest = kit.peer()
        await asyncio.gather(*(peer.open(60) for peer in (*greedy, honest)))
        for peer in greedy:
            await peer.send(Blocked(LARGEST))
            await broker.until(lambda: not budget.waiting)
            if budget.free_bytes < LARGEST:
                break
        payload = bytes(LARGEST - 64)
        sending = asyncio.ensure_future(honest.send(Touch(1, 1), [payload]))
        await broker.until(lambda: broker.closed)
        await sending
        assert "sent hardly any, while others wait" in broker.closed[0][1] and not honest.over
        await broker.until(lambda: len(broker.got) == 1)
        assert broker.got[0].peer == honest.identity
        for peer in (*greedy, honest):
            await peer.close("done", 0, timeout_s=0.1)
        broker.close()

    asyncio.run(scene())


def test_the_room_of_a_peer_that_dies_goes_to_those_that_wait(kit: Any) -> None:
    async def scene() -> None:
        broker, budget = share(kit, silence_s=2.0)
        broker.hold = True
        dying = [kit.peer() for _ in range(3)]
        await asyncio.gather(*(peer.open(60) for peer in dying))
        for peer in dying:
            peer.post(Touch(1, 1), [bytes(LARGEST - 64)])
        await broker.until(lambda: len(broker.got) == 2 and budget.waiting == 1)
        survivor = kit.peer()
        await survivor.open(60)
        sending = asyncio.ensure_future(survivor.send(Touch(2, 1), [bytes(LARGEST - 64)]))
        for peer in dying:
            await peer.close("as if killed", 1, timeout_s=0.0)
        await sending
        await broker.until(lambda: broker.got[-1].peer == survivor.identity)
        await survivor.close("done", 0, timeout_s=0.1)
        broker.close()

    asyncio.run(scene())


def test_peers_behind_a_relay_ask_and_are_answered_through_it(kit: Any) -> None:
    async def scene() -> None:
        broker, budget = share(kit)
        address = f"ipc://{kit.folder}/site"
        passage = Passage(address, parse_address(kit.address), "relay-1", news=lambda v: None, left=lambda p: None)
        bulk = Router(
            address, "bulk", lambda b: None, lambda p, r: None, welcome=lambda p, h: Welcome("run-1", "", 0, 1.0)
        )
        peer = kit.peer(address)
        await peer.open(60)
        for n in range(12):
            peer.post(Touch(n, 1), [bytes(LARGEST // 2)])
        await peer.flush(60)
        assert [touch.lease_id for touch in broker.bodies(Touch)] == list(range(12)) and budget.waiting == 0
        await peer.close("done", 0)
        passage.close()
        bulk.close()
        broker.close()

    asyncio.run(scene())


def test_many_senders_of_like_messages_all_get_through(kit: Any) -> None:
    async def scene() -> None:
        broker, budget = share(kit)
        peers = [kit.peer() for _ in range(32)]
        await asyncio.gather(*(peer.open(60) for peer in peers))
        payload = memoryview(bytes(LARGEST))
        chosen = random.Random(1)
        for n in range(6):
            for peer in peers:
                peer.post(Touch(n, 1), [payload[: chosen.randint(MEBIBYTE, 7 * MEBIBYTE)]])
        count = 0
        while count < 6 * len(peers):
            await broker.until(lambda: broker.got)
            count += len(broker.got)
            broker.got.clear()  # what came is too much to be kept
        await asyncio.gather(*(peer.flush(60) for peer in peers))
        assert broker.closed == [] and budget.waiting == 0
        for peer in peers:
            await peer.close("done", 0)
        broker.close()

    asyncio.run(scene())


def test_who_cancelled_a_send_is_not_closed_for_the_room_it_had_asked_for(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "UNUSED_TICKS", 2)

    async def scene() -> None:
        broker, budget = share(kit)
        broker.hold = True
        holders, honest, other = [kit.peer(), kit.peer()], kit.peer(), kit.peer()
        await asyncio.gather(*(peer.open(60) for peer in (*holders, honest, other)))
        payload = bytes(LARGEST - 64)
        for peer in holders:
            await peer.send(Touch(1, 1), [payload])
        sending = asyncio.ensure_future(honest.send(Touch(2, 1), [payload]))
        await broker.until(lambda: budget.waiting == 1 and len(broker.got) == 2)
        waiting = asyncio.ensure_future(other.send(Touch(3, 1), [payload]))
        await broker.until(lambda: budget.waiting == 2)
        sending.cancel()  # as an actor does whose lease was abandoned
        broker.acknowledge(broker.got[0])
        await broker.until(lambda: broker.closed or waiting.done())
        assert broker.closed == []
        for peer in (*holders, honest, other):
            await peer.close("done", 0, timeout_s=0.1)
        broker.close()

    asyncio.run(scene())


def test_what_is_posted_while_a_new_broker_lets_one_in_is_within_what_that_one_allows(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = Side.greet

    async def scene() -> None:
        budget = Budget(TOTAL, LARGEST)
        broker = kit.Broker(kit.address, budget_of=lambda hello: budget)
        peer = kit.peer()
        await peer.open(60)
        posted = False

        def greet_and_post(side: Side) -> None:
            nonlocal posted
            greet(side)
            if side.greeting and side.kind == "control" and not posted:
                posted = True
                peer.post(Touch(1, 1), [bytes(100_000)])

        monkeypatch.setattr(Side, "greet", greet_and_post)
        broker.close()
        fuller = Budget(TOTAL, LARGEST)
        for _ in range(60):  # as many as were here before: the next floor is smaller
            fuller.join(1024)
        again = kit.Broker(kit.address, budget_of=lambda hello: fuller)
        await again.until(lambda: again.closed or again.bodies(Touch))
        assert posted and again.closed == [] and not peer.over
        await peer.close("done", 0)
        again.close()

    asyncio.run(scene())


def test_nothing_of_the_old_connection_is_acknowledged_on_bulk_before_the_new_broker_lets_one_in(kit: Any) -> None:
    async def scene() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer(hold_bulk=True)
        arrivals: list[tuple[int, int]] = []
        came = asyncio.Event()

        def chunk(body: Chunk, frames: list[memoryview]) -> None:
            arrivals.append(peer.arrival)
            came.set()

        peer.on(Chunk, chunk)
        await peer.open(60)
        broker.bulk.send(peer.identity, Chunk(1, False, 0, ""), [bytes(12 * MEBIBYTE)])
        await came.wait()
        peer.on_resync = lambda welcome: peer.taken(arrivals[0])  # dealt with at just this moment
        broker.close()
        again = kit.Broker(kit.address)
        resynced = asyncio.Event()
        peer.on_bulk_resync = resynced.set
        await asyncio.wait([asyncio.ensure_future(resynced.wait()), peer.lost], return_when=asyncio.FIRST_COMPLETED)
        beats = len(again.beats)
        await again.until(lambda: again.closed or len(again.beats) > beats + 1)
        assert again.closed == [] and not peer.over
        await peer.close("done", 0)
        again.close()

    asyncio.run(scene())


def test_one_acknowledgement_says_both_what_is_taken_and_what_is_granted_when_the_disk_answers(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        budget = Budget(TOTAL, LARGEST)
        broker = kit.Broker(kit.address, budget_of=lambda hello: budget)
        broker.hold = True
        peer = kit.peer()
        await peer.open(60)
        for n in range(4):
            peer.post(Touch(n, 1), [bytes(LARGEST - 64)])
        await broker.until(lambda: len(broker.got) == 1 and budget.waiting == 1)
        channel = broker.control._peers[peer.identity].session.channel
        taken: list[int] = []
        take_ack = Channel.take_ack

        def counted(self: Channel[Any], now: float) -> Any:
            if self is channel:
                taken.append(self.allowed_bytes)
            return take_ack(self, now)

        monkeypatch.setattr(Channel, "take_ack", counted)
        broker.acknowledge(broker.got[0])  # as ControlDesk._acknowledge does when a transaction is done
        broker.control.answer()
        await broker.until(lambda: len(broker.got) == 2)
        assert len(taken) == 1, taken
        monkeypatch.undo()
        await peer.close("done", 0, timeout_s=0.1)
        broker.close()

    asyncio.run(scene())


def test_a_relay_that_is_restarted_while_its_peers_wait_for_room(kit: Any) -> None:
    async def scene() -> None:
        budget = Budget(TOTAL, LARGEST)
        broker = kit.Broker(kit.address, budget_of=lambda hello: budget)
        broker.hold = True
        address = f"ipc://{kit.folder}/site"

        def start() -> tuple[Passage, Router]:
            passage = Passage(address, parse_address(kit.address), "relay-1", news=lambda v: None, left=lambda p: None)
            return passage, Router(
                address, "bulk", lambda b: None, lambda p, r: None, welcome=lambda p, h: Welcome("run-1", "", 0, 1.0)
            )

        passage, bulk = start()
        peers = [kit.peer(address) for _ in range(3)]
        await asyncio.gather(*(peer.open(60) for peer in peers))
        for peer in peers:
            for n in range(6):
                peer.post(Touch(n, 1), [bytes(LARGEST // 2)])
        await broker.until(lambda: budget.waiting and len(broker.got) >= 3)
        passage.close()
        bulk.close()
        broker.hold = False
        for d in broker.got:
            broker.acknowledge(d)
        passage, bulk = start()
        await asyncio.gather(*(peer.flush(60) for peer in peers))
        assert len(broker.got) == 18 and broker.closed == [] and budget.waiting == 0
        for peer in peers:
            await peer.close("done", 0)
        passage.close()
        bulk.close()
        broker.close()

    asyncio.run(scene())
