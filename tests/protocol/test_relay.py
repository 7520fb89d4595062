"""Relays: what passes through them, what they keep, and what their death and their parent's death does."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_stage import Guest, Stage, play, samples, stage
from relay_stage import LightActor, Relay, Writer, guest_at, relays, tensors, weights_of
from temper.common import schema
from temper.common.errors import ConfigError
from temper.common.schema import pack_frames, unpack_frames
from temper.common.wire import HEADER_BYTES, MAGIC, PROTOCOL, pack_fields

SIZE = 200_000  # values; 800 kB


async def train(learner: Guest, version: int) -> list[int]:
    """One step of two groups."""
    await learner.peer.send(schema.Demand("train", 2))
    batch = [(await learner.next(schema.Group))[0].group_id for _ in range(2)]
    await learner.peer.send(schema.Done(version, batch, {}, True))
    return batch


async def work(actor: Guest) -> None:
    while True:
        lease, _ = await actor.next(schema.Lease)
        await actor.peer.send(schema.Touch(lease.lease_id, lease.attempt))
        await actor.peer.send(*samples(lease))


def test_leases_samples_jobs_and_the_end_pass_two_relays_unchanged(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path, 2) as (near, far):
            learner = await s.learner()
            actor = await guest_at(s, far.address, "actor", "actor-far", 4)
            worker = await guest_at(s, far.address, "sandbox", "worker-far", 1)
            working = asyncio.create_task(work(actor))
            job = schema.SandboxJob("j1", "python", {"main.py": b"print(1)" * 50_000}, [schema.TestCase(b"", b"1")])
            await actor.peer.send(schema.Job("j1", 0, "code", None), pack_frames(job))
            _, frames = await worker.next(schema.Job)
            assert unpack_frames(frames, schema.SandboxJob) == job
            await worker.peer.send(schema.JobDone("j1", "ok", 0.1), pack_frames(schema.Verdict("ok", 0)))
            done, _ = await actor.next(schema.JobDone)
            assert done.outcome == "ok"
            trained = [group for version in range(3) for group in await train(learner, version)]
            assert sorted(trained) == list(range(6))
            client = await guest_at(s, far.address, "status", "status")
            client.peer.post(schema.StatusRequest())
            _, frames = await client.next(schema.StatusReport)
            status = await s.status()
            assert bytes(frames[0])[:1] == b"{"
            via = {peer.name: peer.via for peer in status.peers}
            assert via == {
                "learner": [],
                "actor-far": ["relay-2", "relay-1"],
                "worker-far": ["relay-2", "relay-1"],
                "relay-1": [],
                "relay-2": ["relay-1"],
            }
            working.cancel()
            await learner.peer.send(schema.RunOver("max_steps reached", 0))
            await actor.next(schema.Drain)
            await worker.next(schema.Drain)
            await actor.peer.close("drained", 0)
            await worker.peer.close("drained", 0)
            await learner.peer.close("run over", 0)
            for process in (far, near, s):
                code, errors = await process.end()
                assert code == 0, errors

    play(scene)


def test_each_chunk_is_fetched_once_for_a_site_and_verified(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path, 2) as (_, far):
            writer = Writer(await s.learner(), 1)
            first = await writer.publish(SIZE, 0)
            actors = [await LightActor(s, far.address, f"actor-{i}").open() for i in range(8)]
            assert set(await asyncio.gather(*(actor.swap() for actor in actors))) == {first}
            stored = await weights_of(s)
            assert stored.served_bytes == stored.stored_bytes  # one copy for both relays and eight actors
            last = await writer.publish(SIZE, 1)
            last = await writer.publish(SIZE, 2)
            await asyncio.gather(*(actor.swap_until(last) for actor in actors))
            stored = await weights_of(s)
            assert stored.served_bytes == stored.stored_bytes
            assert all(actor.client.fetched_nbytes == stored.stored_bytes for actor in actors)
            assert not any(actor.client.reseeds for actor in actors)
            pinned = await LightActor(s, far.address, "eval", "eval").open()
            assert await pinned.swap(first.ordinal) == first
            assert (await weights_of(s)).served_bytes == stored.stored_bytes
            await writer.close()

    play(scene)


@pytest.mark.parametrize("depth", [0, 1])
def test_sixty_four_light_actors_join_at_once_while_versions_go_on(tmp_path: Path, depth: int) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path, depth) as chain:
            learner = await s.guest("learner", "learner")
            await learner.peer.send(schema.LearnerReady(1, None, 0, 0))
            writer = Writer(learner, 1)
            await writer.publish(20_000, 0)
            site = chain[-1].address if chain else s.address
            actors = [LightActor(s, site, f"actor-{i}") for i in range(64)]
            await asyncio.gather(*(actor.open() for actor in actors))
            joining = asyncio.gather(*(actor.swap() for actor in actors))
            for ordinal in range(1, 5):
                newest = await writer.publish(20_000, ordinal)
            await joining
            await asyncio.gather(*(actor.swap_until(newest) for actor in actors))
            assert {actor.client.version for actor in actors} == {newest}
            assert not any(actor.client.reseeds for actor in actors)
            stored = await weights_of(s)
            fetched = sum(actor.client.fetched_nbytes for actor in actors)
            assert stored.served_bytes == (stored.stored_bytes if depth else fetched)
            assert fetched == 64 * stored.stored_bytes or not depth
            await writer.close()

    play(scene)


def test_a_version_older_than_the_relays_log_is_asked_of_the_parent(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            learner = await s.learner()
            writer = Writer(learner, 1)
            first = await writer.publish(SIZE, 0, keep=True)
            await writer.publish(SIZE, 1)
            await writer.publish(SIZE, 2, seed=1)  # a snapshot, so that a newcomer does not pass version 0
            async with relays(s, tmp_path) as (relay,):
                actor = await LightActor(s, relay.address, "actor").open()
                assert (await actor.swap()).ordinal == 2
                pinned = await LightActor(s, relay.address, "eval", "eval").open()
                assert await pinned.swap(0) == first
                assert (await actor.swap()).ordinal == 2
                await writer.publish(SIZE, 3, seed=1)
                assert (await pinned.swap(3)).ordinal == 3
            await writer.close()

    play(scene)


def test_a_learner_behind_relays_publishes_through_them_and_bears_their_death(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path, 2) as (near, far):
            learner = await guest_at(s, far.address, "learner", "learner")
            await learner.peer.send(schema.LearnerReady(1, None, 0, 0))
            writer = Writer(learner, 1)
            first = await writer.publish(SIZE, 0)
            actor = await LightActor(s, far.address, "actor").open()
            home = await LightActor(s, s.address, "home").open()
            assert await actor.swap() == await home.swap() == first
            await far.kill()
            await writer.publisher.publish(1, tensors(SIZE, 1))
            await far.start()
            await writer.publisher.flush(30.0)
            second = writer.publisher.stored
            assert second is not None and second.ordinal == 1
            await asyncio.gather(actor.swap_until(second), home.swap_until(second))
            await near.kill()
            await near.start()
            third = await writer.publish(SIZE, 2)
            await asyncio.gather(actor.swap_until(third), home.swap_until(third))
            assert not actor.client.reseeds and not home.client.reseeds
            await writer.close()

    play(scene)


def test_a_new_lineage_reaches_the_site_and_orphans_are_not_mixed_in(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path) as (relay,):
            learner = await s.learner(1)
            writer = Writer(learner, 1)
            await writer.publish(SIZE, 0)
            await writer.publish(SIZE, 5)
            actor = await LightActor(s, relay.address, "actor").open()
            assert (await actor.swap()).ordinal == 5
            await writer.close()
            await learner.peer.close("killed", 1)
            again = Writer(await s.learner(2, resumed=1), 2)
            resumed = await again.publish(SIZE, 1)
            await actor.swap_until(resumed)
            assert actor.client.version is not None and actor.client.version.lineage == 2
            await again.close()

    play(scene)


def test_a_killed_relay_comes_back_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path, 2) as (near, far):
            learner = await s.learner()
            writer = Writer(learner, 1)
            await writer.publish(SIZE, 0)
            actor = await guest_at(s, far.address, "actor", "actor", 4)
            follower = await LightActor(s, far.address, "follower", "eval").open()
            await follower.swap()
            working = asyncio.create_task(work(actor))
            trained = await train(learner, 0)
            for version, relay in ((1, near), (2, far)):
                await relay.kill()
                batch = asyncio.create_task(train(learner, version))
                await relay.start()
                trained += await batch
                newest = await writer.publish(SIZE, version)
                await follower.swap_until(newest)
            working.cancel()
            assert sorted(trained) == list(range(6))
            status = await s.status()
            assert {peer.name for peer in status.peers} >= {"actor", "follower"}
            assert status.attempts.get("returned", 0) == status.attempts.get("expired", 0) == 0
            stored = await weights_of(s)
            assert stored.served_bytes == stored.stored_bytes  # what a relay had on disk it did not fetch again
            assert follower.client.fetched_nbytes == stored.stored_bytes
            await writer.close()

    play(scene)


def test_the_parent_is_killed_and_comes_back(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path) as (relay,):
            learner = await s.learner()
            writer = Writer(learner, 1)
            newest = await writer.publish(SIZE, 0)
            actor = await guest_at(s, relay.address, "actor", "actor", 4)
            held = [(await actor.next(schema.Lease))[0] for _ in range(4)]
            actor.holds(attempts=[(lease.lease_id, lease.attempt) for lease in held])
            await actor.peer.send(*samples(held[0]))
            await actor.peer.flush(10.0)
            resumed = asyncio.Event()

            def resume(welcome: schema.Welcome) -> None:
                learner.peer.post(schema.Holding(learner.peer.broker_epoch))
                resumed.set()

            learner.peer.on_resync = resume
            assert s.process is not None
            s.process.kill()
            await s.process.wait()
            joiner = LightActor(s, relay.address, "joiner", "eval")
            opening = asyncio.create_task(joiner.open())
            await actor.peer.send(*samples(held[1]))
            await s.start("--resume")
            await opening
            assert await joiner.swap() == newest
            for lease in held[2:]:
                await actor.peer.send(*samples(lease))
            await asyncio.wait_for(resumed.wait(), 60.0)
            trained = await train(learner, 0) + await train(learner, 1)
            assert sorted(trained) == [lease.lease_id for lease in held]
            assert learner.queues[schema.Group].empty()
            await writer.close()

    play(scene)


def test_a_hostile_peer_is_shut_out_by_the_relay_and_hurts_nobody(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path) as (relay,):
            await s.learner()
            good = await guest_at(s, relay.address, "actor", "good", 4)
            for name in ("frames", "kind", "size", "protocol"):
                bad = await guest_at(s, relay.address, "actor", f"bad-{name}", 0)
                link = bad.peer._sides[0].link
                header = {
                    "frames": lambda e: schema_header(schema.Heartbeat.KIND, e, 0, 4),
                    "kind": lambda e: schema_header(200, e, 1, 1),
                    "size": lambda e: schema_header(schema.Touch.KIND, e, 1, 999),
                    "protocol": lambda e: MAGIC + bytes([PROTOCOL + 1]) + bytes(HEADER_BYTES - 5),
                }[name](bad.peer.epoch)
                link.send(b"", header, b"\x90", [b"123"] if name == "frames" else [])
                cause = await asyncio.wait_for(asyncio.shield(bad.peer.lost), 60.0)
                assert "malformed" in cause, cause
                assert name != "protocol" or f"protocol {PROTOCOL + 1}, this process speaks {PROTOCOL}" in cause
            relay_lease, _ = await good.next(schema.Lease)
            await good.peer.send(*samples(relay_lease))
            await good.peer.flush(10.0)
            second = Guest(relay.address, "learner", "second-learner")
            other = Guest(relay.address, "actor", "of-another-run", run_id="another")
            s.guests += [second, other]
            with pytest.raises(ConfigError, match="already has a learner: learner"):
                await second.peer.open(10.0)
            with pytest.raises(ConfigError, match="belongs to run another"):
                await other.peer.open(10.0)

    play(scene)


def schema_header(kind: int, epoch: int, sequence: int, size: int) -> bytes:
    return pack_fields(kind, 0, 0, epoch, sequence, size)


def test_a_flood_beyond_the_credit_ends_its_sender_and_the_relay_keeps_little_of_it(tmp_path: Path) -> None:
    """A slow consumer, a peer that never reads: the producer is stopped, others go on, memory stays."""

    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path) as (relay,):
            await s.learner()
            good = await guest_at(s, relay.address, "actor", "good", 4)
            flood = await guest_at(s, relay.address, "actor", "flood", 0)
            link, epoch = flood.peer._sides[0].link, flood.peer.epoch
            assert relay.process is not None
            before = rss(relay.process.pid)
            sequence = 0
            payload = bytes(1 << 20)
            while not flood.peer.over:
                sequence += 1
                header = pack_fields(schema.Samples.KIND, 0, 0, epoch, sequence, len(payload) + 1)
                link.send(b"", header, b"\x90", [payload])
                await asyncio.sleep(0)
            cause = await asyncio.shield(flood.peer.lost)
            assert "refused" in cause, cause
            lease, _ = await good.next(schema.Lease)
            await good.peer.send(*samples(lease))
            await good.peer.flush(10.0)
            assert rss(relay.process.pid) - before < 300 << 20

    play(scene)


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_stopped_relay_exits_cleanly_and_a_successor_takes_its_site_over(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s, relays(s, tmp_path) as (relay,):
            learner = await s.learner()
            actor = await guest_at(s, relay.address, "actor", "actor", 4)
            working = asyncio.create_task(work(actor))
            await train(learner, 0)
            assert relay.process is not None
            relay.process.send_signal(signal.SIGTERM)
            code, errors = await relay.end()
            assert code == 0 and "1 peers of this site wait for this relay's return: actor" in errors, errors
            await relay.start()
            assert sorted(await train(learner, 1)) == [2, 3]
            working.cancel()

    play(scene)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--relay", "ipc://none/p", "--connect-timeout", "0.3"], 3, "no broker answered"),
        (["demo", "--relay", "ipc://none/p"], 2, "leave 'demo' out"),
        (["--relay", "ipc://none/p", "--resume"], 2, "leave --resume out"),
        (["--relay", "tcp://127.0.0.1:9"], 2, "needs a key file"),
        (["--relay", "ipc://none/p", "--bind", "ipc://none/p"], 2, "its own parent"),
        (["--relay", "ipc://none/p", "--bind", "tcp://127.0.0.1:9"], 2, "needs keys"),
        ([], 2, "no recipe given"),
    ],
)
def test_what_a_relay_cannot_do_is_said_in_one_line(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    async def scene() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "temper.broker", "--run", str(tmp_path / "r"), *arguments,
            cwd=tmp_path, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == code, errors
        assert said in errors.decode().splitlines()[-1]
        assert b"Traceback" not in errors

    play(scene)


def test_a_relays_directory_belongs_to_one_run(tmp_path: Path) -> None:
    async def scene() -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        async with stage(tmp_path / "one") as first, stage(tmp_path / "two") as second:
            relay = Relay(tmp_path, "relay", first.address)
            await relay.start()
            await relay.kill()
            moved = Relay(tmp_path, "relay", second.address)
            with pytest.raises(AssertionError, match="belongs to run"):
                await moved.start()
            assert (await moved.end())[0] == 2
            broker = Stage(tmp_path / "one")
            taken = Relay(tmp_path, "other", first.address)
            taken.command[taken.command.index("--run") + 1] = str(broker.run_dir)
            with pytest.raises(AssertionError, match="the directory of a run's broker"):
                await taken.start()

    play(scene)
