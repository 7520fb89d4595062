"""Bursts: small reliable messages of one kind that wait for the same socket leave together as one multipart message.

    [header: flags = how many, sequence = the last one's][lengths, then the encoded metas][their frames, joined]

What a message costs is mostly its parts and its system calls, hardly its bytes; so a sender joins what one turn of its loop
brought (``session``), and a receiver takes it apart again: each message keeps its own sequence number, credit and
acknowledgement, as if it had come alone. Lengths: two i32 a message, little-endian, bytes of its meta and of its only
frame (-1: it has none). The joined frame is left out if nothing has one. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add
from typing import Any

from temper.common.errors import ProtocolError
from temper.common.schema import BODIES, Lease, Samples, Touch
from temper.common.wire import JOINED_BYTES, nbytes

KINDS = frozenset({Samples.KIND, Lease.KIND, Touch.KIND})
"""What comes in numbers. Nothing that a relay looks into."""
MESSAGES = 256
BYTES = 60 * 1024
"""Metas and frames together."""
LENGTH_BYTES = 8


def joinable(kind: int, size: int, frames: Sequence[Any]) -> bool:
    """Whether a message of `size` bytes may be in a burst: a frame that is never joined is not joined here either."""
    if kind not in KINDS or size > BYTES or len(frames) > 1:
        return False
    return not frames or size <= JOINED_BYTES or nbytes(frames[0]) <= JOINED_BYTES


def join(messages: Sequence[tuple[bytes, Sequence[Any]]]) -> tuple[bytes, list[bytes]]:
    """The meta part and the frames (one or none) of a burst of (meta, frames)."""
    metas = [meta for meta, _ in messages]
    pieces = [frames[0] for _, frames in messages if frames]
    lengths = [-1] * (2 * len(metas))
    lengths[::2] = map(len, metas)
    held = [len(piece) if type(piece) is bytes else nbytes(piece) for piece in pieces]
    if len(held) == len(metas):
        lengths[1::2] = held
    else:
        sizes = iter(held)
        lengths[1::2] = [next(sizes) if frames else -1 for _, frames in messages]
    table = struct.pack(f"<{len(lengths)}i", *lengths)
    return b"".join([table, *metas]), [b"".join(pieces)] if pieces else []


def outline(count: int, kind: int, parts: Sequence[Any]) -> tuple[list[int], list[bytes], memoryview, tuple[int, ...]]:
    """Sizes and metas of the `count` messages in `parts` (the meta part, then the frames), their frames as they came, joined, and
    the bytes of each (-1: it has none); ProtocolError if it is no burst."""
    if kind not in KINDS:
        raise ProtocolError(f"flags {count} on a {BODIES[kind].__name__ if kind in BODIES else kind}: expected 0")
    table, joined = parts[0], memoryview(parts[1] if len(parts) == 2 else b"").cast("B")
    at = count * LENGTH_BYTES
    if not 2 <= count <= MESSAGES or len(parts) > 2 or len(table) < at or len(table) + len(joined) > BYTES + at:
        raise ProtocolError(
            f"a burst of {count} messages in {len(parts)} parts of {len(table)} and {len(joined)} bytes: expected 2 to "
            f"{MESSAGES} messages in at most 2 parts, {BYTES} bytes"
        )
    lengths = struct.unpack_from(f"<{2 * count}i", table)
    meta_bytes, frame_bytes = lengths[::2], lengths[1::2]
    least = min(frame_bytes)
    if min(meta_bytes) < 0 or least < -1 or max(frame_bytes) > JOINED_BYTES:
        sizes = zip(meta_bytes, frame_bytes, strict=True)
        wrong = next((m, f) for m, f in sizes if m < 0 or not -1 <= f <= JOINED_BYTES)
        raise ProtocolError(
            f"a message of {wrong[0]} and {wrong[1]} bytes in a burst, its frame may have {JOINED_BYTES}"
        )
    held = frame_bytes if least >= 0 else tuple([max(n, 0) for n in frame_bytes])
    ends, held_bytes = list(accumulate(meta_bytes, initial=at)), sum(held)
    if ends[-1] != len(table) or held_bytes != len(joined):
        raise ProtocolError(
            f"a burst of {len(table)} and {len(joined)} bytes, its lengths add up to {ends[-1]} and {held_bytes}"
        )
    metas = [table[begin:end] for begin, end in pairwise(ends)]
    return list(map(add, meta_bytes, held)), metas, joined, frame_bytes


def frames_of(joined: memoryview, lengths: Sequence[int]) -> list[tuple[bytes, ...]]:
    """The frames of each message of an `outline`."""
    whole, bounds = bytes(joined), accumulate([max(n, 0) for n in lengths], initial=0)
    frames: list[tuple[bytes, ...]] = [(whole[begin:end],) for begin, end in pairwise(bounds)]
    if min(lengths) < 0:
        frames = [frame if n >= 0 else () for frame, n in zip(frames, lengths, strict=True)]
    return frames


def divide(count: int, kind: int, parts: Sequence[Any]) -> tuple[list[int], list[bytes], list[tuple[bytes, ...]]]:
    """Sizes, metas and frames of an `outline`."""
    sizes, metas, joined, lengths = outline(count, kind, parts)
    return sizes, metas, frames_of(joined, lengths)
