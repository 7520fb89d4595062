"""What the broker's Router hands on: a `Delivery` is one received message, a `DeliveryRun` several that came in one burst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from temper.common import burst
from temper.common.schema import Body
from temper.common.session import Fields, decode
from temper.common.wire import Header

PeerId = bytes


class Delivery(msgspec.Struct, eq=False, gc=False):
    """One message. `frames` are bytes or, over 16 KiB, zmq.Frames (buffer protocol), as they came.

    `body` is decoded and checked already, except for the Router's `lazy` kinds: there it is decoded on first use and
    may raise ProtocolError (then call `refuse`). `kind`, `sequence` and `size` are the header's; `sequence` is 0 for
    transient messages, which need no acknowledgement.
    """

    peer: PeerId
    type: type[Body]
    fields: Fields
    kind: int
    sequence: int
    size: int
    raw_meta: bytes
    frames: Sequence[Any]
    decoded: Body | None = None

    @property
    def body(self) -> Any:
        """The typed body."""
        if self.decoded is None:
            self.decoded = decode(self.type, self.raw_meta)
        return self.decoded

    @property
    def header(self) -> Header:
        """The header as it came."""
        return Header(*self.fields)


class DeliveryRun(msgspec.Struct, eq=False, gc=False):
    """A burst (``burst``) of a Router's `lazy` kind, each of its messages the next in order: `metas[i]`, `frames[i]` (bytes: one
    or none) and `sizes[i]` (bytes of both) are message i's, `sequence` is the last one's. The frames lie one after another in
    `joined`, `lengths[i]` bytes each (-1: message i has none)."""

    peer: PeerId
    kind: int
    sequence: int
    sizes: list[int]
    metas: list[bytes]
    joined: memoryview
    lengths: tuple[int, ...]

    @property
    def frames(self) -> list[tuple[bytes, ...]]:
        """Each message's own, copied out."""
        return burst.frames_of(self.joined, self.lengths)


Arrival = Delivery | DeliveryRun
