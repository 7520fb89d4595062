"""The Triton head in the interpreter, against float64 on the same rounded inputs, within derived tolerances."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from temper.kernels import linear_logprob as api
from temper.kernels import linear_logprob_triton as kernels
from temper.kernels import support_triton
from temper.kernels.linear_logprob import linear_logprob
from temper.kernels.reference import logits_of, logprob_of
from temper.kernels.segments import segment_ids
from torch import Tensor

assert kernels.INTERPRETED, "run with TRITON_INTERPRET=1"
F64 = torch.float64


def wide(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().double().requires_grad_()


def inside(support: tuple[Tensor, Tensor], vocabulary: int) -> Tensor:
    """bool[N, V]: the ids that each row keeps; an empty support keeps all."""
    ids, cu = support
    kept = torch.zeros(cu.numel() - 1, vocabulary, dtype=torch.bool)
    kept[segment_ids(cu, ids.numel()), ids.long()] = True
    return kept | (cu[1:] == cu[:-1])[:, None]


def judge(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: object) -> None:
    """Values and gradients of a random mixture of the outputs are within the rounding that their arithmetic allows.

    Log-probability: fp32 accumulation of H products, 4 sqrt(H) 2^-24 max |x||w|, and rounding of logits, 8 2^-24 max |z|.
    Gradients: one rounding of d and one of the result, beside what an error of the log-probability does to the softmax. A
    rounding to nearest errs by up to u = eps / 2 of the dtype (bf16: 2^-8, for 1 + 2^-8 lies midway between neighbours), so
    element by element the bound is u (|d||W| + |dX|). Over many elements it errs by .42 u in the mean square, so in the
    norm the bound is half of that, 2^-9 for bf16. fp32: of accumulation.
    """
    out = linear_logprob(
        hidden, weight, target, bias=bias, entropy="grad", return_lse=True, backend="triton", **options
    )  # type: ignore[arg-type]
    assert out.entropy is not None and out.lse is not None
    h, w, b = wide(hidden), wide(weight), wide(bias)
    assert h is not None and w is not None
    temperature, softcap = options.get("temperature", 1.0), options.get("softcap")
    t = temperature.double() if isinstance(temperature, Tensor) else temperature
    z = logits_of(h, w, b, t, softcap)  # type: ignore[arg-type]
    z = torch.where(torch.arange(z.shape[1]) < options.get("valid_vocab", z.shape[1]), z, -torch.inf)  # type: ignore[operator]
    if "support" in options:
        z = torch.where(inside(options["support"], z.shape[1]), z, -torch.inf)  # type: ignore[arg-type]
    kept = target != -100
    goal = [torch.where(kept, value, 0) for value in logprob_of(z, target.clamp_min(0))]
    found = [out.logprob, out.entropy, out.lse]
    products = (hidden.detach().double().abs() @ weight.detach().double().abs().T).flatten().tolist()
    finite = z.detach()[z.detach().isfinite()].abs().tolist()
    low = float(t.min()) if isinstance(t, Tensor) and t.numel() else float(t) if not isinstance(t, Tensor) else 1.0
    bound = max(1e-5, 4 * math.sqrt(h.shape[1]) * 2**-24 * max([0, *products]) / low + 8 * 2**-24 * max([0, *finite]))
    spread = 1 + math.log(z.shape[1])  # the entropy weighs log-probabilities: its error is theirs times their spread
    for value, expected, factor in zip(found, goal, (1, spread, 1), strict=True):
        assert bool(((value.double() - expected).abs() <= factor * bound).all())
    assert bool((out.logprob <= 0).all()) and bool((out.entropy >= 0).all())
    gen = torch.Generator().manual_seed(3)
    mix = [torch.randn(value.shape, generator=gen, dtype=F64) for value in found]
    inputs, leaves = [hidden, weight], [h, w]
    if bias is not None and b is not None:
        inputs, leaves = [*inputs, bias], [*leaves, b]
    one = torch.autograd.grad(sum((m * v).sum() for m, v in zip(mix, found, strict=True)), inputs)
    other = torch.autograd.grad(
        sum((m * v).sum() for m, v in zip(mix, goal, strict=True)), [*leaves, z] if z.requires_grad else leaves
    )
    t = t[:, None] if isinstance(t, Tensor) else t
    p = torch.where(kept[:, None], torch.softmax(z.detach(), -1), 0)
    centred = torch.where(p > 0, z.detach() - (p * torch.where(p > 0, z.detach(), 0)).sum(-1, keepdim=True), 0).abs()
    rounded = other[-1].abs() / t
    g = [m.abs()[:, None] for m in mix]
    shifted = 2 * bound * p * (g[0] + g[2] + g[1] * (1 + centred)) / t
    unit = torch.finfo(hidden.dtype).eps / 2
    if hidden.dtype == torch.float32:
        unit = 4 * math.sqrt(max(*h.shape, w.shape[0])) * 2**-24
    sides = (w.detach().abs(), h.detach().abs())
    for value, expected, d, e in zip(
        one,
        other,
        (rounded @ sides[0], rounded.T @ sides[1], rounded.sum(0)),
        (shifted @ sides[0], shifted.T @ sides[1], shifted.sum(0)),
        strict=False,
    ):
        error = (value.double() - expected).abs()
        assert bool((error <= unit * (d + expected.abs()) + e + 1e-7).all()), float(error.max())
        if error.numel() >= 500:
            assert float(error.norm()) <= unit / 2 * float(d.norm() + expected.norm()) + float((e + 1e-7).norm())


def case(n: int, h: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(n + 1000 * h + v)
    hidden = (torch.randn(n, h, generator=gen, dtype=F64) / h**0.25).to(dtype)
    weight = (torch.randn(v, h, generator=gen, dtype=F64) / h**0.25).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, v, (n,), generator=gen)


SHAPES = list(product((0, 1, 17, 37, 64), (16, 40, 64, 72), (8, 33, 130, 257)))


@pytest.mark.parametrize("n,h,v", SHAPES)
def test_shapes_and_block_edges(n: int, h: int, v: int) -> None:
    hidden, weight, target = case(n, h, v)
    target[::5] = -100
    judge(hidden, weight, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("biased", [False, True])
def test_dtypes_temperature_softcap_bias(dtype: torch.dtype, softcap: float | None, biased: bool) -> None:
    hidden, weight, target = case(37, 40, 70, dtype)
    bias = torch.randn(70).requires_grad_() if biased else None
    judge(hidden, weight, target, bias, temperature=torch.rand(37) + 0.5, softcap=softcap)


@pytest.mark.parametrize("offset", [-200.0, 200.0, 1e4])
def test_large_offsets(offset: float) -> None:
    judge(*case(9, 16, 40), torch.full((40,), offset).requires_grad_())


def test_impossible_first_tiles_and_padding() -> None:
    hidden, weight, target = case(20, 16, 90)
    bias = torch.zeros(90)
    bias[:40] = -torch.inf
    judge(hidden, weight, target % 30 + 42, bias.requires_grad_(), valid_vocab=80)


@pytest.mark.parametrize("pattern", ["all", "none", "alternate"])
def test_ignored_rows(pattern: str) -> None:
    hidden, weight, target = case(33, 16, 24)
    if pattern != "none":
        target[:: 1 if pattern == "all" else 2] = -100
    judge(hidden, weight, target)


def test_strides_expanded_inputs_and_expanded_gradients() -> None:
    hidden, weight, target = case(18, 16, 40)
    judge(hidden.detach().T.contiguous().T.requires_grad_(), weight.detach().T.contiguous().T.requires_grad_(), target)
    judge(hidden.detach()[:1].expand(18, 16).requires_grad_(), weight, target)
    out = linear_logprob(hidden, weight, target, backend="triton").logprob
    one = torch.autograd.grad(out, (hidden, weight), torch.ones(()).expand(18), retain_graph=True)
    other = torch.autograd.grad(linear_logprob(hidden, weight, target, backend="torch").logprob.sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))
    again = torch.autograd.grad(out, (hidden, weight), torch.ones(18))  # the graph was retained
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def test_tied_weights_and_each_output_alone() -> None:
    _, table, target = case(12, 16, 30)
    for name in ("logprob", "entropy", "lse"):
        results = []
        for backend in ("triton", "torch"):
            out = linear_logprob(table[target], table, target, entropy="grad", return_lse=True, backend=backend)  # type: ignore[arg-type]
            results.append(torch.autograd.grad(getattr(out, name).sum(), table)[0])
        assert torch.allclose(*results, atol=2e-5)


def test_only_rows_with_a_gradient_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = case(40, 16, 24)
    out = linear_logprob(hidden, weight, target, backend="triton").logprob
    seen: list[int] = []
    real = kernels.dense_backward
    monkeypatch.setattr(api, "_implementation", lambda *_: kernels)

    def counted(*args: object) -> None:
        seen.append(args[4].numel())  # type: ignore[attr-defined]
        real(*args)

    monkeypatch.setattr(kernels, "dense_backward", counted)
    keep = (torch.arange(40) % 10 == 0).float()
    (grad,) = torch.autograd.grad((out * keep).sum(), hidden)
    assert seen == [4] and not grad[1:10].any()


def test_chunks_of_the_backward_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = case(37, 16, 70)
    out = linear_logprob(hidden, weight, target, backend="triton").logprob.sum()
    whole = torch.autograd.grad(out, (hidden, weight), retain_graph=True)
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 20)
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", 20 * 32)
    parts = torch.autograd.grad(out, (hidden, weight))
    assert all(torch.allclose(a, b, atol=2e-6) for a, b in zip(whole, parts, strict=True))


def test_rounding_of_the_softmax_gradient_keeps_its_row_sum() -> None:
    """Rows of weight share a large component: a row sum of d that is not 0 would show up in it."""
    gen = torch.Generator().manual_seed(0)
    weight = (torch.randn(257, 32, generator=gen) * 0.3 + 6 * torch.randn(1, 32, generator=gen)).half().requires_grad_()
    hidden = (torch.randn(24, 32, generator=gen) * 0.2).half().requires_grad_()
    target = torch.randint(0, 257, (24,), generator=gen)
    out = linear_logprob(hidden, weight, target, backend="triton").logprob.sum()
    (found,) = torch.autograd.grad(out, hidden)
    h, w = wide(hidden), wide(weight)
    assert h is not None and w is not None
    (exact,) = torch.autograd.grad(logprob_of(h @ w.T, target)[0].sum(), h)
    p = torch.softmax((h @ w.T).detach(), -1)
    d = torch.nn.functional.one_hot(target, 257) - p
    uncorrected = (d.half().double() - d) @ w.detach()
    error = found.double() - exact
    assert float(error.norm()) < 0.35 * float(uncorrected.norm())
    assert float(error.norm() / exact.norm()) < 2**-11 * 4


def supports(target: Tensor, vocabulary: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Distinct random ids per row, the target among them; size 0 keeps the whole vocabulary."""
    gen = torch.Generator().manual_seed(5)
    rows = []
    for i, goal in enumerate(target.tolist()):
        size = sizes[i % len(sizes)]
        others = [j for j in torch.randperm(vocabulary, generator=gen).tolist() if j != goal]
        rows.append(sorted(([goal] if goal >= 0 else [others[-1]]) + others[: size - 1]) if size else [])
    cu = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    return torch.tensor([j for row in rows for j in row], dtype=torch.int32), cu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap,biased", [(None, False), (8.0, True)])
