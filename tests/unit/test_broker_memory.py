"""The broker's memory is bounded by bytes: steps leave nothing behind, and a learner that takes nothing stops the actors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from temper.broker import events as ev
from temper.broker.control import ControlDesk
from temper.broker.core import BrokerCore
from temper.broker.guests import Guests
from temper.broker.ledger import Ledger
from temper.common import burst, schema
from temper.common.arrays import divide, pack_arrays, unpack_arrays
from temper.common.config import Pacing, Recipe, Run
from temper.common.delivery import Delivery, DeliveryRun
from temper.common.metrics import Meter
from temper.common.wire import pack_meta, unpack_meta

MIB = 1024 * 1024
ACTOR, LEARNER = b"actor", b"learner"


class Wire:
    """In place of a Router: keeps what is sent."""

    epoch = 1

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, schema.Body, Sequence[Any]]] = []
        self.acknowledged = 0

    def send(self, peer: bytes, body: schema.Body, frames: Sequence[Any] = (), version: int = 0) -> bool:
        self.sent.append((peer, body, frames))
        return True

    def forward(self, peer: bytes, kind: int, meta: bytes, frames: Sequence[Any]) -> None:
        self.sent.append((peer, unpack_meta(meta, schema.BODIES[kind]), frames))

    def acknowledge(self, peer: bytes, sequence: int) -> None:
        self.acknowledged += 1

    def answer(self) -> None:
        pass

    def take(self) -> list[tuple[bytes, schema.Body, Sequence[Any]]]:
        sent, self.sent = self.sent, []
        return sent


def delivery(peer: bytes, body: schema.Body, frames: Sequence[Any] = ()) -> Delivery:
    """A message as it comes."""
    meta = pack_meta(body)
    size = len(meta) + sum(len(frame) for frame in frames)
    return Delivery(peer, type(body), (), body.KIND, 1, size, meta, list(frames))  # type: ignore[arg-type]


class Desk:
    """A control desk without sockets."""

    def __init__(self, folder: Path, cache_bytes: int, **pacing: Any) -> None:
        recipe = Recipe(run=Run(max_steps=1_000_000), pacing=Pacing(samples_per_group=1, max_staleness=0, **pacing))
        self.core, guests = BrokerCore(recipe), Guests("run")
        self.ledger = Ledger(folder, "run", "memory", cache_bytes=cache_bytes)
        self.wire = Wire()
        self.desk = ControlDesk(
            self.core,
            self.ledger,
            guests,
            Meter("broker"),
            finish=lambda over: None,
            broken=self.broken,
            status=lambda: b"",
            fail_after_s=1.0,
        )
        self.desk.router = self.wire  # type: ignore[assignment]
        for peer, role in ((LEARNER, "learner"), (ACTOR, "actor")):
            key = guests.add(peer, schema.Hello(role, role, "session"))  # type: ignore[arg-type]
            self.desk.take(ev.Joined(key, role, role, 1000))  # type: ignore[arg-type]

    def broken(self, error: Exception) -> None:
        raise error

    async def say(self, peer: bytes, body: schema.Body, frames: Sequence[Any] = ()) -> None:
        self.desk.on_batch([delivery(peer, body, frames)])
        await self.desk.settled()


def burst_of(metas: list[bytes], frames: list[list[bytes]]) -> DeliveryRun:
    """Samples messages as they come together."""
    meta, joined = burst.join(list(zip(metas, frames, strict=True)))
    outline = burst.outline(len(metas), schema.Samples.KIND, [meta, *joined])
    return DeliveryRun(ACTOR, schema.Samples.KIND, len(metas), *outline)


def sample(lease: schema.Lease, payload_bytes: int, token: int | None = None) -> tuple[schema.Samples, list[bytes]]:
    tokens = payload_bytes // 9
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    specs, frames = pack_arrays(
        {
            "tokens": np.full(tokens, lease.lease_id % 1000 if token is None else token, np.int32),
            "behaviour_logprob": np.full(tokens, -1.0, np.float32),
            "loss_mask": mask,
            "cu_seqlens": np.array([0, tokens], np.int64),
        }
    )
    meta = schema.SampleMeta(0, "stop", 1.0, True, {}, "ok", [(1, lease.min_version, tokens)])
    return schema.Samples(lease.lease_id, lease.attempt, 1, [meta], specs), [bytes(frame) for frame in frames]


def rss() -> int:
    return psutil.Process().memory_info().rss


def test_a_thousand_steps_of_a_mebibyte_leave_nothing_behind(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path, 8 * MIB, groups_per_step=1)
        await desk.say(LEARNER, schema.LearnerReady(1, None, 0, 0))
        await desk.say(LEARNER, schema.Phase("train", {"a": (0, 1.0)}, 1, 1))
        before = 0
        for version in range(1000):
            await desk.say(LEARNER, schema.Demand("train", 1))
            (lease,) = (body for _, body, _ in desk.wire.take() if isinstance(body, schema.Lease))
            await desk.say(ACTOR, *sample(lease, MIB))
            ((_, group, frames),) = desk.wire.take()
            assert isinstance(group, schema.Group)
            assert sum(len(frame) for frame in frames) > 0.9 * MIB
            await desk.say(LEARNER, schema.Done(version, [group.group_id], {}, True))
            if version % 10 == 9:
                await desk.say(LEARNER, schema.Covered(version + 1, version + 1, "", version + 1))
                desk.desk.commits.settle(force=True)
                await desk.desk.settled()
            if version == 100:
                before = rss()
        assert rss() - before < 20 * MIB
        assert len(desk.core.leases.leases) < 20
        assert sum(file.stat().st_size for file in (tmp_path / "segments").iterdir()) < 100 * MIB

    asyncio.run(play())


def test_samples_of_one_burst_are_kept_as_if_each_had_come_alone(tmp_path: Path) -> None:
    """Interleaved leases, a repeat and an index that there is not."""

    async def play() -> None:
        desk = Desk(tmp_path, 8 * MIB, groups_per_step=4)
        await desk.say(LEARNER, schema.LearnerReady(1, None, 0, 0))
        await desk.say(LEARNER, schema.Phase("train", {"a": (0, 1.0)}, 4, 2))
        await desk.say(LEARNER, schema.Demand("train", 4))
        leases = [body for _, body, _ in desk.wire.take() if isinstance(body, schema.Lease)]
        metas, frames = [], []
        for lease, index in [(0, 0), (1, 0), (0, 0), (2, 0), (0, 1), (2, 7), (1, 1), (2, 0)]:
            body, own = sample(leases[lease], 90)
            (meta,) = body.samples
            meta = msgspec.structs.replace(meta, index=index, reward=float(index), correct=bool(index))
            metas.append(pack_meta(msgspec.structs.replace(body, samples=[meta])))
            frames.append(own)
        desk.desk.on_batch([burst_of(metas, frames)])
        told = [body for _, body, _ in desk.wire.take()]
        groups = {body.group_id: len(body.parts) for body in told if isinstance(body, schema.Group)}
        assert groups == {leases[0].lease_id: 2, leases[1].lease_id: 2}
        (refused,) = (body for body in told if isinstance(body, schema.SampleRefused))
        assert (refused.lease_id, refused.reason[:18]) == (leases[2].lease_id, "sample indices [7]")
        assert dict(desk.desk.samples) == {"accepted": 5, "refused": 1}
        assert desk.core.leases.leases[leases[2].lease_id].have == {0}
        parts = [part for part, _ in desk.ledger.read(leases[0].lease_id)]
        assert [part.samples[0].index for part in parts] == [0, 1]

    asyncio.run(play())


@pytest.mark.parametrize("room", [8 * MIB, 0])
def test_samples_of_a_lease_that_came_together_reach_the_learner_each_with_its_arrays(
    tmp_path: Path, room: int
) -> None:
    """From memory, and from the segments where there is no room."""

    async def play() -> None:
        desk = Desk(tmp_path, room, groups_per_step=2)
        await desk.say(LEARNER, schema.LearnerReady(1, None, 0, 0))
        await desk.say(LEARNER, schema.Phase("train", {"a": (0, 1.0)}, 2, 6))
        leases = [body for _, body, _ in desk.wire.take() if isinstance(body, schema.Lease)]
        metas, frames = [], []
        for lease in leases:
            for index in lease.indices:
                body, own = sample(lease, 900, token=100 * (lease.lease_id + 1) + index)
                meta = msgspec.structs.replace(
                    body.samples[0], index=index, reward=float(index & 1), correct=bool(index & 1)
                )
                metas.append(pack_meta(msgspec.structs.replace(body, samples=[meta])))
                frames.append(own)
        desk.desk.on_batch([burst_of(metas, frames)])
        await desk.desk.settled()
        kept = desk.ledger.messages(leases[0].lease_id)
        assert [len(own) for _, own in kept] == [1, 0, 0, 0, 0, 0]
        await desk.say(LEARNER, schema.Demand("train", 2))
        groups = [(body, own) for _, body, own in desk.wire.take() if isinstance(body, schema.Group)]
        assert len(groups) == 2
        for body, own in groups:
            parts = unpack_meta(pack_meta(body), schema.Group).parts
            arrays = divide([part.arrays for part in parts], own)
            found = {
                part.samples[0].index: unpack_arrays(part.arrays, each)
                for part, each in zip(parts, arrays, strict=True)
            }
            assert {index: set(each["tokens"].tolist()) for index, each in found.items()} == {
                index: {100 * (body.group_id + 1) + index} for index in range(6)
            }

    asyncio.run(play())


@pytest.mark.parametrize("cap", [4 * MIB])
def test_a_learner_that_takes_nothing_stops_the_actors_and_the_rest_lies_on_disk(tmp_path: Path, cap: int) -> None:
    async def play() -> None:
        desk = Desk(tmp_path, cap, groups_per_step=64)
        await desk.say(LEARNER, schema.LearnerReady(1, None, 0, 0))
        await desk.say(LEARNER, schema.Phase("train", {"a": (0, 1.0)}, 64, 1))
        leases = [body for _, body, _ in desk.wire.take() if isinstance(body, schema.Lease)]
        assert len(leases) == 64
        before = rss()
        for lease in leases:
            await desk.say(ACTOR, *sample(lease, MIB))
            assert desk.ledger.payloads.cached_bytes <= cap + MIB
        assert desk.wire.take() == []  # nothing more goes out
        assert desk.wire.acknowledged > 64
        assert rss() - before < cap + 16 * MIB
        await desk.say(LEARNER, schema.Demand("train", 64))
        groups = desk.wire.take()
        assert [body.group_id for _, body, _ in groups] == [lease.lease_id for lease in leases]  # type: ignore[attr-defined]
        for _, body, frames in groups:
            assert np.frombuffer(frames[0], np.int32)[0] == body.group_id % 1000  # type: ignore[attr-defined]

    asyncio.run(play())
