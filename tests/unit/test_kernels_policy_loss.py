"""The policy loss against the golden values of the papers' formulas, and the invariances it promises."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.kernels.flags import PolicyFlags
from temper.kernels.policy_loss import METRICS, Normalisers, PackedBatch, count_normalisers, policy_loss
from temper.kernels.reference import m2_cutoff, vtrace
from torch import Tensor

F64 = torch.float64
LENGTHS = (3, 2)
MU = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.2], dtype=F64)
PROX = torch.tensor([-0.9, -0.6, -2.0, -1.5, -0.3], dtype=F64)
PI = torch.tensor([-0.7, -0.7, -2.5, -1.2, -0.9], dtype=F64)
ADVANTAGE = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=F64)


def packed(
    mu: Tensor, advantage: Tensor, lengths: tuple[int, ...], prox: Tensor | None = None, **more: Tensor
) -> PackedBatch:
    count = mu.shape[0]
    values = {
        "tokens": torch.zeros(count, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "mask": torch.ones(count, dtype=torch.bool),
        "mu": mu,
        "prox": prox,
        "ref": None,
        "advantage": advantage,
        "group_id": torch.zeros(len(lengths), dtype=torch.int64),
        "lag": torch.zeros(count, dtype=torch.int32),
    }
    return PackedBatch(**{**values, **more})  # type: ignore[arg-type]


def per_token(flags: PolicyFlags, batch: PackedBatch, pi: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of each token, gradient of the summed loss): each token alone in the mask shows its own term."""
    leaf = pi.clone().requires_grad_()
    total, _ = policy_loss(batch, leaf, replace(flags, aggregation="token_mean"), Normalisers(1, 1, 1))
    (grad,) = torch.autograd.grad(total, leaf)
    return total.detach(), grad


