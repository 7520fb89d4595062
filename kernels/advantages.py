"""Advantages on the device that holds the rewards: of groups, and of tokens by scans over ragged sequences.

``group_advantage`` gives every sample its advantage in its group; ``gae`` and ``vtrace`` turn rewards and values of packed
sequences into advantages and value targets. No gradient flows through them. Groups and sequences are ragged segments
(`segments`), so a group may miss samples. fp64 for groups (rewards are few, and [1.00000, 1.00001] must not drown), the
dtype of the inputs for tokens. Formulas: `reference`. Called by the learner's advantages.
"""

from __future__ import annotations

from typing import Literal

import torch
from temper.kernels import reference
from temper.kernels.backends import use_triton
from temper.kernels.segments import check_cu_seqlens, segment_ids
from torch import Tensor

GROUP_KINDS = ("grpo", "dr_grpo", "rloo", "maxrl", "batch_std", "opo", "passk")
Backend = Literal["auto", "torch", "triton"]


def _same(name: str, value: Tensor, count: int, other: str) -> None:
    if value.shape != (count,):
        raise ValueError(f"{name}: found {list(value.shape)}, expected [{count}] as {other} has")


def group_advantage(
    kind: str,
    reward: Tensor,
    scored: Tensor,
    cu_groups: Tensor,
    *,
    length: Tensor | None = None,
    std: str = "sample",
    epsilon: float = 1e-6,
    backend: Backend = "auto",
) -> Tensor:
    """f64[S] advantages of samples; 0 where not `scored`, in groups of one and in groups without variance.

    reward f32/f64[S], anything (NaN too) where not scored bool[S]; group g holds samples cu_groups[g]..cu_groups[g+1]-1
    (i64[G+1]); length [S] generated tokens, for opo alone. std: sample or population, of grpo and batch_std, to which
    `epsilon` is added; batch_std divides by the deviation of all scored samples that are passed.
    """
    if kind not in GROUP_KINDS:
        raise ValueError(f"advantage: found {kind!r}, expected {', '.join(GROUP_KINDS)}")
    if std not in ("sample", "population"):
        raise ValueError(f"std: found {std!r}, expected sample or population")
    if reward.dim() != 1 or not reward.is_floating_point():
        raise ValueError(f"reward: found {reward.dtype}{list(reward.shape)}, expected a float [samples]")
    count = reward.shape[0]
    _same("scored", scored, count, "reward")
    if kind == "opo" and length is None:
        raise ValueError("length: found None, expected the generated tokens of every sample (advantage opo)")
    if length is not None:
        _same("length", length, count, "reward")
    check_cu_seqlens(cu_groups, count)
    scored = scored.to(torch.bool)
    if not bool(torch.isfinite(reward[scored]).all()):
        raise ValueError("reward: found NaN or inf at a scored sample, expected finite rewards (clear `scored` there)")
    if use_triton(backend, (reward,), (torch.float32, torch.float64)):
        from temper.kernels import advantages_triton

        return advantages_triton.group_advantage(kind, reward, scored, cu_groups, length, std, epsilon)
    ids = segment_ids(cu_groups, count)
    return reference.group_advantage(
        kind, reward, scored, ids, cu_groups.numel() - 1, length=length, std=std, epsilon=epsilon
    )


def _tokens(backend: str, cu_seqlens: Tensor, bootstrap: Tensor | float, **values: Tensor) -> bool:
    """Check packed values [N]; whether the Triton kernels take them."""
    (first, lead), *others = values.items()
    if lead.dim() != 1 or not lead.is_floating_point():
        raise ValueError(f"{first}: found {lead.dtype}{list(lead.shape)}, expected a float [tokens]")
    for name, value in others:
        _same(name, value, lead.shape[0], first)
    check_cu_seqlens(cu_seqlens, lead.shape[0])
    if isinstance(bootstrap, Tensor) and bootstrap.dim() > 0:
        _same("bootstrap", bootstrap, cu_seqlens.numel() - 1, "cu_seqlens has sequences")
    return use_triton(backend, tuple(values.values()), (torch.float32,))


def gae(
    reward: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(advantage [N], value target [N]) of packed sequences, `reference.gae`.

    reward, value f32[N] (f64 on the torch path); bootstrap: the value after each sequence's end, a number or [S].
    """
    if _tokens(backend, cu_seqlens, bootstrap, reward=reward, value=value):
        from temper.kernels import advantages_triton

        return advantages_triton.gae(reward, value, cu_seqlens, gamma, lam, bootstrap)
    return reference.gae(reward, value, cu_seqlens, gamma=gamma, lam=lam, bootstrap=bootstrap)


def vtrace(
    d: Tensor,
    reward: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap: Tensor | float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(advantage [N], v [N]) of packed sequences, `reference.vtrace`; d = log pi - log mu at the start of the step."""
    if _tokens(backend, cu_seqlens, bootstrap, reward=reward, d=d, value=value):
        from temper.kernels import advantages_triton

        return advantages_triton.vtrace(d, reward, value, cu_seqlens, gamma, lam, rho_bar, c_bar, bootstrap)
    return reference.vtrace(
        d, reward, value, cu_seqlens, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar, bootstrap=bootstrap
    )
