"""Checks every Samples message against itself, before its lease is looked at.

Frames that do not fit their specs, or a meta that no honest actor sends, are a ProtocolError: the peer is closed. What
an engine or a domain can get wrong (fewer log-probs than tokens, a NaN) is a `BadSamples` with a reason: the attempt is
refused and counts against the task, the peer lives on. Called by ``intake``, which looks at the usual ones together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from temper.common.arrays import unpack_arrays, unpacked
from temper.common.errors import ProtocolError, TemperError
from temper.common.metrics import kind_of
from temper.common.schema import ArraySpec, Metrics, Role, SampleMeta, Samples

REQUIRED = {
    "tokens": ("int32", 4),
    "behaviour_logprob": ("float32", 4),
    "loss_mask": ("uint8", 1),
    "cu_seqlens": ("int64", 8),
}
SUPPORT = {"support_ids": ("int32", 4), "support_cu": ("int64", 8)}
EXPERTS = "routed_experts"
KNOWN = {**REQUIRED, **SUPPORT, EXPERTS: ("int16", 2)}
SMALL_TOKENS = 4096
"""Up to here looking at top bytes is faster than numpy, and copies little."""
NOT_ABOVE_ZERO = bytes([0, *range(0x80, 0xFF)])
"""Top bytes of float32 values that are finite and at most 0 (or below 1e-37)."""
LOGPROB_SLACK = 1e-3
"""Nats above 0 that rounding may give a log-probability."""


class BadSamples(TemperError):
    """The samples cannot be trained on; the message says which and why."""


def check(body: Samples, frames: Sequence[Any]) -> None:
    """Raise ProtocolError or BadSamples unless the message is whole and every value in it makes sense."""
    if not body.samples:
        raise ProtocolError(f"Samples of lease {body.lease_id} without a sample")
    views = _views(body.arrays, frames)
    tokens = views["tokens"].nbytes // 4
    starts = views["cu_seqlens"].cast("q").tolist()
    _divides("cu_seqlens", starts, len(body.samples), tokens, "tokens", "samples")
    for name, size in (("behaviour_logprob", 4), ("loss_mask", 1)):
        if views[name].nbytes != size * tokens:
            raise BadSamples(f"{views[name].nbytes // size} values of {name} for {tokens} tokens")
    if "support_cu" in views:
        _support(views, tokens)
    _values(views, starts)
    if EXPERTS in views:
        (shape,) = (spec.shape for spec in body.arrays if spec.name == EXPERTS)
        _experts(views[EXPERTS], shape, tokens)
    for i, meta in enumerate(body.samples):
        _meta(meta, starts[i + 1] - starts[i])


METRICS_OF: dict[Role, str] = {"eval": "actor", "broker": "relay"}  # a broker that is a peer is a relay


def check_metrics(body: Metrics, role: Role) -> None:
    """Raise ProtocolError unless these are finite values of declared metrics of that role's daemon: the learner adds them
    up, and no peer speaks for another."""
    own = METRICS_OF.get(role, role) + "/"
    for kind, values in (("counter", body.counters), ("gauge", body.gauges)):
        for name, value in values.items():
            if not name.startswith(own) or kind_of(name) != kind:
                raise ProtocolError(f"metric {name[:100]!r} is no {kind} that a daemon of role {role} reports")
            if not math.isfinite(value):
                raise ProtocolError(f"metric {name} is {value}, expected a finite number")


def _views(specs: Sequence[ArraySpec], frames: Sequence[Any]) -> dict[str, memoryview]:
    """The known arrays as bytes, each as its spec says; others are only held to their own spec."""
    views: dict[str, memoryview] = {}
    for spec, frame in zip(specs, unpacked(specs, frames), strict=True):
        name = spec.name
        known = KNOWN.get(name)
        if known is None:
            unpack_arrays([spec], [frame])
            continue
        dtype, size = known
        view = memoryview(frame).cast("B")
        dimensions = 2 if name == EXPERTS else 1
        if spec.dtype != dtype or len(spec.shape) != dimensions:
            wanted = f"{dtype} in {'one dimension' if dimensions == 1 else 'two dimensions'}"
            raise ProtocolError(f"array {name!r} is {spec.dtype}{list(spec.shape)}, expected {wanted}")
        if view.nbytes != math.prod(spec.shape) * size:
            raise ProtocolError(f"array {name!r} {dtype}{list(spec.shape)} has a frame of {view.nbytes} bytes")
        if name in views:
            raise ProtocolError(f"array {name!r} appears twice")
        views[name] = view
    for name in REQUIRED if views.keys().isdisjoint(SUPPORT) else (*REQUIRED, *SUPPORT):
        if name not in views:
            raise ProtocolError(f"Samples without the array {name!r}")
    return views


def _divides(name: str, starts: list[int], parts: int, total: int, of: str, among: str) -> None:
    rising = all(before <= after for before, after in pairwise(starts))
    if len(starts) != parts + 1 or starts[0] != 0 or starts[-1] != total or not rising:
        raise BadSamples(f"{name} {starts[:6]}... does not divide {total} {of} among {parts} {among}")


def _support(views: Mapping[str, memoryview], tokens: int) -> None:
    starts = np.frombuffer(views["support_cu"], "<i8")
    total = views["support_ids"].nbytes // 4
    if len(starts) != tokens + 1 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
        text = f"support_cu {starts[:6].tolist()}... does not divide {total} support_ids"
        raise BadSamples(f"{text} among {tokens} tokens")


def _experts(view: memoryview, shape: tuple[int, ...], tokens: int) -> None:
    """How many layers and experts there are only the learner knows."""
    if shape[0] != tokens or not shape[1]:
        raise BadSamples(f"routed_experts of shape {list(shape)} for {tokens} tokens")
    least = np.frombuffer(view, "<i2").min()
    if least < -1:
        raise BadSamples(f"routed_experts holds {int(least)}, expected experts or -1 where unknown")


def at_a_glance(mask: Any, logprobs: Any, tokens: Any) -> bool:
    """Whether every value is fine, as its top byte shows; False if that says nothing (bytes or memoryviews of bytes)."""
    return len(mask) <= SMALL_TOKENS and not (
        bytes(mask).translate(None, b"\0\1")
        or bytes(logprobs[3::4]).translate(None, NOT_ABOVE_ZERO)
        or not bytes(tokens[3::4]).isascii()
    )


def _values(views: Mapping[str, memoryview], starts: list[int]) -> None:
    mask = views["loss_mask"]
    for start, stop in pairwise(starts):
        if stop - start < 2:
            raise BadSamples(f"a sample has {stop - start} tokens, expected a prompt and a completion")
        if mask[start]:
            raise BadSamples("a sample's first token is marked as sampled, so it has no prompt")
    if at_a_glance(mask, views["behaviour_logprob"], views["tokens"]):
        return
    flags, logprob = np.frombuffer(mask, np.uint8), np.frombuffer(views["behaviour_logprob"], "<f4")
    if flags.max() > 1:
        raise BadSamples(f"loss_mask holds {int(flags.max())}, expected 0 or 1")
    least = np.frombuffer(views["tokens"], "<i4").min()
    if least < 0:
        raise BadSamples(f"token id {int(least)}")
    if not np.isfinite(logprob).all():
        raise BadSamples("a behaviour log-probability is not finite")
    if (logprob[flags == 1] > LOGPROB_SLACK).any():
        raise BadSamples(f"a behaviour log-probability is {float(logprob[flags == 1].max()):.4g}, expected at most 0")


def _meta(meta: SampleMeta, tokens: int) -> None:
    runs, reward = meta.version_runs, meta.reward
    if (
        len(runs) == 1
        and runs[0][2] == tokens
        and not meta.step_rewards
        and (reward is None or math.isfinite(reward))
        and all(map(math.isfinite, meta.components.values()))
    ):
        return  # the usual, at a glance
    where = f"sample {meta.index}"
    if meta.reward is not None and not math.isfinite(meta.reward):
        raise BadSamples(f"{where} has the reward {meta.reward}, expected a finite number or none")
    if not all(math.isfinite(value) for value in meta.components.values()):
        raise BadSamples(f"{where} has reward components {meta.components}, expected finite numbers")
    for token, value in meta.step_rewards:
        if not 0 <= token < tokens or not math.isfinite(value):
            raise BadSamples(f"{where} has a step reward of {value} at token {token} of {tokens}")
    counts = [count for _, _, count in meta.version_runs]
    if sum(counts) != tokens or any(count < 0 for count in counts):
        raise BadSamples(f"{where} has version runs over {sum(counts)} tokens, it has {tokens}")
