"""Ragged sums, scans and the weight kernels in the interpreter, against their torch paths."""

from __future__ import annotations

import pytest
import torch
from temper.kernels import reference, segments_triton, weight_delta_triton
from temper.kernels.advantages import GROUP_KINDS, gae, group_advantage, vtrace
from temper.kernels.segments import reverse_scan, segment_broadcast, segment_ids, segment_reduce
from temper.kernels.weight_delta import delta_apply, delta_encode, fingerprint

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


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_of_segments(op: str) -> None:
    values, mask = torch.randn(COUNT), torch.rand(COUNT) < 0.7
    values = torch.where(mask, values, torch.nan)
    one, other = (segment_reduce(values, CU, op, mask, backend=backend) for backend in ("triton", "torch"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", [LENGTHS, (), (0, 0), (1,), (5, 200)])
def test_broadcast_and_its_gradient(lengths: tuple[int, ...]) -> None:
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    results = []
    for backend in ("triton", "torch"):
        leaf = torch.arange(1.0, len(lengths) + 1).requires_grad_()
        out = segment_broadcast(leaf, cu, backend=backend)
        results.append((out, *torch.autograd.grad((out * torch.arange(out.numel())).sum(), leaf)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-6)


def test_scan() -> None:
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


@pytest.mark.parametrize("bootstrap", [0.0, torch.randn(7)])
def test_gae_and_vtrace(bootstrap: float | torch.Tensor) -> None:
    reward, value, d = torch.randn(COUNT), torch.randn(COUNT), 0.5 * torch.randn(COUNT)
    d[::9] = 40.0  # beyond the clamp
    wide = [x.double() for x in (reward, value, d)]
    beyond = bootstrap.double() if isinstance(bootstrap, torch.Tensor) else bootstrap
    found = gae(reward, value, CU, gamma=0.9, lam=0.8, bootstrap=bootstrap, backend="triton")
    exact = reference.gae(wide[0], wide[1], CU, gamma=0.9, lam=0.8, bootstrap=beyond)
    options = {"gamma": 0.97, "lam": 0.95, "rho_bar": 1.2, "c_bar": 0.9}
    found += vtrace(d, reward, value, CU, bootstrap=bootstrap, backend="triton", **options)  # type: ignore[arg-type]
    exact += reference.vtrace(wide[2], wide[0], wide[1], CU, bootstrap=beyond, **options)  # type: ignore[arg-type]
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(one.double(), other, rtol=2e-5, atol=2e-5)
    empty = torch.zeros(0)
    assert all(x.numel() == 0 for x in gae(empty, empty, torch.tensor([0, 0]), backend="triton"))
    assert all(x.numel() == 0 for x in vtrace(empty, empty, empty, torch.tensor([0]), backend="triton"))


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize("std", ["sample", "population"])
def test_group_advantage(kind: str, std: str) -> None:
    gen = torch.Generator().manual_seed(4)
    sizes = (5, 1, 0, 40, 3, 4, 2)
    cu = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    count = sum(sizes)
    reward = torch.randint(0, 5, (count,), generator=gen).double() / 4
    reward[int(cu[4]) : int(cu[4]) + 3] = 0.7  # no variance
    reward[int(cu[5]) : int(cu[6])] = torch.tensor([1.00000, 1.00001, 1.0, 1.0], dtype=torch.float64)
    scored = torch.rand(count, generator=gen) < 0.8
    length = torch.randint(1, 30, (count,), generator=gen)
    dirty = torch.where(scored, reward, torch.nan)
    options = {"length": length, "std": std, "epsilon": 1e-4}
    found = group_advantage(kind, dirty, scored, cu, backend="triton", **options)  # type: ignore[arg-type]
    exact = reference.group_advantage(kind, reward, scored, segment_ids(cu, count), 7, **options)  # type: ignore[arg-type]
    assert found.dtype == torch.float64 and torch.allclose(found, exact, rtol=1e-12, atol=1e-14)
    narrow = group_advantage(kind, dirty.float(), scored, cu, backend="triton", **options)  # type: ignore[arg-type]
    assert torch.allclose(narrow, exact, rtol=0.1, atol=1e-4)


def test_golden_group_advantages() -> None:
    reward, cu, scored = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 4]), torch.ones(4, dtype=torch.bool)
    expected = {
        "grpo": (1.5, -0.5),
        "dr_grpo": (0.75, -0.25),
        "rloo": (1.0, -1 / 3),
        "maxrl": (3.0, -1.0),
        "passk": (1.0, 0.0),
    }
    for kind, (winner, other) in expected.items():
        found = group_advantage(kind, reward, scored, cu, backend="triton").tolist()
        assert found == pytest.approx([winner, other, other, other], rel=2e-6)
    for backend in ("triton", "torch"):
        with pytest.raises(ValueError, match="reward: found NaN or inf at a scored sample"):
            group_advantage("grpo", torch.tensor([1.0, torch.nan]), scored[:2], torch.tensor([0, 2]), backend=backend)  # type: ignore[arg-type]


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
    for backend in ("triton", "torch"):
        target = base.clone()
        for _ in range(2):
            delta_apply(target, *one, backend=backend)  # type: ignore[arg-type]
            assert torch.equal(target.view(torch.uint8), new.view(torch.uint8))
