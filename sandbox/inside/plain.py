"""Plain values across a process boundary: JSON with tags, so that what arrives can only be data.

None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, complex and range keep their exact type; an iterator
arrives as a list iterator. Anything else cannot cross, also subclasses: an object with an `__eq__` of its own
must not meet an assert.
"""

from __future__ import annotations

import itertools
import json
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_ITEMS = 1_000_000
MOST_BYTES = 64 * 1024 * 1024
_SAMPLES: list[object] = [
    iter([]), iter(()), iter(""), iter({}), iter(set()), iter(range(0)), map(len, []), filter(None, []), zip(), enumerate([]),
    reversed([]), (item for item in [0]), {}.keys(), {}.values(), {}.items(), itertools.chain(), itertools.islice([], 0),
]  # fmt: skip
ITERATORS = tuple(map(type, _SAMPLES))


class CannotCross(TypeError):
    """A value that only its own process can hold."""


def encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -(1 << 63) < value < 1 << 63 else {"i": hex(value)}
    if kind is list:
        return [encode(item) for item in value]
    if kind is dict:
        return {"d": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {kind.__name__[0]: [encode(item) for item in value]}
    if kind in (bytes, bytearray):
        return {"b" if kind is bytes else "a": value.hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is range:
        return {"r": [encode(value.start), encode(value.stop), encode(value.step)]}
    if kind in ITERATORS:
        return {"l": [encode(item) for item in itertools.islice(value, MOST_ITEMS)]}
    raise CannotCross(f"a value of type {kind.__name__} cannot cross the process boundary")


def decode(value: Any) -> Any:
    if type(value) is list:
        return [decode(item) for item in value]
    if type(value) is not dict:
        return value
    ((tag, inner),) = value.items()
    if tag == "d":
        return {decode(key): decode(item) for key, item in inner}
    if tag in ("t", "s", "f"):
        return {"t": tuple, "s": set, "f": frozenset}[tag](decode(item) for item in inner)
    if tag == "i":
        return int(inner, 16)
    if tag in ("b", "a"):
        return (bytes if tag == "b" else bytearray).fromhex(inner)
    if tag == "c":
        return complex(*inner)
    if tag == "r":
        return range(*(decode(item) for item in inner))
    if tag == "l":
        return iter([decode(item) for item in inner])
    raise ValueError(f"unknown tag {tag!r}")


class Channel:
    """Messages over two pipes; EOFError when the other side is gone."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        view = memoryview(struct.pack("<Q", len(data)) + data)
        while view:
            view = view[os.write(self.sink, view) :]

    def receive(self) -> Any:
        (size,) = struct.unpack("<Q", self._exactly(8))
        if size > MOST_BYTES:
            raise EOFError("a message too large")
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self.source, min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError("the other side is gone")
            data += chunk
        return bytes(data)
