"""Arrays as frames: no copy, nothing taken on trust."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from temper.common import arrays as arrays_module
from temper.common.arrays import (
    ALONE,
    DTYPES,
    divide,
    join,
    joined_runs,
    pack_arrays,
    packed_bytes,
    unpack_arrays,
)
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec
from temper.common.wire import FRAME_LIMIT_BYTES, JOINED_BYTES


@given(
    st.sampled_from(sorted(DTYPES)).flatmap(
        lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    )
)
@settings(deadline=None)
def test_an_array_comes_back_equal(array: Any) -> None:
    specs, frames = pack_arrays({"x": array, "y": np.arange(3, dtype=np.int32)})
    back = unpack_arrays(specs, [bytes(frame) for frame in frames])
    np.testing.assert_array_equal(back["x"], array)
    assert back["x"].dtype == array.dtype and back["x"].shape == array.shape
    assert list(back) == ["x", "y"]


def test_a_contiguous_array_is_not_copied_in_either_direction() -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    specs, frames = pack_arrays({"x": array})
    assert np.shares_memory(np.frombuffer(frames[0], dtype=np.uint8), array)
    back = unpack_arrays(specs, frames)["x"]
    assert np.shares_memory(back, array)
    with pytest.raises(ValueError, match="read-only"):
        back[0, 0] = 1.0


def test_strided_and_big_endian_arrays_arrive_right() -> None:
    strided = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    swapped = np.arange(5, dtype=">f4")
    back = unpack_arrays(*pack_arrays({"a": strided, "b": swapped}))
    np.testing.assert_array_equal(back["a"], strided)
    np.testing.assert_array_equal(back["b"], swapped)


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        (ArraySpec("x", "float32", (3,)), 8, "needs 12 bytes, its frame has 8"),
        (ArraySpec("x", "object", (1,)), 8, "dtype 'object'"),
        (ArraySpec("x", "float32", (-1, -2)), 8, "shape"),
        (ArraySpec("x", "uint8", (1,) * 9), 1, "shape"),
        (ArraySpec("x", "uint8", (2**62, 2**62)), 8, "needs"),
        (ArraySpec("x", "uint8", (0, 5)), 1, "needs 0 bytes"),
        (ArraySpec("x", "uint8", (2**63, 0)), 0, "shape"),
        (ArraySpec("x", "uint8", (2**40, 2**40, 0)), 0, "shape"),
    ],
)
def test_what_does_not_fit_its_spec_is_refused(spec: ArraySpec, size: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack_arrays([spec], [bytes(size)])


def test_the_number_of_frames_and_their_names_must_fit() -> None:
    spec = ArraySpec("x", "uint8", (1,))
    with pytest.raises(ProtocolError, match=r"2 arrays in 2 frames of \[1, 1\] bytes, expected one of 16 bytes"):
        unpack_arrays([spec, spec], [b"a", b"b"])
    with pytest.raises(ProtocolError, match=r"2 arrays in 1 frames of \[15\] bytes, expected one of 16"):
        unpack_arrays([spec, spec], [bytes(15)])
    with pytest.raises(ProtocolError, match="appears twice"):
        unpack_arrays([spec, spec], [bytes(16)])
    large = ArraySpec("y", "uint8", (FRAME_LIMIT_BYTES,))
    with pytest.raises(ProtocolError, match="1 frames for 2 arrays"):
        unpack_arrays([spec, large], [bytes(FRAME_LIMIT_BYTES)])


@given(st.lists(st.lists(st.integers(0, 9000), min_size=1, max_size=4), max_size=12), st.integers(0, 4))
@settings(deadline=None)
def test_the_frames_of_a_group_are_divided_as_they_were_joined(parts: list[list[int]], alone: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays_module, "ALONE", alone)
        _divided_as_joined(parts)


def _divided_as_joined(parts: list[list[int]]) -> None:
    packed = [pack_arrays({str(i): np.full(n, i, np.uint16) for i, n in enumerate(sizes)}) for sizes in parts]
    frames = join([(packed_bytes(specs) > 0, own) for specs, own in packed])
    divided = divide([specs for specs, _ in packed], frames)
    assert [[bytes(f) for f in own] for own in divided] == [[bytes(f) for f in own] for _, own in packed]
    for sizes, (specs, _), own in zip(parts, packed, divided, strict=True):
        arrays = unpack_arrays(specs, own)
        assert [arrays[str(i)].tolist() for i in range(len(sizes))] == [[i] * n for i, n in enumerate(sizes)]
    with pytest.raises(ProtocolError):
        divide([specs for specs, _ in packed], [*frames, b""])


def test_joined_frames_stay_within_a_frame() -> None:
    assert joined_runs([JOINED_BYTES] * 2500) == [1024, 1024, 452]


def test_large_frames_pass_alone_unless_they_are_too_many() -> None:
    large = JOINED_BYTES + 8
    assert joined_runs([8, 8, large, 8, large, large, 8]) == [2, 1, 1, 1, 1, 1]
    assert joined_runs([large] * ALONE) == [1] * ALONE
    assert joined_runs([large] * (ALONE + 1)) == [ALONE + 1]
    assert joined_runs([FRAME_LIMIT_BYTES] * (ALONE + 1)) == [1] * (ALONE + 1)
    assert joined_runs([large, large], ALONE - 2) == [1, 1] and joined_runs([large, large], ALONE - 1) == [2]


def test_arrays_that_share_a_frame_begin_at_multiples_of_eight() -> None:
    rows = {
        "a": np.arange(5, dtype=np.uint8),
        "b": np.arange(40_000, dtype=np.float64),
        "c": np.arange(3, dtype=np.int16),
    }
    specs, frames = pack_arrays(rows)
    assert [len(frame) for frame in frames] == [8 + 320_000 + 8]
    found = unpack_arrays(specs, frames)
    assert all(found[name].tolist() == rows[name].tolist() for name in rows)
    assert [found[name].ctypes.data % 8 for name in rows] == [found["a"].ctypes.data % 8] * 3


def test_what_cannot_travel_is_refused_before_it_leaves() -> None:
    with pytest.raises(ProtocolError, match="complex128"):
        pack_arrays({"x": np.zeros(2, dtype=np.complex128)})
    with pytest.raises(ProtocolError, match="object"):
        pack_arrays({"x": np.array([{}], dtype=object)})
    with pytest.raises(ProtocolError, match="65 arrays"):
        pack_arrays({str(i): np.zeros(1) for i in range(65)})
    with pytest.raises(ProtocolError, match="split it"):
        pack_arrays({"x": np.zeros(16 * 1024 * 1024 + 1, dtype=np.uint8)})
