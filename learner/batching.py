"""Packs the rows of a step into micro-batches without padding, each shared prefix forwarded once.

The rows of a micro-batch form a prefix tree: whatever tokens rows have in common at their start (a group's prompt,
few-shot examples of a whole domain, equal beginnings of completions) is one *segment*, computed once; every token
attends to its own path from the root and nothing else. Loss and gradient equal those of each row on its own.

Guarantees: the same rows give the same micro-batches in whatever order they arrive (rows are laid out in the order of
their tokens); tokens after the last trained one, and rows without any, are not computed; a row is never divided
between micro-batches. Pure numpy; called by `step` and, through it, by the in-process loop.

Legend: R rows, T packed tokens, M trained tokens, S segments, B segments of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# A bucket of attention costs a handful of kernel launches: up to this many padded (query, key) cells are cheaper.
LAUNCH_CELLS = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A sequence to train: `tokens` i32[N]; `trained` i64[n], ascending positions >= 1 of tokens with gradient;
    `start`: where its trained tokens begin in the step's flat arrays."""

    tokens: Array
    trained: Array
    start: int

    @property
    def computed(self) -> int:
        """Tokens that must be forwarded: those before the last trained one."""
        return int(self.trained[-1]) if len(self.trained) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Segments of similar size whose attention is one padded call.

    `queries` i64[B, Q] and `keys` i64[B, K] are packed positions (padding repeats position 0 of the segment);
    `before` i64[B] is the number of keys ahead of the first query: query i sees keys 0..before + i.
    `query_start`: the queries are the packed range [query_start, query_start + B*Q), or None.
    `plain`: every segment is a root and full, so keys = queries and the mask is causal.
    """

    queries: Array
    keys: Array
    before: Array
    query_start: int | None
    plain: bool

    def mask(self) -> Array | None:
        """bool[B, Q, K], true where a query sees a key; None where `is_causal` or no mask says the same."""
        q, k = self.queries.shape[1], self.keys.shape[1]
        if not self.before.any() and q == k:
            return None
        return np.arange(k)[None, None, :] <= self.before[:, None, None] + np.arange(q)[None, :, None]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One forward and backward.

    `input_ids`, `positions` i64[T]; attention in `buckets`, whose outputs, laid one after another (B*Q rows each), are
    brought into packed order by `restore` i64[T] (None: they are). Trained token j has the id `target[j]`, is predicted
    from packed position `predict[j]` and is entry `flat[j]` of the step's flat arrays; `cu_seqlens` i64[R+1] divides the
    trained tokens among the rows `rows` i64[R] (numbers in the step).
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
    row_tokens: int  # tokens that the same rows would take without sharing

    @property
    def packed_tokens(self) -> int:
        """T."""
        return len(self.input_ids)


@dataclass(slots=True, eq=False)
class _Segment:
    low: int  # rows low..high-1 of the micro-batch share it
    high: int
    begin: int  # positions begin..end-1 of those rows
    end: int
    start: int = 0  # packed position of its first token


def common_prefix(a: Array, b: Array) -> int:
    """Length of the longest common prefix of two 1-d arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _sorted(rows: Sequence[Row], include: Iterable[int]) -> list[int]:
    """Numbers of rows with something to compute, in the order of their computed tokens, equal ones by their number."""
    keys = {i: rows[i].tokens[: rows[i].computed].astype(">u4").tobytes() for i in include if rows[i].computed}
    return sorted(keys, key=lambda i: (keys[i], i))


def plan(rows: Sequence[Row], tokens_per_microbatch: int, include: Iterable[int] | None = None) -> list[Microbatch]:
    """Micro-batches of at most `tokens_per_microbatch` packed tokens (a longer single row gets one of its own) over the
    rows numbered `include` (None: all)."""
    order = _sorted(rows, range(len(rows)) if include is None else include)
    batches: list[Microbatch] = []
    members: list[int] = []
    shared: list[int] = []  # shared[i]: common prefix of members[i] with members[i - 1]
    size = 0
    for i in order:
        row = rows[i]
        with_last = 0
        if members:
            last = rows[members[-1]]
            with_last = common_prefix(last.tokens[: last.computed], row.tokens[: row.computed])
        if members and size + row.computed - with_last > tokens_per_microbatch:
            batches.append(_pack(rows, members, shared))
            members, shared, size, with_last = [], [], 0, 0
        members.append(i)
        shared.append(with_last)
        size += row.computed - with_last
    if members:
        batches.append(_pack(rows, members, shared))
    return batches


