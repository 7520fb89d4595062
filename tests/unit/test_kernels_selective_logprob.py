"""Log-probabilities of existing logits: equal to the head's on an identity weight, to torch, bad input named."""

from __future__ import annotations

import math

import pytest
import torch
from temper.kernels import selective_logprob as module
from temper.kernels.linear_logprob import linear_logprob
from temper.kernels.selective_logprob import selective_logprob

F64 = torch.float64


@pytest.mark.parametrize("workspace", [40, 1 << 21])
@pytest.mark.parametrize("supported", [False, True])
def test_equals_the_head_with_an_identity_weight(
    workspace: int, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORKSPACE_ELEMENTS", workspace)
    gen = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(14, 30, generator=gen, dtype=F64)).requires_grad_()
    index = torch.randint(0, 25, (14,), generator=gen)
    index[::4] = -100
    support = None
    if supported:
        rows = [sorted({max(i, 0), 3, 7}) if n % 3 else [] for n, i in enumerate(index.tolist())]
        support = (
            torch.tensor([i for row in rows for i in row]),
            torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()]),
        )
    options = {
        "temperature": torch.rand(14, generator=gen, dtype=F64) + 0.5,
        "valid_vocab": 25,
        "entropy": "grad",
        "return_lse": True,
        "support": support,
    }
    one = selective_logprob(logits, index, **options)  # type: ignore[arg-type]
    other = linear_logprob(logits, torch.eye(30, dtype=F64), index, **options)  # type: ignore[arg-type]
    mix = torch.randn(3, 14, generator=gen, dtype=F64)
    grads = []
    for out in (one, other):
        assert out.entropy is not None and out.lse is not None
        values = torch.stack([out.logprob, out.entropy, out.lse])
        grads.append((values, *torch.autograd.grad((mix * values).sum(), logits)))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_equals_torch_and_takes_low_precision_and_no_rows() -> None:
    logits = torch.randn(9, 50, dtype=torch.bfloat16, requires_grad=True)
    index = torch.arange(9)
    out = selective_logprob(logits, index).logprob
    exact = torch.log_softmax(logits.float(), -1)[torch.arange(9), index]
    assert out.dtype == torch.float32 and torch.allclose(out, exact, atol=1e-5)
    (a,), (b,) = (torch.autograd.grad(value.sum(), logits) for value in (out, exact))
    assert torch.allclose(a.float(), b.float(), atol=4e-3)
    assert selective_logprob(logits[:0], index[:0]).logprob.shape == (0,)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"logits": torch.zeros(3)}, "logits: found"),
        ({"index": torch.zeros(2, dtype=torch.int64)}, "index: found"),
        ({"index": torch.tensor([0, 5, 1])}, "index: found 5 in row 1"),
        ({"logits": torch.full((3, 4), math.nan)}, "logits: found a log-sum-exp of nan in row 0"),
        ({"temperature": 0.0}, "temperature: found 0"),
        ({"valid_vocab": 9}, "valid_vocab: found 9"),
        ({"entropy": "yes"}, "entropy: found 'yes'"),
        ({"backend": "x"}, "backend: found 'x'"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.zeros(3, 4), "index": torch.tensor([0, 1, 2]), **change}
    with pytest.raises(ValueError, match=message):
        selective_logprob(**arguments)  # type: ignore[arg-type]