PPO = PolicyFlags(clip_low=0.2, clip_high=0.28, base="mu")
GOLDEN = {
    "ppo": (PPO, [-1.28, -0.81873, -0.60653, 1.34986, 0.8], [0, -0.81873, -0.60653, 1.34986, 0], -0.111081),
    "decoupled": (
        replace(PPO, base="prox", weight="truncate", weight_high=5.0),
        [-1.34986, -0.81873, -0.60653, 1.34986, 0.72387],
        [-1.34986, -0.81873, -0.60653, 1.34986, 0],
        -0.140278,
    ),
    "tis": (
        PolicyFlags(loss="score", weight="truncate", weight_of="pi", weight_high=1.1),
        [0.77, 0.57311, 1.51633, -1.32, -0.44693],
        [-1.1, -0.81873, -0.60653, 1.1, 0.49659],
        0.218502,
    ),
    "mis": (
        PolicyFlags(loss="score", weight="mask", weight_of="pi", weight_low=0.5, weight_high=1.5),
        [0.9449, 0.57311, 1.51633, -1.61983, 0],
        [-1.34986, -0.81873, -0.60653, 1.34986, 0],
        0.282902,
    ),
    "cispo": (
        PolicyFlags(loss="cispo", base="mu", clip_low=1.0, clip_high=0.28),
        [0.896, 0.57311, 1.51633, -1.536, -0.44693],
        [-1.28, -0.81873, -0.60653, 1.28, 0.49659],
        0.200502,
    ),
    "gspo": (
        PolicyFlags(level="sequence", base="mu", clip_low=3e-4, clip_high=4e-4, aggregation="seq_mean_token_mean"),
        [-0.87517] * 3 + [0.9997] * 2,
        [-0.87517] * 3 + [0, 0],
        0.062263,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values(name: str) -> None:
    flags, losses, gradients, mean = GOLDEN[name]
    batch = packed(MU, ADVANTAGE, LENGTHS, PROX)
    total, grad = per_token(flags, batch, PI)
    assert torch.allclose(grad, torch.tensor(gradients, dtype=F64), atol=6e-6)
    assert abs(float(total) - sum(losses)) < 3e-5
    if flags.level == "token":
        for i, expected in enumerate(losses):
            alone = replace(batch, mask=torch.arange(5) == i)
            assert abs(float(per_token(flags, alone, PI)[0]) - expected) < 6e-6
    loss, metrics = policy_loss(batch, PI, flags, count_normalisers(batch.mask, batch.cu_seqlens, 10))
    assert abs(float(loss) - mean) < 1e-6
    assert list(metrics) == list(METRICS)


def test_vtrace_golden() -> None:
    cu, reward, value = (
        torch.tensor([0, 3]),
        torch.tensor([0.0, 0, 1], dtype=F64),
        torch.tensor([0.2, 0.4, 0.6], dtype=F64),
    )
    a, v = vtrace(torch.tensor([0.3, -0.2, -0.5], dtype=F64), reward, value, cu)
    assert torch.allclose(v, torch.tensor([0.762380, 0.762380, 0.842612], dtype=F64), atol=1e-6)
    assert torch.allclose(a, torch.tensor([0.562380, 0.362380, 0.242612], dtype=F64), atol=1e-6)
    a, v = vtrace(torch.zeros(3, dtype=F64), reward, value, cu)
    assert torch.allclose(v, torch.ones(3, dtype=F64)) and torch.allclose(a, torch.tensor([0.8, 0.6, 0.4], dtype=F64))


@pytest.mark.parametrize(
    "aggregation,expected",
    [
        ("token_mean", 1.8),
        ("seq_mean_token_mean", 1.5),
        ("seq_mean_token_sum", 9.0),
        ("seq_mean_token_sum_norm", 0.9),
    ],
)
def test_aggregation_is_the_same_for_any_split_over_ranks(aggregation: str, expected: float) -> None:
    flags = PolicyFlags(loss="score", aggregation=aggregation)  # type: ignore[arg-type]
    total = 0.0
    for count, each in ((2, 1.0), (8, 2.0)):
        pi = torch.full((count,), -each, dtype=F64)
        loss, _ = policy_loss(packed(pi, torch.ones(count, dtype=F64), (count,)), pi, flags, Normalisers(10, 2, 10))
        total += float(loss)
    assert abs(total - expected) < 1e-12


LOSSES = [
    PPO,
    replace(PPO, dual_clip=3.0),
    replace(PPO, base="prox", weight="truncate", weight_high=5.0),
    PolicyFlags(loss="ratio", base="mu", tv_delta=0.2),
    PolicyFlags(loss="score", weight="truncate", weight_of="pi", weight_high=2.0),
    PolicyFlags(loss="score", weight="mask", weight_of="pi", weight_low=0.5, weight_high=2.0),
    PolicyFlags(loss="cispo", base="mu", clip_low=1.0),
    PolicyFlags(loss="topr", base="mu"),
    PolicyFlags(loss="sapo", base="mu", tau_positive=1.0, tau_negative=1.05),
    PolicyFlags(loss="dro", base="mu", dro_beta=0.1),
    PolicyFlags(loss="gmpo", base="mu", clip_low=0.4, clip_high=0.4, aggregation="seq_mean_token_mean"),
    replace(GOLDEN["gspo"][0]),
    replace(PPO, weight="truncate", weight_level="sequence", weight_high=2.0, aggregation="seq_mean_token_sum_norm"),
    replace(PPO, geometric_low=0.5, geometric_high=2.0, veto=1e-4),
    replace(PPO, opsm_delta=0.1),
    replace(PPO, m2_tau=0.04),
]


@pytest.mark.parametrize("flags", LOSSES, ids=lambda f: f"{f.loss}-{f.weight}-{f.level}")
def test_on_policy_every_ratio_is_exactly_one(flags: PolicyFlags) -> None:
    batch = packed(PI, ADVANTAGE, LENGTHS, PI)
    leaf = PI.clone().requires_grad_()
    normalisers = Normalisers(1, 1, 1)
    loss, metrics = policy_loss(batch, leaf, replace(flags, aggregation="token_mean"), normalisers)
    (grad,) = torch.autograd.grad(loss, leaf)
    if flags.loss == "gmpo":  # the geometric mean's gradient is exact up to the division by the length
        assert torch.allclose(grad, -ADVANTAGE, atol=1e-15)
    else:
        assert torch.equal(grad, -ADVANTAGE)
    assert float(metrics["ratio"][0]) == float(metrics["weight"][0]) == 5.0
    for name in ("clip_fraction", "dropped_fraction", "clamped_fraction", "kl_behaviour"):
        assert float(metrics[name][0]) == 0.0


@pytest.mark.parametrize("flags", LOSSES, ids=lambda f: f"{f.loss}-{f.weight}-{f.level}")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_wildly_different_policies_stay_finite(flags: PolicyFlags, masked: bool, dtype: torch.dtype) -> None:
    mu = torch.tensor([-91.0, -0.5, -91.0, -2.0, -1.0], dtype=dtype)
    pi = torch.tensor([-2.0, -0.5, -2.0, -91.0, -1.0], dtype=dtype, requires_grad=True)
    batch = packed(mu, ADVANTAGE.to(dtype), LENGTHS, mu)
    if masked:
        batch = replace(batch, mask=torch.tensor([False, True, False, False, True]))
    loss, metrics = policy_loss(batch, pi, flags, Normalisers(5, 2, 3))
    (grad,) = torch.autograd.grad(loss, pi)
    assert bool(loss.isfinite()) and bool(grad.isfinite().all())
    assert all(bool(value.isfinite()) for value, _ in metrics.values())


def test_plain_ppo_on_an_exploded_ratio_loses_its_gradient_and_dual_clip_bounds_it() -> None:
    batch = packed(torch.tensor([-91.0], dtype=F64), torch.tensor([-1.0], dtype=F64), (1,))
    pi = torch.tensor([-2.0], dtype=F64, requires_grad=True)
    loss, metrics = policy_loss(batch, pi, PPO, Normalisers(1, 1, 1))
    assert abs(float(loss.detach()) / 4.85165195e8 - 1) < 1e-6
    assert float(torch.autograd.grad(loss, pi)[0]) == 0.0
    assert float(metrics["clamped_fraction"][0]) == 1.0
    bounded, _ = policy_loss(batch, pi, replace(PPO, dual_clip=3.0), Normalisers(1, 1, 1))
    assert float(bounded.detach()) == 3.0


@pytest.mark.parametrize("flags", LOSSES, ids=lambda f: f"{f.loss}-{f.weight}-{f.level}")
def test_nothing_of_a_masked_position_matters(flags: PolicyFlags) -> None:
    flags = replace(flags, kl="k2", kl_coefficient=0.1, entropy_coefficient=0.01)
    keep = torch.tensor([True, False, True, True, True])
    clean = packed(MU, ADVANTAGE, LENGTHS, PROX, mask=keep, ref=MU)
    broken = torch.where(keep, 0.0, nan)
    dirty = replace(clean, mu=MU + broken, prox=PROX + broken, advantage=ADVANTAGE + broken, ref=MU + broken)
    results = []
    for batch, offset in ((clean, 0.0), (dirty, broken)):
        pi, entropy = (PI + offset).requires_grad_(), (torch.ones(5, dtype=F64) + offset).requires_grad_()
        loss, metrics = policy_loss(batch, pi, flags, Normalisers(4, 2, 3), entropy=entropy)
        results.append((loss, *torch.autograd.grad(loss, (pi, entropy)), *(s for s, _ in metrics.values())))
        assert results[-1][1][1] == 0 and results[-1][2][1] == 0
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_masked_mean_of_one_nan_three_is_two() -> None:
    pi = torch.tensor([-1.0, nan, -3.0], dtype=F64, requires_grad=True)
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    batch = packed(torch.tensor([-1.0, nan, -3.0], dtype=F64), torch.ones(3, dtype=F64), (3,), mask=mask)
    loss, _ = policy_loss(batch, pi, PolicyFlags(loss="score"), count_normalisers(mask, batch.cu_seqlens, 3))
    assert float(loss.detach()) == 2.0
    assert torch.equal(torch.autograd.grad(loss, pi)[0], torch.tensor([-0.5, 0, -0.5], dtype=F64))


def test_a_fully_masked_sequence_is_in_no_denominator() -> None:
    mask = torch.tensor([1, 1, 1, 0, 0], dtype=torch.bool)
    found = count_normalisers(mask, torch.tensor([0, 3, 5, 5]), 7)
    assert (found.tokens, found.sequences, found.max_length, found.m2_cutoff) == (3, 1, 7, inf)


@pytest.mark.parametrize(
    "kind,value,gradient",
    [
        ("k1", -0.2, 1.0),
        ("k2", 0.02, -0.2),
        ("k3", 0.0214028, 1 - 1.2214028),
        ("k3_straight_through", 0.0214028, -0.2),
        ("k3_weighted", 0.0214028, 1 - 1.2214028),
    ],
)
def test_kl_estimates(kind: str, value: float, gradient: float) -> None:
    pi = torch.tensor([-1.0], dtype=F64, requires_grad=True)
    batch = packed(pi.detach(), torch.zeros(1, dtype=F64), (1,), ref=pi.detach() + 0.2)
    flags = PolicyFlags(kl=kind, kl_coefficient=1.0)  # type: ignore[arg-type]
    loss, _ = policy_loss(batch, pi, flags, Normalisers(1, 1, 1))
    assert abs(float(loss.detach()) - value) < 1e-7
    assert abs(float(torch.autograd.grad(loss, pi)[0]) - gradient) < 1e-7


def test_filters_keep_what_they_should() -> None:
    d = torch.tensor([0.0, 0.3, 0.0, 0.01, -12.0, 0.0], dtype=F64)
    mu = torch.full((6,), -13.0, dtype=F64)
    batch = packed(mu, torch.tensor([1.0, 1, -1, -1, -1, -1], dtype=F64), (2, 2, 2))

    def dropped(**choices: float) -> float:
        flags = PolicyFlags(loss="ratio", base="mu", **choices)  # type: ignore[arg-type]
        return float(policy_loss(batch, mu + d, flags, Normalisers(6, 3, 2))[1]["dropped_fraction"][0])

    assert dropped(geometric_low=0.9, geometric_high=1.1) == 4  # means .15, .005, -6
    assert dropped(veto=1e-4) == 2
    assert dropped(opsm_delta=1.0) == 2  # only the last sequence has A < 0 and drifted
    cutoff = m2_cutoff((mu + d) - mu, 0.04)
    assert cutoff == pytest.approx(0.3)  # mean of {0, 0, 0, 1e-4, .09} = .018; with 144 it is 24
    flags = PolicyFlags(loss="ratio", base="mu", m2_tau=0.04)
    _, metrics = policy_loss(batch, mu + d, flags, Normalisers(6, 3, 2, cutoff))
    assert float(metrics["dropped_fraction"][0]) == 1
    assert m2_cutoff(d, 1e3) == inf and m2_cutoff(torch.ones(3), 0.5) < 0


def test_tv_filter_looks_at_probabilities_and_signs() -> None:
    mu = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=F64).log()
    pi = torch.tensor([0.8, 0.2, 0.8, 0.2], dtype=F64).log()
    batch = packed(mu, torch.tensor([1.0, 1, -1, -1], dtype=F64), (4,))
    leaf = pi.clone().requires_grad_()
    loss, _ = policy_loss(batch, leaf, PolicyFlags(loss="ratio", base="mu", tv_delta=0.2), Normalisers(1, 1, 1))
    (grad,) = torch.autograd.grad(loss, leaf)
    assert torch.allclose(grad, torch.tensor([0.0, -0.4, 1.6, 0.0], dtype=F64))


def test_loglinear_prox_needs_no_proximal_policy() -> None:
    batch = packed(MU, ADVANTAGE, LENGTHS, None, lag=torch.tensor([2, 2, 0, 1, 4]))
    flags = replace(
        PPO, base="prox", loglinear_prox=True, weight="truncate", weight_high=5.0, clip_low=1.0, clip_high=9.0
    )
    loss, metrics = policy_loss(batch, PI, flags, Normalisers(1, 1, 1), ahead=0.0)
    share = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=F64)  # at the step's start prox is pi, but mu where lag is 0
    prox = MU + share * (PI - MU)
    expected = -((prox - MU).exp().clamp_max(5) * (PI - prox).exp() * ADVANTAGE).sum()
    assert torch.allclose(loss, expected)
    assert float(metrics["lag"][0]) == 9.0
    later, _ = policy_loss(batch, PI, flags, Normalisers(1, 1, 1), ahead=1.0)
    prox = MU + torch.tensor([2 / 3, 2 / 3, 0, 1 / 2, 4 / 5], dtype=F64) * (PI - MU)
    assert torch.allclose(later, -((prox - MU).exp().clamp_max(5) * (PI - prox).exp() * ADVANTAGE).sum())


