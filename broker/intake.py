"""How the broker reads Samples messages: only what it needs, and many at once.

A run of messages is decoded, checked and told to the core together. `read` decodes the facts of the samples (typed, as
every body is); the description of the arrays stays encoded, because few different ones come again and again. `faults` finds
the messages that are wrong: the values of all small ones are looked at together, and only where something is off, or a
message is not of the usual shape, `validate.check` looks at that message alone and says what. Called by ``control``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import msgspec
import numpy as np
from temper.broker.validate import LOGPROB_SLACK, BadSamples, check
from temper.common.arrays import packed_bytes, spec_bytes
from temper.common.errors import ProtocolError
from temper.common.schema import ArraySpec, SampleMeta, Samples

FEW = 3
"""Up to here each message alone is faster."""
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
    """Where things lie in the one frame of a message with a single sample: (begin, end) in bytes."""

    nbytes: int
    count: int  # tokens
    tokens: tuple[int, int]
    logprob: tuple[int, int]
    mask: tuple[int, int]
    cu: tuple[int, int]
    starts: bytes  # what cu_seqlens must hold


_decode = msgspec.msgpack.Decoder(Intake).decode
_specs = msgspec.msgpack.Decoder(list[ArraySpec]).decode
_layouts: dict[bytes, Layout | None] = {}


def read(meta: bytes) -> Intake:
    """The body in `meta`; ProtocolError if it is malformed."""
    try:
        return _decode(meta)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed Samples: {error}") from error


def _whole(body: Intake) -> Samples:
    try:
        specs = _specs(body.arrays)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed Samples: {error}") from error
    return Samples(body.lease_id, body.attempt, body.lineage, body.samples, specs)


def _layout(encoded: bytes) -> Layout | None:
    """The layout that an encoded description means, None unless it is the usual one for a single small sample."""
    try:
        specs = _specs(encoded)
        size = packed_bytes(specs)
    except (msgspec.DecodeError, ValueError, RecursionError, ProtocolError):
        return None  # `check` says what is wrong
    if not size or {spec.name: spec.dtype for spec in specs} != USUAL or len(specs) != len(USUAL):
        return None
    places, at = {}, 0
    for spec in specs:
        length = spec_bytes(spec)
        places[spec.name] = (at, at + length)
        at += (length + 7) & -8
    shapes = {spec.name: spec.shape for spec in specs}
    (count, *more) = shapes["tokens"] or (0,)
    one = (count,)
    if more or count < 2 or shapes["behaviour_logprob"] != one or shapes["loss_mask"] != one:
        return None
    if shapes["cu_seqlens"] != (2,):
        return None
    tokens, logprob, mask, cu = (places[name] for name in USUAL)
    return Layout(size, count, tokens, logprob, mask, cu, struct.pack("<qq", 0, count))


def _usual(body: Intake, frames: Sequence[Any]) -> Layout | None:
    """The layout of a message that is as it should be apart from the values in its arrays; None if it must be looked at."""
    encoded = bytes(body.arrays)
    try:
        layout = _layouts[encoded]
    except KeyError:
        if len(encoded) > LAYOUT_BYTES:
            return None
        if len(_layouts) >= LAYOUTS:
            _layouts.clear()
        layout = _layouts[encoded] = _layout(encoded)
    if layout is None or len(frames) != 1 or len(body.samples) != 1:
        return None
    frame = frames[0]
    if type(frame) is not bytes or len(frame) != layout.nbytes or frame[layout.mask[0]]:
        return None
    meta = body.samples[0]
    runs = meta.version_runs
    if (
        len(runs) != 1
        or runs[0][2] != layout.count
        or meta.step_rewards
        or not frame.startswith(layout.starts, layout.cu[0])
    ):
        return None
    return layout


def _values_are_fine(tokens: list[bytes], logprobs: list[bytes], masks: list[bytes], facts: list[float]) -> bool:
    """Whether all ids are there, all masks 0 or 1, all log-probabilities finite and (everywhere, to be quick) at most 0, all
    rewards and components finite."""
    values = np.frombuffer(b"".join(logprobs), "<f4")
    return all(map(isfinite, facts)) and bool(
        np.frombuffer(b"".join(tokens), "<i4").min() >= 0
        and np.frombuffer(b"".join(masks), np.uint8).max() <= 1
        and values.min() > -inf
        and values.max() <= LOGPROB_SLACK
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
    looked_at: Sequence[int] = range(len(bodies))
    if len(bodies) > FEW:
        looked_at, quick = [], []
        tokens, logprobs, masks = [], [], []
        facts: list[float] = []
        for i, body in enumerate(bodies):
            layout = _usual(body, frames[i])
            if layout is None:
                looked_at.append(i)
                continue
            frame, meta = frames[i][0], body.samples[0]
            begin, end = layout.tokens
            tokens.append(frame[begin:end])
            begin, end = layout.logprob
            logprobs.append(frame[begin:end])
            begin, end = layout.mask
            masks.append(frame[begin:end])
            facts += meta.components.values()
            if meta.reward is not None:
                facts.append(meta.reward)
            quick.append(i)
        if quick and not _values_are_fine(tokens, logprobs, masks, facts):
            looked_at += quick
    for i in looked_at:
        fault = _fault(bodies[i], frames[i])
        if fault is not None:
            found[i] = fault
    return found