@pytest.mark.parametrize("n,h,v", [(0, 16, 8), (7, 40, 30)])
def test_supports(dtype: torch.dtype, softcap: float | None, biased: bool, n: int, h: int, v: int) -> None:
    hidden, weight, target = case(n, h, v, dtype)
    target[4::7] = -100
    bias = torch.randn(v).requires_grad_() if biased else None
    options = {"temperature": torch.rand(n) + 0.5, "softcap": softcap}
    judge(hidden, weight, target, bias, support=supports(target, v, [1, 5, 0, 8, 17, 2]), **options)


def test_supports_in_chunks_each_gradient_alone_and_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = case(5, 40, 20)
    bias = torch.randn(20).requires_grad_()
    support = supports(target, 20, [3, 9])

    def out(backend: str) -> Tensor:
        found = linear_logprob(
            hidden, weight, target, bias=bias, support=support, entropy="grad", return_lse=True, backend=backend
        )  # type: ignore[arg-type]
        assert found.entropy is not None and found.lse is not None
        return (found.logprob + 0.3 * found.entropy + 0.2 * found.lse).sum()

    every = (hidden, weight, bias)
    whole, plain = torch.autograd.grad(out("triton"), every), torch.autograd.grad(out("torch"), every)
    for leaf, expected in zip(every, whole, strict=True):
        assert torch.equal(torch.autograd.grad(out("triton"), leaf)[0], expected)
    monkeypatch.setattr(support_triton, "PAIRS", 15)
    for one, other, part in zip(whole, plain, torch.autograd.grad(out("triton"), every), strict=True):
        assert torch.allclose(one, other, atol=2e-5) and torch.allclose(part, other, atol=2e-5)


