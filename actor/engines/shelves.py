"""Where the keys and values of shared prefixes lie: on shelves, each for prefixes up to a length.

A decode step attends to all prefixes of a shelf in one product, padded to the longest of them, so short prompts do not pay
for long ones. Memory is taken page by page as prefixes are written and given back when they go. Called by `caches`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from temper.actor.engines.llama import Cache
from temper.actor.engines.shape import ModelShape
from torch import Tensor

SHORTEST = 64  # tokens; every second shelf is for twice as long ones


@dataclass(slots=True, eq=False)
class Shelf:
    """`cache`: one prefix a row; rows below `used` have been taken before, `free` are those of them that are free."""

    cache: Cache
    used: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        """The lowest free row."""
        if self.free:
            return heappop(self.free)
        self.used += 1
        return self.used - 1

    def give_back(self, row: int) -> None:
        """`row` is free; its memory too."""
        self.cache.free(row)
        heappush(self.free, row)


def length_for(tokens: int, longest: int) -> int:
    """The length of the shelf for prefixes of `tokens`: 64, 96, 128, 192, 256, ... and `longest`."""
    size = SHORTEST
    while size < tokens:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return min(size, longest)


class Shelves:
    """Places for at most `count` prefixes of up to `longest` tokens, by slot of the book."""

    def __init__(self, shape: ModelShape, count: int, longest: int) -> None:
        self._shape, self._count, self._longest = shape, count, longest
        self._shelves: dict[int, Shelf] = {}
        self._places: dict[int, tuple[Shelf, int]] = {}

    def put(self, slot: int, tokens: int) -> None:
        """A place for the prefix in `slot`, which has `tokens`."""
        length = length_for(tokens, self._longest)
        if length not in self._shelves:
            self._shelves[length] = Shelf(Cache(self._shape, self._count, length))
        shelf = self._shelves[length]
        self._places[slot] = shelf, shelf.take()

    def remove(self, slot: int) -> None:
        """The prefix in `slot` is gone; one that never had a place is ignored."""
        shelf, row = self._places.pop(slot, (None, 0))
        if shelf is not None:
            shelf.give_back(row)

    def at(self, slot: int) -> tuple[Cache, int]:
        """The cache and its row that hold the prefix in `slot`."""
        shelf, row = self._places[slot]
        return shelf.cache, row

    def read(self, slot: int, size: int) -> Tensor:
        """f32[L, 2, K, size, D]: its first `size` positions, a view."""
        cache, row = self.at(slot)
        return cache.all[:, :, row, :, :size]

    def write(self, slot: int, begin: int, found: Tensor) -> None:
        """Keys and values f32[L, 2, K, S, D] as positions begin..begin+S-1."""
        cache, row = self.at(slot)
        cache.write(row, begin, found)

    def wipe(self, slot: int) -> None:
        """Zeros instead of what is not finite."""
        cache, row = self.at(slot)
        cache.all[:, :, row] = 0
