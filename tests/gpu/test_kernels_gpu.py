"""The kernels on a real GPU: equal to torch's paths, deterministic, wide offsets, workspace within its bounds.

Skipped where there is no GPU; nothing here was run on one yet unless the README names the card.
"""

from __future__ import annotations

import pytest
import torch
from temper.kernels.linear_logprob import linear_logprob
from temper.kernels.policy_loss import METRICS, PackedBatch, count_normalisers, policy_loss
from temper.kernels.segments import reverse_scan, segment_reduce
from temper.kernels.selective_logprob import selective_logprob
from temper.kernels.weight_delta import delta_apply, delta_encode, fingerprint
from temper.learner.objectives import TABLE, compile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def head(n: int, h: int, v: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(n, h, device="cuda", generator=gen).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, device="cuda", generator=gen) * h**-0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), device="cuda", generator=gen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16, 8), (300, 72, 1000), (1000, 576, 49_152), (257, 4096, 5003)])
def test_the_head_equals_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    hidden, weight, target = head(*shape, dtype)
    target[::7] = -100
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True, backend="triton")
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = linear_logprob(*wide, target, entropy="grad", return_lse=True, backend="torch")
    assert out.entropy is not None and exact.entropy is not None
    assert torch.allclose(out.logprob.double(), exact.logprob, atol=2e-4)
    assert torch.allclose(out.entropy.double(), exact.entropy, atol=2e-3)
    one = torch.autograd.grad((out.logprob + 0.1 * out.entropy).sum(), (hidden, weight))
    other = torch.autograd.grad((exact.logprob + 0.1 * exact.entropy).sum(), wide)
    for a, b in zip(one, other, strict=True):
        assert float((a.double() - b).norm() / b.norm().clamp_min(1e-12)) < 4e-3


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
        loss, metrics = policy_loss(batch, leaf, compile(TABLE[name]), count_normalisers(mask, cu, 100))
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
    base = torch.randn(1_000_003, device="cuda").bfloat16()
    new = torch.where(torch.rand(1_000_003, device="cuda") < 0.01, base * 1.01, base)
    one, other = delta_encode(base, new), delta_encode(base, new, backend="torch")
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert fingerprint(new) == fingerprint(new.cpu())
    delta_apply(base, *one)
    assert torch.equal(base, new)
