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
from typing import Any

from temper.common.errors import ProtocolError
from temper.common.schema import BODIES, Lease, Samples, Touch

KINDS = frozenset({Samples.KIND, Lease.KIND, Touch.KIND})
"""What comes in numbers. Nothing that a relay looks into."""
MESSAGES = 256
BYTES = 60 * 1024
"""Metas and frames together: below what is received uncopied, where one kept message would pin the whole burst."""
LENGTH_BYTES = 8


def joinable(kind: int, size: int, frames: Sequence[Any]) -> bool:
    """Whether a message of `size` bytes may be in a burst."""
    return kind in KINDS and size <= BYTES and len(frames) < 2


def join(messages: Sequence[tuple[bytes, Sequence[Any]]]) -> tuple[bytes, list[bytes]]:
    """The meta part and the frames (one or none) of a burst of (meta, frames)."""
    lengths: list[int] = []
    pieces: list[Any] = []
    for meta, frames in messages:
        if frames:
            frame = frames[0]
            lengths += (len(meta), len(frame) if type(frame) is bytes else memoryview(frame).nbytes)
            pieces.append(frame)
        else:
            lengths += (len(meta), -1)
    table = struct.pack(f"<{len(lengths)}i", *lengths)
    return b"".join([table, *(meta for meta, _ in messages)]), [b"".join(pieces)] if pieces else []


def divide(count: int, kind: int, parts: Sequence[Any]) -> tuple[list[int], list[bytes], list[list[bytes]]]:
    """Sizes, metas and frames of the `count` messages in `parts` (the meta part, then the frames); ProtocolError if it is no
    burst."""
    if kind not in KINDS:
        raise ProtocolError(f"flags {count} on a {BODIES[kind].__name__ if kind in BODIES else kind}: expected 0")
    table, joined = parts[0], parts[1] if len(parts) == 2 else b""
    at = count * LENGTH_BYTES
    if not 2 <= count <= MESSAGES or len(parts) > 2 or len(table) < at or len(table) + len(joined) > BYTES + at:
        raise ProtocolError(
            f"a burst of {count} messages in {len(parts)} parts of {len(table)} and {len(joined)} bytes: expected 2 to "
            f"{MESSAGES} messages in at most 2 parts, {BYTES} bytes"
        )
    lengths = struct.unpack_from(f"<{2 * count}i", table)
    sizes: list[int] = []
    metas: list[bytes] = []
    frames: list[list[bytes]] = []
    begin = 0
    for meta_bytes, frame_bytes in zip(lengths[::2], lengths[1::2], strict=True):
        if meta_bytes < 0 or frame_bytes < -1:
            raise ProtocolError(f"a message of {meta_bytes} and {frame_bytes} bytes in a burst")
        metas.append(table[at : at + meta_bytes])
        at += meta_bytes
        if frame_bytes < 0:
            frames.append([])
            sizes.append(meta_bytes)
        else:
            frames.append([joined[begin : begin + frame_bytes]])
            begin += frame_bytes
            sizes.append(meta_bytes + frame_bytes)
    if at != len(table) or begin != len(joined):
        raise ProtocolError(f"a burst of {len(table)} and {len(joined)} bytes, its lengths add up to {at} and {begin}")
    return sizes, metas, frames
