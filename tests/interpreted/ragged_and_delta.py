"""Ragged sums, scans and the weight kernels in the interpreter, against their torch paths."""

from __future__ import annotations

import pytest
import torch
from temper.kernels import segments_triton, weight_delta_triton
from temper.kernels.reference import gae, vtrace
from temper.kernels.segments import reverse_scan, segment_reduce
from temper.kernels.weight_delta import delta_encode, fingerprint

assert segments_triton.INTERPRETED and weight_delta_triton.INTERPRETED, "run with TRITON_INTERPRET=1"
LENGTHS = (3, 0, 70, 32, 1, 33, 0)
CU = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
COUNT = sum(LENGTHS)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_segment_reduce_and_its_gradient(op: str) -> None:
    values = torch.randn(COUNT)
    mask = torch.rand(COUNT) < 0.7
    results = []
    for backend in ("triton", "torch"):
        leaf = torch.where(mask, values, torch.nan).requires_grad_()
        out = segment_reduce(leaf, CU, op, mask, backend=backend)
        results.append((out, *torch.autograd.grad((out * torch.arange(7)).sum(), leaf)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_scan_gae_and_vtrace(monkeypatch: pytest.MonkeyPatch) -> None:
    decay, addend = torch.rand(COUNT) * 1.2, torch.randn(COUNT)
    one, other = (reverse_scan(decay, addend, CU, backend=backend) for backend in ("triton", "torch"))
    assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    slow = torch.zeros(COUNT, dtype=torch.float64)
    for start, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        x = 0.0
        for t in range(end - 1, start - 1, -1):
            x = float(addend[t]) + float(decay[t]) * x
            slow[t] = x
    assert torch.allclose(one.double(), slow, rtol=1e-5, atol=1e-5)
    assert reverse_scan(decay[:0], addend[:0], torch.tensor([0]), backend="triton").numel() == 0
    from temper.kernels import reference

    reward, value, d = torch.randn(COUNT), torch.randn(COUNT), 0.3 * torch.randn(COUNT)
    plain = (*gae(reward, value, CU, gamma=0.9, lam=0.8), *vtrace(d, reward, value, CU, gamma=0.9))
    monkeypatch.setattr(reference, "reverse_scan", lambda a, b, cu: reverse_scan(a, b, cu, backend="triton"))
    kernel = (*gae(reward, value, CU, gamma=0.9, lam=0.8), *vtrace(d, reward, value, CU, gamma=0.9))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(plain, kernel, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_delta_and_fingerprint(dtype: torch.dtype, count: int) -> None:
    base = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    new = base.clone()
    new.view(torch.uint8)[:: 7 * dtype.itemsize] ^= 129
    one, other = (delta_encode(base, new, backend=backend) for backend in ("triton", "torch"))  # type: ignore[arg-type]
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1].view(torch.uint8), other[1].view(torch.uint8))
    assert fingerprint(new, backend="triton") == fingerprint(new, backend="torch")
    if count:
        assert fingerprint(new, backend="triton") != fingerprint(base, backend="triton")
