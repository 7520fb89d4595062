"""How the broker reads Samples messages: only what it needs, and many at once.

A run of messages is decoded, checked and told to the core together. `read` decodes the facts of the samples (typed, as
every body is); the description of the arrays stays encoded, because few different ones come again and again. `faults` finds
the messages that are wrong: the values of all small ones are looked at together, and only where something is off, or a
message is not of the usual shape, `validate.check` looks at that message alone and says what. Called by ``control``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from operator import sub
from typing import Any

import msgspec
import numpy as np
from temper.broker.messages import Messages, Uniform
from temper.broker.validate import LOGPROB_SLACK, BadSamples, at_a_glance, check
from temper.common.arrays import packed_bytes, spec_bytes
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec, SampleMeta, Samples

LAYOUTS, LAYOUT_BYTES = 8192, 512
ALONE_BYTES = 16 * 1024  # values from here on are looked at where they are
FEW = 4  # messages of one layout: from here on they are looked at as one table
USUAL = {"tokens": "int32", "behaviour_logprob": "float32", "loss_mask": "uint8", "cu_seqlens": "int64"}


class Intake(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A Samples body; `arrays` still encoded."""

    lease_id: int
    attempt: int
    lineage: int
    samples: tuple[SampleMeta, ...]
    arrays: msgspec.Raw


class Layout(msgspec.Struct, frozen=True, gc=False):
    """Where things lie in the frames of a message: (frame, begin, end) in bytes."""

    nbytes: tuple[int, ...]  # of the frames
    samples: int
    tokens: tuple[int, int, int]
    logprob: tuple[int, int, int]
    mask: tuple[int, int, int]
    cu: tuple[int, int, int]
    count: int  # tokens
    starts: bytes  # what cu_seqlens must hold if there is one sample
    alone: bool  # one sample, one frame: what comes most


class Values(msgspec.Struct, gc=False):
    """What is looked at together, of all usual messages."""

    tokens: list[Any]
    logprobs: list[Any]
    masks: list[Any]
    facts: list[float]


class Alike(msgspec.Struct, gc=False):
    """Messages of one sample with the same layout, looked at together: their places, frames, and the values in their facts."""

    layout: Layout
    places: list[int] = []
    frames: list[bytes] = []
    facts: list[float] = []


_decode = msgspec.msgpack.Decoder(Intake).decode
_specs = msgspec.msgpack.Decoder(list[ArraySpec]).decode
_layouts: dict[bytes, Layout | None] = {}


def read(meta: bytes) -> Intake:
    """The body in `meta`; ProtocolError if it is malformed."""
    return read_all([meta])[0]


def read_all(metas: Iterable[bytes]) -> list[Intake]:
    """`read` for many; ProtocolError if one of them is malformed."""
    try:
        return [_decode(meta) for meta in metas]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed Samples: {error}") from error


def _whole(body: Intake) -> Samples:
    try:
        specs = _specs(body.arrays)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed Samples: {error}") from error
    return Samples(body.lease_id, body.attempt, body.lineage, list(body.samples), specs)


def _layout(encoded: bytes) -> Layout | None:
    """The layout that an encoded description means, None unless it is the usual one."""
    try:
        specs = _specs(encoded)
        packed = packed_bytes(specs)
        sizes = [spec_bytes(spec) for spec in specs]
    except (msgspec.DecodeError, ValueError, RecursionError, ProtocolError):
        return None  # `check` says what is wrong
    if {spec.name: spec.dtype for spec in specs} != USUAL or len(specs) != len(USUAL):
        return None
    places, at = {}, 0
    for i, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
        places[spec.name] = (0, at, at + size) if packed else (i, 0, size)
        at += (size + 7) & -8
    shapes = {spec.name: spec.shape for spec in specs}
    (count, *more), (starts, *others) = shapes["tokens"] or (0,), shapes["cu_seqlens"] or (0,)
    one = (count,)
    if more or others or count < 2 or starts < 2 or shapes["behaviour_logprob"] != one or shapes["loss_mask"] != one:
        return None
    tokens, logprob, mask, cu = (places[name] for name in USUAL)
    nbytes = (packed,) if packed else tuple(sizes)
    return Layout(
        nbytes, starts - 1, tokens, logprob, mask, cu, count, struct.pack("<qq", 0, count), bool(packed) and starts == 2
    )


