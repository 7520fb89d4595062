"""A broker made of two Routers that records what happens, and peers to go with it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from temper.common.config import Recipe
from temper.common.keys import BrokerKeys, PeerKeys
from temper.common.peer import Peer, new_session
from temper.common.pump import Delivery, DeliveryRun, Router
from temper.common.schema import Body, Goodbye, Heartbeat, Hello, Lease, Refused, Welcome

DEADLINE_S = 60.0
RECIPE = msgspec.json.encode(Recipe()).decode()


class Broker:
    """Both sockets of a broker. `got` holds every delivery but heartbeats; it acknowledges unless `hold` is set, and answers within
    the turn if `answer_at_once` is."""

    def __init__(self, address: str, keys: BrokerKeys | None = None, **options: Any) -> None:
        self.got: list[Delivery] = []
        self.runs: list[DeliveryRun] = []
        self.beats: list[Delivery] = []
        self.closed: list[tuple[bytes, str]] = []
        self.greeted: list[bytes] = []
        self.roomy: list[bytes] = []
        self.hold = self.answer_at_once = False
        self.answer: Callable[[Hello], Welcome | Refused] = lambda hello: Welcome("run-1", RECIPE, 7, 1.0)
        self._changed = asyncio.Event()
        options = {"welcome": self._welcome, "on_room": self._room, "keys": keys, **options}
        self.control = Router(address, "control", self._batch, self._gone, **options)
        self.bulk = Router(address, "bulk", self._batch, self._gone, **options)

    def _welcome(self, peer: bytes, hello: Hello) -> Welcome | Refused:
        self.greeted.append(peer)
        self._changed.set()
        return self.answer(hello)

    def _room(self, peer: bytes) -> None:
        self.roomy.append(peer)
        self._changed.set()

    def _gone(self, peer: bytes, reason: str) -> None:
        self.closed.append((peer, reason))
        self._changed.set()

    def _batch(self, deliveries: list[Delivery | DeliveryRun]) -> None:
        for d in deliveries:
            if isinstance(d, DeliveryRun):
                self.runs.append(d)
                self.control.acknowledge(d.peer, d.sequence)
                continue
            (self.beats if d.type is Heartbeat else self.got).append(d)
            if d.sequence and not self.hold:
                self.acknowledge(d)
        if self.answer_at_once:
            self.control.answer()
        self._changed.set()

    def acknowledge(self, d: Delivery) -> None:
        (self.bulk if d.type.BULK else self.control).acknowledge(d.peer, d.sequence)

    def bodies(self, kind: type[Body]) -> list[Any]:
        return [d.body for d in self.got if d.type is kind]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds, looking whenever something happened."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def goodbye(self) -> Goodbye:
        await self.until(lambda: self.bodies(Goodbye))
        return self.bodies(Goodbye)[0]

    def close(self) -> None:
        self.control.close()
        self.bulk.close()


def _lease(lease_id: int) -> Lease:
    return Lease(lease_id, 1, 7, "train", "words", 0, lease_id, [0, 1], 0, None, 60.0)


class Kit:
    """What the tests of the protocol need."""

    Broker = Broker
    lease = staticmethod(_lease)

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        self.address = f"ipc://{self.folder}/b"
        self.children: list[subprocess.Popen[str]] = []

    def peer(self, address: str | None = None, keys: PeerKeys | None = None, **options: Any) -> Peer:
        hello = Hello("actor", f"actor-{secrets.token_hex(2)}", new_session())
        return Peer(address or self.address, hello, keys=keys, **options)

    def tcp(self) -> str:
        """A TCP address with two free ports."""
        for _ in range(50):
            with socket.socket() as first, socket.socket() as second:
                first.bind(("127.0.0.1", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("127.0.0.1", port + 1))
                except (OSError, OverflowError):
                    continue
                return f"tcp://127.0.0.1:{port}"
        raise AssertionError("no two neighbouring ports are free")

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start tests/protocol/echo_daemon.py as a process."""
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("echo_daemon.py")), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.children.append(child)
        return child

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate()
        shutil.rmtree(self.folder)


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    kit.close()
