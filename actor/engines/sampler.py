"""From logits to tokens, with the log-probability of the distribution that was actually sampled.

Order: logits / temperature -> softmax -> top-k, top-p and min-p judged on that one distribution -> renormalise ->
inverse CDF of one given uniform a row. Pure; each row depends on its own inputs alone. Called by `decoder` each step.

Shapes: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = 256  # sorted candidates looked at first; the whole vocabulary only where they don't hold the support
BLOCK = 128  # a large vocabulary is searched block by block
EDGE = 1e-6  # mass within this of top_p counts as having reached it


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per-row limits: `top_k` i64[N] (0 off), `top_p` f32[N] (1 off), `min_p` f32[N] (0 off)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """`tokens` i64[N], `logprobs` f32[N] in nats. Truncated rows only: `ids` i64[N, C], `keep` bool[N, C]."""

    tokens: Tensor
    logprobs: Tensor
    ids: Tensor | None = None
    keep: Tensor | None = None


def sample(scaled_NV: Tensor, uniform_N1: Tensor) -> Sampled:
    """Sample from softmax(`scaled_NV`), f32 logits already divided by the temperature; `uniform_N1` f32 in [0, 1).

    `scaled_NV` is overwritten: a large vocabulary costs one pass for the softmax and one for the sums.
    """
    probs_NV = torch.softmax(scaled_NV, -1, out=scaled_NV)
    tokens_N1 = _invert(probs_NV, uniform_N1)
    return Sampled(tokens_N1.squeeze(1), probs_NV.gather(1, tokens_N1).log_().squeeze(1))


def sample_truncated(scaled_NV: Tensor, uniform_N1: Tensor, limits: Truncation) -> Sampled:
    """Like `sample`, from the renormalised distribution that top-k, top-p and min-p leave (at least the best token).

    A token is kept while its rank is below top_k, the mass before it is below top_p, and its probability is at least
    min_p times the best one's.
    """
    logprobs_NV = torch.log_softmax(scaled_NV, -1)
    vocabulary = scaled_NV.shape[1]
    count = min(vocabulary, CANDIDATES)
    ids_NC, top_NC, keep_NC = _candidates(logprobs_NV, limits, count)
    if count < vocabulary and bool(keep_NC[:, -1].any()):
        ids_NC, top_NC, keep_NC = _candidates(logprobs_NV, limits, vocabulary)
    kept_NC = torch.where(keep_NC, top_NC, -torch.inf)
    processed_NC = torch.log_softmax(kept_NC, -1)
    choice_N1 = _invert(processed_NC.exp(), uniform_N1)
    tokens = ids_NC.gather(1, choice_N1).squeeze(1)
    return Sampled(tokens, processed_NC.gather(1, choice_N1).squeeze(1), ids_NC, keep_NC)


def _candidates(logprobs_NV: Tensor, limits: Truncation, count: int) -> tuple[Tensor, Tensor, Tensor]:
    top_NC, ids_NC = torch.topk(logprobs_NV, count, dim=-1, sorted=True)
    probs_NC = top_NC.exp()
    before_NC = probs_NC.cumsum(-1) - probs_NC
    rank_C = torch.arange(count)
    top_k_N1 = torch.where(limits.top_k > 0, limits.top_k, logprobs_NV.shape[1]).unsqueeze(1)
    top_p_N1 = torch.where(limits.top_p < 1, limits.top_p - EDGE, torch.inf).unsqueeze(1)
    keep_NC = (rank_C < top_k_N1) & (before_NC < top_p_N1) & (probs_NC >= probs_NC[:, :1] * limits.min_p.unsqueeze(1))
    keep_NC[:, 0] = True
    return ids_NC, top_NC, keep_NC


def _invert(probs_NC: Tensor, uniform_N1: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds uniform * total: never one without mass. (The clamps are for rows
    that are not finite: their log-probability shows it.)"""
    if probs_NC.shape[1] >= 4 * BLOCK and probs_NC.shape[1] % BLOCK == 0:
        return _invert_by_blocks(probs_NC, uniform_N1)
    cumulative_NC = probs_NC.cumsum(-1)
    chosen_N1 = torch.searchsorted(cumulative_NC, uniform_N1 * cumulative_NC[:, -1:], right=True)
    return chosen_N1.clamp_(max=probs_NC.shape[1] - 1)


def _invert_by_blocks(probs_NC: Tensor, uniform_N1: Tensor) -> Tensor:
    """The same in two steps: the block of `BLOCK` candidates that holds the point, then the candidate inside it."""
    blocks_NKB = probs_NC.view(probs_NC.shape[0], -1, BLOCK)
    cumulative_NK = blocks_NKB.sum(-1).cumsum(-1)
    point_N1 = uniform_N1 * cumulative_NK[:, -1:]
    block_N1 = torch.searchsorted(cumulative_NK, point_N1, right=True).clamp_(max=cumulative_NK.shape[1] - 1)
    before_N1 = torch.where(block_N1 > 0, cumulative_NK.gather(1, (block_N1 - 1).clamp_(min=0)), 0.0)
    inside_NB = blocks_NKB.gather(1, block_N1.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).cumsum(-1)
    end_N1 = inside_NB[:, -1:]
    rest_N1 = torch.minimum(point_N1 - before_N1, end_N1 * (1 - 2.0**-23))  # rounding may point past the block's end
    chosen_N1 = torch.searchsorted(inside_NB, rest_N1, right=True).clamp_(max=BLOCK - 1)
    return block_N1 * BLOCK + chosen_N1
