"""Which prompts' keys and values are kept, in which slot, for which rows: the book of the shared prefixes.

A prefix is a prompt without its last token. Rows that ask for the same prompt share one; a new prompt that begins like
a known one (the few-shot examples of a domain) starts from its keys and values. An entry made under old weights serves
the rows that run on it and is never found again. Entries without rows are kept while there is room, the least recently
used ones go first. Holds no tensors and computes nothing; used by `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SHARED_TOKENS = 32  # shorter prefixes are copied into each row: attending to them apart would cost more
COMMON_TOKENS = 16  # a common beginning of fewer tokens is not worth a pass of its own
KEPT = 8  # entries without rows


@dataclass(slots=True, eq=False)
class Prefix:
    """`ids` whose keys and values lie in `slot`; `rows` rows use it; `current`: computed under the present weights."""

    ids: tuple[int, ...]
    slot: int
    rows: int = 0
    current: bool = True
    broken: bool = False
    used: int = 0
    array: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.array = np.asarray(self.ids, dtype=np.int64)


def common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many ids two sequences have in common at their start."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


class Prefixes:
    """The entries. There are slots for `rows` rows with a prefix each and KEPT more. `on_free` hears of slots whose entry
    is gone."""

    def __init__(self, rows: int, on_free: Callable[[int], None] = lambda slot: None) -> None:
        self.slots = rows + KEPT
        self._on_free = on_free
        self._entries: dict[int, Prefix] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def used(self) -> list[Prefix]:
        """Entries with rows, by slot."""
        return [entry for _, entry in sorted(self._entries.items()) if entry.rows]

    def find(self, ids: tuple[int, ...]) -> Prefix | None:
        """The entry of exactly `ids` under the present weights."""
        return next((entry for entry in self._entries.values() if entry.current and entry.ids == ids), None)

    def longest(self, ids: tuple[int, ...]) -> tuple[Prefix | None, int]:
        """The present entry that has most ids in common with `ids` at the start, and how many; (None, 0) if they are
        fewer than COMMON_TOKENS."""
        wanted = np.asarray(ids, dtype=np.int64)
        best: tuple[Prefix | None, int] = (None, 0)
        for entry in self._entries.values():
            size = common(entry.array, wanted) if entry.current else 0
            if size > best[1]:
                best = entry, size
        return best if best[1] >= COMMON_TOKENS else (None, 0)

    def acquire(self, entry: Prefix) -> None:
        """One more row."""
        self._clock += 1
        entry.rows, entry.used = entry.rows + 1, self._clock

    def release(self, entry: Prefix) -> None:
        """One row less. An entry of old weights goes with its last row."""
        if entry.rows < 1:
            raise AssertionError(f"prefix slot {entry.slot} is released more often than it was acquired")
        entry.rows -= 1
        if not entry.rows and not entry.current:
            self._free(entry.slot)
        self._trim(KEPT)

    def take(self, ids: tuple[int, ...]) -> Prefix:
        """A new entry in the lowest free slot."""
        if len(self._entries) == self.slots:
            self._trim(KEPT - 1)
        slot = next((slot for slot in range(self.slots) if slot not in self._entries), None)
        if slot is None:
            raise AssertionError(f"all {self.slots} prefix slots are in use")
        entry = self._entries[slot] = Prefix(ids, slot)
        return entry

    def expire(self) -> None:
        """The weights have changed: no new row meets what was computed before."""
        for entry in list(self._entries.values()):
            entry.current = False
            if not entry.rows:
                self._free(entry.slot)

    def drop(self, entry: Prefix) -> None:
        """Its values are not finite: it is not found again."""
        entry.current, entry.broken = False, True

    def _trim(self, keep: int) -> None:
        idle = sorted((entry.used, entry.slot) for entry in self._entries.values() if not entry.rows)
        for _, slot in idle[: max(0, len(idle) - keep)]:
            self._free(slot)

    def _free(self, slot: int) -> None:
        del self._entries[slot]
        self._on_free(slot)
