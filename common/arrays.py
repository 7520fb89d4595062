"""numpy arrays <-> (`ArraySpec`s, frames), without copies. Used for samples on their way actor -> broker -> learner.

Only the dtypes of `DTYPES` travel, little-endian, C-contiguous. What arrives is checked against its specs (dtype,
shape, bytes, count) before an array is made of it; the arrays are read-only views of the received frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec
from temper.common.wire import FRAME_LIMIT, FRAME_LIMIT_BYTES

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


def pack_arrays(arrays: Mapping[str, Array]) -> tuple[list[ArraySpec], list[memoryview]]:
    """Specs and frames of named arrays. A contiguous array is not copied: don't write to it until it is acknowledged.

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
    return specs, frames


def unpack_arrays(specs: Sequence[ArraySpec], frames: Sequence[Any]) -> dict[str, Array]:
    """Named read-only views of `frames` (anything with the buffer protocol); ProtocolError if they don't match `specs`."""
    if len(specs) != len(frames):
        raise ProtocolError(f"{len(frames)} frames for {len(specs)} arrays")
    arrays: dict[str, Array] = {}
    for spec, frame in zip(specs, frames, strict=True):
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            raise ProtocolError(f"array {spec.name!r} has dtype {spec.dtype!r}, expected one of {', '.join(DTYPES)}")
        if spec.name in arrays:
            raise ProtocolError(f"array {spec.name!r} appears twice")
        if len(spec.shape) > DIMENSION_LIMIT or (spec.shape and min(spec.shape) < 0):
            raise ProtocolError(f"array {spec.name!r} has shape {spec.shape}")
        shape = spec.shape
        size = len(frame) if type(frame) is bytes else memoryview(frame).nbytes
        expected = (shape[0] if len(shape) == 1 else math.prod(shape)) * dtype.itemsize
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
