"""The chunked head against float64, its gradients, invariances, bounded memory and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.kernels import linear_logprob_torch as chunked
from temper.kernels.flags import SUPPORT_LIMIT
from temper.kernels.linear_logprob import LogprobOut, linear_logprob
from temper.kernels.reference import logits_of, logprob_of
from torch import Tensor

F64 = torch.float64


def reference(hidden: Tensor, weight: Tensor, target: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """float64 (logprob, entropy, lse) with 0 at ignored rows, from whole logits."""
    bias, temperature, softcap, support, valid = (
        options.get(name) for name in ("bias", "temperature", "softcap", "support", "valid_vocab")
    )
    temperature = temperature.double() if isinstance(temperature, Tensor) else temperature or 1.0
    logits = logits_of(hidden.double(), weight.double(), None if bias is None else bias.double(), temperature, softcap)  # type: ignore
    if valid is not None:
        logits = torch.where(torch.arange(logits.shape[1]) < valid, logits, -torch.inf)  # type: ignore[operator]
    kept = target != -100
    found = logprob_of(logits, target.clamp_min(0), support)  # type: ignore[arg-type]
    return tuple(torch.where(kept, value, 0) for value in found)  # type: ignore[return-value]


def case(n: int, h: int, v: int, seed: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=gen, dtype=F64).to(dtype)
    weight = torch.randn(v, h, generator=gen, dtype=F64).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, v, (n,), generator=gen)


def compare(
    out: LogprobOut, expected: tuple[Tensor, Tensor, Tensor], inputs: tuple[Tensor, ...], tolerance: float
) -> None:
    """Values, and the gradient of a random combination of all three outputs."""
    assert out.entropy is not None and out.lse is not None
    found = (out.logprob, out.entropy, out.lse)
    gen = torch.Generator().manual_seed(7)
    mix = [torch.randn(value.shape, generator=gen, dtype=F64) for value in found]
    for value, goal in zip(found, expected, strict=True):
        assert torch.allclose(value.double(), goal, rtol=tolerance, atol=tolerance)
    one = torch.autograd.grad(sum((m * v).sum() for m, v in zip(mix, found, strict=True)), inputs)
    other = torch.autograd.grad(sum((m * v).sum() for m, v in zip(mix, expected, strict=True)), inputs)
    for value, goal in zip(one, other, strict=True):
        assert torch.allclose(
            value.double(), goal.double(), rtol=tolerance, atol=tolerance * max([1.0, *goal.abs().flatten().tolist()])
        )


@pytest.mark.parametrize("n", [0, 1, 17, 64])
@pytest.mark.parametrize("v", [1, 8, 33, 257])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equals_the_reference(n: int, v: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", 96)  # many blocks of rows and of vocabulary
    hidden, weight, target = case(n, 16, v)
    target[::5] = -100
    options = {
        "bias": torch.randn(v, dtype=F64).requires_grad_(),
        "temperature": torch.rand(n, dtype=F64) + 0.5,
        "softcap": softcap,
    }
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True, **options)  # type: ignore[arg-type]
    compare(out, reference(hidden, weight, target, **options), (hidden, weight, options["bias"]), 1e-11)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [-200.0, 200.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_large_logits_are_shifted_away(offset: float, dtype: torch.dtype) -> None:
    hidden, weight, target = case(9, 8, 40, dtype=dtype)
    bias = torch.full((40,), offset, dtype=dtype)
    out = linear_logprob(hidden, weight, target, bias=bias, entropy="grad", return_lse=True)
    tolerance = 1e-9 if dtype == F64 else 8 * 2**-24 * (abs(offset) + 10)  # fp32 rounding of logits of that size
    compare(out, reference(hidden, weight, target, bias=bias), (hidden, weight), tolerance)


def test_a_first_block_of_impossible_ids_and_a_padded_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", 64)
    hidden, weight, target = case(12, 8, 50)
    target = target % 20 + 16
    bias = torch.zeros(50, dtype=F64)
    bias[:16] = -torch.inf
    options = {"bias": bias, "valid_vocab": 40}
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True, **options)  # type: ignore[arg-type]
    compare(out, reference(hidden, weight, target, **options), (hidden, weight), 1e-11)
    (grad,) = torch.autograd.grad(linear_logprob(hidden, weight, target, valid_vocab=40).logprob.sum(), weight)
    assert not grad[40:].any()


def supports(target: Tensor, v: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids per row, always with the target, some rows empty."""
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for i, goal in enumerate(target.tolist()):
        ids = set(torch.randint(0, v, (i % 5,), generator=gen).tolist())
        rows.append(sorted(ids | {max(goal, 0)}) if i % 5 else [])
    cu = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
    return torch.tensor([i for row in rows for i in row], dtype=torch.int32), cu