def _layout_of(encoded: bytes) -> Layout | None:
    """`_layout`, remembered."""
    try:
        return _layouts[encoded]
    except KeyError:
        if len(encoded) > LAYOUT_BYTES:
            return None
        if len(_layouts) >= LAYOUTS:
            _layouts.clear()
        layout = _layouts[encoded] = _layout(encoded)
        return layout


def _cover(runs: Sequence[Sequence[tuple[int, int, int]]], lengths: list[int]) -> bool:
    """Whether each sample has one version run, over all of its tokens."""
    try:
        return [count for ((_, _, count),) in runs] == lengths
    except ValueError:  # none, or several
        return False


def _add_facts(samples: Iterable[SampleMeta], facts: list[float]) -> None:
    """What has to be finite in the facts of samples without step rewards."""
    facts += [meta.reward for meta in samples if meta.reward is not None]
    for meta in samples:
        facts += meta.components.values()


def _usual(body: Intake, frames: Sequence[Any], values: Values) -> bool:
    """Whether a message is as it should be apart from the `values` in it, which are added to the others'."""
    layout, samples = _layout_of(bytes(body.arrays)), body.samples
    if layout is None or len(samples) != layout.samples or len(frames) != len(layout.nbytes):
        return False
    for frame, size in zip(frames, layout.nbytes, strict=True):
        if len(frame) != size:
            return False
    if [*map(type, frames)].count(bytes) != len(frames):
        frames = [memoryview(frame) for frame in frames]  # nothing is copied
    of, mask_at, mask_end = layout.mask
    masks = frames[of]
    cu_of, cu_at, _ = layout.cu
    runs = [meta.version_runs for meta in samples]
    if layout.samples == 1:
        if masks[mask_at] or frames[cu_of][cu_at : cu_at + len(layout.starts)] != layout.starts:
            return False
        lengths = [layout.count]
    else:
        starts = struct.unpack_from(f"<{layout.samples + 1}q", frames[cu_of], cu_at)
        lengths = list(map(sub, starts[1:], starts))
        if (
            starts[0] != 0
            or starts[-1] != layout.count
            or min(lengths) < 2
            or any([masks[mask_at + begin] for begin in starts[:-1]])
        ):
            return False
    if not _cover(runs, lengths) or any([meta.step_rewards for meta in samples]):
        return False
    _add_facts(samples, values.facts)
    values.masks.append(masks[mask_at:mask_end])
    of, begin, end = layout.tokens
    values.tokens.append(frames[of][begin:end])
    of, begin, end = layout.logprob
    values.logprobs.append(frames[of][begin:end])
    return True


def _are_fine(values: Values) -> bool:
    """Whether all ids are there, all masks 0 or 1, all log-probabilities finite and (everywhere, to be quick) at most 0, all
    rewards and components finite."""
    if not all(map(isfinite, values.facts)):
        return False
    if len(values.masks) < FEW and all(map(at_a_glance, values.masks, values.logprobs, values.tokens)):
        return True
    return (
        all([np.minimum.reduce(np.frombuffer(ids, "<i4")) >= 0 for ids in _together(values.tokens)])
        and all([np.maximum.reduce(np.frombuffer(mask, np.uint8)) <= 1 for mask in _together(values.masks)])
        and all([_are_logprobs(np.frombuffer(each, "<f4")) for each in _together(values.logprobs)])
    )


def _are_logprobs(values: np.ndarray) -> bool:
    return bool(np.minimum.reduce(values) > -inf and np.maximum.reduce(values) <= LOGPROB_SLACK)


def _together(pieces: Sequence[Any]) -> list[Any]:
    """The small ones as one, which is quicker to look through; the large ones as they are."""
    small = [piece for piece in pieces if len(piece) < ALONE_BYTES]
    if len(small) == len(pieces):
        return [b"".join(small)]
    return [b"".join(small)] * bool(small) + [piece for piece in pieces if len(piece) >= ALONE_BYTES]


def _fault(body: Intake, frames: Sequence[Any]) -> BadSamples | ProtocolError | None:
    try:
        check(_whole(body), frames)
    except (BadSamples, ProtocolError) as error:
        return error
    return None


Fault = BadSamples | ProtocolError


