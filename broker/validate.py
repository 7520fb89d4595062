"""Checks every Samples message against itself, before its lease is looked at.

Frames that do not fit their specs, or a meta that no honest actor sends, are a ProtocolError: the peer is closed. What
an engine or a domain can get wrong (fewer log-probs than tokens, a NaN) is a `BadSamples` with a reason: the attempt is
refused and counts against the task, the peer lives on. Called by the broker's daemon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from temper.common.arrays import unpack_arrays
from temper.common.errors import ProtocolError, TemperError
from temper.common.schema import SampleMeta, Samples

Array = NDArray[Any]

REQUIRED = {"tokens": "int32", "behaviour_logprob": "float32", "loss_mask": "uint8", "cu_seqlens": "int64"}
SUPPORT = {"support_ids": "int32", "support_cu": "int64"}
LOGPROB_SLACK = 1e-3
"""Nats above 0 that rounding may give a log-probability."""


class BadSamples(TemperError):
    """The samples cannot be trained on; the message says which and why."""


def check(body: Samples, frames: Sequence[Any]) -> None:
    """Raise ProtocolError or BadSamples unless the message is whole and every value in it makes sense."""
    if not body.samples:
        raise ProtocolError(f"Samples of lease {body.lease_id} without a sample")
    arrays = unpack_arrays(body.arrays, frames)
    wanted = REQUIRED if "support_cu" not in arrays and "support_ids" not in arrays else {**REQUIRED, **SUPPORT}
    for name, dtype in wanted.items():
        if name not in arrays:
            raise ProtocolError(f"Samples without the array {name!r}")
        if arrays[name].ndim != 1 or arrays[name].dtype.name != dtype:
            found = f"{arrays[name].dtype.name}{list(arrays[name].shape)}"
            raise ProtocolError(f"array {name!r} is {found}, expected {dtype} in one dimension")
    tokens, starts = arrays["tokens"], arrays["cu_seqlens"]
    _divides("cu_seqlens", starts, len(body.samples), len(tokens), "tokens", "samples")
    for name in ("behaviour_logprob", "loss_mask"):
        if len(arrays[name]) != len(tokens):
            raise BadSamples(f"{len(arrays[name])} values of {name} for {len(tokens)} tokens")
    if "support_cu" in arrays:
        _divides("support_cu", arrays["support_cu"], len(tokens), len(arrays["support_ids"]), "support_ids", "tokens")
    _values(arrays, starts)
    for i, meta in enumerate(body.samples):
        _meta(meta, int(starts[i + 1] - starts[i]))


def _divides(name: str, starts: Array, parts: int, total: int, of: str, among: str) -> None:
    if len(starts) != parts + 1 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) < 0).any():
        raise BadSamples(f"{name} {starts[:6].tolist()}... does not divide {total} {of} among {parts} {among}")


def _values(arrays: Mapping[str, Array], starts: Array) -> None:
    tokens, mask, logprob = arrays["tokens"], arrays["loss_mask"], arrays["behaviour_logprob"]
    lengths = np.diff(starts)
    if (lengths < 2).any():
        raise BadSamples(f"a sample has {int(lengths.min())} tokens, expected a prompt and a completion")
    if mask[starts[:-1]].any():
        raise BadSamples("a sample's first token is marked as sampled, so it has no prompt")
    if (mask > 1).any():
        raise BadSamples(f"loss_mask holds {int(mask.max())}, expected 0 or 1")
    if (tokens < 0).any():
        raise BadSamples(f"token id {int(tokens.min())}")
    if not np.isfinite(logprob).all():
        raise BadSamples("a behaviour log-probability is not finite")
    if (logprob[mask == 1] > LOGPROB_SLACK).any():
        raise BadSamples(f"a behaviour log-probability is {float(logprob[mask == 1].max()):.4g}, expected at most 0")


def _meta(meta: SampleMeta, tokens: int) -> None:
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
