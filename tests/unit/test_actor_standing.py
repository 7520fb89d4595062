"""An actor whose engine does not answer is as good as starting: the broker leases it nothing meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from temper.actor.daemon import ActorDaemon
from temper.common.metrics import ACTOR_STARTING


def test_what_heartbeats_say_while_the_engine_comes_and_goes() -> None:
    daemon = ActorDaemon("actor", "actor-1", "ipc:///nowhere")
    assert daemon.standing()[0] == "STARTING"
    engine: Any = SimpleNamespace(trouble="")
    daemon._engine, daemon.state = engine, "READY"
    assert daemon.standing() == ("READY", "") and daemon.meter.gauges[ACTOR_STARTING] == 0.0
    engine.trouble = "the server has ended: out of memory"
    assert daemon.standing() == ("STARTING", "engine: the server has ended: out of memory")
    assert daemon.meter.gauges[ACTOR_STARTING] >= 0.0
    daemon.state = "DRAINING"
    assert daemon.standing()[0] == "DRAINING"
    daemon.state, engine.trouble = "READY", ""
    assert daemon.standing() == ("READY", "") and daemon.meter.gauges[ACTOR_STARTING] == 0.0
