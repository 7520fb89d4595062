"""The GPU part of the kernel benchmark: our head and `selective_logprob` beside GEMMs, a copy and other projects' heads.

Every case runs in one process on one card, after a warm-up call that compiles it and fills the libraries' workspaces; the
best of the rounds counts, between two synchronisations. Memory is what torch's allocator had live at the peak. A case that
does not fit the card is a row with the reason, and its goals are missed. Written for cards of 80 GB and more; not yet run
on one unless the results name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from temper.kernels.linear_logprob import linear_logprob
from temper.kernels.selective_logprob import selective_logprob
from torch import Tensor

SHAPES = ((131_072, 151_936, 4096), (32_768, 151_936, 2048), (8192, 151_936, 4096))  # tokens, vocabulary, hidden
PARTS = 16  # the bare GEMMs go over the tokens in so many parts: their whole output would not fit
SLOW_S = 5.0  # measuring one case takes about this long at most, beyond its warm-up and one round
COPY_BYTES = 10 << 30  # of the logits for `selective_logprob`, less where the card is small
Rows = list[dict[str, Any]]


def naive(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Whole logits, as most trainers do."""
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    found = -(logp.exp() * logp).sum(-1) if entropy else None
    return logp.gather(1, target[:, None])[:, 0], found


def goal(name: str, limit: float, value: float | None, at_most: bool = True) -> dict[str, Any]:
    """One goal; without a value it is missed."""
    value = None if value is None else round(value, 3)
    met = value is not None and (value <= limit if at_most else value >= limit)
    return {"name": name, "goal": f"{'<=' if at_most else '>='} {limit}", "value": value, "met": met}


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Best time of one call, after a warm-up; a slow case has fewer rounds, within `SLOW_S`, but at least one."""
    work()
    best, spent = float("inf"), 0.0
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took = time.perf_counter() - begun
        best, spent = min(best, took), spent + took
        if spent > SLOW_S:
            break
    return best


def peak_bytes(work: Callable[[], Any]) -> int:
    """Bytes that one call had live above what was there before, its results included, after a warm-up."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def fitting(rows: Rows, case: dict[str, Any], work: Callable[[], float]) -> float | None:
    """What `work` measures, None and a row with the reason where the card is too small."""
    try:
        return work()
    except torch.OutOfMemoryError:
        rows.append({**case, "value": None, "note": "out of memory"})
        return None
    finally:
        torch.cuda.empty_cache()


