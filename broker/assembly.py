"""From accepted messages to one Group message. What came passes through as it came: encoded metas inside the new one,
array frames untouched (small ones joined), unless there are too many large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
from temper.broker.leases import LeaseRecord
from temper.broker.packed import apart
from temper.broker.segments import Message
from temper.common.arrays import join, pack_arrays, unpack_arrays
from temper.common.errors import ProtocolError
from temper.common.schema import Group, Samples
from temper.common.wire import (
    FRAME_LIMIT,
    FRAME_LIMIT_BYTES,
    JOINED_BYTES,
    META_LIMIT_BYTES,
    nbytes,
    pack_meta,
    unpack_meta,
)

OFFSETS = {"cu_seqlens": "tokens", "support_cu": "support_ids"}
"""Arrays of offsets, and the array that they divide."""
META_ROOM_BYTES = META_LIMIT_BYTES - 2048  # the rest is for what surrounds the parts


class Unsendable(ProtocolError):
    """The group fits no message; it is given up with this reason."""


def build_group(
    record: LeaseRecord, messages: Sequence[Message], lineage: int, void: str | None
) -> tuple[Group, list[Any]]:
    """The message and its frames. Samples that infrastructure lost are not in it. Unsendable if it fits no message."""
    parts: Sequence[Message] = messages
    facts: list[Any] = []
    frames = _joined(parts)
    if frames is None:
        parts = apart(parts)
        frames = _frames(parts)
    if len(frames) > FRAME_LIMIT:
        parts = _merge(parts)
        frames = _frames(parts)
    raws = [msgspec.Raw(meta) for meta, _ in parts]
    if sum([len(meta) for meta, _ in parts]) > META_ROOM_BYTES:
        encoded = memoryview(msgspec.msgpack.encode(raws))
        facts = [encoded[at : at + FRAME_LIMIT_BYTES] for at in range(0, len(encoded), FRAME_LIMIT_BYTES)]
        raws = []
    body = Group(
        group_id=record.lease_id,
        lane=record.lane,
        domain=record.domain,
        level=record.level,
        task_seed=record.task_seed,
        lineage=lineage,
        parts=cast("list[Samples]", raws),
        pinned_version=record.pinned_version,
        void=void,
        facts=len(facts),
    )
    if len(facts) + len(frames) > FRAME_LIMIT:
        raise Unsendable(f"{len(facts) + len(frames)} frames, at most {FRAME_LIMIT}")
    return body, [*facts, *frames]


def _shared(frames: Sequence[Any]) -> bool:
    """Whether a message's arrays share a frame: there are four at least."""
    return len(frames) == 1


def _joined(parts: Sequence[Message]) -> list[Any] | None:
    """What `join` makes of the usual: small frames that came one or none a message, all in one; None of anything else. Frames that
    are joined already were small (``burst``)."""
    if any([len(frames) > 1 for _, frames in parts]):
        return None
    pieces = [frame for _, frames in parts for frame in frames]
    if [*map(type, pieces)].count(bytes) != len(pieces) or sum(map(len, pieces)) > FRAME_LIMIT_BYTES:
        return None
    if max(map(len, pieces), default=0) > JOINED_BYTES:
        alone = [bool(frames) for _, frames in parts[1:]] + [True]  # nothing is joined to this one's
        if any(
            [ends and len(frames[0]) > JOINED_BYTES for ends, (_, frames) in zip(alone, parts, strict=True) if frames]
        ):
            return None
    return [b"".join(pieces)] if pieces else []


def _frames(parts: Sequence[Message]) -> list[Any]:
    return join([(_shared(frames), frames) for _, frames in parts])


def _merge(parts: Sequence[Message]) -> list[Message]:
    """Join neighbouring large parts with the same arrays, as far as no array outgrows a frame and the facts a meta."""
    merged: list[list[tuple[Samples, Sequence[Any]]]] = []
    size = facts = 0
    kept: list[Message] = [part for part in parts if _shared(part[1])]
    for meta, frames in parts:
        if _shared(frames):
            continue
        body = unpack_meta(meta, Samples)
        names = [(spec.name, spec.dtype) for spec in body.arrays]
        largest = max((nbytes(frame) for frame in frames), default=0)
        same = bool(merged) and names == [(spec.name, spec.dtype) for spec in merged[-1][0][0].arrays]
        if not same or size + largest > FRAME_LIMIT_BYTES or facts + len(meta) > META_ROOM_BYTES:
            merged.append([])
            size = facts = 0
        merged[-1].append((body, frames))
        size += largest
        facts += len(meta)
    return kept + [_join(run) for run in merged]


def _join(parts: Sequence[tuple[Samples, Sequence[Any]]]) -> Message:
    body, frames = parts[0]
    if len(parts) > 1:
        rows = [unpack_arrays(part.arrays, frames) for part, frames in parts]
        joined = {}
        for name in rows[0]:
            if name in OFFSETS:
                bases = np.cumsum([0, *(len(row[OFFSETS[name]]) for row in rows)])
                pieces = [row[name][:-1] + base for row, base in zip(rows, bases[:-1], strict=True)]
                joined[name] = np.concatenate([*pieces, bases[-1:]]).astype(rows[0][name].dtype)
            else:
                joined[name] = np.concatenate([row[name] for row in rows])
        specs, frames = pack_arrays(joined)
        samples = [meta for part, _ in parts for meta in part.samples]
        body = msgspec.structs.replace(body, samples=samples, arrays=specs)
    return pack_meta(body), frames
