"""Packs the rows of a step into micro-batches without padding, each shared prefix forwarded once.

The rows of a micro-batch form prefix trees: whatever tokens rows have in common at their start (a group's prompt,
few-shot examples of a whole domain, equal beginnings of completions) is one *segment*, computed once; every token
attends to its own path from the root and nothing else. Tokens with different experts on record are not in common. Loss and
gradient equal those of each row on its own.

Guarantees: the same rows give the same micro-batches in whatever order they arrive (rows are laid out in the order of
their tokens); tokens after the last trained one, and rows without any, are not computed; a row is never divided
between micro-batches. Pure numpy; called by `step` and, through it, by the in-process loop.

Legend: R rows, N tokens, T packed tokens, M trained tokens, S segments, B items of a bucket with Q queries and K keys each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Costs of attention in (query, key) cells: one more padded call, and one more item of a call.
LAUNCH_CELLS = 1 << 15
ITEM_CELLS = 400


def ragged(starts: Array, sizes: Array) -> Array:
    """Indices start..start+size-1 of every (start, size), one after another."""
    if not len(sizes):
        return np.zeros(0, dtype=np.int64)
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R sequences, one after another.

    `tokens` i32, divided among the rows by `offsets` i64[R+1]; `trained` i64[M]: ascending positions >= 1 within their
    row of the tokens that have a gradient, divided by `cu_seqlens` i64[R+1]. `computed` i64[R]: tokens that must be
    forwarded, those before the last trained one. `experts` i16[N, layers, experts per token], or None: on record, see
    `routing_replay`. `symbols` i64[N]: equal where token and experts are, ordered by token first.
    """

    tokens: Array
    offsets: Array
    trained: Array
    cu_seqlens: Array
    experts: Array | None = None
    computed: Array = field(init=False)
    symbols: Array = field(init=False)

    def __post_init__(self) -> None:
        counts = np.diff(self.cu_seqlens)
        computed = np.zeros(len(counts), dtype=np.int64)
        computed[counts > 0] = self.trained[self.cu_seqlens[1:][counts > 0] - 1]
        object.__setattr__(self, "computed", computed)
        object.__setattr__(
            self, "symbols", self.tokens if self.experts is None else _symbols(self.tokens, self.experts)
        )


def _symbols(tokens: Array, experts: Array) -> Array:
    if not len(tokens):
        return np.zeros(0, dtype=np.int64)
    ids = tokens.astype(">u4")[:, None].view(">u2")
    cells = np.concatenate([ids, experts.reshape(len(tokens), -1).astype(">i2").view(">u2")], axis=1)
    order = np.argsort(np.ascontiguousarray(cells).view(f"V{2 * cells.shape[1]}").reshape(-1), kind="stable")
    ordered = cells[order]
    symbols = np.zeros(len(tokens), dtype=np.int64)
    symbols[order[1:]] = np.cumsum((ordered[1:] != ordered[:-1]).any(1))
    return symbols


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """B pieces of a micro-batch whose attention is one padded call.

    `queries` i64[B, Q] and `keys` i64[B, K] are packed positions (padding repeats the first of its item); `mask`
    bool[B, Q, K] is true where a query sees a key, None where that is causal. `start`: the queries are the packed range
    [start, start + B*Q), or None. `keys` is `queries` where they are the same.
    """

    queries: Array
    keys: Array
    mask: Array | None
    start: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One forward and backward.

    `input_ids`, `positions` i64[T], `experts` i16[T, layers, experts per token] if the rows have any; attention in
    `buckets`, whose outputs, laid one after another (B*Q rows each), are brought into packed order by `restore` i64[T]
    (None: they are). Trained token j has the id `target[j]`, is predicted from packed position `predict[j]` and is entry
    `flat[j]` of the step's trained tokens; `cu_seqlens` i64[R+1] divides the trained tokens among the rows `rows` i64[R]
    (numbers in the step).
    """

    input_ids: Array
    positions: Array
    buckets: tuple[Bucket, ...]
    restore: Array | None
    predict: Array
    target: Array
    flat: Array
    cu_seqlens: Array
    rows: Array
    row_tokens: int  # tokens that the same rows hold, without sharing
    experts: Array | None = None

    @property
    def packed_tokens(self) -> int:
        """T."""
        return len(self.input_ids)


def plan(rows: Rows, tokens_per_microbatch: int, include: Array | None = None) -> list[Microbatch]:
    """Micro-batches of at most `tokens_per_microbatch` packed tokens (a longer single row gets one of its own) over the
    rows numbered `include` (None: all)."""
    members = np.arange(len(rows.computed)) if include is None else np.asarray(include, dtype=np.int64)
    members = members[rows.computed[members] > 0]
    if not len(members):
        return []
    lengths = rows.computed[members]
    width = int(lengths.max())
    ids = np.zeros((len(members), width), dtype=">u4")  # symbol + 1; 0 is padding, so that a prefix sorts first
    ids[np.arange(width) < lengths[:, None]] = rows.symbols[ragged(rows.offsets[members], lengths)] + 1
    order = np.argsort(ids.view(f"V{4 * width}").reshape(-1), kind="stable")
    members, lengths, ids = members[order], lengths[order], ids[order]
    differ = ids[1:] != ids[:-1]
    shared = np.concatenate([[0], np.where(differ.any(1), differ.argmax(1), lengths[1:])])
    batches, low, size = [], 0, 0
    for i, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        if i > low and size + length - common > tokens_per_microbatch:
            batches.append(_pack(rows, members[low:i], lengths[low:i], shared[low:i]))
            low, size = i, 0
        size += length - (common if i > low else 0)
    batches.append(_pack(rows, members[low:], lengths[low:], shared[low:]))
    return batches


def segments(lengths: Sequence[int], shared: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The prefix trees of rows sorted by their tokens, from their lengths and common prefixes with the row before.

    (low, high, begin, end): rows low..high-1 have positions begin..end-1 in common, and no others have. `shared[0]` is
    not read.
    """
    found: list[tuple[int, int, int, int]] = []
    open_at: list[tuple[int, int]] = [(0, 0)]  # (depth, first row) of the nodes on the present row's path
    for i in range(len(lengths) + 1):
        common = shared[i] if 0 < i < len(lengths) else 0
        low = i
        while open_at[-1][0] > common:
            depth, low = open_at.pop()
            found.append((low, i, max(open_at[-1][0], common), depth))
        if open_at[-1][0] < common:
            open_at.append((common, low))
        if i < len(lengths) and lengths[i] > common:
            open_at.append((lengths[i], i))
    return found


