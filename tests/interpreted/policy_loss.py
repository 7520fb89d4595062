"""The policy-loss kernel in the interpreter: loss, gradient and metrics of every objective equal float64 torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from temper.kernels import policy_loss_triton as kernels
from temper.kernels.flags import PolicyFlags
from temper.kernels.policy_loss import METRICS, PackedBatch, count_normalisers, policy_loss
from temper.kernels.reference import m2_cutoff
from temper.kernels.segments import segment_ids
from temper.learner.objectives import TABLE, compile
from torch import Tensor

assert kernels.INTERPRETED, "run with TRITON_INTERPRET=1"
LENGTHS = (3, 0, 70, 1, 64)


def batch_of(lengths: tuple[int, ...], spread: float, seed: int = 0) -> tuple[PackedBatch, Tensor, Tensor]:
    """Ragged float32 sequences, NaN at masked positions, with a reference policy; and pi and entropy."""
    gen = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    mask = torch.rand(count, generator=gen) < 0.8
    mu = -3 * torch.rand(count, generator=gen) - 0.1
    prox, pi, ref = (mu + spread * torch.randn(count, generator=gen) for _ in range(3))
    advantage = torch.randn(len(lengths), generator=gen)[segment_ids(cu, count)]
    hole = torch.where(mask, 0.0, torch.nan)
    batch = PackedBatch(
        torch.zeros(count, dtype=torch.int32),
        cu,
        mask,
        mu + hole,
        prox + hole,
        ref + hole,
        advantage + hole,
        torch.zeros(len(lengths), dtype=torch.int64),
        torch.randint(0, 4, (count,), generator=gen),
    )
    return batch, pi + hole, torch.rand(count, generator=gen) + hole


def compare(batch: PackedBatch, pi: Tensor, entropy: Tensor | None, flags: PolicyFlags, ahead: float = 0.0) -> None:
    normalisers = count_normalisers(batch.mask, batch.cu_seqlens, 50)
    if flags.m2_tau < torch.inf:
        normalisers = replace(normalisers, m2_cutoff=m2_cutoff((pi - batch.mu)[batch.mask], flags.m2_tau))
    found = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaf = pi.to(dtype).requires_grad_()
        bonus = None if entropy is None else entropy.to(dtype).requires_grad_()
        loss, metrics = policy_loss(batch, leaf, flags, normalisers, entropy=bonus, ahead=ahead, backend=backend)  # type: ignore[arg-type]
        inputs = [leaf] if bonus is None or flags.entropy_coefficient == 0 else [leaf, bonus]
        found.append((loss, torch.autograd.grad(3 * loss, inputs), metrics))
    (loss, grads, metrics), (goal, exact, sums) = found
    assert torch.allclose(loss.double(), goal, rtol=2e-5, atol=2e-6)
    for one, other in zip(grads, exact, strict=True):
        assert torch.allclose(one.double(), other, rtol=2e-4, atol=2e-6)
        assert not one[~batch.mask].any()
    for name in METRICS:
        assert torch.allclose(metrics[name][0], sums[name][0], rtol=2e-5, atol=2e-4), name
        assert metrics[name][1] == sums[name][1], name


@pytest.mark.parametrize("name", TABLE)
def test_every_row_of_the_table(name: str) -> None:
    batch, pi, entropy = batch_of(LENGTHS, 0.005 if TABLE[name].level == "sequence" else 0.4)
    compare(batch, pi, entropy, compile(TABLE[name]))


def test_without_proximal_and_reference_policy() -> None:
    batch, pi, _ = batch_of(LENGTHS, 0.4)
    compare(replace(batch, prox=None, ref=None), pi, None, compile(TABLE["decoupled_ppo"]))


@pytest.mark.parametrize(
    "kl,aggregation",
    product(
        ("k1", "k2", "k3", "k3_straight_through", "k3_weighted"),
        ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    ),
)
def test_kl_entropy_and_aggregation(kl: str, aggregation: str) -> None:
    batch, pi, entropy = batch_of(LENGTHS, 0.4, 1)
    flags = PolicyFlags(kl=kl, kl_coefficient=0.3, entropy_coefficient=0.05, aggregation=aggregation)  # type: ignore[arg-type]
    compare(batch, pi, entropy, flags)


@pytest.mark.parametrize("weight", ["truncate", "mask", "clip"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights(weight: str, level: str) -> None:
    batch, pi, entropy = batch_of(LENGTHS, 0.3, 2)
    for loss, of in (("ppo", "pi"), ("gmpo", "prox")):
        flags = PolicyFlags(
            loss=loss,
            weight=weight,
            weight_level=level,
            weight_of=of,
            weight_low=0.7,
            weight_high=1.6,
            base="mu",  # type: ignore[arg-type]
        )
        compare(batch, pi, entropy, flags)


@pytest.mark.parametrize(
    "choices", [{"veto": 0.2}, {"geometric_low": 0.95}, {"opsm_delta": 0.02}, {"tv_delta": 0.1}, {"m2_tau": 0.05}]
)
@pytest.mark.parametrize("loss", ["ppo", "gmpo"])
def test_filters(choices: dict[str, float], loss: str) -> None:
    compare(*batch_of(LENGTHS, 0.3, 3), PolicyFlags(loss=loss, base="mu", **choices))  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0.0, 0.5])
def test_loglinear_prox(ahead: float) -> None:
    flags = PolicyFlags(loglinear_prox=True, weight="truncate", weight_high=2.0)
    compare(*batch_of(LENGTHS, 0.3, 4), flags, ahead)


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo", "decoupled_ppo", "tis"])
def test_exploded_ratios_stay_finite(name: str) -> None:
    batch, pi, entropy = batch_of((4, 3), 0.1, 5)
    wild = replace(batch, mu=torch.where(torch.arange(7) % 3 == 0, -91.0, batch.mu))
    pi = torch.where(batch.mask, pi, 0)
    pi = torch.where(torch.arange(7) % 3 == 1, -91.0, pi)
    compare(wild, pi, entropy, compile(TABLE[name]))


def test_no_sequence_and_equal_policies() -> None:
    batch, pi, _ = batch_of((), 0.1)
    loss, _ = policy_loss(
        batch, pi.requires_grad_(), PolicyFlags(), count_normalisers(batch.mask, batch.cu_seqlens, 1), backend="triton"
    )
    assert float(loss.detach()) == 0.0
    batch, _, _ = batch_of(LENGTHS, 0.1)
    pi = torch.where(batch.mask, batch.mu, 0).requires_grad_()
    flags = PolicyFlags(base="mu", weight="truncate", weight_high=2.0)
    loss, metrics = policy_loss(
        replace(batch, prox=batch.mu),
        pi,
        flags,
        replace(count_normalisers(batch.mask, batch.cu_seqlens, 1), tokens=1),
        backend="triton",
    )
    (grad,) = torch.autograd.grad(loss, pi)
    assert torch.equal(grad, torch.where(batch.mask, -batch.advantage, 0))
    assert metrics["ratio"][0] == metrics["ratio"][1]