def uniform(run: Messages, bodies: Sequence[Intake]) -> Uniform | None:
    """All messages of a run as one table, if there are enough of them, each of one sample, with the same layout, and nothing is
    wrong with any of them: what comes most."""
    arrays, rows = [body.arrays for body in bodies], len(bodies)
    if rows < FEW or arrays.count(arrays[0]) != rows:
        return None
    layout = _layout_of(bytes(arrays[0]))
    if layout is None or not layout.alone or (joined := run.joined(layout.nbytes[0])) is None:
        return None
    try:
        samples = [sample for body in bodies for (sample,) in (body.samples,)]
    except ValueError:
        return None
    if not _cover([meta.version_runs for meta in samples], [layout.count] * rows):
        return None
    if any([meta.step_rewards for meta in samples]):
        return None
    facts: list[float] = []
    _add_facts(samples, facts)
    return Uniform(run, samples, layout.nbytes[0], joined) if _all_fine(layout, rows, joined, facts) else None


def _alike(bodies: Sequence[Intake], frames: Sequence[Sequence[Any]]) -> tuple[list[Alike], list[int]]:
    """Messages of one sample in one frame, by their layout, and the places of the others."""
    found: dict[bytes, Alike] = {}
    others: list[int] = []
    encoded: msgspec.Raw | None = None
    alike: Alike | None = None
    for i, (body, own) in enumerate(zip(bodies, frames, strict=True)):
        if body.arrays != encoded:
            encoded = body.arrays
            alike, layout = found.get(bytes(encoded)), _layouts.get(bytes(encoded))
            if alike is None and layout is not None and layout.alone:
                alike = found[bytes(encoded)] = Alike(layout)
            if alike is not None:
                count, size = alike.layout.count, alike.layout.nbytes[0]
                places, whole, facts = alike.places, alike.frames, alike.facts
        samples = body.samples
        if alike is not None and len(own) == len(samples) == 1:
            frame, meta = own[0], samples[0]
            runs = meta.version_runs
            if (
                type(frame) is bytes
                and len(frame) == size
                and len(runs) == 1
                and runs[0][2] == count
                and not meta.step_rewards
            ):
                places.append(i)
                whole.append(frame)
                if meta.components:
                    facts += meta.components.values()
                if meta.reward is not None:
                    facts.append(meta.reward)
                continue
        others.append(i)
    return list(found.values()), others


def _all_fine(layout: Layout, rows: int, joined: bytes, facts: Sequence[float]) -> bool:
    """`_are_fine` and what `_usual` looks at, of `rows` messages with the same layout."""
    size, count = layout.nbytes[0], layout.count

    def table(place: tuple[int, int, int], dtype: str, nbytes: int, columns: int) -> np.ndarray:
        return np.ndarray((rows, columns), dtype, joined, place[1], (size, nbytes))

    mask, logprob = table(layout.mask, "u1", 1, count), table(layout.logprob, "<f4", 4, count)
    return all(map(isfinite, facts)) and bool(
        (table(layout.cu, "<i8", 8, 2) == (0, count)).all()
        and not mask[:, 0].any()
        and np.maximum.reduce(mask, None) <= 1
        and np.minimum.reduce(table(layout.tokens, "<i4", 4, count), None) >= 0
        and np.minimum.reduce(logprob, None) > -inf
        and np.maximum.reduce(logprob, None) <= LOGPROB_SLACK
    )


def faults(bodies: Sequence[Intake], frames: Sequence[Sequence[Any]]) -> dict[int, Fault]:
    """What is wrong with messages, by their place; nothing with those that are not in it. See ``validate`` for the two
    kinds of wrong."""
    found: dict[int, Fault] = {}
    values = Values([], [], [], [])
    looked_at: list[int] = []
    quick: list[int] = []
    together, others = _alike(bodies, frames)
    for alike in together:
        if len(alike.places) < FEW:
            others += alike.places
        elif not _all_fine(alike.layout, len(alike.frames), b"".join(alike.frames), alike.facts):
            looked_at += alike.places
    for i in others:
        (quick if _usual(bodies[i], frames[i], values) else looked_at).append(i)
    if quick and not _are_fine(values):
        looked_at += quick
    for i in looked_at:
        fault = _fault(bodies[i], frames[i])
        if fault is not None:
            found[i] = fault
    return found