def test_support_of_strided_inputs() -> None:
    hidden, weight, target = case(6, 16, 20)
    support = supports(target, 20, [4, 9])
    judge(
        hidden.detach().T.contiguous().T.requires_grad_(), weight.detach().T.contiguous().T.requires_grad_(), target,
        support=support,
    )  # fmt: skip
    judge(hidden.detach()[:1].expand(6, 16).requires_grad_(), weight, target, support=support)


def test_tiny_fp16_upstream_gradients_do_not_underflow() -> None:
    hidden, weight, target = case(16, 16, 40, torch.float16)
    (small,) = torch.autograd.grad(
        linear_logprob(hidden, weight, target, backend="triton").logprob.sum() * 2.0**-14, weight, retain_graph=True
    )
    (plain,) = torch.autograd.grad(linear_logprob(hidden, weight, target, backend="triton").logprob.sum(), weight)
    assert float((small.double() * 2.0**14 - plain.double()).abs().max()) < 2**-9 * float(plain.abs().max()) + 2.0**-10


@pytest.mark.parametrize("rows", [65_535, 65_536, 70_001])
def test_many_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "tile_of", lambda *_: kernels.Tile(8192, 16, 16, 1, 1))
    hidden, weight, target = case(64, 16, 16)
    where = torch.arange(rows) % 64
    with torch.no_grad():
        out = linear_logprob(hidden[where], weight, target[where], backend="triton").logprob
        expected = linear_logprob(hidden, weight, target, backend="triton").logprob[where]
    assert torch.allclose(out, expected, atol=1e-6)


