"""The framed protocol: ``[32-byte header][msgpack meta <= 64 KiB][<= 64 array frames, each <= 16 MiB]``.

Pure functions from values to frames and back. Nothing is unpickled, nothing unbounded is decoded: the header is
checked first, then sizes, then the meta (MessagePack) is decoded straight into the message type of its kind
(``schema``). Any violation is a ``ProtocolError`` that names what was found and what is allowed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from temper.common.errors import ProtocolError

MAGIC = b"TMPR"
PROTOCOL = 5
META_LIMIT_BYTES = 64 * 1024
FRAME_LIMIT = 64
FRAME_LIMIT_BYTES = 16 * 1024 * 1024
JOINED_BYTES = 16 * 1024
"""Array frames up to here may be joined with others, and are copied; larger ones pass uncopied."""

_HEADER = struct.Struct("<4sBBHIIQQ")
_FIELDS = struct.Struct("<BHIIQQ")
_PREFIX = MAGIC + bytes([PROTOCOL])
HEADER_BYTES = _HEADER.size

Frame = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a message.

    ``flags`` are 0, or how many messages a burst holds (``burst``).
    ``sequence`` 0 marks a transient message (heartbeats, acks): never acknowledged, never resent.
    ``epoch`` is the sender's incarnation, drawn at random when its process starts.
    """

    kind: int
    flags: int = 0
    version: int = 0
    epoch: int = 0
    sequence: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Envelope:
    """A received message: checked header, undecoded meta, untouched array frames."""

    header: Header
    meta: bytes
    frames: list[memoryview]


def pack_fields(kind: int, flags: int, version: int, epoch: int, sequence: int, size: int) -> bytes:
    """The 32 bytes of a header, little-endian."""
    return _HEADER.pack(MAGIC, PROTOCOL, kind, flags, version, epoch, sequence, size)


def pack_header(header: Header) -> bytes:
    """`pack_fields` of a Header."""
    return pack_fields(header.kind, header.flags, header.version, header.epoch, header.sequence, header.size)


def unpack_header(data: bytes | memoryview) -> Header:
    """The header in `data`; ProtocolError if its length, magic or protocol number is not ours."""
    return Header(*unpack_fields(data))


def is_header(data: bytes | memoryview) -> bool:
    """Whether `data` has a header's length, magic and protocol number; then ``header_fields(data, 5)`` are its fields."""
    return len(data) == HEADER_BYTES and data[:5] == _PREFIX


header_fields = _FIELDS.unpack_from


def unpack_fields(data: bytes | memoryview) -> tuple[int, int, int, int, int, int]:
    """(kind, flags, version, epoch, sequence, size) of a header, checked like `unpack_header`: the fast way."""
    if is_header(data):
        return header_fields(data, 5)
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"header of {len(data)} bytes, expected {HEADER_BYTES}")
    magic, protocol = bytes(data[:4]), data[4]
    if magic != MAGIC:
        raise ProtocolError(f"magic {magic!r}, expected {MAGIC!r}: the peer does not speak Temper's protocol")
    raise ProtocolError(f"protocol {protocol}, this process speaks {PROTOCOL}: install the same version on both")


def nbytes(frame: Any) -> int:
    """Size of a frame in bytes, whatever its item size."""
    return len(frame) if type(frame) is bytes else memoryview(frame).nbytes


def encode(
    kind: int,
    meta: bytes,
    frames: Sequence[Any] = (),
    *,
    flags: int = 0,
    version: int = 0,
    epoch: int = 0,
    sequence: int = 0,
) -> list[Any]:
    """Frames to send for one message. `frames` are passed through uncopied; limits are checked here too."""
    if len(meta) > META_LIMIT_BYTES:
        raise ProtocolError(f"meta of {len(meta)} bytes, at most {META_LIMIT_BYTES}: put large values into frames")
    if len(frames) > FRAME_LIMIT:
        raise ProtocolError(f"{len(frames)} frames, at most {FRAME_LIMIT}")
    size = len(meta)
    for frame in frames:
        n = nbytes(frame)
        if n > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"frame of {n} bytes, at most {FRAME_LIMIT_BYTES}: split it")
        size += n
    return [pack_header(Header(kind, flags, version, epoch, sequence, size)), meta, *frames]


def decode(parts: Sequence[Any]) -> Envelope:
    """The message in `parts` (as received, without any routing frame), sizes checked, meta still bytes."""
    if not 2 <= len(parts) <= 2 + FRAME_LIMIT:
        raise ProtocolError(f"{len(parts)} frames, expected 2 to {2 + FRAME_LIMIT}")
    views = [memoryview(part) for part in parts]
    header = unpack_header(views[0])
    if views[1].nbytes > META_LIMIT_BYTES:
        raise ProtocolError(f"meta of {views[1].nbytes} bytes, at most {META_LIMIT_BYTES}")
    size = 0
    for view in views[1:]:
        if view.nbytes > FRAME_LIMIT_BYTES:
            raise ProtocolError(f"frame of {view.nbytes} bytes, at most {FRAME_LIMIT_BYTES}")
        size += view.nbytes
    if size != header.size:
        raise ProtocolError(f"{size} bytes after the header, which announced {header.size}")
    return Envelope(header, bytes(views[1]), views[2:])


T = TypeVar("T")


_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def pack_meta(body: msgspec.Struct) -> bytes:
    """A typed body as MessagePack."""
    return _encode(body)


def unpack_meta(meta: bytes, body: type[T]) -> T:
    """MessagePack bytes as a validated `body`; ProtocolError says which field was wrong.

    Decoded straight into the type: nothing untyped is built on the way, and a length beyond the data is refused unread.
    """
    decoder = _decoders.get(body)
    if decoder is None:
        decoder = _decoders[body] = msgspec.msgpack.Decoder(body)
    try:
        return decoder.decode(meta)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed {body.__name__}: {error}") from error
