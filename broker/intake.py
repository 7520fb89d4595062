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
from typing import Any

import msgspec
import numpy as np
from temper.broker.validate import LOGPROB_SLACK, BadSamples, check
from temper.common.arrays import packed_bytes, spec_bytes
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec, SampleMeta, Samples

LAYOUTS, LAYOUT_BYTES = 8192, 512
USUAL = {"tokens": "int32", "behaviour_logprob": "float32", "loss_mask": "uint8", "cu_seqlens": "int64"}


class Intake(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A Samples body; `arrays` still encoded."""

    lease_id: int
    attempt: int
    lineage: int
    samples: list[SampleMeta]
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

    tokens: list[bytes]
    logprobs: list[bytes]
    masks: list[bytes]
    facts: list[float]


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
    return Samples(body.lease_id, body.attempt, body.lineage, body.samples, specs)


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


def _usual(body: Intake, frames: Sequence[Any], values: Values) -> bool:
    """Whether a message is as it should be apart from the `values` in it, which are added to the others'."""
    encoded = bytes(body.arrays)
    try:
        layout = _layouts[encoded]
    except KeyError:
        if len(encoded) > LAYOUT_BYTES:
            return False
        if len(_layouts) >= LAYOUTS:
            _layouts.clear()
        layout = _layouts[encoded] = _layout(encoded)
    samples = body.samples
    if layout is None or len(samples) != layout.samples or len(frames) != len(layout.nbytes):
        return False
    for frame, size in zip(frames, layout.nbytes, strict=True):
        if type(frame) is not bytes or len(frame) != size:
            return False
    facts = values.facts
    of, mask_at, mask_end = layout.mask
    masks = frames[of]
    cu_of, cu_at, _ = layout.cu
    if layout.samples == 1:
        meta = samples[0]
        runs = meta.version_runs
        if (
            masks[mask_at]
            or len(runs) != 1
            or runs[0][2] != layout.count
            or meta.step_rewards
            or not frames[cu_of].startswith(layout.starts, cu_at)
        ):
            return False
        facts += meta.components.values()
        if meta.reward is not None:
            facts.append(meta.reward)
    else:
        starts = struct.unpack_from(f"<{layout.samples + 1}q", frames[cu_of], cu_at)
        if starts[0] != 0 or starts[-1] != layout.count:
            return False
        begin = 0
        for meta, end in zip(samples, starts[1:], strict=True):
            runs = meta.version_runs
            if (
                not begin + 2 <= end <= layout.count
                or masks[mask_at + begin]
                or len(runs) != 1
                or runs[0][2] != end - begin
                or meta.step_rewards
            ):
                return False
            facts += meta.components.values()
            if meta.reward is not None:
                facts.append(meta.reward)
            begin = end
    values.masks.append(masks[mask_at:mask_end])
    of, begin, end = layout.tokens
    values.tokens.append(frames[of][begin:end])
    of, begin, end = layout.logprob
    values.logprobs.append(frames[of][begin:end])
    return True


def _are_fine(values: Values) -> bool:
    """Whether all ids are there, all masks 0 or 1, all log-probabilities finite and (everywhere, to be quick) at most 0, all
    rewards and components finite."""
    logprobs = np.frombuffer(b"".join(values.logprobs), "<f4")
    return all(map(isfinite, values.facts)) and bool(
        np.minimum.reduce(np.frombuffer(b"".join(values.tokens), "<i4")) >= 0
        and np.maximum.reduce(np.frombuffer(b"".join(values.masks), np.uint8)) <= 1
        and np.minimum.reduce(logprobs) > -inf
        and np.maximum.reduce(logprobs) <= LOGPROB_SLACK
    )


def _fault(body: Intake, frames: Sequence[Any]) -> BadSamples | ProtocolError | None:
    try:
        check(_whole(body), frames)
    except (BadSamples, ProtocolError) as error:
        return error
    return None


Fault = BadSamples | ProtocolError


def faults(bodies: Sequence[Intake], frames: Sequence[Sequence[Any]]) -> dict[int, Fault]:
    """What is wrong with messages, by their place; nothing with those that are not in it. See ``validate`` for the two
    kinds of wrong."""
    found: dict[int, Fault] = {}
    values = Values([], [], [], [])
    looked_at: list[int] = []
    quick: list[int] = []
    for i, body in enumerate(bodies):
        own, samples = frames[i], body.samples
        layout = _layouts.get(bytes(body.arrays))
        if layout is not None and layout.alone and len(own) == len(samples) == 1:  # `_usual`, without a detour
            frame, meta = own[0], samples[0]
            runs, (_, mask, end), (_, cu, _) = meta.version_runs, layout.mask, layout.cu
            if (
                type(frame) is bytes
                and len(frame) == layout.nbytes[0]
                and not frame[mask]
                and len(runs) == 1
                and runs[0][2] == layout.count
                and not meta.step_rewards
                and frame.startswith(layout.starts, cu)
            ):
                values.masks.append(frame[mask:end])
                _, begin, end = layout.tokens
                values.tokens.append(frame[begin:end])
                _, begin, end = layout.logprob
                values.logprobs.append(frame[begin:end])
                values.facts += meta.components.values()
                if meta.reward is not None:
                    values.facts.append(meta.reward)
                quick.append(i)
                continue
        (quick if _usual(body, own, values) else looked_at).append(i)
    if quick and not _are_fine(values):
        looked_at += quick
    for i in looked_at:
        fault = _fault(bodies[i], frames[i])
        if fault is not None:
            found[i] = fault
    return found
