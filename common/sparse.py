"""The sparse form of a piece: which values changed and by how many steps, coded class by class. Pure; used by ``coding``.

Values of the base below a bound of magnitude are *hot*. They may be told apart by class (exponent; the lowest ones
together), and within a class the gaps between the changed ones, or between the unchanged ones where those are fewer, are
Rice-coded: its members change with about the same probability, so this takes little more than half of what gaps between
positions take. The bound is where that stops to pay, and where all of it saves less than the time of the pass is worth
nothing is told apart. The rest is *cold*: gaps between positions. With them go, class by
class, the sign of each change and the steps beyond one: as gaps between the exceptions where those are few, else as squeezed
bytes.

Parameters: bound, lowest class, then for each class from there to the bound, and for the cold: n; if n: k, mode; and by
mode, 0: nothing (all changes are single steps); 1: exceptions, k of their gaps, k of what exceeds two steps;
2: planes, which of them are squeezed (bits), their sizes. Streams: quotients, low bits, signs, planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from temper.common import rice, scan
from temper.common.errors import ProtocolError
from temper.common.float_bits import class_count, classes, moved, steps
from temper.common.squeeze import squeeze, unsqueeze

CLASSES = 12  # that a piece may tell apart below the bound; what is lower counts as one
WRITTEN_CLASSES = 1  # that are told apart here: each saves bytes and takes a pass over the base
SCAN_BITS = 0.5  # what looking at a hot value must save: the time of a pass, in bits
HOT_FROM_VALUES = 1 << 12  # smaller pieces aren't worth a look at their classes
CLASS_BITS = 40.0  # what a class costs in parameters
PASS_BITS = 0.065  # what telling classes apart must save a value of the piece: what 100 Mbit/s carry in a pass's time
SAMPLE = 1 << 12  # values of a piece that its classes are estimated from
STRETCH = 1 << 7  # of them in a row

STREAMS = 4
PLANES = 5  # bytes that a number of steps may take


def _hot(base: np.ndarray, dtype: str, bound: int, lowest: int) -> tuple[np.ndarray, list[int]]:
    """(int64[m]: positions of the hot values class by class; where each class begins there, and the end)."""
    if bound == lowest:
        return np.empty(0, np.int64), [0]
    positions = scan.small(base, dtype, bound)
    if bound == lowest + 1:
        return positions, [0, positions.size]
    kinds = classes(base[positions], dtype)
    kinds -= np.minimum(kinds, np.uint8(lowest))
    order, starts = scan.by_kind(kinds, bound - lowest)
    return positions[order], starts


@dataclass(slots=True)
class _Writer:
    parameters: list[int]
    runs: list[rice.Run] = field(default_factory=list)
    planes: list[bytes] = field(default_factory=list)

    def places(self, gaps: np.ndarray, last: int) -> None:
        """Ascending ranks as the gaps between them; `last` is the last rank."""
        k = _shift(gaps.size, last)
        self.parameters.append(k)
        self.runs.append((gaps, k))

    def excess(self, excess: np.ndarray, gaps: np.ndarray, more: np.ndarray, last: int) -> None:
        """Steps beyond one: not 0 at ranks with `gaps` between them (the last is `last`), where they exceed 1 by `more`."""
        if not gaps.size:
            self.parameters.append(0)
            return
        k_gap = _shift(gaps.size, last)
        k_more = rice.best_shift(int(more.sum()) / more.size)
        if 8 * gaps.size > excess.size >= 32:
            planes, squeezed = _planes(excess)
            if 8 * sum(map(len, planes)) < rice.cost_bits(gaps, k_gap) + rice.cost_bits(more, k_more):
                self.parameters += [2, len(planes), squeezed, *map(len, planes)]
                self.planes += planes
                return
        self.parameters += [1, gaps.size, k_gap, k_more]
        self.runs += [(gaps, k_gap), (more, k_more)]


def encode(base: np.ndarray, changes: scan.Changes, dtype: str) -> tuple[list[int], list[bytes]]:
    """(parameters, streams) for `changes` of `base`[n]."""
    by = steps(changes.before, changes.after, dtype)
    ranks, bound, lowest = changes.where, 0, 0
    cuts, sizes = [0, by.size], [base.size]
    if class_count(dtype) and base.size >= HOT_FROM_VALUES:
        kinds = classes(changes.before, dtype)
        bound, lowest = _bounds(base, kinds, dtype)
    if bound:
        np.minimum(kinds, np.uint8(bound), out=kinds)
        kinds -= np.minimum(kinds, np.uint8(lowest))
        order, cuts = scan.by_kind(kinds, bound - lowest + 1)
        members = scan.Members(base, dtype, lowest, bound)
        by, ranks, sizes = by.take(order), ranks.take(order), [*members.sizes, base.size]
        ranks[: cuts[-2]] = members.ranks(ranks[: cuts[-2]], cuts[:-1])
    excess = np.abs(by)
    excess -= 1
    out = _Writer([bound, lowest])
    gaps = _gaps(ranks, cuts, [0] * len(sizes))
    exceptions = scan.true(excess != 0)
    ends = np.searchsorted(exceptions, cuts).tolist()
    apart = _gaps(exceptions, ends, cuts)
    more = excess[exceptions] - 1
    for i, (first, last) in enumerate(pairwise(cuts)):
        n, size = last - first, sizes[i]
        out.parameters.append(n)
        if not n:
            continue
        if i < len(sizes) - 1 and 2 * n > size:
            others = _others(ranks[first:last], size)
            out.places(_gaps(others, [0, others.size], [0]), int(others[-1]) if others.size else -1)
        else:
            out.places(gaps[first:last], int(ranks[last - 1]))
        begin, end = ends[i], ends[i + 1]
        furthest = int(exceptions[end - 1]) - first if end > begin else -1
        out.excess(excess[first:last], apart[begin:end], more[begin:end], furthest)
    signs = np.packbits(by < 0, bitorder="little").tobytes()
    return out.parameters, [*rice.encode(out.runs), signs, b"".join(out.planes)]


def decode(
    parameters: Sequence[int], streams: Sequence[memoryview], base: np.ndarray, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] distinct positions, new bits[n]); ProtocolError if the streams are not a change of `base`."""
    if len(streams) != STREAMS:
        raise ProtocolError(f"{len(streams)} streams in a sparse piece, expected {STREAMS}")
    numbers = _Numbers(parameters)
    reader = rice.Reader(streams[0], streams[1])
    bound, lowest = numbers.take(), numbers.take()
    if not 0 <= lowest <= bound < max(class_count(dtype), 1) or bound - lowest > CLASSES:
        raise ProtocolError(f"classes {lowest} to {bound} of {dtype}")
    hot, starts = _hot(base, dtype, bound, lowest)
    planes = _Planes(streams[3])
    at: list[np.ndarray] = []
    excess: list[np.ndarray] = []
    for start, stop in pairwise(starts):
        if n := numbers.among(stop - start):
            few = 2 * n <= stop - start
            ranks = _ranks(reader.take(n if few else stop - start - n, numbers.take()), stop - start)
            at.append((ranks if few else _others(ranks, stop - start)) + start)
            excess.append(_excess(n, numbers, reader, planes))
    where = [hot[np.concatenate(at)]] if at else []
    if n := numbers.among(base.size):
        where.append(_ranks(reader.take(n, numbers.take()), base.size))
        excess.append(_excess(n, numbers, reader, planes))
    for part in (reader, numbers, planes):
        part.finish()
    if not where:
        raise ProtocolError("a sparse piece without a change")
    positions, by = np.concatenate(where), np.concatenate(excess) + 1
    signs = np.frombuffer(streams[2], np.uint8)
    if signs.size != (by.size + 7) // 8:
        raise ProtocolError(f"{signs.size} bytes of signs for {by.size} changes")
    direction = np.unpackbits(signs, count=by.size, bitorder="little").view(np.int8)
    direction *= -2
    direction += 1
    by *= direction
    values = moved(base[positions], by, dtype)
    if values is None:
        raise ProtocolError("a step leaves the range of its dtype: damaged, or applied to another base")
    return positions, values


