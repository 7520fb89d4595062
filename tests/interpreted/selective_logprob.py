"""The kernel for existing logits in the interpreter."""

from __future__ import annotations

import pytest
import torch
from temper.kernels import selective_logprob_triton as kernels
from temper.kernels.selective_logprob import selective_logprob

assert kernels.INTERPRETED, "run with TRITON_INTERPRET=1"


@pytest.mark.parametrize("n,v", [(0, 8), (1, 1), (17, 64), (9, 65), (5, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 200.0])
def test_equals_float64(n: int, v: int, dtype: torch.dtype, offset: float) -> None:
    gen = torch.Generator().manual_seed(v)
    logits = (4 * torch.randn(n, v, generator=gen) + offset).to(dtype).requires_grad_()
    index = torch.randint(0, v, (n,), generator=gen)
    index[::4] = -100
    temperature = torch.rand(n, generator=gen) + 0.5
    mix = torch.randn(3, n, generator=gen).double()
    results = []
    for backend, values in (("triton", logits), ("torch", logits.detach().double().requires_grad_())):
        out = selective_logprob(
            values, index, temperature=temperature, entropy="grad", return_lse=True, backend=backend
        )  # type: ignore[arg-type]
        assert out.entropy is not None and out.lse is not None
        stacked = torch.stack([out.logprob, out.entropy, out.lse]).double()
        results.append((stacked, torch.autograd.grad((mix * stacked).sum(), values)[0].double()))
    size = (4 + offset) * 8 * 2**-24 * 8  # rounding of scaled logits in fp32
    assert torch.allclose(results[0][0], results[1][0], atol=size * 4 + 1e-5)
    unit = torch.finfo(dtype).eps / 2
    assert torch.allclose(results[0][1], results[1][1], rtol=unit, atol=8 * size + 2 * unit)


def test_strides_padding_and_impossible_ids() -> None:
    wide = torch.randn(12, 200)
    wide[:, :70] = -torch.inf
    index = torch.arange(12) + 80
    for logits in (wide, wide.T.contiguous().T, torch.randn(12, 400)[:, ::2], wide[:1].expand(12, 200)):
        one = selective_logprob(logits, index, valid_vocab=190, backend="triton").logprob
        other = selective_logprob(logits, index, valid_vocab=190, backend="torch").logprob
        assert torch.allclose(one, other, atol=1e-5)


def test_rows_without_gradient_stay_zero() -> None:
    logits = torch.randn(6, 70, requires_grad=True)
    keep = torch.tensor([1.0, 0, 0, 1, 0, 0])
    out = selective_logprob(logits, torch.arange(6), backend="triton").logprob
    (grad,) = torch.autograd.grad((out * keep).sum(), logits)
    assert not grad[keep == 0].any()
    assert torch.allclose(grad.sum(1), torch.zeros(6), atol=1e-6)
