"""The weight codec: a version of the weights as chunks of at most 16 MiB, against a base or on its own.

``encode`` makes the chunks of one log entry: a snapshot (base None) or the exact delta from one version to a later
one. ``stage`` reads the chunks of one entry, or of a chain of them, checks them against the base and the digest of the
version they claim to lead to, and returns what to overwrite. Nothing is applied before the root digest is right;
applying twice is harmless. A mismatch or a gap is a `DeltaError`: take the newest snapshot and its chain.

Called by the learner's publisher (encode), the actors (stage, overwrite) and the broker's store (compose).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from temper.common import coding
from temper.common.bits import TensorBits, Weights, unsigned
from temper.common.schema import Version
from temper.common.weight_chain import TensorPatch, read_chain
from temper.common.weight_format import (
    FORMAT,
    FORMAT_VERSION,
    SEGMENT_VALUES,
    Chunk,
    DeltaError,
    Head,
    Record,
    Tally,
    layout_of,
    pack,
    record_of,
    table_of,
)

__all__ = ["Chunk", "DeltaError", "StagedUpdate", "Tally", "TensorPatch", "compose", "encode", "overwrite", "stage"]

In = TypeVar("In")
Out = TypeVar("Out")

PARALLEL_FROM_BYTES = 32 << 20  # smaller models are coded by the calling thread alone


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """A verified step from the base (None: from nothing) to `version`: overwrite `changed` and it is there.

    `digest` (hex) is the root digest of the result, checked already. `entries` and `nbytes` say what was read.
    """

    version: Version
    base_digest: str | None
    digest: str
    changed: list[TensorPatch]
    entries: int = 1
    nbytes: int = 0


# ---------------------------------------------------------------- encode


def encode(base: Weights | None, new: Weights, *, threads: int = 1, tally: Tally | None = None) -> Iterator[Chunk]:
    """The chunks of the entry base -> new, or of a snapshot of `new`, made as they are asked for.

    A tensor whose digest is the base's costs nothing. DeltaError("layout") if the two versions do not hold the same
    tensors. `threads` code pieces side by side; their order, and so the bytes, do not depend on it.
    """
    names = sorted(new.tensors)
    tensors = [new.tensors[name] for name in names]
    table = table_of(new)
    if base is not None and table_of(base) != table:
        raise DeltaError("layout", f"version {new.version.ordinal} does not hold the tensors of its base: snapshot it")
    head = Head(
        FORMAT,
        FORMAT_VERSION,
        new.version,
        base.version if base else None,
        layout_of(table),
        table if base is None else None,
    )
    tally = tally or Tally()
    tally.values += sum(tensor.bits.size for tensor in tensors)
    jobs = [
        (i, start)
        for i, name in enumerate(names)
        if base is None or base.digests[name] != new.digests[name]
        for start in range(0, max(tensors[i].bits.size, 1), SEGMENT_VALUES)
    ]

    def code(job: tuple[int, int]) -> tuple[Record, coding.Coded] | None:
        i, start = job
        piece = tensors[i].bits[start : start + SEGMENT_VALUES]
        old = None if base is None else base.tensors[names[i]].bits[start : start + SEGMENT_VALUES]
        coded = coding.encode(old, piece, tensors[i].dtype)
        return None if coded is None else (record_of(i, start, piece.size, coded), coded)

    pieces = in_order(code, jobs, threads if new.nbytes >= PARALLEL_FROM_BYTES else 1)
    return pack(head, (piece for piece in pieces if piece is not None), tally)


# ---------------------------------------------------------------- stage


def stage(chunks: Iterable[coding.Frame], base: Weights | None, *, threads: int = 1) -> StagedUpdate:
    """What to overwrite in `base` to get to the version that these chunks lead to; `base` is only read.

    `chunks` are those of one entry or of several that follow one another, in order; they must stay unchanged for as
    long as the result is used. DeltaError with a reason when they do not lead from `base` to what they claim:
    gap, base, layout, malformed, truncated, digest.
    """
    chain = read_chain(chunks, base.version.digest if base else None, table_of(base) if base else None)
    names = [row[0] for row in chain.table]

    def rebuild(i: int) -> TensorPatch:
        old = base.tensors[names[i]].bits if base is not None and not chain.whole else None
        return chain.rebuild(i, old)

    size = sum(prod(shape) * unsigned(dtype).itemsize for _, dtype, shape in chain.table)
    changed = list(in_order(rebuild, sorted(chain.pieces), threads if size >= PARALLEL_FROM_BYTES else 1))
    digests = {} if base is None else dict(base.digests)
    digests.update({patch.name: patch.digest for patch in changed})
    chain.check(digests)
    from_digest = None if base is None or chain.whole else base.version.digest
    return StagedUpdate(chain.version, from_digest, chain.version.digest, changed, chain.entries, chain.nbytes)


def overwrite(base: Weights | None, update: StagedUpdate) -> Weights:
    """`base` moved to `update.version` by writing into its arrays (they must be the caller's own and writable).

    Harmless when repeated, also after a failure half-way. Without a base (or for a snapshot of another layout) the
    arrays are made.
    """
    if update.base_digest is not None and (
        base is None or base.version.digest not in (update.base_digest, update.digest)
    ):
        raise DeltaError("base", f"this update starts from {update.base_digest}, these weights are another version")
    tensors = {} if base is None or update.base_digest is None else dict(base.tensors)
    digests = {} if base is None or update.base_digest is None else dict(base.digests)
    for patch in update.changed:
        old = base.tensors.get(patch.name) if base is not None else None
        if old is None or (old.dtype, old.shape) != (patch.dtype, patch.shape):
            tensors[patch.name] = TensorBits(patch.dtype, patch.shape, patch.values.copy())
        else:
            old.bits[slice(None) if patch.indices is None else patch.indices] = patch.values
            tensors[patch.name] = old
        digests[patch.name] = patch.digest
    return Weights(update.version, tensors, digests)


def compose(chunks: Iterable[coding.Frame], *, threads: int = 1) -> Iterator[Chunk]:
    """The chunks of a snapshot of the version that a snapshot and its chain lead to; one tensor in memory at a time.

    The last chunk comes out only if the root digest is right; DeltaError before it if not.
    """
    chain = read_chain(chunks, None, None)
    head = Head(FORMAT, FORMAT_VERSION, chain.version, None, layout_of(chain.table), chain.table)

    def pieces() -> Iterator[tuple[Record, coding.Coded]]:
        digests: dict[str, bytes] = {}
        for patch in in_order(lambda i: chain.rebuild(i, None), range(len(chain.table)), threads):
            digests[patch.name] = patch.digest
            tensor = len(digests) - 1
            for start in range(0, max(patch.values.size, 1), SEGMENT_VALUES):
                piece = patch.values[start : start + SEGMENT_VALUES]
                coded = coding.encode(None, piece, patch.dtype)
                if coded is not None:
                    yield record_of(tensor, start, piece.size, coded), coded
        chain.check(digests)

    return pack(head, pieces(), Tally())


def in_order(work: Callable[[In], Out], jobs: Iterable[In], threads: int) -> Iterator[Out]:
    """map(work, jobs) on `threads` threads, in order, at most 2 * threads results ahead of the reader."""
    if threads <= 1:
        yield from map(work, jobs)
        return
    with ThreadPoolExecutor(threads, "delta") as pool:
        ahead: deque[Future[Out]] = deque()
        for job in jobs:
            ahead.append(pool.submit(work, job))
            if len(ahead) >= 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