def divide(sizes: Sequence[tuple[int, int]]) -> list[slice]:
    """Divide items of (queries, keys), sorted by keys, where padding would cost more than another call."""
    found: list[slice] = []
    begin = real = widest = 0
    for i, (q, k) in enumerate(sizes):
        real, widest = real + q * k, max(widest, q)
        if i > begin and (i + 1 - begin) * widest * k - real > max(LAUNCH_CELLS, real // 4):
            found.append(slice(begin, i))
            begin, real, widest = i, q * k, q
    return [*found, slice(begin, len(sizes))] if sizes else found


@dataclass(slots=True, eq=False)
class _Tree:
    """The segments of a micro-batch as arrays [S], in packed order once `place` ran."""

    low: Array
    high: Array
    begin: Array
    end: Array
    tree: Array  # number of its tree
    start: Array  # packed position of its first token

    @property
    def width(self) -> Array:
        return self.end - self.begin

    def pick(self, order: Array) -> _Tree:
        return _Tree(*(getattr(self, name)[order] for name in ("low", "high", "begin", "end", "tree", "start")))


def _pack(rows: Rows, members: Array, lengths: Array, shared: Array) -> Microbatch:
    low, high, begin, end = np.asarray(segments(lengths.tolist(), shared.tolist()), dtype=np.int64).T
    roots = np.sort(low[begin == 0])
    seg = _Tree(low, high, begin, end, np.searchsorted(roots, low, "right") - 1, np.zeros_like(low))
    seg = seg.pick(np.lexsort((seg.low, seg.begin, seg.tree)))
    tokens = np.bincount(seg.tree, weights=seg.width).astype(np.int64)
    apart = np.bincount(seg.tree, weights=ITEM_CELLS + seg.width * seg.end)
    whole = tokens * tokens <= apart + ITEM_CELLS  # attention over the whole tree at once is cheaper than by segment

    trees = np.flatnonzero(whole)
    trees = trees[np.argsort(tokens[trees], kind="stable")]
    tree_parts = [trees[part] for part in divide([(n, n) for n in tokens[trees].tolist()])]
    single = np.flatnonzero(~whole[seg.tree])
    single = single[np.lexsort((seg.low[single], seg.width[single], seg.end[single]))]
    seg_parts = [
        single[part] for part in divide(list(zip(seg.width[single].tolist(), seg.end[single].tolist(), strict=True)))
    ]

    first = np.searchsorted(seg.tree, np.arange(len(tokens) + 1))
    order = [ragged(first[part], np.diff(first)[part]) for part in tree_parts] + seg_parts
    counts = np.cumsum([0, *(len(part) for part in order)])
    seg = seg.pick(np.concatenate(order))
    seg.start = np.cumsum(seg.width) - seg.width
    paths = _paths(seg, (len(members), int(lengths.max())))
    buckets = [_tree_bucket(seg.pick(np.arange(counts[i], counts[i + 1])), paths) for i in range(len(tree_parts))]
    buckets += [
        _segment_bucket(seg.pick(np.arange(counts[i], counts[i + 1])), paths)
        for i in range(len(tree_parts), len(order))
    ]
    trained = np.diff(rows.cu_seqlens)[members]
    flat = ragged(rows.cu_seqlens[members], trained)
    source = ragged(rows.offsets[members[seg.low]] + seg.begin, seg.width)
    of_row, position = np.repeat(np.arange(len(members)), trained), rows.trained[flat]
    return Microbatch(
        input_ids=rows.tokens[source].astype(np.int64),
        positions=ragged(seg.begin, seg.width),
        buckets=tuple(bucket for bucket, _ in buckets),
        restore=_restore(buckets),
        predict=paths[of_row, position - 1],
        target=rows.tokens[rows.offsets[members][of_row] + position].astype(np.int64),
        flat=flat,
        cu_seqlens=np.concatenate([[0], np.cumsum(trained)]),
        rows=members,
        row_tokens=int(np.diff(rows.offsets)[members].sum()),
        experts=None if rows.experts is None else rows.experts[source],
    )


def _paths(seg: _Tree, shape: tuple[int, ...]) -> Array:
    """i64[R, longest]: the packed position of every token of every row; undefined past a row's end."""
    paths = np.zeros(shape, dtype=np.int64)
    copies = seg.high - seg.low
    each = np.repeat(np.arange(len(copies)), copies)
    cells = np.repeat(ragged(seg.low, copies) * shape[1] + seg.begin[each], seg.width[each])
    within = ragged(np.zeros_like(each), seg.width[each])
    paths.reshape(-1)[cells + within] = np.repeat(seg.start[each], seg.width[each]) + within
    return paths


def _padded(starts: Array, sizes: Array) -> Array:
    """i64[B, longest]: start..start+size-1 of each item, padded with its start."""
    offsets = np.arange(int(sizes.max()))
    return starts[:, None] + np.where(offsets < sizes[:, None], offsets, 0)


def _tree_bucket(seg: _Tree, paths: Array) -> tuple[Bucket, Array]:
    """Whole trees: every token of a tree is query and key. With the sizes i64[B] of the trees."""
    numbers, first = np.unique(seg.tree, return_index=True)
    by_start = np.argsort(first)
    numbers, first = numbers[by_start], first[by_start]
    sizes = np.add.reduceat(seg.width, first)
    starts = seg.start[first]
    queries = _padded(starts, sizes)
    full = bool((sizes == sizes[0]).all())
    mask = None
    if len(seg.low) > len(numbers):  # some tree branches
        mask = np.zeros((len(sizes), queries.shape[1], queries.shape[1]), dtype=bool)
        mask[:, :, 0] = True
        item = np.repeat(np.repeat(np.arange(len(sizes)), np.diff([*first, len(seg.low)])), seg.width)
        query = np.arange(int(sizes.sum())) + seg.start[0] - starts[item]
        depth = ragged(seg.begin, seg.width) + 1
        row = np.repeat(seg.low, seg.width)
        key = paths.reshape(-1)[ragged(row * paths.shape[1], depth)] - np.repeat(starts[item], depth)
        mask[np.repeat(item, depth), np.repeat(query, depth), key] = True
    return Bucket(queries, queries, mask, int(starts[0]) if full else None), sizes


def _segment_bucket(seg: _Tree, paths: Array) -> tuple[Bucket, Array]:
    """Single segments: queries are its tokens, keys its whole path. With the sizes i64[B] of the segments."""
    queries = _padded(seg.start, seg.width)
    offsets = np.arange(int(seg.end.max()))
    keys = np.where(offsets < seg.end[:, None], paths[seg.low, : len(offsets)], paths[seg.low, :1])
    mask = offsets[None, None, :] <= seg.begin[:, None, None] + np.arange(queries.shape[1])[None, :, None]
    full = bool((seg.width == seg.width[0]).all())
    return Bucket(queries, keys, mask, int(seg.start[0]) if full else None), seg.width


def _restore(buckets: list[tuple[Bucket, Array]]) -> Array | None:
    """Where each packed token's attention output lies among the buckets' padded outputs; None if in place."""
    if all(bucket.start is not None for bucket, _ in buckets):
        return None
    found, offset = [], 0
    for bucket, sizes in buckets:
        found.append(ragged(offset + np.arange(len(sizes)) * bucket.queries.shape[1], sizes))
        offset += bucket.queries.size
    return np.concatenate(found)
