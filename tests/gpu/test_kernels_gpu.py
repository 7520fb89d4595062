"""The kernels on a real GPU: equal to torch's paths, deterministic, wide offsets, workspace within its bounds.

Skipped where there is no GPU; nothing here was run on one yet unless kernels/README.md names the card.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from temper.kernels import linear_logprob_triton, support_triton
from temper.kernels.advantages import GROUP_KINDS, gae, group_advantage, vtrace
from temper.kernels.linear_logprob import linear_logprob
from temper.kernels.policy_loss import METRICS, PackedBatch, count_normalisers, policy_loss
from temper.kernels.reference import m2_cutoff
from temper.kernels.segments import reverse_scan, segment_broadcast, segment_reduce
from temper.kernels.selective_logprob import selective_logprob
from temper.kernels.weight_delta import delta_apply, delta_encode, fingerprint
from temper.learner.objectives import TABLE, compile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def head(n: int, h: int, v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(n, h, device="cuda", generator=gen).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device="cuda", generator=gen) * h**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), device="cuda", generator=gen)


def equal_to_float64(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: object) -> None:
    """Values and gradients within the derived tolerances of `tests/interpreted/linear_logprob.py`, the gradients' in the
    norm."""
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True, backend="triton", **options)  # type: ignore[arg-type]
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = linear_logprob(*wide, target, entropy="grad", return_lse=True, backend="torch", **options)  # type: ignore[arg-type]
    assert out.entropy is not None and exact.entropy is not None and out.lse is not None and exact.lse is not None
    with torch.no_grad():
        lengths = wide[0].norm(dim=1).max() * wide[1].norm(dim=1).max()  # at least max |x| |w|
        bound = max(1e-5, 12 * 2**-24 * math.sqrt(hidden.shape[1]) * float(lengths))
    spread = 1 + math.log(weight.shape[0])
    assert float((out.logprob.double() - exact.logprob).abs().max()) <= bound
    assert float((out.lse.double() - exact.lse).abs().max()) <= bound
    assert float((out.entropy.double() - exact.entropy).abs().max()) <= spread * bound
    assert bool((out.logprob <= 0).all()) and bool((out.entropy >= 0).all())
    one = torch.autograd.grad((out.logprob + 0.1 * out.entropy).sum(), (hidden, weight))
    other = torch.autograd.grad((exact.logprob + 0.1 * exact.entropy).sum(), wide)
    for a, b in zip(one, other, strict=True):
        assert float((a.double() - b).norm() / b.norm().clamp_min(1e-12)) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 16, 8), (300, 72, 1000), (1000, 576, 49_152), (257, 4096, 5003), (129, 2048, 20_001)]
)
def test_the_head_equals_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    hidden, weight, target = head(*shape, dtype)
    equal_to_float64(hidden, weight, target)
    target = target % (shape[2] - 1)
    equal_to_float64(hidden, weight, target, valid_vocab=shape[2] - 1)
    target[::7] = -100  # listed rows: brought together where tiles are read through descriptors
    temperature = torch.rand(shape[0], device="cuda") + 0.5
    equal_to_float64(hidden, weight, target, temperature=temperature, softcap=30.0)


@pytest.mark.parametrize("shape", [(300, 71, 1000), (64, 4095, 2000)])
def test_unaligned_and_strided_inputs(shape: tuple[int, int, int]) -> None:
    hidden, weight, target = head(*shape, torch.bfloat16)
    equal_to_float64(hidden, weight, target)
    hidden, weight, target = head(96, 128, 777, torch.bfloat16)
    turned = [x.detach().T.contiguous().T.requires_grad_() for x in (hidden, weight)]
    equal_to_float64(*turned, target)
    equal_to_float64(hidden.detach()[:1].expand(96, 128).requires_grad_(), weight, target)


def test_tiles_through_descriptors_equal_those_through_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = head(1000, 1024, 30_001, torch.bfloat16)
    found = []
    for aligned in (True, False):
        if not aligned:
            monkeypatch.setattr(linear_logprob_triton, "describable", lambda _: False)
        out = linear_logprob(hidden, weight, target, entropy="grad")
        assert out.entropy is not None
        loss = (out.logprob + 0.1 * out.entropy).sum()
        found.append((out.logprob.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supports_equal_float64_and_are_deterministic(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = head(700, 576, 5000, dtype)
    gen = torch.Generator().manual_seed(1)
    rows = []
    for i, goal in enumerate(target.tolist()):
        size = (0, 1, 3, 40, 300)[i % 5]
        others = torch.randperm(5000, generator=gen)[:size].tolist()
        rows.append(sorted({goal, *others}) if size else [])
    cu = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()], device="cuda")
    support = (torch.tensor([j for row in rows for j in row], dtype=torch.int32, device="cuda"), cu)
    equal_to_float64(hidden, weight, target, support=support)
    monkeypatch.setattr(support_triton, "PAIRS", 5000)
    equal_to_float64(hidden, weight, target, support=support)
    again = [
        torch.autograd.grad(linear_logprob(hidden, weight, target, support=support).logprob.sum(), (hidden, weight))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*again, strict=True))


def test_memory_does_not_grow_with_tokens() -> None:
    """From 1k to 8k tokens the peak above inputs, outputs and gradients grows by less than 8 MiB."""

    def peak(tokens: int) -> int:
        hidden, weight, target = head(tokens, 64, 50_000, torch.bfloat16)
        torch.autograd.grad(linear_logprob(hidden[:64], weight, target[:64]).logprob.sum(), weight)  # workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = linear_logprob(hidden, weight, target)
        torch.autograd.grad(out.logprob.sum(), (hidden, weight))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - tokens * (64 * 2 + 4)

    assert peak(8192) - peak(1024) < 8 << 20
    assert peak(32_768) - peak(8192) < 8 << 20


def test_the_head_is_deterministic_and_bounded() -> None:
    hidden, weight, target = head(4096, 1024, 50_000, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outs = [linear_logprob(hidden, weight, target).logprob for _ in range(2)]
    assert torch.equal(*outs)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20  # whole logits would be 800 MiB in fp32


@pytest.mark.parametrize("rows", [65_535, 65_536, 70_001])
def test_many_rows(rows: int) -> None:
    hidden, weight, target = head(64, 64, 1000, torch.bfloat16)
    where = torch.arange(rows, device="cuda") % 64
    with torch.no_grad():
        whole = linear_logprob(hidden[where], weight, target[where]).logprob
        few = linear_logprob(hidden, weight, target).logprob
    assert torch.allclose(whole, few[where], atol=1e-5)


def test_offsets_beyond_31_bits() -> None:
    """16,000 x 140,000 logits are more than 2^31 values."""
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GiB")
    logits = torch.randn(16_000, 140_000, device="cuda", dtype=torch.bfloat16)
    index = torch.full((16_000,), 139_999, device="cuda")
    out = selective_logprob(logits, index).logprob
    exact = torch.log_softmax(logits[-4:].float(), -1)[:, -1]
    assert torch.allclose(out[-4:], exact, atol=1e-3)


@pytest.mark.parametrize("name", TABLE)
def test_the_loss_equals_torch(name: str) -> None:
    gen = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 0, 4000, 1, 700])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(cu[-1])
    mu = -3 * torch.rand(count, generator=gen)
    prox, pi = (mu + 0.1 * torch.randn(count, generator=gen) for _ in range(2))
    mask = torch.rand(count, generator=gen) < 0.8
    advantage = torch.randn(count, generator=gen)
    tensors = (
        torch.zeros(count, dtype=torch.int32),
        cu,
        mask,
        mu,
        prox,
        None,
        advantage,
        torch.zeros(5),
        torch.zeros(count),
    )
    results = []
    for device in ("cpu", "cuda"):
        batch = PackedBatch(*(None if t is None else t.to(device) for t in tensors))  # type: ignore[arg-type]
        leaf = pi.to(device).requires_grad_()
        flags, normalisers = compile(TABLE[name]), count_normalisers(mask, cu, 100)
        if flags.m2_tau < math.inf:
            normalisers = replace(normalisers, m2_cutoff=m2_cutoff((pi - mu)[mask], flags.m2_tau))
        loss, metrics = policy_loss(batch, leaf, flags, normalisers)
        (grad,) = torch.autograd.grad(loss, leaf)
        results.append((loss.detach().cpu(), grad.cpu(), torch.stack([metrics[m][0] for m in METRICS]).cpu()))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-3, atol=1e-6)
    assert torch.allclose(results[0][2], results[1][2], rtol=1e-3, atol=1e-2)


def test_ragged_sums_scans_and_deltas() -> None:
    cu = torch.tensor([0, 5, 5, 3000, 9000], device="cuda")
    values, decay = torch.randn(9000, device="cuda"), torch.rand(9000, device="cuda")
    for op in ("sum", "mean"):
        assert torch.allclose(
            segment_reduce(values, cu, op), segment_reduce(values, cu, op, backend="torch"), atol=1e-3
        )
    assert torch.allclose(reverse_scan(decay, values, cu), reverse_scan(decay, values, cu, backend="torch"), atol=1e-4)
    for op in ("max", "min"):
        assert torch.equal(segment_reduce(values, cu, op), segment_reduce(values, cu, op, backend="torch"))
    each = torch.randn(4, device="cuda")
    assert torch.equal(segment_broadcast(each, cu), segment_broadcast(each, cu, backend="torch"))
    base = torch.randn(1_000_003, device="cuda").bfloat16()
    new = torch.where(torch.rand(1_000_003, device="cuda") < 0.01, base * 1.01, base)
    one, other = delta_encode(base, new), delta_encode(base, new, backend="torch")
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert fingerprint(new) == fingerprint(new.cpu())
    for backend in ("triton", "torch"):
        target = base.clone()
        delta_apply(target, *one, backend=backend)  # type: ignore[arg-type]
        assert torch.equal(target, new)
    eight = torch.randint(0, 255, (100_001,), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert fingerprint(eight) == fingerprint(eight.cpu()) and delta_encode(eight, eight.clone())[0].numel() == 0


def test_advantages_equal_the_cpus() -> None:
    gen = torch.Generator().manual_seed(0)
    sizes = torch.tensor([8, 1, 0, 300, 16])
    cu = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    count = int(cu[-1])
    reward = torch.randint(0, 5, (count,), generator=gen).double() / 4
    scored, length = torch.rand(count, generator=gen) < 0.9, torch.randint(1, 50, (count,), generator=gen)
    for kind in GROUP_KINDS:
        cpu = group_advantage(kind, reward, scored, cu, length=length)
        gpu = group_advantage(kind, reward.cuda(), scored.cuda(), cu.cuda(), length=length.cuda())
        assert torch.allclose(gpu.cpu(), cpu, rtol=1e-9, atol=1e-12), kind
    r, v, d, after = (torch.randn(size, generator=gen) for size in (count, count, count, 5))
    for cpu_pair, gpu_pair in (
        (
            gae(r.double(), v.double(), cu, gamma=0.99, lam=0.95, bootstrap=after.double()),
            gae(r.cuda(), v.cuda(), cu.cuda(), gamma=0.99, lam=0.95, bootstrap=after.cuda()),
        ),
        (
            vtrace(0.3 * d.double(), r.double(), v.double(), cu, gamma=0.99, bootstrap=after.double()),
            vtrace(0.3 * d.cuda(), r.cuda(), v.cuda(), cu.cuda(), gamma=0.99, bootstrap=after.cuda()),
        ),
    ):
        for cpu, gpu in zip(cpu_pair, gpu_pair, strict=True):
            assert torch.allclose(gpu.cpu().double(), cpu, rtol=1e-4, atol=1e-4)