def forward_gemm(hidden: Tensor, weight: Tensor) -> None:
    """The products that the head's forward cannot avoid."""
    size = hidden.shape[0] // PARTS
    out = torch.empty(size, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    for first in range(0, hidden.shape[0], size):
        torch.mm(hidden[first : first + size], weight.T, out=out)


def three_gemms(hidden: Tensor, weight: Tensor) -> None:
    """Those of its backward: logits again, the gradient of hidden, the gradient of weight."""
    size = hidden.shape[0] // PARTS
    out = torch.empty(size, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for first in range(0, hidden.shape[0], size):
        part = hidden[first : first + size]
        torch.mm(part, weight.T, out=out)
        torch.mm(out, weight, out=d_hidden[first : first + size])
        d_weight.addmm_(out.T, part)


def peers() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Fused heads of other projects that are installed: (hidden, weight, target) -> mean negative log-probability."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda hidden, weight, target: liger(weight, hidden, target)
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = linear_cross_entropy
    except ImportError:
        pass
    return found


def heads(shape: tuple[int, int, int], rounds: int) -> tuple[Rows, Rows]:
    """One shape: times and memory of our forward and backward, of the bare GEMMs and of other heads."""
    n, v, h = shape
    device = torch.device("cuda")
    gen = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(n, h, device=device, dtype=torch.bfloat16, generator=gen).requires_grad_()
    weight = (torch.randn(v, h, device=device, dtype=torch.bfloat16, generator=gen) * 0.02).requires_grad_()
    target = torch.randint(0, v, (n,), device=device, generator=gen)
    rows: Rows = []
    label = " x ".join(map(str, shape))

    def case(name: str, unit: str) -> dict[str, Any]:
        return {"device": torch.cuda.get_device_name(), "shape": list(shape), "case": name, "unit": unit}

    def measure(name: str, work: Callable[[], Any]) -> float | None:
        made = case(name, "s")
        value = fitting(rows, made, lambda: seconds(work, rounds))
        if value is not None:
            rows.append({**made, "value": value})
        return value

    def forward(**options: Any) -> Tensor:
        with torch.no_grad():
            return linear_logprob(hidden, weight, target, **options).logprob

    def whole(**options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_logprob(hidden, weight, target, **options).logprob.sum(), (hidden, weight))

    def all_of(loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (hidden, weight))

    with torch.no_grad():
        gemm = measure("GEMM", partial(forward_gemm, hidden, weight))
        gemms = measure("three GEMMs", partial(three_gemms, hidden, weight))
    mine = measure("ours, forward", forward)
    measure("ours, forward with entropy", lambda: forward(entropy="value"))
    again = partial(torch.autograd.grad, inputs=(hidden, weight), retain_graph=True)
    back = measure("ours, backward", partial(again, linear_logprob(hidden, weight, target).logprob.sum()))
    measure("ours, forward + backward", whole)
    measure("chunked torch, forward + backward", lambda: whole(backend="torch"))
    measure("naive, forward + backward", lambda: all_of(naive(hidden, weight, target, False)[0].sum()))
    for name, peer in peers().items():
        measure(f"{name}, forward + backward", lambda peer=peer: all_of(peer(hidden, weight, target)))
    goals = [
        goal(f"forward rate over the GEMM's, {label}", 0.8, _over(gemm, mine), at_most=False),
        goal(f"backward rate over three GEMMs', {label}", 0.8, _over(gemms, back), at_most=False),
    ]
    gradients = hidden.numel() * 2 + weight.numel() * (2 + 4)  # and one fp32 accumulator
    for name, work, base, limit in (
        ("forward", forward, 0, 32.0),
        ("forward + backward", whole, gradients, 560.0),
    ):
        made = case(f"ours, {name}: memory beyond inputs and gradients", "MiB")
        extra = fitting(rows, made, lambda work=work, base=base: (peak_bytes(work) - base) / 2**20)
        if extra is not None:
            rows.append({**made, "value": extra})
        if shape == SHAPES[0]:
            goals.append(goal(f"extra MiB {name}, {label}", limit, extra))
    return rows, goals


def _over(base: float | None, mine: float | None) -> float | None:
    return None if base is None or mine is None else base / mine


def bandwidth(rounds: int) -> tuple[Rows, Rows]:
    """selective_logprob's bytes a second against those of a copy, which moves every byte twice."""
    free, _ = torch.cuda.mem_get_info()
    vocabulary = SHAPES[0][1]
    tokens = max(128, int(min(COPY_BYTES, free // 4)) // (2 * vocabulary))
    logits = torch.randn(tokens, vocabulary, device="cuda", dtype=torch.bfloat16)
    index = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    spare = torch.empty_like(logits)
    size = logits.numel() * 2
    copy = 2 * size / seconds(lambda: spare.copy_(logits), rounds)
    mine = size / seconds(lambda: selective_logprob(logits, index), rounds)
    rows = [
        {
            "device": torch.cuda.get_device_name(),
            "shape": [tokens, vocabulary],
            "case": name,
            "unit": "B/s",
            "value": value,
        }
        for name, value in (("copy", copy), ("selective_logprob", mine))
    ]
    return rows, [goal("selective_logprob bandwidth over a copy's", 0.85, mine / copy, at_most=False)]


def measure(rounds: int) -> tuple[Rows, Rows]:
    """Rows and goals of all shapes."""
    if not torch.cuda.is_available():
        return [{"device": "gpu", "note": "not yet measured on a GPU"}], []
    rows: Rows = []
    goals: Rows = []
    for shape in SHAPES:
        more_rows, more_goals = heads(shape, max(rounds, 5))
        torch.cuda.empty_cache()
        rows, goals = [*rows, *more_rows], [*goals, *more_goals]
    more_rows, more_goals = bandwidth(max(rounds, 5))
    return [*rows, *more_rows], [*goals, *more_goals]
