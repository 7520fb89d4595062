# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Advantages on GPU: one program per group or per sequence, no atomics. Called by `advantages` only.

Token recurrences x_t = addend_t + decay_t x_{t+1} are associative scans of blocks, walked from a sequence's end, with the
last block's x carried on. Offsets are 64-bit; the grid only uses x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from temper.kernels.flags import LOG_RATIO_LIMIT
from temper.kernels.reference import ZERO_VARIANCE
from temper.kernels.segments_triton import BLOCK, INTERPRETED, compose
from torch import Tensor

MEMBERS = 16 if INTERPRETED else 128  # samples of a group looked at together


@triton.jit
def _group(
    reward_ptr, scored_ptr, length_ptr, cu_ptr, knob_ptr, out_ptr, ddof, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The advantages f64 of one group's samples; knob: epsilon, the batch's deviation, zero variance, least mean."""
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + group)
    end = tl.load(cu_ptr + group + 1)
    step = tl.arange(0, BLOCK)
    none = tl.zeros((BLOCK,), dtype=tl.float64)
    count = none
    total = none
    tokens = none
    paid = none
    top = none + float("-inf")
    bottom = none + float("inf")
    for first in range(start, end, BLOCK):
        at = first + step
        on = tl.load(scored_ptr + at, mask=at < end, other=0) != 0
        r = tl.load(reward_ptr + at, mask=on, other=0.0)
        count += tl.where(on, 1.0, 0.0)
        total += r
        top = tl.maximum(top, tl.where(on, r, float("-inf")))
        bottom = tl.minimum(bottom, tl.where(on, r, float("inf")))
        if KIND == "opo":
            n = tl.load(length_ptr + at, mask=on, other=0.0)
            tokens += n
            paid += n * r
    samples = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(samples, 1.0)
    best = tl.max(top, 0)
    # 0 for a group of one and for one whose rewards differ by float noise alone
    contrast = tl.where((best - tl.min(bottom, 0) <= tl.load(knob_ptr + 2)) | (samples < 2), 0.0, 1.0)
    base = mean
    factor = 1.0
    if KIND == "grpo":
        squares = none
        for first in range(start, end, BLOCK):
            at = first + step
            on = tl.load(scored_ptr + at, mask=at < end, other=0) != 0
            apart = tl.where(on, tl.load(reward_ptr + at, mask=on, other=0.0) - mean, 0.0)
            squares += apart * apart
        deviation = tl.sqrt(tl.sum(squares, 0) / tl.maximum(samples - ddof, 1.0))
        factor = 1.0 / (deviation + tl.load(knob_ptr))
    elif KIND == "batch_std":
        factor = 1.0 / (tl.load(knob_ptr + 1) + tl.load(knob_ptr))
    elif KIND == "rloo":
        factor = samples / tl.maximum(samples - 1, 1.0)
    elif KIND == "maxrl":
        factor = tl.where(mean > 0, 1.0 / tl.maximum(mean, tl.load(knob_ptr + 3)), 0.0)
    elif KIND == "opo":
        base = tl.sum(paid, 0) / tl.maximum(tl.sum(tokens, 0), 1.0)
    elif KIND == "passk":
        winners = none
        second = none + float("-inf")
        for first in range(start, end, BLOCK):
            at = first + step
            on = tl.load(scored_ptr + at, mask=at < end, other=0) != 0
            r = tl.load(reward_ptr + at, mask=on, other=0.0)
            winners += tl.where(on & (r == best), 1.0, 0.0)
            second = tl.maximum(second, tl.where(on & (r != best), r, float("-inf")))
        base = tl.max(second, 0)
        contrast = tl.where(tl.sum(winners, 0) > 1, 0.0, contrast)
    for first in range(start, end, BLOCK):
        at = first + step
        on = tl.load(scored_ptr + at, mask=at < end, other=0) != 0
        r = tl.load(reward_ptr + at, mask=on, other=0.0)
        value = (r - base) * factor
        on = on & (none + contrast > 0.5)
        if KIND == "passk":
            on = on & (r == best)
        tl.store(out_ptr + at, tl.where(on, value, 0.0), mask=at < end)


@triton.jit
def _gae(
    reward_ptr, value_ptr, bootstrap_ptr, cu_ptr, advantage_ptr, target_ptr, gamma, decay, BLOCK: tl.constexpr
):  # fmt: skip
    """One sequence: A_t = delta_t + decay A_{t+1}, target = A + V."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    beyond = tl.load(bootstrap_ptr + sequence)
    step = tl.arange(0, BLOCK)
    carry = 0.0
    for first in range(0, end - start, BLOCK):
        at = end - 1 - first - step
        inside = at >= start
        v = tl.load(value_ptr + at, mask=inside, other=0.0)
        after = tl.load(value_ptr + at + 1, mask=inside & (at + 1 < end), other=0.0)
        after = tl.where(at + 1 < end, after, beyond)
        delta = tl.where(inside, tl.load(reward_ptr + at, mask=inside, other=0.0) + gamma * after - v, 0.0)
        factor = tl.where(inside, decay, 1.0)
        factor, x = tl.associative_scan((factor, delta), 0, compose)
        x = x + factor * carry
        tl.store(advantage_ptr + at, x, mask=inside)
        tl.store(target_ptr + at, x + v, mask=inside)
        carry = tl.sum(tl.where(step == BLOCK - 1, x, 0.0))


@triton.jit
def _vtrace_terms(
    d_ptr, reward_ptr, value_ptr, beyond, at, start, end, gamma, lam, rho_bar, c_bar, LIMIT: tl.constexpr
):  # fmt: skip
    """(rho, r, V, V after, decay, delta) at positions `at`; outside the sequence decay 1 and delta 0."""
    inside = (at >= start) & (at < end)
    d = tl.load(d_ptr + at, mask=inside, other=0.0)
    r = tl.load(reward_ptr + at, mask=inside, other=0.0)
    v = tl.load(value_ptr + at, mask=inside, other=0.0)
    after = tl.load(value_ptr + at + 1, mask=inside & (at + 1 < end), other=0.0)
    after = tl.where(at + 1 < end, after, beyond)
    pi_over_mu = tl.exp(tl.minimum(tl.maximum(d, -LIMIT), LIMIT))
    rho = tl.minimum(pi_over_mu, rho_bar)
    decay = tl.where(inside, gamma * lam * tl.minimum(pi_over_mu, c_bar), 1.0)
    delta = tl.where(inside, rho * (r + gamma * after - v), 0.0)
    return rho, r, v, after, decay, delta


@triton.jit
def _vtrace(
    d_ptr, reward_ptr, value_ptr, bootstrap_ptr, cu_ptr, advantage_ptr, target_ptr, gamma, lam, rho_bar, c_bar,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: x = v - V by one scan, and x at t + 1, which the advantage needs, by the same scan moved by one."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_ptr + sequence)
    end = tl.load(cu_ptr + sequence + 1)
    beyond = tl.load(bootstrap_ptr + sequence)
    step = tl.arange(0, BLOCK)
    carry = 0.0
    for first in range(0, end - start, BLOCK):
        at = end - 1 - first - step
        rho, r, v, after, decay, delta = _vtrace_terms(
            d_ptr, reward_ptr, value_ptr, beyond, at, start, end, gamma, lam, rho_bar, c_bar, LIMIT
        )
        _rho, _r, _v, _after, next_decay, next_delta = _vtrace_terms(
            d_ptr, reward_ptr, value_ptr, beyond, at + 1, start, end, gamma, lam, rho_bar, c_bar, LIMIT
        )
        moved = step > 0  # the first position's successor is what `carry` holds
        next_decay = tl.where(moved, next_decay, 1.0)
        next_delta = tl.where(moved, next_delta, 0.0)
        decay, x = tl.associative_scan((decay, delta), 0, compose)
        next_decay, next_x = tl.associative_scan((next_decay, next_delta), 0, compose)
        x = x + decay * carry
        next_x = next_x + next_decay * carry
        inside = at >= start
        tl.store(target_ptr + at, v + x, mask=inside)
        tl.store(advantage_ptr + at, rho * (r + gamma * (after + next_x) - v), mask=inside)
        carry = tl.sum(tl.where(step == BLOCK - 1, x, 0.0))


def group_advantage(
    kind: str, reward: Tensor, scored: Tensor, cu_groups: Tensor, length: Tensor | None, std: str, epsilon: float
) -> Tensor:
    """`advantages.group_advantage`; arguments are checked already."""
    reward = reward.double().contiguous()
    out = torch.zeros_like(reward)
    groups, ddof = cu_groups.numel() - 1, 1 if std == "sample" else 0
    if not groups or not reward.numel():
        return out
    knobs = torch.tensor([epsilon, 0.0, ZERO_VARIANCE, 1e-12], dtype=torch.float64, device=reward.device)
    if kind == "batch_std":
        picked = reward[scored]
        knobs[1] = ((picked - picked.mean()).square().sum() / max(picked.numel() - ddof, 1)).sqrt()
    _group[(groups,)](
        reward, scored.to(torch.uint8).contiguous(), reward if length is None else length.double().contiguous(),
        cu_groups.contiguous(), knobs, out, ddof, KIND=kind, BLOCK=MEMBERS,
    )  # fmt: skip
    return out


def _beyond(bootstrap: Tensor | float, cu_seqlens: Tensor) -> Tensor:
    """f32[S] values after the sequences' ends."""
    value = torch.as_tensor(bootstrap, dtype=torch.float32, device=cu_seqlens.device)
    return value.detach().expand(cu_seqlens.numel() - 1).contiguous()


def gae(
    reward: Tensor, value: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, bootstrap: Tensor | float
) -> tuple[Tensor, Tensor]:
    """`advantages.gae`, fp32; arguments are checked already."""
    advantage = torch.empty(reward.shape, dtype=torch.float32, device=reward.device)
    target = torch.empty_like(advantage)
    if reward.numel():
        _gae[(cu_seqlens.numel() - 1,)](
            reward.contiguous(), value.contiguous(), _beyond(bootstrap, cu_seqlens), cu_seqlens.contiguous(), advantage,
            target, gamma, gamma * lam, BLOCK=BLOCK,
        )  # fmt: skip
    return advantage, target


def vtrace(
    d: Tensor, reward: Tensor, value: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, rho_bar: float, c_bar: float,
    bootstrap: Tensor | float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`advantages.vtrace`, fp32; arguments are checked already."""
    advantage = torch.empty(reward.shape, dtype=torch.float32, device=reward.device)
    target = torch.empty_like(advantage)
    if reward.numel():
        _vtrace[(cu_seqlens.numel() - 1,)](
            d.contiguous(), reward.contiguous(), value.contiguous(), _beyond(bootstrap, cu_seqlens), cu_seqlens.contiguous(),
            advantage, target, gamma, lam, rho_bar, c_bar, LIMIT=LOG_RATIO_LIMIT, BLOCK=BLOCK,
        )  # fmt: skip
    return advantage, target
