"""Messages of one lease that came together keep their arrays in one piece: the first one holds the frames of all of them, joined,
the others hold none. What is joined once need not be cut up, kept and joined again, sample by sample.

`together` makes such a piece, `apart` undoes it. A message whose arrays are not in one frame, or that came alone, is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from temper.broker.segments import Message
from temper.common.arrays import packed_bytes
from temper.common.schema import Samples
from temper.common.wire import unpack_meta


def together(metas: Sequence[bytes], piece: bytes) -> list[Message]:
    """Messages whose frames, one each, lie one after another in `piece`."""
    return list(zip(metas, [(piece,), *[()] * (len(metas) - 1)], strict=True))


def apart(messages: Sequence[Message]) -> list[Message]:
    """Each message with its own frames, which are views of the joined ones."""
    found: list[Message] = []
    rest = memoryview(b"")
    for at, (meta, frames) in enumerate(messages):
        begins = len(frames) == 1 and at + 1 < len(messages) and not messages[at + 1][1]
        if begins:
            rest = memoryview(frames[0])
        if begins or not frames:
            size = packed_bytes(unpack_meta(meta, Samples).arrays)
            found.append((meta, (rest[:size],)))
            rest = rest[size:]
        else:
            found.append((meta, frames))
    return found
