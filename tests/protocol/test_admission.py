"""Who gets in: folders, locks, ports, keys."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from temper.common import keys
from temper.common.admission import Admission
from temper.common.errors import ConfigError, EnvironmentFault, PeerLost
from temper.common.peer import Peer
from temper.common.schema import Touch
from temper.common.sockets import bind, domain_of, parse_address

HOLDER = (
    "import sys, time\n"
    "from temper.common.sockets import bind, parse_address\n"
    "bound = bind(parse_address(sys.argv[1]), 'control')\n"
    "print('bound', flush=True)\n"
    "time.sleep(60)\n"
)


def test_a_live_brokers_path_is_not_stolen_and_a_dead_ones_is_free(kit: Any) -> None:
    holder = subprocess.Popen([sys.executable, "-P", "-c", HOLDER, kit.address], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "bound\n"
        with pytest.raises(EnvironmentFault, match=rf"served by another broker \(pid {holder.pid}\)"):
            bind(parse_address(kit.address), "control")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        bind(parse_address(kit.address), "control").close()
    finally:
        holder.kill()
        holder.communicate()


def test_the_folder_of_the_sockets_is_ours_alone(kit: Any) -> None:
    bind(parse_address(kit.address), "control").close()
    folder = parse_address(kit.address).place
    assert os.stat(folder).st_mode & 0o777 == 0o700
    os.chmod(folder, 0o755)
    with pytest.raises(EnvironmentFault, match=rf"mode 755.*chmod 700 {folder}"):
        bind(parse_address(kit.address), "control")


def test_a_folder_that_cannot_be_made_is_named(kit: Any) -> None:
    (kit.folder / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="Not a directory"):
        bind(parse_address(f"ipc://{kit.folder}/file/b"), "control")


def test_tcp_without_keys_is_refused_on_both_ends(kit: Any) -> None:
    async def keyless() -> None:
        with pytest.raises(ConfigError, match=r"needs keys.*temper keys new"):
            kit.Broker(kit.tcp())
        peer = kit.peer(kit.tcp())
        with pytest.raises(ConfigError, match="needs a key file"):
            await peer.open(5)
        await peer.close("no key", 2)

    asyncio.run(keyless())


def test_a_taken_port_is_named(kit: Any) -> None:
    async def taken() -> None:
        address = kit.tcp()
        port = int(address.rsplit(":", 1)[1])
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            other.listen()
            with pytest.raises(EnvironmentFault, match=f"127.0.0.1:{port} is taken by another process"):
                kit.Broker(address, keys.new_broker(kit.folder / "k"))

    asyncio.run(taken())


def test_a_revoked_key_closes_its_live_peer_and_only_that(kit: Any) -> None:
    async def revoke() -> None:
        folder, address = kit.folder / "k", kit.tcp()
        files = [keys.new_peer(folder, name) for name in ("one", "two")]
        broker = kit.Broker(address, keys.load_broker(folder))
        one, two = (kit.peer(address, keys.load_peer(file)) for file in files)
        await one.open(60)
        await two.open(60)
        keys.revoke(folder, "one")
        async with asyncio.timeout(60):
            assert "the key of this peer was revoked" in await one.lost
        await two.send(Touch(2, 1))
        await two.flush(60)
        assert [touch.lease_id for touch in broker.bodies(Touch)] == [2]
        again = kit.peer(address, keys.load_peer(files[0]))
        with pytest.raises(PeerLost, match="is the key allowed"):
            await again.open(1)
        for peer in (one, two, again):
            await peer.close("done", 0)
        broker.close()

    asyncio.run(revoke())


def test_a_key_that_is_allowed_later_gets_in_without_a_restart(kit: Any) -> None:
    async def later() -> None:
        folder, address = kit.folder / "k", kit.tcp()
        file = keys.new_peer(folder, "late")
        peer_keys = keys.load_peer(file)
        keys.revoke(folder, "late")
        broker = kit.Broker(address, keys.load_broker(folder))
        peer: Peer = kit.peer(address, peer_keys)
        opening = asyncio.ensure_future(peer.open(60))
        await asyncio.wait({opening}, timeout=0.5)
        assert not opening.done()
        keys.allow(folder, "late", peer_keys.public)
        assert (await opening).run_id == "run-1"
        await peer.close("done", 0)
        broker.close()

    asyncio.run(later())


def test_whoever_knocks_often_does_not_fill_the_log(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("temper.common.admission.log", lines.append)

    async def knock() -> None:
        broker_keys = keys.new_broker(kit.folder / "k")
        handler = Admission.of(broker_keys)
        try:
            request = [b"1.0", b"1", domain_of(broker_keys).encode(), b"10.0.0.9", b"", b"CURVE", bytes(32)]
            assert all(handler._answer(request)[2] == b"400" for _ in range(100))
        finally:
            handler.leave()

    asyncio.run(knock())
    assert len(lines) == 1 and "10.0.0.9 was refused" in lines[0]


def test_a_broker_with_another_key_is_not_trusted(kit: Any) -> None:
    async def impostor() -> None:
        address = kit.tcp()
        file = keys.new_peer(kit.folder / "real", "one")
        broker = kit.Broker(address, keys.new_broker(kit.folder / "other"))
        peer = kit.peer(address, keys.load_peer(file))
        with pytest.raises(PeerLost, match="no broker answered"):
            await peer.open(1)
        assert broker.greeted == []
        await peer.close("impostor", 3)
        broker.close()

    asyncio.run(impostor())
