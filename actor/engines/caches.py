"""Keys and values of the decode batch: computed once for all rows that ask for the same prompt.

A long prompt is stored once, in a prefix slot, and a decode step attends to it for all of its rows together; a new one
that begins like a known one starts from there. A short prompt is copied into each row, which then needs no second
product. Memory is what running rows and kept prefixes fill. In `deterministic` mode each row's prompt is computed alone
and copied, and a step has its full shape.

Owned by `decoder`; `prefixes` decides what is kept, `llama` computes. Must be called under ``torch.inference_mode``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
from temper.actor.engines.llama import Cache, Llama, Past, Prefixed, Shared
from temper.actor.engines.prefixes import COMMON_TOKENS, KEPT, SHARED_TOKENS, Prefix, Prefixes, common
from temper.actor.engines.rows import Row, Slots
from temper.actor.engines.shelves import Shelves
from torch import Tensor

PREFILL_TOKENS = 2048  # padded prompt tokens of one prefill pass
BUCKET = 8  # attended cache lengths are rounded up to a multiple of this
FIRST_TOKENS = 32  # of each row's own cache at the start; it grows with what rows ask for

Item = TypeVar("Item", bound=tuple[Any, ...])


class Caches:
    """The caches of all slots. `prefilled_tokens`: prompt tokens computed so far."""

    def __init__(self, model: Llama, slots: Slots, max_rows: int, *, deterministic: bool) -> None:
        self.prefilled_tokens = 0
        self._model, self._slots, self._deterministic = model, slots, deterministic
        self._own = Cache(model.shape, max_rows, slots.length if deterministic else FIRST_TOKENS)
        self._shelves = Shelves(model.shape, max_rows + KEPT, slots.length)
        self._book = Prefixes(max_rows, self._shelves.remove)
        self._copied: dict[tuple[int, ...], Row] = {}  # short prompts: a row that holds their keys and values
        self._prefixed: Prefixed | None = None  # of the running rows, while they stay the same

    def decode(self, running: Collection[Row], count: int) -> Tensor:
        """One decode pass over slots 0..count-1: f32 logits [count, V]."""
        slots = self._slots
        position = slots.position[:count]
        if self._deterministic:
            return self._model.decode(slots.token[:count], position, self._own, slots.length)
        lengths = slots.shared[:count]
        if self._prefixed is None and bool(lengths.any()):
            self._prefixed = self._tables(running, count)
        longest = self._bucket(int((position - lengths).max()) + 1)
        return self._model.decode(slots.token[:count], position, self._own, longest, self._prefixed)

    def fill(self, rows: list[Row]) -> None:
        """Compute what the prompts of new `rows` need: all but their last token."""
        self._prefixed = None
        long: dict[tuple[int, ...], list[Row]] = {}
        short: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            if len(row.prompt) > SHARED_TOKENS and not self._deterministic:
                long.setdefault(row.prompt[:-1], []).append(row)
            elif len(row.prompt) > 1:
                short.setdefault(row.prompt, []).append(row.slot)
                self._copied.setdefault(row.prompt, row)
        self._share(long)
        most = max((row.slot for row in self._slots.rows if row is not None), default=-1) + 1
        self._own.grow(self._bucket(max(self._tokens(row) for row in rows)), most)
        self._copy(short)

    def expire(self) -> None:
        """The weights have changed: new rows meet nothing that was computed under the old ones."""
        self._book.expire()
        self._copied.clear()

    def recompute(self, rows: Collection[Row]) -> None:
        """After `expire`: bring the caches of the running `rows` to the weights just committed."""
        self._compute(self._book.used())
        fresh, later = [], []
        for row in rows:
            position = int(self._slots.position[row.slot])
            ids = row.prompt + tuple(self._slots.tokens[row.slot, len(row.prompt) : position + 1].tolist())
            begin = len(row.prefix.ids) if row.prefix else 0
            if row.prefix and begin < position:
                later.append((ids[begin:position], row.prefix, row.slot))
            elif not row.prefix and position > 0:
                fresh.append((ids[:position], [row.slot]))
        self._prefill(fresh)
        for group in self._by_cache(later):
            for part in self._passes(group):
                past = self._past([(prefix, len(prefix.ids)) for _, prefix, _ in part])
                found = self._model.prefill(self._padded([ids for ids, _, _ in part]), past)
                for index, (ids, _, slot) in enumerate(part):
                    self._own.write(slot, 0, found[:, :, index, :, : len(ids)])

    def release(self, row: Row, *, broken: bool) -> None:
        """`row` has ended. After `broken` ones no later row must meet a NaN, not even a masked one."""
        self._prefixed = None
        if broken:
            self._own.all[:, :, row.slot] = 0
        if self._copied.get(row.prompt) is row:
            del self._copied[row.prompt]
        if row.prefix is None:
            return
        if broken:
            self._book.drop(row.prefix)
        if row.prefix.broken and row.prefix.rows == 1:
            self._shelves.wipe(row.prefix.slot)
        self._book.release(row.prefix)

    def rest(self) -> None:
        """No row runs and none will for a while: give the memory of everything back."""
        self.expire()
        self._own.clear()

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows of slots `source` i64[M] take the slots `target` i64[M]."""
        self._prefixed = None
        length = int((self._slots.position - self._slots.shared)[source].max()) + 1
        self._own.copy_rows(source, target, length)

    # ------------------------------------------------------------ inside

    def _bucket(self, size: int) -> int:
        return min(self._slots.length, -(-size // BUCKET) * BUCKET)

    def _tokens(self, row: Row) -> int:
        """Positions of its own that `row` may come to need."""
        whole = min(len(row.prompt) + row.budget, self._slots.length)
        return whole - (len(row.prefix.ids) if row.prefix else 0)

    def _tables(self, running: Collection[Row], count: int) -> Prefixed:
        """Which of slots 0..count-1 share which prefix, shelf by shelf."""
        shelves: dict[Cache, list[tuple[int, Prefix, int]]] = {}
        for row in running:
            if row.prefix is not None:
                cache, place = self._shelves.at(row.prefix.slot)
                shelves.setdefault(cache, []).append((row.slot, row.prefix, place))
        parts, with_prefix = [], 0
        for cache, found in shelves.items():
            found.sort(key=lambda item: item[0])
            with_prefix += len(found)
            rows: list[list[int]] = [[] for _ in range(max(place for _, _, place in found) + 1)]
            rank = []
            for index, (_, _, place) in enumerate(found):
                rank.append(len(rows[place]))
                rows[place].append(index)
            most = max(map(len, rows))
            everyone = len(found) == count
            parts.append(
                Shared(
                    cache,
                    self._bucket(max(len(prefix.ids) for _, prefix, _ in found)),
                    slice(None) if everyone else torch.tensor([slot for slot, _, _ in found]),
                    torch.tensor([own + [0] * (most - len(own)) for own in rows]),
                    torch.tensor([place for _, _, place in found]),
                    torch.tensor(rank),
                )
            )
        lengths = self._slots.shared[:count]
        return Prefixed(lengths, tuple(parts), None if with_prefix == count else (lengths == 0).nonzero()[:, 0])

    def _share(self, prompts: dict[tuple[int, ...], list[Row]]) -> None:
        """Give the rows of each prompt their prefix, computing the new ones."""
        new = []
        for ids, rows in prompts.items():
            entry = self._book.find(ids)
            for row in rows:
                if entry is None:
                    entry = self._book.take(ids)
                    self._shelves.put(entry.slot, len(ids))
                    entry.current = False  # until it is computed
                    new.append(entry)
                self._book.acquire(entry)
                row.prefix = entry
        self._compute(new)

    def _compute(self, entries: list[Prefix]) -> None:
        """Keys and values of `entries`. One that begins like another one waits for it and goes on from there."""
        waiting = sorted(entries, key=lambda entry: entry.ids)
        while waiting:
            now: list[tuple[tuple[int, ...], Prefix | None, Prefix]] = []
            later = []
            for entry in waiting:
                source, size = self._book.longest(entry.ids[:-1])
                if now and common(now[-1][2].array, entry.array) >= size + COMMON_TOKENS:
                    later.append(entry)
                else:
                    now.append((entry.ids[size:], source, entry))
            self._extend([item for item in now if item[1] is not None])
            self._prefill_prefixes([item for item in now if item[1] is None])
            for _, _, entry in now:
                entry.current = True
            waiting = later

    def _prefill_prefixes(self, items: list[tuple[tuple[int, ...], Prefix | None, Prefix]]) -> None:
        for part in self._passes(items):
            found = self._model.prefill(self._padded([ids for ids, _, _ in part]))
            for index, (ids, _, entry) in enumerate(part):
                self._shelves.write(entry.slot, 0, found[:, :, index, :, : len(ids)])

    def _extend(self, items: list[tuple[tuple[int, ...], Prefix | None, Prefix]]) -> None:
        """The last `ids` of each entry, after what it has in common with its source."""
        for group in self._by_cache([(ids, source, entry) for ids, source, entry in items if source is not None]):
            for part in self._passes(group):
                begins = [len(entry.ids) - len(ids) for ids, _, entry in part]
                past = self._past([(source, begin) for (_, source, _), begin in zip(part, begins, strict=True)])
                found = self._model.prefill(self._padded([ids for ids, _, _ in part]), past)
                for index, ((ids, source, entry), begin) in enumerate(zip(part, begins, strict=True)):
                    self._shelves.write(entry.slot, 0, self._shelves.read(source.slot, begin))
                    self._shelves.write(entry.slot, begin, found[:, :, index, :, : len(ids)])

    def _by_cache(
        self, items: list[tuple[tuple[int, ...], Prefix, Any]]
    ) -> list[list[tuple[tuple[int, ...], Prefix, Any]]]:
        """Items (ids, prefix, ...) apart by the cache that holds their prefix: a pass continues prefixes of one."""
        found: dict[Cache, list[tuple[tuple[int, ...], Prefix, Any]]] = {}
        for item in items:
            found.setdefault(self._shelves.at(item[1].slot)[0], []).append(item)
        return list(found.values())

    def _past(self, sources: list[tuple[Prefix, int]]) -> Past:
        """The first tokens (how many is given) of prefixes in one cache."""
        places = [self._shelves.at(prefix.slot) for prefix, _ in sources]
        return Past(places[0][0], torch.tensor([row for _, row in places]), torch.tensor([size for _, size in sources]))

    def _copy(self, prompts: dict[tuple[int, ...], list[int]]) -> None:
        """Short prompts into the rows' own caches, from a row that has them or computed."""
        fresh: list[tuple[tuple[int, ...], list[int]]] = []
        for prompt, targets in prompts.items():
            source = self._copied[prompt].slot
            if source in targets:
                fresh.append((prompt[:-1], targets))
            else:
                self._own.copy_rows(torch.tensor([source] * len(targets)), torch.tensor(targets), len(prompt) - 1)
        self._prefill(fresh)

    def _prefill(self, prompts: list[tuple[tuple[int, ...], list[int]]]) -> None:
        """Keys and values of each token sequence into its target slots."""
        for part in self._passes(prompts):
            found = self._model.prefill(self._padded([ids for ids, _ in part]))
            for index, (ids, targets) in enumerate(part):
                self._own.all[:, :, targets, :, : len(ids)] = found[:, :, index : index + 1, :, : len(ids)]

    def _passes(self, items: list[Item]) -> Iterator[list[Item]]:
        """Items (ids, ...) in parts of similar length, one prefill pass each."""
        items = sorted(items, key=lambda item: len(item[0]))
        while items:
            take = 1
            if not self._deterministic:
                while take < len(items) and (take + 1) * len(items[take][0]) <= PREFILL_TOKENS:
                    take += 1
            yield items[:take]
            self.prefilled_tokens += sum(len(item[0]) for item in items[:take])
            items = items[take:]

    @staticmethod
    def _padded(sequences: list[tuple[int, ...]]) -> Tensor:
        size = max(len(ids) for ids in sequences)
        return torch.tensor([list(ids) + [0] * (size - len(ids)) for ids in sequences])