@st.composite
def ragged(draw: st.DrawFn) -> tuple[PackedBatch, Tensor]:
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    count = sum(lengths)
    seed = draw(st.integers(0, 2**31))
    gen = torch.Generator().manual_seed(seed)
    mu, prox, pi = (-3 * torch.rand(count, generator=gen, dtype=F64) for _ in range(3))
    sample = torch.randn(len(lengths), generator=gen, dtype=F64)
    advantage = sample.repeat_interleave(torch.tensor(lengths))
    mask = torch.rand(count, generator=gen) < 0.7
    return packed(mu, advantage, tuple(lengths), prox, mask=mask, lag=torch.randint(0, 4, (count,), generator=gen)), pi


def part(batch: PackedBatch, pi: Tensor, order: list[int]) -> tuple[PackedBatch, Tensor, Tensor]:
    """The sequences `order` of a batch, packed anew; with the positions they came from."""
    cu = batch.cu_seqlens.tolist()
    where = torch.tensor([i for s in order for i in range(cu[s], cu[s + 1])], dtype=torch.int64)
    lengths = tuple(cu[s + 1] - cu[s] for s in order)
    fields = {name: getattr(batch, name)[where] for name in ("mask", "lag")}
    assert batch.prox is not None
    return packed(batch.mu[where], batch.advantage[where], lengths, batch.prox[where], **fields), pi[where], where