@pytest.mark.parametrize("workspace", [20, 1 << 21])
def test_support_normalises_over_the_kept_ids(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", workspace)
    hidden, weight, target = case(23, 8, 60)
    target[4] = -100
    options = {
        "support": supports(target, 60),
        "temperature": torch.rand(23, dtype=F64) + 0.5,
        "softcap": 3.0,
        "bias": torch.randn(60, dtype=F64).requires_grad_(),
    }
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True, **options)  # type: ignore[arg-type]
    compare(out, reference(hidden, weight, target, **options), (hidden, weight, options["bias"]), 1e-11)  # type: ignore[arg-type]


def test_golden_temperature_and_nucleus() -> None:
    hidden, target = torch.tensor([[1.0]], dtype=F64), torch.tensor([0])
    weight = torch.tensor([[2.0], [0.0]], dtype=F64)
    assert float(linear_logprob(hidden, weight, target, temperature=2.0).logprob) == pytest.approx(-0.313262, abs=1e-6)
    logits = torch.tensor([[0.5], [0.3], [0.2]], dtype=F64).log()
    kept = (torch.tensor([0, 1]), torch.tensor([0, 2]))
    assert float(linear_logprob(hidden, logits, target, support=kept).logprob) == pytest.approx(-0.470004, abs=1e-6)


def test_gradcheck() -> None:
    hidden, weight, target = case(5, 3, 7)
    bias = torch.randn(7, dtype=F64, requires_grad=True)

    def run(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = linear_logprob(h, w, target, bias=b, temperature=0.7, softcap=4.0, entropy="grad", return_lse=True)
        return out.logprob, out.entropy, out.lse  # type: ignore[return-value]

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def test_gradient_of_each_output_alone_and_retained_graph() -> None:
    hidden, weight, target = case(11, 8, 21)
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True)
    expected = reference(hidden, weight, target)
    for value, goal in zip((out.logprob, out.entropy, out.lse), expected, strict=True):
        assert value is not None
        for _ in range(2):
            one = torch.autograd.grad(value.sum(), (hidden, weight), retain_graph=True)
            other = torch.autograd.grad(goal.sum(), (hidden, weight), retain_graph=True)
            for a, b in zip(one, other, strict=True):
                assert torch.allclose(a, b, atol=1e-12)


