"""What `/generate` answers, checked: anything incomplete is an `EngineError` with its reason, never a shorter sample."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from temper.actor.engines.base import Generation, SamplingParams, longer_record
from temper.common.errors import EngineError

Runs = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, or several joined: like `base.Generation`. `retractions`: how often the server took its row back for
    want of KV memory. `labels`: of one answer, what the server called the weights of each version run."""

    ids: list[int]
    logprobs: list[float]
    version_runs: Runs
    finish_reason: str
    support: list[list[int]] | None
    experts: npt.NDArray[np.int16] | None = None
    retractions: int = 0
    labels: tuple[str, ...] = field(default=(), compare=False)

    def until_not(self, good: Callable[[str], bool]) -> Answer:
        """What was sampled before the first weights whose label isn't `good`, as aborted there; itself if all are."""
        kept = next((at for at, label in enumerate(self.labels) if not good(label)), None)
        if kept is None:
            return self
        runs = self.version_runs[:kept]
        size = sum(count for _, _, count in runs)
        experts = None if self.experts is None else self.experts[: len(self.experts) - (len(self.ids) - size)]
        return replace(
            self,
            ids=self.ids[:size],
            logprobs=self.logprobs[:size],
            version_runs=runs,
            finish_reason="abort",
            support=None if self.support is None else self.support[:size],
            experts=experts,
            labels=self.labels[:kept],
        )

    def followed_by(self, other: Answer) -> Answer:
        """Both in a row."""
        runs = list(self.version_runs)
        for lineage, ordinal, count in other.version_runs:
            if runs and runs[-1][:2] == (lineage, ordinal):
                runs[-1] = (lineage, ordinal, runs[-1][2] + count)
            else:
                runs.append((lineage, ordinal, count))
        support = None if self.support is None else self.support + (other.support or [])
        return Answer(
            self.ids + other.ids,
            self.logprobs + other.logprobs,
            runs,
            other.finish_reason,
            support,
            longer_record(self.experts, other.experts),
            self.retractions + other.retractions,
        )

    def generation(self, budget: int) -> Generation:
        """As the engine returns it; an abort that left no budget is a length."""
        reason = self.finish_reason
        if reason == "abort" and len(self.ids) >= budget:
            reason = "length"
        return Generation(self.ids, self.logprobs, self.version_runs, reason, self.support, self.experts)  # type: ignore[arg-type]


def parse(body: Any, params: SamplingParams, before: int = 0, width: int = 0) -> Answer:
    """The answer to one request of `before` tokens with `params`; `width`: routed experts of each token, 0 where the model
    doesn't say. EngineError names what is missing or wrong."""
    try:
        ids = [int(token) for token in body["output_ids"]]
        meta = body["meta_info"]
        reason, matched = str(meta["finish_reason"]["type"]), meta["finish_reason"].get("matched")
        entries = meta["output_token_logprobs"][: len(ids)] if reason == "abort" else meta["output_token_logprobs"]
        pairs = [(float(value), int(token)) for value, token, *_ in entries]
        spans = meta["weight_versions"] if ids else []
        runs, labels = [_run(span) for span in spans], tuple(str(span["version"]) for span in spans)
        mask = meta.get("output_token_sampling_mask") if params.truncates else None
        processed = meta.get("output_token_sampling_logprobs") if params.truncates else None
        routed = meta.get("routed_experts") if params.want_experts else None
        retractions = int(meta.get("num_retractions") or 0)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"sglang: an answer without {type(error).__name__} {error}: {str(body)[:300]}") from error
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"sglang: finish reason {reason!r}, expected stop, length or abort")
    if [token for _, token in pairs] != ids:
        raise EngineError(f"sglang: {len(pairs)} log-probabilities that do not belong to the {len(ids)} tokens")
    if sum(count for _, _, count in runs) != len(ids):
        raise EngineError(f"sglang: version spans {runs} do not cover {len(ids)} tokens")
    if reason == "stop" and matched not in params.stop_token_ids:
        if not ids or matched != ids[-1]:
            raise EngineError(f"sglang: it stopped at {matched!r}, which is no token of the answer")
        reason = "abort"  # an end that its model's config names and the request does not: it goes on
    logprobs = [value for value, _ in pairs]
    if params.truncates and ids:
        if mask is None or processed is None or len(mask) != len(ids) or len(processed) != len(ids):
            raise EngineError(
                "sglang: truncated sampling without its mask: this version can't say what it sampled from"
            )
        logprobs = [float(value) for value in processed]
        if not all(token in kept for token, kept in zip(ids, mask, strict=True)):
            raise EngineError("sglang: a sampled token outside its sampling mask")
    if not params.temperature:
        logprobs = [0.0] * len(ids)  # greedy is a point mass
    if not (math.isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= 1e-4):
        raise EngineError(f"sglang: log-probabilities that are none: {logprobs[:5]}")
    support = None
    if params.want_support:
        support = [[int(token) for token in kept] for kept in mask or []]
    experts = _experts(routed, before + len(ids) - 1, width) if params.want_experts and ids else None
    return Answer(ids, logprobs, runs, reason, support, experts, retractions, labels)


def _experts(routed: Any, rows: int, width: int) -> npt.NDArray[np.int16]:
    """int16[rows, layers * experts per token] from base64 of int32s: all tokens but the last, which was not fed back."""
    try:
        flat = np.frombuffer(base64.b64decode(routed or "", validate=True), "<i4")
    except (binascii.Error, TypeError, ValueError) as error:
        raise EngineError(f"sglang: routed experts that are none: {str(routed)[:100]}") from error
    if rows < 1 or flat.size == 0 or flat.size % rows:
        raise EngineError(
            f"sglang: {flat.size} routed experts for {rows} tokens: they were asked for and are incomplete"
        )
    if width and flat.size != rows * width:
        raise EngineError(
            f"sglang: {flat.size} routed experts for {rows} tokens, expected {width} for each: does it serve this model?"
        )
    if flat.min() < 0 or flat.max() > np.iinfo(np.int16).max:
        raise EngineError(f"sglang: routed experts from {flat.min()} to {flat.max()}")
    return flat.astype(np.int16).reshape(rows, -1)


def _run(span: Any) -> tuple[int, int, int]:
    lineage, ordinal, *_ = str(span["version"]).split(":")  # and which push of it
    return int(lineage), int(ordinal), int(span["end"]) - int(span["start"])