def test_the_grid_only_uses_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """131,072 rows need 1,024 row blocks of a real tile times the splits: one dimension, 31 bits."""
    assert (2**31 // 128) * kernels.SPLITS < 2**31
    grids: list[tuple[int, ...]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "_forward", Launch())
    stats = kernels.Stats.empty(70_001, torch.float32, torch.device("cpu"))
    shard = kernels.Shard(torch.zeros(300, 16), None, None, 0, torch.float32)
    hidden, rows = torch.zeros(70_001, 16), torch.arange(70_001)
    kernels.dense_stats(shard, hidden, rows, torch.ones(70_001), rows, stats, False, 0)
    assert len(grids) == 1 and len(grids[0]) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("n,h,v", [(1, 16, 8), (37, 40, 70), (40, 24, 129)])
def test_tiles_read_through_descriptors(
    n: int, h: int, v: int, halves: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "tile_of", lambda *_: kernels.Tile(16, 32, 16, 1, 1, True, halves))
    monkeypatch.setattr(kernels, "LISTED_BYTES", 16 * 2 * h)  # listed rows in blocks of one tile
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 24)
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", 24 * 64)
    hidden, weight, target = case(n, h, v, dtype)
    judge(hidden, weight, target, torch.randn(v).requires_grad_(), temperature=torch.rand(n) + 0.5, softcap=8.0)
    target = target % max(1, v - 1)
    target[::3] = -100
    judge(hidden, weight, target, valid_vocab=max(1, v - 1))


def test_tiles_come_from_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    bf16 = torch.bfloat16
    for kernel in ("forward", "gradient"):
        assert kernels.tile_of(kernel, bf16, "sm_90", True).described
        assert kernels.tile_of(kernel, bf16, "sm_100", True).described
        for target in ("sm_80", "sm_86", "sm_89", "sm_120", "gfx942"):
            assert not kernels.tile_of(kernel, bf16, target, True).described
        for target in ("sm_90", "sm_100", "sm_103"):
            assert not kernels.tile_of(kernel, bf16, target, False).described
            assert not kernels.tile_of(kernel, torch.float32, target, True).described
    plain = torch.zeros(6, 16, dtype=bf16)
    assert kernels.describable(plain) and kernels.describable(plain[2:])
    for odd in (plain.T, plain[:, 1:], torch.zeros(6, 9, dtype=bf16), plain[:, ::2], plain[:1].expand(6, 16)):
        assert not kernels.describable(odd)


def test_triton_refuses_what_it_cannot_do() -> None:
    hidden, weight, target = case(4, 16, 8)
    with pytest.raises(ValueError, match=r"backend: found 'triton' with torch\.float64"):
        linear_logprob(hidden.double(), weight.double(), target, backend="triton")
