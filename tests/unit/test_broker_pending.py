"""With durability "memory" samples are acknowledged first and decided about together, soon, before anything that depends on it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.broker import events as ev
from temper.broker.pending import EVERY_S, MUCH_BYTES, MUCH_MESSAGES, STEP_MESSAGES, Pending
from temper.common import schema
from temper.common.delivery import Delivery, DeliveryRun
from temper.common.wire import pack_meta

from tests.unit.test_broker_memory import ACTOR, LEARNER, MIB, Desk, delivery, sample

STEPS = st.lists(st.tuples(st.floats(0, 2 * EVERY_S), st.sampled_from([1, 1000, MUCH_BYTES // 2])), max_size=400)


@given(STEPS)
def test_they_wait_only_after_others_were_decided_about_and_never_long_or_many(steps: list[tuple[float, int]]) -> None:
    pending, now, decided, due = Pending(), 0.0, float("-inf"), float("inf")
    out: list[bytes] = []
    for number, (gap_s, size) in enumerate(steps):
        if now + gap_s >= due:  # the caller's timer
            out += pending.take(due).metas
            decided, due = due, float("inf")
        now += gap_s
        pending.add("peer", Delivery(b"peer", schema.Samples, (), 1, 1, size, b"%d" % number, []))  # type: ignore[arg-type]
        left_s = pending.left_s(now)
        if left_s:
            assert now < decided + EVERY_S and left_s <= EVERY_S + 1e-9 and len(pending) < MUCH_MESSAGES
            due = min(due, now + left_s)
        else:
            out += pending.take(now).metas
            decided, due = now, float("inf")
        assert due <= now + EVERY_S + 1e-9 or not pending
    out += pending.take(now).metas
    assert out == [b"%d" % i for i in range(len(steps))]


def _run(count: int) -> DeliveryRun:
    data = [b"%d" % i for i in range(count)]
    return DeliveryRun(b"peer", schema.Samples.KIND, count, [1] * count, data, memoryview(b""), (-1,) * count)


@given(st.lists(st.integers(1, 60), max_size=20), st.lists(st.integers(1, 80)))
def test_steps_take_whole_deliveries_in_order_and_no_more_than_reaches_their_number(
    counts: list[int], steps: list[int]
) -> None:
    pending = Pending()
    for count in counts:
        pending.add("peer", _run(count))
    left = list(counts)
    for most in [*steps, None]:
        expected: list[bytes] = []
        while left and (most is None or len(expected) < most):
            expected += _run(left.pop(0)).metas
        assert pending.take(0.0, most).metas == expected
        assert len(pending) == sum(left)


async def _ready(folder: Path) -> tuple[Desk, list[Delivery]]:
    """A desk where samples wait, and samples of three leases."""
    desk = Desk(folder, 8 * MIB, groups_per_step=4)
    await desk.say(LEARNER, schema.LearnerReady(1, None, 0, 0))
    await desk.say(LEARNER, schema.Phase("train", {"a": (0, 1.0)}, 4, 1))
    await desk.say(LEARNER, schema.Demand("train", 4))
    leases = [body for _, body, _ in desk.wire.take() if isinstance(body, schema.Lease)]
    desk.desk._pending._next_at = float("inf")  # however slow this machine is
    desk.wire.acknowledged = 0
    return desk, [delivery(ACTOR, *sample(lease, 90)) for lease in leases[:3]]


def test_samples_are_acknowledged_at_once_and_their_groups_follow(tmp_path: Path) -> None:
    async def play() -> None:
        desk, samples = await _ready(tmp_path)
        for number, each in enumerate(samples, 1):
            desk.desk.on_batch([each])
            assert desk.wire.acknowledged == number and not desk.wire.sent
            assert desk.desk.samples["accepted"] == 0
        desk.desk._decide_some()
        assert [type(body) for _, body, _ in desk.wire.take()] == [schema.Group] * 3
        assert desk.desk.samples["accepted"] == 3

    asyncio.run(play())


def test_the_loop_decides_in_time_though_nothing_else_comes(tmp_path: Path) -> None:
    async def play() -> None:
        desk, samples = await _ready(tmp_path)
        desk.desk._pending._next_at = time.monotonic() + 0.2
        told = asyncio.Event()
        send = desk.wire.send
        desk.wire.send = lambda *message: send(*message) and (told.set() or True)  # type: ignore[func-returns-value, method-assign]
        for each in samples:
            desk.desk.on_batch([each])
        await asyncio.wait_for(told.wait(), 20.0)
        assert desk.desk.samples["accepted"] == 3

    asyncio.run(play())


@pytest.mark.parametrize("what", ["return", "left", "tick", "status", "goodbye", "end"])
def test_what_depends_on_samples_comes_after_them(tmp_path: Path, what: str) -> None:
    async def play() -> None:
        desk, samples = await _ready(tmp_path)
        lease = samples[0].body
        desk.desk.gone = lambda peer: None
        desk.wire.forget = lambda peer, reason: None  # type: ignore[attr-defined]
        desk.desk.on_batch([samples[0]])
        assert desk.desk.samples["accepted"] == 0
        if what == "return":
            desk.desk.on_batch([delivery(ACTOR, schema.Return(lease.lease_id, lease.attempt, "infra", "it fell"))])
        elif what == "left":
            desk.desk.left(ACTOR, "it fell")
        elif what == "tick":
            desk.desk.take(ev.Tick())
        elif what == "status":
            desk.desk.on_batch([delivery(LEARNER, schema.StatusRequest())])
        elif what == "goodbye":
            desk.desk.on_batch([delivery(ACTOR, schema.Goodbye(0, "done"))])
        else:
            await desk.desk.settled()
        desk.desk.settle()
        assert desk.desk.samples["accepted"] == 1
        groups = [body for _, body, _ in desk.wire.take() if isinstance(body, schema.Group)]
        assert [group.group_id for group in groups] == [lease.lease_id]

    asyncio.run(play())


def test_a_heartbeat_and_a_touch_let_them_wait(tmp_path: Path) -> None:
    async def play() -> None:
        desk, samples = await _ready(tmp_path)
        lease = samples[1].body
        desk.desk.on_batch([samples[0], delivery(ACTOR, schema.Heartbeat("READY"))])
        desk.desk.on_batch([delivery(ACTOR, schema.Touch(lease.lease_id, lease.attempt))])
        assert desk.desk.samples["accepted"] == 0
        assert desk.core.leases.leases[lease.lease_id].touched

    asyncio.run(play())


def test_many_do_not_wait(tmp_path: Path) -> None:
    async def play() -> None:
        desk, (first, *_) = await _ready(tmp_path)
        desk.desk.on_batch([first] * (MUCH_MESSAGES - 1))
        assert desk.desk.samples["accepted"] == 0
        desk.desk.on_batch([first])
        assert desk.desk.samples["accepted"] == 1

    asyncio.run(play())


def test_a_long_row_is_decided_about_step_by_step_and_all_of_it_before_what_depends_on_it(tmp_path: Path) -> None:
    async def play() -> None:
        desk, (first, second, third) = await _ready(tmp_path)
        row = [first] * STEP_MESSAGES
        desk.desk.on_batch([*row, second])
        desk.desk._decide_some()
        assert desk.desk.samples["accepted"] == 1
        desk.desk.on_batch([*row, third])
        assert desk.wire.acknowledged == 2  # two turns
        for _ in range(9):  # steps of the loop, of which each decides about some
            await asyncio.sleep(0)
        assert desk.desk.samples["accepted"] == 3
        desk.desk.on_batch([*row, *row])
        desk.desk._decide_some()
        desk.desk.take(ev.Tick())
        assert not len(desk.desk._pending) and desk.desk._step is None

    asyncio.run(play())


def test_many_bytes_do_not_wait_however_many_messages_they_are(tmp_path: Path) -> None:
    """What waits is acknowledged, so that no credit bounds it."""

    async def play() -> None:
        desk, (first, *_) = await _ready(tmp_path)
        desk.desk.on_batch([first] * (STEP_MESSAGES + 1))
        assert len(desk.desk._pending) == STEP_MESSAGES + 1
        desk.desk.on_batch([msgspec.structs.replace(first, size=MUCH_BYTES)])
        assert not len(desk.desk._pending) and desk.desk._step is None

    asyncio.run(play())


def test_one_that_cannot_be_read_ends_its_sender_and_the_others_are_kept(tmp_path: Path) -> None:
    async def play() -> None:
        desk, samples = await _ready(tmp_path)
        refused: list[Any] = []
        desk.wire.refuse = lambda peer, code, reason: refused.append((peer, code))  # type: ignore[attr-defined]
        key = desk.desk.guests.add(b"hostile", schema.Hello("actor", "hostile", "session"))
        desk.desk.take(ev.Joined(key, "actor", "hostile", 1))
        broken = msgspec.structs.replace(samples[1], peer=b"hostile", raw_meta=b"no Samples")
        desk.desk.on_batch([samples[0], broken, samples[2]])
        desk.desk._decide_some()
        assert refused == [(b"hostile", "malformed")]
        assert desk.desk.samples["accepted"] == 2

    asyncio.run(play())


def test_samples_that_no_learner_can_use_are_refused_after_their_acknowledgement(tmp_path: Path) -> None:
    async def play() -> None:
        desk, samples = await _ready(tmp_path)
        body = samples[0].body
        (meta,) = body.samples
        spoilt = msgspec.structs.replace(body, samples=[msgspec.structs.replace(meta, reward=float("nan"))])
        desk.desk.on_batch([msgspec.structs.replace(samples[0], raw_meta=pack_meta(spoilt), decoded=None)])
        assert desk.wire.acknowledged == 1 and not desk.wire.sent
        desk.desk._decide_some()
        (refusal,) = (each for _, each, _ in desk.wire.take() if isinstance(each, schema.SampleRefused))
        assert refusal.lease_id == body.lease_id and "reward nan" in refusal.reason

    asyncio.run(play())


def test_nothing_is_acknowledged_first_while_the_disk_is_a_whole_cache_behind(tmp_path: Path) -> None:
    async def play() -> None:
        desk, _ = await _ready(tmp_path)
        ledger, disk = desk.ledger, threading.Event()
        ledger.payloads.cache_bytes = 1000
        write = ledger.segments.write
        ledger.segments.write = lambda chunks: (disk.wait(20.0), write(chunks))[1]  # type: ignore[method-assign]
        leases = [record for record in desk.core.leases.leases.values() if record.out]
        acknowledged = []
        for record in leases:
            lease = schema.Lease(record.lease_id, record.attempt, 1, "train", "a", 0, 0, [0], 0, None, 60.0)
            desk.desk.on_batch([delivery(ACTOR, *sample(lease, 900))])
            desk.desk._decide_some()
            acknowledged.append(desk.wire.acknowledged)
        assert acknowledged == [1, 2, 3, 3]  # the first two fill the cache and more, the third as much again
        disk.set()
        await asyncio.wait_for(desk.desk.settled(), 60.0)
        assert desk.wire.acknowledged == 4
        desk.desk.close()

    asyncio.run(play())
