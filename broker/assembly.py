"""From accepted parts to one Group message. Array frames pass through untouched unless there are too many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from temper.broker.leases import LeaseRecord
from temper.broker.payloads import Payload
from temper.common.arrays import pack_arrays, unpack_arrays
from temper.common.errors import ProtocolError
from temper.common.schema import Group, SamplePart
from temper.common.wire import FRAME_LIMIT, FRAME_LIMIT_BYTES, META_LIMIT_BYTES, pack_meta

OFFSETS = {"cu_seqlens": "tokens", "support_cu": "support_ids"}
"""Arrays of offsets, and the array that they divide."""


class Unsendable(ProtocolError):
    """The group fits no message; it is given up with this reason."""


def build_group(
    record: LeaseRecord, payloads: Sequence[Payload], lineage: int, void: str | None
) -> tuple[Group, list[Any]]:
    """The message and its frames. Samples that infrastructure lost are not in it. Unsendable if it fits no message."""
    parts = list(payloads)
    if sum(len(frames) for _, frames in parts) > FRAME_LIMIT:
        parts = _merge(parts)
    frames = [frame for _, frames in parts for frame in frames]
    body = Group(
        group_id=record.lease_id,
        lane=record.lane,
        domain=record.domain,
        level=record.level,
        task_seed=record.task_seed,
        lineage=lineage,
        parts=[part for part, _ in parts],
        pinned_version=record.pinned_version,
        void=void,
    )
    if len(frames) > FRAME_LIMIT:
        raise Unsendable(f"{len(frames)} array frames, at most {FRAME_LIMIT}")
    meta = len(pack_meta(body))
    if meta > META_LIMIT_BYTES:
        raise Unsendable(f"facts of {meta} bytes, at most {META_LIMIT_BYTES}")
    return body, frames


def _merge(parts: Sequence[Payload]) -> list[Payload]:
    """Join neighbouring parts with the same arrays, as far as no array outgrows a frame."""
    merged: list[list[Payload]] = []
    size = 0
    for part in parts:
        names = [(spec.name, spec.dtype) for spec in part[0].arrays]
        nbytes = max((memoryview(frame).nbytes for frame in part[1]), default=0)
        same = bool(merged) and names == [(spec.name, spec.dtype) for spec in merged[-1][0][0].arrays]
        if not same or size + nbytes > FRAME_LIMIT_BYTES:
            merged.append([])
            size = 0
        merged[-1].append(part)
        size += nbytes
    return [_join(group) if len(group) > 1 else group[0] for group in merged]


def _join(parts: Sequence[Payload]) -> Payload:
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
    return SamplePart([meta for part, _ in parts for meta in part.samples], specs), frames