@settings(max_examples=60, deadline=None)
@given(ragged(), st.sampled_from(LOSSES), st.randoms(use_true_random=False))
def test_invariant_under_split_packing_order_and_ranks(case, flags, random) -> None:  # type: ignore[no-untyped-def]
    batch, pi = case
    normalisers = count_normalisers(batch.mask, batch.cu_seqlens, 8)
    normalisers = replace(normalisers, m2_cutoff=m2_cutoff((pi - batch.mu)[batch.mask], flags.m2_tau))
    leaf = pi.clone().requires_grad_()
    whole, metrics = policy_loss(batch, leaf, flags, normalisers)
    (grad,) = torch.autograd.grad(whole, leaf)
    order = list(range(len(batch.cu_seqlens) - 1))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    total, gradient, sums = torch.zeros((), dtype=F64), torch.zeros_like(grad), dict.fromkeys(METRICS, 0.0)
    for piece in (order[:cut], order[cut:]):
        sub, values, where = part(batch, pi, piece)
        values = values.requires_grad_()
        loss, found = policy_loss(sub, values, flags, normalisers)
        total = total + loss.detach()
        gradient[where] = torch.autograd.grad(loss, values)[0]
        for name, (value, _) in found.items():
            sums[name] += float(value)
    assert torch.allclose(total, whole.detach(), rtol=1e-12, atol=1e-12)
    assert torch.allclose(gradient, grad, rtol=1e-12, atol=1e-12)
    for name, (value, _) in metrics.items():
        assert sums[name] == pytest.approx(float(value), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("loss", ["ppo", "ratio", "sapo", "dro", "gmpo"])
def test_gradcheck_of_losses_without_stopped_gradients(loss: str) -> None:
    flags = PolicyFlags(
        loss=loss, base="mu", clip_low=0.25, clip_high=0.27, dro_beta=0.3, kl="k2", kl_coefficient=0.2,  # type: ignore[arg-type]
        entropy_coefficient=0.1, aggregation="seq_mean_token_mean",
    )  # fmt: skip
    batch = packed(MU, ADVANTAGE, LENGTHS, PROX, ref=MU - 0.3)

    def run(pi: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(batch, pi, flags, Normalisers(5, 2, 3), entropy=entropy)[0]

    assert torch.autograd.gradcheck(run, (PI.clone().requires_grad_(), torch.ones(5, dtype=F64).requires_grad_()))


def test_an_empty_batch_has_loss_zero_and_every_metric() -> None:
    empty = torch.zeros(0, dtype=F64, requires_grad=True)
    loss, metrics = policy_loss(packed(empty.detach(), empty.detach(), ()), empty, PPO, Normalisers(0, 0, 0))
    assert float(loss.detach()) == 0 and list(metrics) == list(METRICS)
    loss.backward()


def test_wrong_shapes_are_named() -> None:
    batch = packed(MU, ADVANTAGE, LENGTHS, PROX)
    normalisers = Normalisers(5, 2, 3)
    with pytest.raises(ValueError, match=r"batch\.mu: found \[4\], expected \[5\]"):
        policy_loss(replace(batch, mu=MU[:4]), PI, PPO, normalisers)
    with pytest.raises(ValueError, match=r"cu_seqlens: found a range 0\.\.4"):
        policy_loss(replace(batch, cu_seqlens=torch.tensor([0, 3, 4])), PI, PPO, normalisers)
    with pytest.raises(ValueError, match="group_id"):
        policy_loss(replace(batch, group_id=torch.zeros(3)), PI, PPO, normalisers)
    with pytest.raises(ValueError, match=r"batch\.ref: found None"):
        policy_loss(batch, PI, replace(PPO, kl="k2", kl_coefficient=0.1), normalisers)
    with pytest.raises(ValueError, match="entropy: found None"):
        policy_loss(batch, PI, replace(PPO, entropy_coefficient=0.1), normalisers)
