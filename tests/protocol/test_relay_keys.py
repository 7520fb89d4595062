"""Keys on both sides of a relay: the site's own allow-list, the relay's key at its parent, and both revoked while in use."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_stage import Guest, Stage, play
from relay_stage import DEADLINE_S, LightActor, Relay, Writer
from temper.cli import keys as keys_command
from temper.common import keys, schema
from temper.common.errors import ConfigError, PeerLost


def test_a_relay_has_keys_on_both_sides_and_revoking_acts_on_live_peers(
    kit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, site = tmp_path / "home", tmp_path / "site"
    relay_key, learner_key = (keys.new_peer(home, name) for name in ("relay", "learner"))
    for name in ("actor", "other"):
        keys_command.main(["new", name, "--keys", str(site)])
    allowed = {name: keys.load_peer(site / f"{name}.key") for name in ("actor", "other")}
    s = Stage(tmp_path, "--keys", str(home))
    s.address, address = kit.tcp(), kit.tcp()
    s.command[s.command.index("--bind") + 1] = s.address
    relay = Relay(
        tmp_path, "relay-1", s.address, "--key", str(relay_key), "--keys", str(site), address=address
    )  # fmt: skip

    async def scene() -> None:
        await s.start()
        await relay.start()
        learner = Guest(s.address, "learner", "learner", keys=keys.load_peer(learner_key))
        await learner.peer.open(DEADLINE_S)
        await learner.peer.send(schema.LearnerReady(1, None, 0, 0))
        writer = Writer(learner, 1)
        newest = await writer.publish(10_000, 0)
        actors = [LightActor(s, address, name, keys=peer_keys) for name, peer_keys in allowed.items()]
        assert {await (await actor.open()).swap() for actor in actors} == {newest}
        stranger = Guest(address, "actor", "stranger", keys=keys.load_peer(relay_key))  # of the parent, not of the site
        s.guests += [learner, stranger]
        with pytest.raises(PeerLost, match="is the key allowed"):
            await stranger.peer.open(1.0)

        keys_command.main(["revoke", "actor", "--keys", str(site)])
        lost = await asyncio.wait_for(asyncio.shield(actors[0].guest.peer.lost), DEADLINE_S)
        assert "the key of this peer was revoked" in lost
        assert isinstance(actors[0].guest.peer.fault, ConfigError)
        newest = await writer.publish(10_000, 1)
        await actors[1].swap_until(newest)
        capsys.readouterr()
        keys_command.main(["list", "--keys", str(site)])
        assert capsys.readouterr().out == f"other {allowed['other'].public}\n"

        keys_command.main(["revoke", "relay", "--keys", str(home)])
        code, errors = await relay.end()
        assert code == 2, errors
        assert "the key of this peer was revoked" in errors.splitlines()[-1]
        newest = await writer.publish(10_000, 2)  # nobody else is hurt
        await writer.close()

    async def whole() -> None:
        try:
            await scene()
        finally:
            for guest in s.guests:
                await guest.peer.close("done", 0, timeout_s=0.2)
            for process in (relay.process, s.process):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.communicate()

    play(whole)
