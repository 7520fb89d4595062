"""Samples are checked before they are taken, and groups become messages within the protocol's limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.broker.assembly import Unsendable, build_group
from temper.broker.bundle import BUNDLE_LIMIT_BYTES, BundleStore, digest
from temper.broker.leases import LeaseRecord
from temper.broker.validate import BadSamples, check
from temper.common import schema
from temper.common.arrays import pack_arrays, unpack_arrays
from temper.common.errors import ProtocolError

LENGTHS = (5, 3)


def arrays(**changed: Any) -> dict[str, np.ndarray]:
    total = sum(LENGTHS)
    given = {
        "tokens": np.arange(total, dtype=np.int32),
        "behaviour_logprob": np.array([0, 0, -1, -2, -0.5, 0, 0, -3], np.float32),
        "loss_mask": np.array([0, 0, 1, 1, 1, 0, 0, 1], np.uint8),
        "cu_seqlens": np.array([0, 5, 8], np.int64),
        **changed,
    }
    return {name: array for name, array in given.items() if array is not None}


def metas(**changed: Any) -> list[schema.SampleMeta]:
    first = schema.SampleMeta(0, "stop", 1.0, True, {"outcome": 1.0}, "ok", [(1, 4, 3), (1, 5, 2)], [(4, 0.5)], "key")
    second = schema.SampleMeta(1, "length", None, None, {}, "infra", [(1, 4, 3)])
    return [msgspec.structs.replace(first, **changed), second]


def verify(samples: list[schema.SampleMeta] | None = None, **changed: Any) -> None:
    specs, frames = pack_arrays(arrays(**changed))
    check(schema.Samples(0, 1, 1, metas() if samples is None else samples, specs), frames)


def test_honest_samples_pass() -> None:
    verify()
    verify(support_ids=np.arange(16, dtype=np.int32), support_cu=np.arange(9, dtype=np.int64) * 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"behaviour_logprob": np.zeros(7, np.float32)}, "7 values of behaviour_logprob for 8 tokens"),
        ({"loss_mask": np.zeros(9, np.uint8)}, "9 values of loss_mask for 8 tokens"),
        ({"cu_seqlens": np.array([0, 5, 9], np.int64)}, r"cu_seqlens \[0, 5, 9\]... does not divide 8 tokens"),
        ({"cu_seqlens": np.array([0, 9, 8], np.int64)}, "does not divide"),
        ({"cu_seqlens": np.array([0, 8], np.int64)}, "among 2 samples"),
        ({"cu_seqlens": np.array([1, 5, 8], np.int64)}, "does not divide"),
        ({"cu_seqlens": np.array([0, 7, 8], np.int64)}, "expected a prompt and a completion"),
        ({"behaviour_logprob": np.full(8, np.nan, np.float32)}, "not finite"),
        ({"behaviour_logprob": np.full(8, -np.inf, np.float32)}, "not finite"),
        ({"behaviour_logprob": np.full(8, 0.5, np.float32)}, "log-probability is 0.5, expected at most 0"),
        ({"loss_mask": np.full(8, 1, np.uint8)}, "no prompt"),
        ({"loss_mask": np.array([0, 2, 1, 1, 1, 0, 0, 1], np.uint8)}, "loss_mask holds 2"),
        ({"tokens": np.full(8, -1, np.int32)}, "token id -1"),
        (
            {"support_ids": np.zeros(3, np.int32), "support_cu": np.arange(9, dtype=np.int64)},
            "support_cu .* does not divide 3 support_ids among 8 tokens",
        ),
    ],
)
def test_values_that_cannot_be_trained_on_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSamples, match=message):
        verify(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": math.nan}, "has the reward nan"),
        ({"reward": math.inf}, "has the reward inf"),
        ({"components": {"style": math.nan}}, "reward components"),
        ({"step_rewards": [(5, 1.0)]}, "step reward of 1.0 at token 5 of 5"),
        ({"step_rewards": [(0, math.nan)]}, "step reward of nan"),
        ({"version_runs": [(1, 4, 4)]}, "version runs over 4 tokens, it has 5"),
        ({"version_runs": [(1, 4, 6), (1, 5, -1)]}, "version runs"),
    ],
)
def test_facts_that_make_no_sense_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSamples, match=message):
        verify(metas(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": None}, "without the array 'tokens'"),
        ({"tokens": np.zeros(8, np.int64)}, r"'tokens' is int64\[8\], expected int32"),
        ({"tokens": np.zeros((2, 4), np.int32)}, r"int32\[2, 4\]"),
        ({"support_ids": np.zeros(3, np.int32)}, "without the array 'support_cu'"),
    ],
)
def test_wrong_arrays_are_an_offence(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        verify(**changed)


def test_no_samples_and_missing_frames_are_offences() -> None:
    with pytest.raises(ProtocolError, match="without a sample"):
        verify([])
    specs, frames = pack_arrays(arrays())
    with pytest.raises(ProtocolError, match="3 frames for 4 arrays"):
        check(schema.Samples(0, 1, 1, metas(), specs), frames[:-1])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tokens", "behaviour_logprob", "loss_mask", "cu_seqlens", "x"]),
            st.sampled_from(["int32", "float32", "uint8", "int64", "complex128"]),
            st.lists(st.integers(-3, 40), max_size=3),
            st.binary(max_size=64),
        ),
        max_size=6,
    )
)
def test_no_array_description_does_more_than_be_refused(parts: list[tuple[str, str, list[int], bytes]]) -> None:
    specs = [schema.ArraySpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in parts]
    try:
        check(schema.Samples(0, 1, 1, metas(), specs), [data for *_, data in parts])
    except (ProtocolError, BadSamples):
        return


def record(size: int = 64) -> LeaseRecord:
    return LeaseRecord(7, "train", "a", 0, 1, size)


def test_a_group_of_few_messages_passes_its_frames_through_untouched() -> None:
    specs, frames = pack_arrays(arrays())
    part = schema.SamplePart(metas(), specs)
    body, out = build_group(record(), [(part, frames), (part, frames)], 3, None)
    assert [id(frame) for frame in out] == [id(frame) for frame in [*frames, *frames]]
    assert (body.group_id, body.lineage, len(body.parts)) == (7, 3, 2)


def test_a_group_of_many_messages_is_joined_without_changing_a_sample() -> None:
    parts = []
    rows = []
    for i in range(40):
        row = arrays(
            tokens=np.arange(8, dtype=np.int32) + 100 * i,
            support_ids=np.arange(16, dtype=np.int32) * i,
            support_cu=np.arange(9, dtype=np.int64) * 2,
        )
        specs, frames = pack_arrays(row)
        parts.append(
            (schema.SamplePart([msgspec.structs.replace(m, index=2 * i + m.index) for m in metas()], specs), frames)
        )
        rows.append(row)
    body, frames = build_group(record(80), parts, 3, None)
    assert len(frames) <= 64
    index = used = 0
    for part in body.parts:
        joined = unpack_arrays(part.arrays, frames[used : used + len(part.arrays)])
        used += len(part.arrays)
        for position, meta in enumerate(part.samples):
            assert meta.index == index
            own = rows[index // 2]
            start, stop = own["cu_seqlens"][index % 2], own["cu_seqlens"][index % 2 + 1]
            at, end = joined["cu_seqlens"][position], joined["cu_seqlens"][position + 1]
            for name in ("tokens", "behaviour_logprob", "loss_mask"):
                assert joined[name][at:end].tolist() == own[name][start:stop].tolist()
            cu = joined["support_cu"]
            assert joined["support_ids"][cu[at] : cu[end]].tolist() == own["support_ids"][2 * start : 2 * stop].tolist()
            index += 1
    assert index == 80


def test_a_group_that_fits_no_message_says_so() -> None:
    specs, frames = pack_arrays(arrays())
    long = msgspec.structs.replace(metas()[0], task_key="x" * 70_000)
    with pytest.raises(Unsendable, match="facts of 70"):
        build_group(record(), [(schema.SamplePart([long], specs), frames)], 1, None)


def bundle(**files: bytes) -> tuple[schema.Bundle, list[bytes]]:
    entries = [schema.BundleFile(name, digest([data]), 1) for name, data in files.items()]
    return schema.Bundle(entries, "micro"), list(files.values())


def test_a_bundle_survives_the_process(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundle")
    body, frames = bundle(config=b"{}", empty=b"", tokenizer=b"t" * 1000)
    store.put(body, frames)
    again = BundleStore(tmp_path / "bundle")
    assert again.body == body
    assert [bytes(frame) for frame in again.frames] == frames
    (tmp_path / "bundle/config").write_bytes(b"{ }")
    assert BundleStore(tmp_path / "bundle").body is None


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", ".hidden", "a/b", ".."])
def test_a_bundle_writes_only_plain_names(tmp_path: Path, name: str) -> None:
    body = schema.Bundle([schema.BundleFile(name, digest([b"x"]), 1)])
    with pytest.raises(ProtocolError, match="plain file name"):
        BundleStore(tmp_path / "bundle").put(body, [b"x"])
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_must_be_what_it_says(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundle")
    body, frames = bundle(config=b"{}")
    with pytest.raises(ProtocolError, match="digest"):
        store.put(body, [b"{!}"])
    with pytest.raises(ProtocolError, match="2 frames, its files name 1"):
        store.put(body, [*frames, b"more"])
    with pytest.raises(ProtocolError, match=f"at most {BUNDLE_LIMIT_BYTES}"):
        store.put(body, [bytes(BUNDLE_LIMIT_BYTES + 1)])
