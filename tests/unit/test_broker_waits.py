"""Who waits for whom, in links and in words, from the broker's books and the peers' heartbeats."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from temper.broker import events as ev
from temper.broker import stats
from temper.broker.waits import chain, sentence
from temper.common import metrics, schema
from temper.common.reports import LetterStatus
from test_broker_core import Desk, leases


def beat(waiting_for: str = "", state: schema.State = "READY", progress: str = "") -> schema.Heartbeat:
    return schema.Heartbeat(state, progress, 0.5, waiting_for)


def told(desk: Desk, **beats: schema.Heartbeat) -> str:
    return sentence(chain(desk.core, beats))


def test_without_a_learner_everybody_waits_for_it() -> None:
    desk = Desk()
    desk.tell(ev.Left("learner", "gone"))
    assert told(desk) == "everybody waits for the learner: it has not come yet"
    desk = Desk()
    desk.ready()
    desk.tell(ev.Left("learner", "gone"))
    assert told(desk) == "everybody waits for the learner: it is gone; its restart goes on with this run"


def test_the_chain_follows_groups_to_actors_to_jobs_to_workers() -> None:
    desk = Desk()
    desk.ready()
    desk.phase()
    waiting = {"learner": beat("actors: groups (lane train, 0 of 2 there) (5 s)")}
    start = "the learner waits for actors: groups (lane train, 0 of 2 there) (5 s); "
    assert told(desk, **waiting) == f"{start}the broker waits for an actor: none is connected"
    lease, _ = leases(desk.actor())
    waiting["actor"] = beat(progress="lease-0 begun")
    assert told(desk, **waiting) == f"{start}actor: sampling 2 leases"
    desk.tell(ev.Received("actor", schema.Job("j1", lease.lease_id, "code"), 10))
    assert told(desk, **waiting) == (
        f"{start}actors wait for sandbox workers: 1 verdicts for 2 leases; "
        "the broker waits for a sandbox worker: none is connected"
    )
    desk.tell(ev.Joined("w", "sandbox", "sandbox-1", 1))
    desk.tell(ev.Received("actor", schema.Job("j2", lease.lease_id, "code"), 10))
    assert told(desk, **waiting).endswith("sandbox-1: 1 jobs run in 1 slots, 1 wait")
    assert desk.core.jobs.by_domain() == {"code": {"waiting": 1, "running": 1}}


def test_a_learner_that_works_holds_leases_back_by_pacing() -> None:
    desk = Desk()
    desk.actor()
    desk.ready()
    one, two = leases(desk.phase())
    desk.samples(one)
    desk.samples(two)
    working = {"learner": beat(progress="step 3 of 10"), "actor": beat("broker: a lease (3 s)")}
    assert told(desk, **working) == (
        "the learner: at work (step 3 of 10); the broker waits for the learner: 2 groups are begun (2 queued), "
        "max_staleness 0 allows 2"
    )
    desk.say(schema.Demand("train", 3))
    assert "its next step waits for actors: 1 more groups" in told(desk, **working)


def test_an_actor_that_starts_says_whom_it_waits_for() -> None:
    desk = Desk()
    desk.ready()
    desk.phase(groups=0)
    desk.actor()
    beats = {"learner": beat("actors: groups (1 s)"), "actor": beat("learner: model bundle (9 s)", "STARTING")}
    assert told(desk, **beats).endswith("actors actor wait for learner: model bundle (9 s)")


def test_the_end_waits_for_goodbyes() -> None:
    desk = Desk()
    desk.actor("actor-1")
    desk.ready()
    desk.say(schema.RunOver("done", 0))
    assert told(desk) == "the broker waits for actor-1, learner: goodbye, the run is over"


def test_the_whole_status_counts_what_the_books_hold() -> None:
    desk = Desk(task_attempts=1)
    desk.actor()
    desk.ready()
    one, two = leases(desk.phase())
    desk.say(schema.Return(one.lease_id, one.attempt, "task", "ValueError: bad task"), "actor")
    desk.samples(two)
    gauges = {
        metrics.LEARNER_LAG_MEAN: 1.5,
        metrics.LEARNER_LAG_SHARE.replace("*", "00"): 0.25,
        metrics.LEARNER_LAG_SHARE.replace("*", "02"): 0.75,
        **{metrics.LEARNER_LAG_LENGTH.replace("*", str(i)): float(i) for i in range(10)},
    }
    facts = stats.Facts("run-1", "demo", 1.0, {"accepted": 2}, 8, gauges)
    status = stats.run_status(desk.core, facts, {}, {})
    assert status.leases["train"]["quarantined"] == 1
    assert status.leases["train"]["accepted"] == 1
    assert status.leases["train"]["out"] + status.leases["train"]["waiting"] == status.leases["train"]["in flight"] == 1
    assert status.queues["train"] == {"assembling": 1, "queued": 1, "leased": 0}
    assert status.dead_letters == [
        LetterStatus(one.lease_id, "train", "a", one.task_seed, "quarantined", 1, "ValueError: bad task")
    ]
    assert status.lag is not None
    assert (status.lag.mean, status.lag.shares) == (1.5, {"0": 0.25, "2": 0.75})
    assert status.lag.by_length == [float(i) for i in range(10)]
    assert stats.run_status(desk.core, stats.Facts("r", "n", 0.0, {}, 0), {}, {}).lag is None
