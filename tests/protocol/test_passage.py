"""A relay's lines one by one: how many, how deep, and when they end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from temper.broker import passage as passage_module
from temper.broker.passage import Passage
from temper.common.errors import PeerLost, ProtocolError
from temper.common.pump import Router
from temper.common.schema import Hello, NewVersion, Touch, Version, Welcome
from temper.common.sockets import parse_address


class Site:
    """A parent that records, and a passage to it with a bulk socket beside it."""

    def __init__(self, kit: Any) -> None:
        self.parent = kit.Broker(kit.address)
        self.address = f"ipc://{kit.folder}/site"
        self.news: list[Version] = []
        self.left: asyncio.Queue[bytes] = asyncio.Queue()
        parent = parse_address(kit.address)
        self.passage = Passage(self.address, parent, "relay-1", news=self.news.append, left=self.left.put_nowait)
        self.bulk = Router(self.address, "bulk", lambda batch: None, lambda peer, reason: None, welcome=self._welcome)

    def _welcome(self, peer: bytes, hello: Hello) -> Welcome:
        return Welcome("run-1", "", 0, 1.0)

    def close(self) -> None:
        self.passage.close()
        self.bulk.close()
        self.parent.close()


def test_handshakes_are_marked_and_heartbeats_and_news_are_seen(kit: Any) -> None:
    async def scene() -> None:
        site = Site(kit)
        peer = kit.peer(site.address)
        held, announced = Version(3, 7, "ab"), Version(4, 7, "cd")
        heard = asyncio.get_running_loop().create_future()
        peer.on(NewVersion, lambda body, frames: heard.set_result(body.version))
        assert (await peer.open(60)).run_id == "run-1"
        (at_parent,) = site.parent.control.peers.items()
        assert at_parent[0] == peer.identity and at_parent[1].via == ["relay-1"]
        peer.beat("READY", "", "", held)
        site.parent.control.send(peer.identity, NewVersion(announced))
        async with asyncio.timeout(60):
            assert await heard == announced
        await site.parent.until(lambda: any(beat.body.version == held for beat in site.parent.beats))
        assert site.news == [announced] and site.passage.versions() == [held]
        assert site.passage.roles() == {"actor": 1} and len(site.passage.working()) == 1
        await peer.send(Touch(1, 1))
        await peer.close("done", 0)
        assert [touch.lease_id for touch in site.parent.bodies(Touch)] == [1]
        assert await site.left.get() == peer.identity and site.passage.working() == []
        assert site.passage.passed() > 4 and site.passage.dropped() == 0
        site.close()

    asyncio.run(scene())


def test_one_peer_too_many_is_told_so_and_the_others_stay(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage_module, "LINES", 1)

    async def scene() -> None:
        site = Site(kit)
        first, second = kit.peer(site.address), kit.peer(site.address)
        await first.open(60)
        with pytest.raises(PeerLost, match="this relay serves 1 peers already: start another one"):
            await second.open(60)
        await first.send(Touch(1, 1))
        await first.flush(60)
        for peer in (first, second):
            await peer.close("done", 0)
        site.close()

    asyncio.run(scene())


def test_a_handshake_that_has_gone_in_circles_is_refused(kit: Any) -> None:
    async def scene() -> None:
        site = Site(kit)
        peer = kit.peer(site.address)
        peer.hello = msgspec.structs.replace(peer.hello, via=["relay"] * 8)
        with pytest.raises(ProtocolError, match=r"handshake over 8 relays \(relay, .*\): at most 8"):
            await peer.open(60)
        await peer.close("done", 3)
        site.close()

    asyncio.run(scene())


def test_the_line_of_a_silent_peer_ends_and_opens_anew_with_its_next_word(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passage_module, "SILENCE_S", 1.5)

    async def scene() -> None:
        site = Site(kit)
        peer = kit.peer(site.address)
        await peer.open(60)
        assert peer._timer is not None
        peer._timer.cancel()  # no heartbeat any more
        async with asyncio.timeout(60):
            assert await site.left.get() == peer.identity
        assert not site.passage.lines
        await peer.send(Touch(5, 1))
        peer._tick()  # its timer runs again: what a line drops before it is connected is sent again
        await site.parent.until(lambda: site.parent.bodies(Touch))
        assert list(site.passage.lines) == [peer.identity] and site.passage.roles() == {"unknown": 1}
        await peer.close("done", 0)
        site.close()

    asyncio.run(scene())
