"""Messages that keep their arrays in one piece are the same messages: cut up again, and in the group that they make."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.broker import assembly
from temper.broker.assembly import build_group
from temper.broker.leases import LeaseRecord
from temper.broker.packed import apart, together
from temper.broker.segments import Message
from temper.common import arrays, schema
from temper.common.wire import JOINED_BYTES, pack_meta

RECORD = LeaseRecord(3, "train", "reverse", 0, 11, 64)
LARGE = 70_000  # tokens: an array of its own frame


def message(index: int, tokens: int) -> Message:
    """A sample alone in its message."""
    rows = {
        "tokens": np.arange(index, index + tokens, dtype=np.int32),
        "behaviour_logprob": np.full(tokens, -0.5, np.float32),
        "loss_mask": np.ones(tokens, np.uint8),
        "cu_seqlens": np.array([0, tokens], np.int64),
    }
    specs, frames = arrays.pack_arrays(rows)
    meta = schema.SampleMeta(index, "stop", 1.0, True, {}, "ok", [(1, 0, tokens)])
    return pack_meta(schema.Samples(3, 1, 1, [meta], specs)), tuple(map(bytes, frames))


def packed(runs: list[list[Message]]) -> list[Message]:
    """Each run in one piece, as far as its messages have one frame that is joined."""
    found: list[Message] = []
    for run in runs:
        if all(len(frames) == 1 and len(frames[0]) <= JOINED_BYTES for _, frames in run):
            found += together([meta for meta, _ in run], b"".join(frames[0] for _, frames in run))
        else:
            found += run
    return found


def as_bytes(messages: list[Message]) -> list[tuple[bytes, list[bytes]]]:
    return [(meta, [bytes(frame) for frame in frames]) for meta, frames in messages]


lengths = st.lists(st.lists(st.sampled_from([2, 3, 7, 100, LARGE]), min_size=1, max_size=5), min_size=1, max_size=5)


@settings(deadline=None)
@given(lengths)
def test_apart_undoes_together(runs: list[list[int]]) -> None:
    alone = [[message(10 * i + j, tokens) for j, tokens in enumerate(run)] for i, run in enumerate(runs)]
    assert as_bytes(apart(packed(alone))) == as_bytes([each for run in alone for each in run])


@pytest.mark.parametrize("limit", [arrays.FRAME_LIMIT_BYTES, 3000])
@settings(deadline=None)
@given(lengths)
def test_a_group_is_the_same_however_its_messages_are_kept(limit: int, runs: list[list[int]]) -> None:
    """Also where a piece does not fit the joined frame in which it would lie."""
    alone = [[message(10 * i + j, tokens) for j, tokens in enumerate(run)] for i, run in enumerate(runs)]
    flat = [each for run in alone for each in run]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "FRAME_LIMIT_BYTES", limit)
        patch.setattr(assembly, "FRAME_LIMIT_BYTES", limit)
        body, frames = build_group(RECORD, flat, 1, None)
        kept_body, kept = build_group(RECORD, packed(alone), 1, None)
        assert pack_meta(kept_body) == pack_meta(body)
        assert [bytes(frame) for frame in kept] == [bytes(frame) for frame in frames]
        specs = [msgspec.msgpack.decode(meta, type=schema.Samples).arrays for meta, _ in flat]
        if limit == arrays.FRAME_LIMIT_BYTES and max(map(max, runs)) < LARGE:
            parts = arrays.divide(specs, kept)
            assert [[bytes(each) for each in part] for part in parts] == [[bytes(f) for f in own] for _, own in flat]
