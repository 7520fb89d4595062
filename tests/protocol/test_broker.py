"""A real broker process over ipc, with a scripted learner, actors, a sandbox worker and an evaluator."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_stage import Guest, Stage, play, samples, stage
from temper.broker.ahead import SPARE_IDS
from temper.common import schema
from temper.common.arrays import unpack_arrays
from temper.common.credit import LARGEST_BYTES
from temper.common.errors import ConfigError, PeerLost, ProtocolError, TemperError
from temper.common.schema import pack_frames, unpack_frames


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)


async def work(actor: Guest) -> None:
    """An honest actor, for ever."""
    while True:
        lease, _ = await actor.next(schema.Lease)
        await actor.peer.send(schema.Touch(lease.lease_id, lease.attempt))
        await actor.peer.send(*samples(lease))


async def chat(actor: Guest, lease: schema.Lease) -> None:
    """An actor that always has something to say."""
    while True:
        await actor.peer.send(schema.Touch(lease.lease_id, lease.attempt))
        await asyncio.sleep(0)


def test_a_run_of_three_steps_from_lease_to_exit_code_0(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            learner = await s.learner()
            actor = await s.guest("actor", "actor-1", 4)
            working = asyncio.create_task(work(actor))
            trained: list[int] = []
            for version in range(3):
                await learner.peer.send(schema.Demand("train", 2))
                batch = []
                for _ in range(2):
                    group, frames = await learner.next(schema.Group)
                    (part,) = group.parts
                    tokens = unpack_arrays(part.arrays, frames)["tokens"].reshape(-1, 4)
                    assert tokens.tolist() == [[group.group_id, i, 7, 8] for i in range(2)]
                    assert [meta.reward for meta in part.samples] == [1.0, 0.0]
                    batch.append(group.group_id)
                trained += batch
                await learner.peer.send(schema.Done(version, batch, {}, True))
            assert sorted(trained) == list(range(6))
            await learner.peer.send(schema.RunOver("max_steps reached", 0))
            drain, _ = await actor.next(schema.Drain)
            assert drain.reason == "max_steps reached"
            working.cancel()
            await actor.peer.close("drained", 0)
            await learner.peer.close("run over", 0)
            code, errors = await s.end()
            assert code == 0, errors
        books = sqlite3.connect(tmp_path / "run/ledger/ledger.sqlite")
        trained_rows = books.execute(
            "SELECT group_id, version FROM groups WHERE state = 'trained' ORDER BY 1"
        ).fetchall()
        assert len(trained_rows) == 6
        assert sorted(version for _, version in trained_rows) == [0, 0, 1, 1, 2, 2]
        assert books.execute("SELECT COUNT(*) FROM samples").fetchone() == (12,)
        books.close()

    play(scene)


def test_leases_of_a_killed_actor_go_out_again_and_its_late_samples_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            first = await s.guest("actor", "first", 4)
            await s.learner()
            lost = [(await first.next(schema.Lease))[0] for _ in range(4)]
            second = await s.guest("actor", "second", 4)
            await first.peer.send(*samples(lost[0], tokens=np.zeros(8, np.int32), loss_mask=np.zeros(3, np.uint8)))
            refused, _ = await first.next(schema.SampleRefused)
            assert refused.lease_id == lost[0].lease_id
            assert "3 values of loss_mask for 8 tokens" in refused.reason
            await first.peer.close("crashed", 1)
            again = [(await second.next(schema.Lease))[0] for _ in range(4)]
            assert [(a.lease_id, a.task_seed, a.indices) for a in sorted(again, key=lambda a: a.lease_id)] == [
                (b.lease_id, b.task_seed, b.indices) for b in lost
            ]
            stale = schema.Lease(**{f: getattr(again[0], f) for f in again[0].__struct_fields__} | {"attempt": 1})
            await second.peer.send(*samples(stale))
            refused, _ = await second.next(schema.SampleRefused)
            assert (refused.lease_id, refused.attempt) == (again[0].lease_id, 1)
            assert "abandoned" in refused.reason

    play(scene)


def test_a_job_goes_to_a_worker_and_its_verdict_back_also_after_a_death(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            actor = await s.guest("actor", "actor", 1)
            worker = await s.guest("sandbox", "worker-1", 1)
            job = schema.SandboxJob("j1", "python", {"main.py": b"print(1)"}, [schema.TestCase(b"", b"1")])
            await actor.peer.send(schema.Job("j1", 0, "code", None), pack_frames(job))
            body, frames = await worker.next(schema.Job)
            assert unpack_frames(frames, schema.SandboxJob) == job
            await worker.peer.close("crashed", 1)
            other = await s.guest("sandbox", "worker-2", 1)
            body, frames = await other.next(schema.Job)
            assert body.job_id == "j1"
            verdict = schema.Verdict("ok", 0, stdout=b"1")
            await other.peer.send(schema.JobDone("j1", "ok", 0.1), pack_frames(verdict))
            done, frames = await actor.next(schema.JobDone)
            assert done.outcome == "ok"
            assert unpack_frames(frames, schema.Verdict) == verdict
            assert (await s.status()).jobs == {"ok": 1}

    play(scene)


def test_one_broken_peer_is_closed_with_the_reason_and_hurts_no_other(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            learner = await s.learner()
            broken = await s.guest("actor", "broken", 1)
            lease, _ = await broken.next(schema.Lease)
            body, frames = samples(lease)
            await broken.peer.send(body, frames[:-1])  # a frame less than the specs say
            cause = await asyncio.wait_for(broken.peer.lost, 60.0)
            assert "4 arrays in 0 frames" in cause
            working = asyncio.create_task(work(await s.guest("actor", "honest", 4)))
            await learner.peer.send(schema.Demand("train", 2))
            groups = {(await learner.next(schema.Group))[0].group_id for _ in range(2)}
            assert lease.lease_id in groups or len(groups) == 2
            working.cancel()

    play(scene)


def test_a_second_learner_and_a_peer_of_another_run_are_refused_by_name(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.learner()
            with pytest.raises(ConfigError, match=r"role_taken.*already has a learner: learner"):
                await s.guest("learner", "rival")
            stranger = Guest(s.address, "actor", "stranger", 1, run_id="feedface")
            s.guests.append(stranger)
            with pytest.raises(TemperError, match=r"this is run [0-9a-f]{16}, the peer belongs to run feedface"):
                await stranger.peer.open(60)

    play(scene)


def test_a_learner_started_at_once_after_its_predecessor_was_killed_waits_for_the_place_and_gets_it(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            first = await s.learner()
            actor = await s.guest("actor", "actor-1", 1)
            lease, _ = await actor.next(schema.Lease)
            chatting = asyncio.create_task(chat(actor, lease))  # the broker has others to listen to in every turn
            first.peer.lose(PeerLost("killed: no goodbye"))
            second = await s.learner(lineage=2)  # before its silence can be told from a pause between two heartbeats
            await second.peer.send(schema.Demand("train", 1))
            chatting.cancel()
            while lease.lineage != 2:
                lease, _ = await actor.next(schema.Lease)
            await actor.peer.send(*samples(lease))
            group, _ = await second.next(schema.Group)
            assert group.group_id == lease.lease_id
            assert [p.name for p in (await s.status()).peers if p.role == "learner"] == ["learner"]

    play(scene)


def test_what_a_peer_may_have_under_way_is_bounded_and_a_larger_message_fails_at_its_sender(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.learner()
            actor = await s.guest("actor", "actor-1", 1)
            lease, _ = await actor.next(schema.Lease)
            body, _ = samples(lease)
            frame = bytes(LARGEST_BYTES // 2)
            with pytest.raises(ProtocolError, match=f"the peer takes at most {LARGEST_BYTES} at once: split it"):
                await actor.peer.send(body, [frame, frame])
            await actor.peer.send(*samples(lease))  # nothing is lost
            await actor.peer.flush(60)

    play(scene)


def test_status_says_who_waits_for_whom(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            assert "waiting for the learner: it has not come" in (await s.status()).reason
            learner = await s.learner()
            await learner.peer.send(schema.Demand("train", 2))
            await learner.peer.send(schema.Evaluate(0, [("a", 0, 1)], 1))
            await learner.peer.flush(60)
            status = await s.status()
            assert "waiting for an actor: none is connected" in status.reason
            assert "waiting for an evaluator: none is connected" in status.reason
            judge = await s.guest("eval", "judge", 1)
            lease, _ = await judge.next(schema.Lease)
            assert (lease.lane, lease.pinned_version, lease.task_seed) == ("eval", 0, 0)
            await judge.peer.send(*samples(lease))
            group, _ = await learner.next(schema.Group)
            assert (group.lane, group.pinned_version, group.void) == ("eval", 0, None)
            status = await s.status()
            assert {peer.name: peer.role for peer in status.peers} == {"learner": "learner", "judge": "eval"}
            assert (status.phase, status.max_steps, status.name) == ("train", 3, "script")

    play(scene)


def test_the_bundle_reaches_those_who_asked_before_it_was_there(tmp_path: Path) -> None:
    from temper.broker.bundle import digest

    async def scene() -> None:
        async with stage(tmp_path) as s:
            early = await s.guest("actor", "early", 1)
            await early.peer.send(schema.NeedBundle())
            learner = await s.learner()
            files = [b'{"hidden_size": 64}', b"tokens"]
            entries = [schema.BundleFile(f"f{i}.json", digest([data]), 1) for i, data in enumerate(files)]
            await learner.peer.send(schema.Bundle(entries, "micro"), files)
            bundle, frames = await early.next(schema.Bundle)
            assert (bundle.model, [bytes(frame) for frame in frames]) == ("micro", files)
            evil = [schema.BundleFile("../../escape", digest([b"x"]), 1)]
            await learner.peer.send(schema.Bundle(evil), [b"x"])
            assert "plain file name" in await asyncio.wait_for(learner.peer.lost, 60.0)

    play(scene)


def test_sigterm_drains_and_a_resume_queues_the_old_groups_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            learner = await s.learner()
            actor = await s.guest("actor", "actor", 4)
            leases = [(await actor.next(schema.Lease))[0] for _ in range(4)]
            for lease in leases[:3]:
                await actor.peer.send(*samples(lease))
            await learner.peer.send(schema.Demand("train", 2))
            taken = [(await learner.next(schema.Group))[0].group_id for _ in range(2)]
            await actor.peer.flush(60)
            assert s.process is not None
            s.process.send_signal(signal.SIGTERM)
            await actor.next(schema.Drain)
            await actor.peer.send(schema.Return(leases[3].lease_id, 1, "drain", "SIGTERM"))
            await actor.peer.close("drained", 0)
            await learner.peer.close("drained", 0)
            assert (await s.end())[0] == 0
            await s.start("--resume")
            heir = await s.learner(lineage=2)
            helper = await s.guest("actor", "helper", 4)
            lease, _ = await helper.next(schema.Lease)
            assert (lease.lease_id, lease.attempt, lease.lineage) == (leases[3].lease_id, 2, 2)
            await heir.peer.send(schema.Demand("train", 3))
            again = [await heir.next(schema.Group) for _ in range(3)]
            assert [group.group_id for group, _ in again] == [*taken, leases[2].lease_id]
            tokens = unpack_arrays(again[0][0].parts[0].arrays, again[0][1])["tokens"]
            assert tokens.tolist() == [taken[0], 0, 7, 8, taken[0], 1, 7, 8]

    play(scene)


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.learner()
            actor = await s.guest("actor", "actor", 4)
            leases = [(await actor.next(schema.Lease))[0] for _ in range(4)]
            for lease in leases:
                await actor.peer.send(*samples(lease))
            await actor.peer.flush(60)
            assert s.process is not None
            s.process.kill()
            await s.process.wait()
            await s.start("--resume")
            status = await s.status()
            assert (status.queued_groups, status.leases_in_flight) == (4, 0)

    play(scene)


def test_peers_live_through_a_kill_of_the_broker(tmp_path: Path) -> None:
    """Killed with leases out, samples unsent, a group at the learner and a job running: everything goes on, once."""

    async def scene() -> None:
        async with stage(tmp_path) as s:
            learner = await s.learner()
            actor = await s.guest("actor", "actor", 4)
            worker = await s.guest("sandbox", "worker", 1)
            leases = [(await actor.next(schema.Lease))[0] for _ in range(4)]
            await actor.peer.send(*samples(leases[0]))
            await learner.peer.send(schema.Demand("train", 2))
            first, _ = await learner.next(schema.Group)
            job = pack_frames(schema.SandboxJob("j", "python", {"main.py": b""}, []))
            await actor.peer.send(schema.Job("j", 0, "a", None), job)
            await worker.next(schema.Job)
            await asyncio.gather(*(guest.peer.flush(60) for guest in (learner, actor, worker)))
            assert s.process is not None
            s.process.kill()
            await s.process.wait()

            learner.holds(groups=[first.group_id], demand={"train": 1})
            actor.holds(attempts=[(lease.lease_id, 1) for lease in leases[2:]])
            worker.holds(jobs=["j"])
            await actor.peer.send(*samples(leases[1]))  # into the resend window: nobody is there
            await s.start("--resume")
            second, _ = await learner.next(schema.Group)
            assert (first.group_id, second.group_id) == (leases[0].lease_id, leases[1].lease_id)
            await actor.peer.send(schema.Job("j", 0, "a", None), job)  # the same job, which still runs
            await actor.peer.flush(60)
            await worker.peer.send(schema.JobDone("j", "ok"), pack_frames(schema.Verdict("ok")))
            assert (await actor.next(schema.JobDone))[0].job_id == "j"
            assert worker.queues[schema.Job].empty()
            for lease in leases[2:]:
                await actor.peer.send(*samples(lease))
            await learner.peer.send(schema.Done(0, [first.group_id, second.group_id], {}, True))
            fresh = [(await actor.next(schema.Lease))[0] for _ in range(2)]
            after = 4 + SPARE_IDS  # ids that the killed one might have given out already
            assert [(lease.lease_id, lease.attempt, lease.min_version) for lease in fresh] == [
                (after, 1, 1),
                (after + 1, 1, 1),
            ]
            assert actor.queues[schema.SampleRefused].empty()
            status = await s.status()
            assert (status.steps_done, status.queued_groups, status.leases_in_flight) == (1, 2, 2)

    play(scene)


def test_what_was_lost_on_its_way_when_the_broker_died_goes_out_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            learner = await s.learner()
            actor = await s.guest("actor", "actor", 4)
            leases = [(await actor.next(schema.Lease))[0] for _ in range(4)]
            for lease in leases[:2]:
                await actor.peer.send(*samples(lease))
            await learner.peer.send(schema.Demand("train", 2))
            groups = [(await learner.next(schema.Group))[0].group_id for _ in range(2)]
            await asyncio.gather(*(guest.peer.flush(60) for guest in (learner, actor)))
            assert s.process is not None
            s.process.kill()
            await s.process.wait()
            # as if the second group and the last lease had never arrived
            learner.holds(groups=groups[:1], demand={"train": 1})
            held = [(leases[2].lease_id, 1), (77, 1)]
            actor.holds(attempts=held)
            await s.start("--resume")
            assert (await learner.next(schema.Group))[0].group_id == groups[1]
            again, _ = await actor.next(schema.Lease)
            assert (again.lease_id, again.attempt, again.task_seed) == (leases[3].lease_id, 2, leases[3].task_seed)
            assert (await actor.next(schema.SampleRefused))[0].lease_id == 77

    play(scene)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--pacing.groups_per_stp=1",), 2, "groups_per_step"),
        (("--bind", "tcp://127.0.0.1:7000"), 2, "temper keys new"),
        (("--bind", "ipc://" + "x" * 120), 2, "at most 107"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    scene = Stage(tmp_path, *arguments)
    done = run(scene.command)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("temper broker: ")


def test_a_folder_with_a_run_wants_resume_and_a_place_has_one_broker(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            twin = await asyncio.to_thread(run, s.command)
            assert twin.returncode == 2
            assert "go on with it by --resume" in twin.stderr
            other = [part.replace(str(s.run_dir), str(tmp_path / "other")) for part in s.command]
            rival = await asyncio.to_thread(run, other)
            assert rival.returncode == 4
            assert "is served by another broker" in rival.stderr

    play(scene)


def test_an_actor_gets_leases_only_while_it_says_ready(tmp_path: Path) -> None:
    """An engine may start for minutes: no lease waits for it, nobody's weights_timeout_s runs out."""

    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.learner()
            slow = Guest(s.address, "actor", "slow", 4)
            slow.peer.beat("STARTING")
            s.guests.append(slow)
            await slow.peer.open(60)
            quick = await s.guest("actor", "quick", 2)
            leases = [(await quick.next(schema.Lease))[0] for _ in range(2)]
            while (status := await s.status()).leases_in_flight < 2:
                pass
            assert status.leases_in_flight == 2 and slow.queues[schema.Lease].empty()
            slow.peer.beat("READY")
            assert (await slow.next(schema.Lease))[0].lease_id == 2
            assert (await slow.next(schema.Lease))[0].lease_id == 3
            quick.peer.beat("STARTING")  # its engine has died and comes back
            for lease in leases:
                await quick.peer.send(*samples(lease))
            await quick.peer.flush(60)
            assert (await s.status()).leases_in_flight == 2 and quick.queues[schema.Lease].empty()

    play(scene)