def test_tied_weights_and_strides() -> None:
    _, table, target = case(10, 8, 30)
    hidden = table[target]  # an embedding of the same table

    def both(head: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = torch.autograd.grad(linear_logprob(states, head, target).logprob.sum(), table, retain_graph=True)
        (other,) = torch.autograd.grad(reference(states, head, target)[0].sum(), table, retain_graph=True)
        return one, other

    for head, states in (
        (table, hidden),
        (table.T.contiguous().T, hidden),
        (table, hidden.T.contiguous().T),
        (table, table[:1].expand(10, 8)),
    ):
        one, other = both(head, states)
        assert torch.allclose(one, other, atol=1e-12)
    out = linear_logprob(hidden, table, target).logprob
    (one,) = torch.autograd.grad(out, table, torch.ones((), dtype=F64).expand(10), retain_graph=True)
    assert torch.allclose(one, both(table, hidden)[1], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    n, h, v = 64, 72, 257
    hidden, weight, target = case(n, h, v, dtype=dtype)
    out = linear_logprob(hidden, weight, target, entropy="grad", return_lse=True)
    expected = reference(hidden, weight, target)
    absolute = hidden.detach().double().abs() @ weight.detach().double().abs().T
    largest = float((hidden.detach().double() @ weight.detach().double().T).abs().max())
    bound = max(1e-5, 4 * math.sqrt(h) * 2**-24 * float(absolute.max()) + 8 * 2**-24 * largest)
    assert out.logprob.dtype == torch.float32
    assert float((out.logprob.double() - expected[0]).detach().abs().max()) <= bound
    one = torch.autograd.grad(out.logprob.sum(), (hidden, weight))
    wide = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    other = torch.autograd.grad(reference(*wide, target)[0].sum(), wide)
    d = torch.eye(v, dtype=F64)[target] - torch.softmax(hidden.detach().double() @ weight.detach().double().T, -1)
    limits = (d.abs() @ weight.detach().double().abs(), d.abs().T @ hidden.detach().double().abs())
    # one rounding of d and one of the result: up to u = eps / 2 each (bf16: 2^-8), half of that in the norm of many
    unit = torch.finfo(dtype).eps / 2
    for a, b, limit in zip(one, other, limits, strict=True):
        assert a.dtype == dtype
        error = (a.double() - b.double()).abs()
        assert bool((error <= unit * (limit + b.double().abs()) + 2 * bound).all())
        assert float(error.norm()) <= unit / 2 * float(limit.norm() + b.norm()) + 2 * bound * math.sqrt(error.numel())


@pytest.mark.parametrize("rows", [65_535, 65_536, 70_001])
def test_many_rows(rows: int) -> None:
    hidden, weight, target = case(50, 4, 9, dtype=torch.float32)
    where = torch.arange(rows) % 50
    out = linear_logprob(hidden[where], weight, target[where]).logprob
    assert torch.allclose(out, linear_logprob(hidden, weight, target).logprob[where], atol=1e-6)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    times = torch.bincount(where, minlength=50)
    (exact,) = torch.autograd.grad((linear_logprob(hidden, weight, target).logprob * times).sum(), weight)
    assert torch.allclose(grad, exact, rtol=1e-4, atol=rows * 1e-6)


def test_fp32_masters_are_rounded_to_the_hidden_states_dtype_and_keep_an_fp32_gradient() -> None:
    hidden, weight, target = case(64, 72, 257, dtype=torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    out = linear_logprob(low, weight, target).logprob
    same = linear_logprob(low, weight.detach().bfloat16().requires_grad_(), target).logprob
    assert torch.equal(out, same)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    wide = (low.detach().double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_())
    (exact,) = torch.autograd.grad(reference(*wide, target)[0].sum(), wide[1])
    assert grad.dtype == torch.float32
    assert float((grad.double() - exact).norm() / exact.norm()) < 4e-3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 70), st.integers(1, 400))
def test_bounds_zero_row_sums_shift_chunk_and_split(seed: int, n: int, v: int, workspace: int) -> None:
    hidden, weight, target = case(n, 4, v, seed, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "WORKSPACE_ELEMENTS", workspace)
        out = linear_logprob(hidden, weight, target, entropy="grad")
        (grad,) = torch.autograd.grad(out.logprob.sum(), weight)
    assert out.entropy is not None
    assert bool((out.logprob <= 0).all())
    assert bool((out.entropy >= 0).all()) and bool((out.entropy <= math.log(v) + 1e-6).all())
    whole = linear_logprob(hidden, weight, target)
    assert torch.allclose(out.logprob, whole.logprob, atol=2e-6)
    half = n // 2
    parts = [linear_logprob(hidden[s], weight, target[s]).logprob for s in (slice(0, half), slice(half, n))]
    assert torch.allclose(torch.cat(parts), whole.logprob, atol=2e-6)
    assert torch.allclose(
        linear_logprob(hidden, weight, target, bias=torch.full((v,), 3.0)).logprob, whole.logprob, atol=1e-5
    )
    row_sums = (
        torch.autograd.grad(out.logprob.sum(), hidden)[0] if weight.grad else grad.sum(0)
    )  # sum_v dW = sum_n (sum_v d) h
    assert torch.allclose(row_sums, torch.zeros_like(row_sums), atol=1e-4)


def test_rows_without_upstream_gradient_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target = case(200, 8, 30)
    out = linear_logprob(hidden, weight, target)
    keep = torch.arange(200) % 10 == 3
    seen: list[Tensor] = []
    real = chunked.dense_backward

    def counted(*args: object) -> None:
        seen.append(args[4])  # type: ignore[arg-type]
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(chunked, "dense_backward", counted)
    one = torch.autograd.grad((out.logprob * keep).sum(), (hidden, weight))
    assert torch.equal(seen[0], keep.nonzero()[:, 0])
    other = torch.autograd.grad((reference(hidden, weight, target)[0] * keep).sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(one, other, strict=True))


def test_entropy_value_has_no_gradient() -> None:
    hidden, weight, target = case(4, 3, 6)
    out = linear_logprob(hidden, weight, target, entropy="value")
    assert out.entropy is not None and not out.entropy.requires_grad
    assert out.lse is None and linear_logprob(hidden, weight, target).entropy is None


def test_agrees_with_torchs_linear_cross_entropy() -> None:
    hidden, weight, target = case(40, 16, 100, dtype=torch.float32)
    target[::7] = -100
    loss = torch.nn.functional.linear_cross_entropy(hidden, weight, target, reduction="sum")
    out = -linear_logprob(hidden, weight, target).logprob.sum()
    assert torch.allclose(loss, out, rtol=1e-6)
    for a, b in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(out, (hidden, weight)), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden": torch.zeros(4, 7)}, r"hidden: found torch.float32\[4, 7\], expected hidden states \[tokens, 3\]"),
        ({"hidden": torch.zeros(4, 6)}, "not logits"),
        ({"target": torch.tensor([0, 1, 6, 2])}, r"target: found 6 in row 2, expected 0\.\.5 or ignore_index -100"),
        ({"target": torch.tensor([0, -1, 2, 2])}, "target: found -1 in row 1"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "target: found"),
        ({"temperature": 0.0}, "temperature: found 0"),
        ({"temperature": torch.tensor([1.0, 1.0, -1.0, 1.0])}, "temperature: found -1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": torch.ones(2)}, r"temperature: found shape \[2\]"),
        ({"softcap": -1.0}, "softcap: found -1"),
        ({"valid_vocab": 7}, "valid_vocab: found 7"),
        ({"valid_vocab": 2, "target": torch.tensor([0, 1, 2, 0])}, r"target: found 2 in row 2, expected 0\.\.1"),
        ({"bias": torch.zeros(5)}, r"bias: found \[5\], expected \[6\]"),
        ({"entropy": "maybe"}, "entropy: found 'maybe'"),
        ({"backend": "cuda"}, "backend: found 'cuda'"),
        ({"weight": torch.full((6, 3), math.nan)}, "found a log-sum-exp of nan in row 0"),
        (
            {"support": (torch.tensor([1, 2]), torch.tensor([0, 1, 2, 2, 2]))},
            "target: found 0 in row 0, expected one of the ids",
        ),
        ({"support": (torch.tensor([0, 9]), torch.tensor([0, 1, 2, 2, 2]))}, r"support: found ids 0\.\.9"),
        ({"support": (torch.tensor([0]), torch.tensor([0, 1]))}, "support: found ids"),
        (
            {
                "support": (
                    torch.zeros(SUPPORT_LIMIT + 1, dtype=torch.int32),
                    torch.tensor([0, *[SUPPORT_LIMIT + 1] * 4]),
                )
            },
            f"support: found a row with {SUPPORT_LIMIT + 1} ids",
        ),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    arguments = {"hidden": torch.ones(4, 3), "weight": torch.ones(6, 3), "target": torch.tensor([0, 1, 2, 3]), **change}
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)  # type: ignore[arg-type]