def _segments(lengths: Sequence[int], shared: Sequence[int]) -> list[_Segment]:
    """The prefix tree of rows sorted by their tokens, from their lengths and common prefixes with the row before."""
    segments: list[_Segment] = []
    todo = [(0, len(lengths), 0)]
    while todo:
        low, high, begin = todo.pop()
        end = min((shared[i] for i in range(low + 1, high)), default=lengths[low])
        if end > begin:
            segments.append(_Segment(low, high, begin, end))
        if high - low == 1:
            continue
        run = low
        for i in range(low + 1, high + 1):
            if i == high or shared[i] == end:
                if lengths[i - 1] > end:  # a run of rows that all end here has nothing more
                    todo.append((run, i, end))
                run = i
    return segments


def _buckets(segments: list[_Segment]) -> list[list[_Segment]]:
    """Divide segments, sorted by size, where padding would cost more than another call."""
    segments.sort(key=lambda s: (s.end, s.end - s.begin, s.low))
    found: list[list[_Segment]] = []
    real = queries = 0
    for segment in segments:
        q, k = segment.end - segment.begin, segment.end
        if found:
            widest = max(queries, q)
            padded = (len(found[-1]) + 1) * widest * k
            if padded - real - q * k <= max(LAUNCH_CELLS, (real + q * k) // 4):
                found[-1].append(segment)
                real, queries = real + q * k, widest
                continue
        found.append([segment])
        real, queries = q * k, q
    return found


def _bucket(segments: list[_Segment], paths: list[Array]) -> Bucket:
    size, q = len(segments), max(s.end - s.begin for s in segments)
    k = max(s.end for s in segments)
    starts = np.asarray([s.start for s in segments], dtype=np.int64)
    widths = np.asarray([s.end - s.begin for s in segments], dtype=np.int64)
    before = np.asarray([s.begin for s in segments], dtype=np.int64)
    full = bool((widths == q).all())
    offsets = np.arange(q, dtype=np.int64)[None, :]
    queries = starts[:, None] + np.where(offsets < widths[:, None], offsets, 0)
    keys = np.empty((size, k), dtype=np.int64)
    for i, segment in enumerate(segments):
        path = paths[segment.low]
        keys[i, : segment.end] = path[: segment.end]
        keys[i, segment.end :] = path[0]
    plain = full and not before.any()
    return Bucket(queries, keys, before, int(starts[0]) if full else None, plain)


def _pack(rows: Sequence[Row], members: list[int], shared: list[int]) -> Microbatch:
    lengths = [rows[i].computed for i in members]
    grouped = _buckets(_segments(lengths, shared))
    total = 0
    for segment in (s for bucket in grouped for s in bucket):
        segment.start = total
        total += segment.end - segment.begin
    paths = [np.empty(length, dtype=np.int64) for length in lengths]
    input_ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    for segment in sorted((s for bucket in grouped for s in bucket), key=lambda s: s.begin):
        begin, end, start = segment.begin, segment.end, segment.start
        packed = np.arange(start, start + end - begin)
        input_ids[start : start + end - begin] = rows[members[segment.low]].tokens[begin:end]
        positions[start : start + end - begin] = np.arange(begin, end)
        for i in range(segment.low, segment.high):
            paths[i][begin:end] = packed
    buckets = tuple(_bucket(bucket, paths) for bucket in grouped)
    return Microbatch(
        input_ids=input_ids,
        positions=positions,
        buckets=buckets,
        restore=_restore(grouped, buckets, total),
        predict=np.concatenate([paths[n][rows[i].trained - 1] for n, i in enumerate(members)]),
        target=np.concatenate([rows[i].tokens[rows[i].trained] for i in members]).astype(np.int64),
        flat=np.concatenate([rows[i].start + np.arange(len(rows[i].trained)) for i in members]),
        cu_seqlens=np.cumsum([0, *(len(rows[i].trained) for i in members)], dtype=np.int64),
        rows=np.asarray(members, dtype=np.int64),
        row_tokens=sum(len(rows[i].tokens) for i in members),
    )


def _restore(grouped: list[list[_Segment]], buckets: tuple[Bucket, ...], total: int) -> Array | None:
    """Where each packed token's attention output lies among the buckets' padded outputs; None if in place."""
    if all(bucket.query_start is not None for bucket in buckets):
        return None
    restore = np.empty(total, dtype=np.int64)
    offset = 0
    for segments, bucket in zip(grouped, buckets, strict=True):
        width = bucket.queries.shape[1]
        for i, segment in enumerate(segments):
            length = segment.end - segment.begin
            restore[segment.start : segment.start + length] = np.arange(offset + i * width, offset + i * width + length)
        offset += bucket.queries.size
    return restore