def _bounds(base: np.ndarray, kinds: np.ndarray, dtype: str) -> tuple[int, int]:
    """(bound, lowest class) that make the piece smallest, from the classes of the changes and a sample of all values."""
    some, sampled = kinds[:: 1 + kinds.size // SAMPLE], _sample(base)
    scale = base.size / sampled.size
    changes = np.bincount(some)
    members = np.bincount(classes(sampled, dtype), minlength=changes.size)
    first, last = int((changes != 0).argmax()), changes.size
    within = np.empty((2, last - first))  # (changes, members) of each class
    np.multiply(changes[first:], kinds.size / some.size, out=within[0])
    np.maximum(members[first:last] * scale, within[0], out=within[1])
    below = within.cumsum(axis=1)  # and of all below it
    below[1] += scale * int(members[:first].sum())
    whole = below[:, -1:] + [[0.0], [scale * int(members[last:].sum())]]
    above = whole - below
    costs = _entropy(below) + SCAN_BITS * below[1] + CLASS_BITS * WRITTEN_CLASSES
    if others := WRITTEN_CLASSES - 1:  # than the lowest, which holds all below it too
        apart = _entropy(within).cumsum()
        costs[others:] = costs[:-others] + apart[others:] - apart[:-others]
        costs[:others] = costs[0] + apart[:others] - apart[0]
    costs += _entropy(above)
    best = int(costs.argmin())
    bound = min(first + best + 1, class_count(dtype) - 1)
    if costs[best] + PASS_BITS * base.size >= _entropy(whole)[0] or bound <= first:
        return 0, 0
    return bound, max(first, bound - WRITTEN_CLASSES)


def _sample(base: np.ndarray) -> np.ndarray:
    """About SAMPLE values: stretches of them, since every value touched alone costs a line of the cache."""
    if base.size <= SAMPLE:
        return base
    rows = SAMPLE // STRETCH
    return base[: base.size // rows * rows].reshape(rows, -1)[:, :STRETCH].reshape(-1)


def _entropy(counts: np.ndarray) -> np.ndarray:
    """Bits to say which of the members (at least as many as changes) changed: float[n] of counts (changes, members)[2, n]."""
    parts = np.array([counts[1], counts[0], counts[1] - counts[0]])
    parts *= np.log2(parts + 1e-9)
    bits: np.ndarray = parts[0] - parts[1] - parts[2]
    return bits


def _gaps(ranks: np.ndarray, cuts: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    """Gaps between ascending ranks, run by run: run i is ranks[cuts[i]:cuts[i + 1]] and begins at starts[i]."""
    gaps = np.empty_like(ranks)
    np.subtract(ranks[1:], ranks[:-1], out=gaps[1:])
    gaps -= 1
    for (first, last), start in zip(pairwise(cuts), starts, strict=False):
        if last > first:
            gaps[first] = ranks[first] - start
    return gaps


def _shift(n: int, last: int) -> int:
    """The Rice parameter of the gaps between n ascending ranks."""
    return rice.best_shift((last + 1 - n) / n) if n else 0


def _others(ranks: np.ndarray, size: int) -> np.ndarray:
    """All ranks below `size` that are not in `ranks`."""
    rest = np.ones(size, bool)
    rest[ranks] = False
    return scan.true(rest)


def _planes(excess: np.ndarray) -> tuple[list[bytes], int]:
    """Byte planes of `excess`, lowest first, and which of them are squeezed."""
    planes, squeezed = [], 0
    for i in range((int(excess.max()).bit_length() + 7) // 8):
        plane = rice.byte(excess, 8 * i).tobytes()
        packed = squeeze(plane)
        planes.append(plane if packed is None else packed)
        squeezed |= (packed is not None) << i
    return planes, squeezed


class _Numbers:
    """Reads the parameters of a piece."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers, self._at = numbers, 0

    def take(self) -> int:
        if self._at >= len(self._numbers):
            raise ProtocolError("a sparse piece with parameters missing")
        self._at += 1
        return self._numbers[self._at - 1]

    def among(self, limit: int) -> int:
        """A count that can't exceed `limit`."""
        number = self.take()
        if not 0 <= number <= limit:
            raise ProtocolError(f"{number} of {limit} values")
        return number

    def finish(self) -> None:
        if self._at != len(self._numbers):
            raise ProtocolError(f"{len(self._numbers) - self._at} parameters too many in a sparse piece")


class _Planes:
    """Reads byte planes."""

    def __init__(self, stream: memoryview) -> None:
        self._stream, self._at = stream, 0

    def take(self, size: int, n: int, squeezed: bool) -> np.ndarray:
        """uint8[n] from the next `size` bytes."""
        data: bytes | memoryview = self._stream[self._at : self._at + size]
        if size < 0 or len(data) != size:
            raise ProtocolError(f"a plane of {size} bytes where {len(data)} are left")
        self._at += size
        data = unsqueeze(data, n) if squeezed else data
        if len(data) != n:
            raise ProtocolError(f"a plane of {len(data)} bytes for {n} changes")
        return np.frombuffer(data, np.uint8)

    def finish(self) -> None:
        if self._at != len(self._stream):
            raise ProtocolError(f"{len(self._stream) - self._at} bytes too many in a sparse piece")


def _excess(n: int, numbers: _Numbers, reader: rice.Reader, planes: _Planes) -> np.ndarray:
    """int64[n], steps beyond one of n changes."""
    mode = numbers.take()
    excess = np.zeros(n, np.int64)
    if mode == 1:
        exceptions = numbers.among(n)
        where = _ranks(reader.take(exceptions, numbers.take()), n)
        excess[where] = reader.take(exceptions, numbers.take()) + 1
    elif mode == 2:
        count, squeezed = numbers.among(PLANES), numbers.take()
        for i, size in enumerate([numbers.take() for _ in range(count)]):
            excess |= planes.take(size, n, bool(squeezed >> i & 1)).astype(np.int64) << (8 * i)
    elif mode != 0:
        raise ProtocolError(f"unknown mode {mode} of steps")
    return excess


def _ranks(gaps: np.ndarray, size: int) -> np.ndarray:
    """Ascending ranks below `size` from their gaps."""
    if gaps.size and int(gaps.max()) >= size:
        raise ProtocolError(f"a gap of {int(gaps.max())} among {size} values")
    ranks = np.cumsum(gaps + 1) - 1
    if ranks.size and int(ranks[-1]) >= size:
        raise ProtocolError(f"a rank of {int(ranks[-1])} among {size} values")
    return ranks
