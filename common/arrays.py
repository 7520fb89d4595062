"""numpy arrays <-> (`ArraySpec`s, frames). Used for samples on their way actor -> broker -> learner.

Only the dtypes of `DTYPES` travel, little-endian, C-contiguous. The arrays of a message share one frame, in which each begins at a
multiple of 8, in the order of the specs, and which ends at one: a frame costs everybody on the way more than its sender's one
copy. Only where that would be more than a frame may have does each have its own, uncopied. The specs alone say which it is
(`packed_bytes`). What arrives is checked against its specs (dtype, shape, bytes, count) before an array is made of it; the arrays
are read-only views of the received frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec
from temper.common.wire import FRAME_LIMIT, FRAME_LIMIT_BYTES, JOINED_BYTES, nbytes

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}
DIMENSION_LIMIT = 8
ALONE = 48
"""At most so many frames of a group pass alone: of more, those that can be are joined, because a message has no more than 64."""


def spec_bytes(spec: ArraySpec) -> int:
    """What the array takes; ProtocolError if there is no such array."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise ProtocolError(f"array {spec.name!r} has dtype {spec.dtype!r}, expected one of {', '.join(DTYPES)}")
    shape = spec.shape
    if len(shape) > DIMENSION_LIMIT or (shape and min(shape) < 0):
        raise ProtocolError(f"array {spec.name!r} has shape {shape}")
    return (shape[0] if len(shape) == 1 else math.prod(shape)) * dtype.itemsize


def packed_bytes(specs: Sequence[ArraySpec]) -> int:
    """Size of the one frame that these arrays share; 0 if each has a frame of its own. ProtocolError for a bad spec."""
    if len(specs) < 2:
        return 0
    total = sum((spec_bytes(spec) + 7) & -8 for spec in specs)
    return total if total <= FRAME_LIMIT_BYTES else 0


def joined_runs(sizes: Sequence[int], others: int = 0) -> list[int]:
    """How many of the packed frames of these `sizes` lie in each frame of a group that has so many `others`: of small ones as many
    as fit, in order."""
    runs: list[int] = []
    room = 0
    alone = others + sum([size > JOINED_BYTES for size in sizes])
    joined_bytes = JOINED_BYTES if alone <= ALONE else FRAME_LIMIT_BYTES
    for size in sizes:
        if not runs or size > room or size > joined_bytes:
            runs.append(0)
            room = FRAME_LIMIT_BYTES if size <= joined_bytes else size
        runs[-1] += 1
        room -= size
    return runs


def divide(parts: Sequence[Sequence[ArraySpec]], frames: Sequence[Any]) -> list[list[Any]]:
    """The array frames of a group by part: first the packed frames, small ones joined, then the others (see ``schema.Group``).

    ProtocolError if they are not as many and as large as the parts' specs say.
    """
    sizes = [packed_bytes(specs) for specs in parts]
    others = sum(len(specs) for specs, size in zip(parts, sizes, strict=True) if not size)
    runs = joined_runs([size for size in sizes if size], others)
    expected = len(runs) + others
    if expected != len(frames):
        raise ProtocolError(f"{len(frames)} array frames, expected {expected}")
    packed: list[memoryview] = []
    wanted = iter([size for size in sizes if size])
    for count, frame in zip(runs, frames, strict=False):
        view, at = memoryview(frame).cast("B"), 0
        for _ in range(count):
            size = next(wanted)
            packed.append(view[at : at + size])
            at += size
        if at != view.nbytes:
            raise ProtocolError(f"a joined frame of {view.nbytes} bytes, expected {at}")
    found: list[list[Any]] = []
    used, joined = len(runs), iter(packed)
    for specs, size in zip(parts, sizes, strict=True):
        if size:
            found.append([next(joined)])
        else:
            found.append(list(frames[used : used + len(specs)]))
            used += len(specs)
    return found


def join(parts: Sequence[tuple[bool, Sequence[Any]]]) -> list[Any]:
    """The array frames of a group of `parts` (whether its arrays share a frame, its frames): the inverse of `divide`."""
    packed = [frames[0] for shared, frames in parts if shared]
    others = [frame for shared, frames in parts if not shared for frame in frames]
    joined: list[Any] = []
    at = 0
    for count in joined_runs([nbytes(frame) for frame in packed], len(others)):
        joined.append(packed[at] if count == 1 else b"".join(packed[at : at + count]))
        at += count
    return joined + others


def unpacked(specs: Sequence[ArraySpec], frames: Sequence[Any]) -> list[Any]:
    """One buffer for each array. ProtocolError for a bad spec or the wrong number or size of frames."""
    size = packed_bytes(specs)
    if not size:
        if len(specs) != len(frames):
            raise ProtocolError(f"{len(frames)} frames for {len(specs)} arrays")
        return list(frames)
    if len(frames) != 1 or memoryview(frames[0]).nbytes != size:
        got = [memoryview(frame).nbytes for frame in frames[:8]]
        raise ProtocolError(f"{len(specs)} arrays in {len(frames)} frames of {got} bytes, expected one of {size} bytes")
    view, at = memoryview(frames[0]).cast("B"), 0
    found = []
    for spec in specs:
        length = spec_bytes(spec)
        found.append(view[at : at + length])
        at += (length + 7) & -8
    return found


def pack_arrays(arrays: Mapping[str, Array]) -> tuple[list[ArraySpec], list[memoryview]]:
    """Specs and frames of named arrays. Contiguous arrays with frames of their own (more than 16 MiB together) are not copied:
    don't write to them until they are acknowledged.

    ProtocolError for a dtype that does not travel, an array over 16 MiB or more than 64 arrays.
    """
    if len(arrays) > FRAME_LIMIT:
        raise ProtocolError(f"{len(arrays)} arrays, at most {FRAME_LIMIT} travel in one message")
    specs: list[ArraySpec] = []
    frames: list[memoryview] = []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise ProtocolError(f"array {name!r} is {array.dtype}, expected one of {', '.join(DTYPES)}")
        if array.nbytes > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"array {name!r} has {array.nbytes} bytes, at most {FRAME_LIMIT_BYTES}: split it")
        data = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name])
        specs.append(ArraySpec(name, array.dtype.name, array.shape))
        frames.append(data.reshape(-1).view(np.uint8).data if data.size else memoryview(b""))
    if packed_bytes(specs):
        return specs, [memoryview(b"".join([b for f in frames for b in (f, bytes(-f.nbytes % 8))]))]
    return specs, frames


def unpack_arrays(specs: Sequence[ArraySpec], frames: Sequence[Any]) -> dict[str, Array]:
    """Named read-only views of `frames` (anything with the buffer protocol); ProtocolError if they don't match `specs`."""
    buffers = unpacked(specs, frames)
    arrays: dict[str, Array] = {}
    for spec, frame in zip(specs, buffers, strict=True):
        expected = spec_bytes(spec)
        if spec.name in arrays:
            raise ProtocolError(f"array {spec.name!r} appears twice")
        shape, dtype = spec.shape, DTYPES[spec.dtype]
        size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        if size != expected:
            raise ProtocolError(
                f"array {spec.name!r} {spec.dtype}{list(shape)} needs {expected} bytes, its frame has {size}"
            )
        try:
            array = np.frombuffer(frame, dtype=dtype) if expected else np.empty(0, dtype=dtype)
            array.flags.writeable = False
            arrays[spec.name] = array if len(shape) == 1 else array.reshape(shape)
        except ValueError as error:  # empty, with other dimensions beyond what numpy takes
            raise ProtocolError(f"array {spec.name!r} has shape {shape}: {error}") from error
    return arrays
