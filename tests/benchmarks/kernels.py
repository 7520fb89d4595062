"""The head and the loss: time and peak memory against the naive path, and on a GPU against GEMMs and fused kernels.

``bin/bench kernels --json FILE [--rounds 3] [--tokens 4096]``. CPU: every case runs in a process of its own, one thread, the
naive path (logits, float32 log-softmax, gather) beside ours; the best of the rounds counts, peaks are resident memory above
the inputs. GPU: the shapes of large models, baselines in the same process; without a GPU the row says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from temper.kernels.linear_logprob import linear_logprob
from torch import Tensor

HIDDEN, VOCABULARY = 576, 49_152
GPU_SHAPES = ((131_072, 151_936, 4096), (32_768, 151_936, 2048), (8192, 151_936, 4096))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def naive(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Whole logits, as most trainers do."""
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    found = -(logp.exp() * logp).sum(-1) if entropy else None
    return logp.gather(1, target[:, None])[:, 0], found


def ours(hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """The chunked head (Triton on a GPU)."""
    out = linear_logprob(hidden, weight, target, entropy="grad" if entropy else "none")
    return out.logprob, out.entropy


def step(
    head: Callable[..., tuple[Tensor, Tensor | None]], inputs: tuple[Tensor, ...], entropy: bool, keep: Tensor
) -> float:
    """One forward and backward; the loss. `keep` f32[N] weighs the tokens: 0 = masked."""
    hidden, weight, target = inputs
    logprob, spread = head(hidden, weight, target, entropy)
    loss = -(logprob * keep).sum() / keep.sum()
    if spread is not None:
        loss = loss - 0.01 * (spread * keep).sum() / keep.sum()
    loss.backward()
    hidden.grad = weight.grad = None
    return float(loss.detach())


# ---------------------------------------------------------------- CPU: one case per process


def _memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Time (best of rounds, CPU seconds of one thread) and peak bytes above the inputs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n, dtype = int(case["tokens"]), DTYPES[case["dtype"]]
    hidden = torch.randn(n, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.05).to(dtype).requires_grad_()
    target = torch.randint(0, VOCABULARY, (n,))
    keep = torch.ones(n)
    if case["masked"]:
        keep = (torch.arange(n) % 10 == 0).float()
        if case["head"] == "ours":
            target = torch.where(keep > 0, target, -100)
    head = ours if case["head"] == "ours" else naive
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # peaks count from here
    before, best, loss = _memory("VmRSS"), float("inf"), 0.0
    for _ in range(int(case["rounds"])):
        begun = time.process_time()
        loss = step(head, (hidden, weight, target), bool(case["entropy"]), keep)
        best = min(best, time.process_time() - begun)
    return {"seconds": best, "peak_bytes": _memory("VmHWM") - before, "loss": loss}


def in_process(**case: Any) -> dict[str, Any]:
    """`run_case` in a fresh process."""
    child = subprocess.run(
        [sys.executable, "-P", __file__, "--case", json.dumps(case)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"case {case} failed: {child.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def goal(name: str, limit: float, value: float, at_most: bool = True) -> dict[str, Any]:
    value = round(value, 3)
    return {
        "name": name,
        "goal": f"{'<=' if at_most else '>='} {limit}",
        "value": value,
        "met": value <= limit if at_most else value >= limit,
    }


def cpu(tokens: int, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, goals = [], []

    def measure(
        head: str, dtype: str, entropy: bool = False, masked: bool = False, tokens: int = tokens
    ) -> dict[str, Any]:
        case = {"head": head, "dtype": dtype, "entropy": entropy, "masked": masked, "tokens": tokens}
        found = in_process(**case, rounds=rounds)
        rows.append({"device": "cpu", **case, **found})
        return found

    for dtype in DTYPES:
        for entropy in (False, True):
            base, mine = measure("naive", dtype, entropy), measure("ours", dtype, entropy)
            label = f"{dtype}{' with entropy' if entropy else ''}"
            goals.append(goal(f"peak memory over naive, {label}", 0.125, mine["peak_bytes"] / base["peak_bytes"]))
            goals.append(goal(f"time over naive, {label}", 1.0 if entropy else 1.3, mine["seconds"] / base["seconds"]))
    full, few = measure("naive", "float32", masked=True), measure("ours", "float32", masked=True)
    goals.append(goal("head time saved by 90 % masked rows", 5, full["seconds"] / few["seconds"], at_most=False))
    goals.append(goal("difference of the loss with 90 % masked rows", 1e-5, abs(full["loss"] - few["loss"])))
    small, large = (measure("ours", "float32", tokens=n) for n in (1024, 8192))
    outputs = (8192 - 1024) * HIDDEN * 4
    grown = (large["peak_bytes"] - small["peak_bytes"] - outputs) / 2**20
    goals.append(goal("MiB that the peak above inputs and outputs grows from 1k to 8k tokens", 8, grown))
    return rows, goals


# ---------------------------------------------------------------- GPU


def timed(work: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Best seconds of one call."""
    best = float("inf")
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def _peers() -> dict[str, Callable[..., Tensor]]:
    """Fused heads of other projects that are installed: (hidden, weight, target) -> mean loss."""
    found: dict[str, Callable[..., Tensor]] = {}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger"] = liger_fused_linear_cross_entropy
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut_cross_entropy"] = linear_cross_entropy
    except ImportError:
        pass
    return found


def heads(
    shape: tuple[int, int, int], device: torch.device, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One shape: our forward and backward, the bare GEMMs, chunked torch, the naive path where it fits, and peers."""
    n, v, h = shape
    gen = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(n, h, device=device, generator=gen).bfloat16().requires_grad_()
    weight = (torch.randn(v, h, device=device, generator=gen) * 0.02).bfloat16().requires_grad_()
    target = torch.randint(0, v, (n,), device=device, generator=gen)
    rows: list[dict[str, Any]] = []
    part = max(1, n // 16)  # the GEMM in row blocks: its whole output would not fit
    seconds: dict[str, float] = {}
    with torch.no_grad():
        seconds["gemm"] = timed(lambda: [hidden[i : i + part] @ weight.T for i in range(0, n, part)], rounds, device)
        seconds["forward"] = timed(lambda: linear_logprob(hidden, weight, target), rounds, device)
    out = linear_logprob(hidden, weight, target).logprob.sum()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds["backward"] = timed(lambda: torch.autograd.grad(out, (hidden, weight), retain_graph=True), rounds, device)
    extra: dict[str, float] = {}
    if device.type == "cuda":
        gradients = hidden.numel() * 2 + weight.numel() * 2 + weight.numel() * 4
        extra["backward_extra_mib"] = (torch.cuda.max_memory_allocated() - before - gradients) / 2**20
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            linear_logprob(hidden, weight, target)
        extra["forward_extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    others: dict[str, Callable[[], Any]] = {
        "chunked torch": lambda: torch.autograd.grad(
            linear_logprob(hidden, weight, target, backend="torch").logprob.sum(), (hidden, weight)
        )
    }
    if n * v <= 8192 * 151_936:
        others["naive"] = lambda: torch.autograd.grad(naive(hidden, weight, target, False)[0].sum(), (hidden, weight))
    for name, peer in _peers().items():
        others[name] = lambda peer=peer: torch.autograd.grad(peer(hidden, weight, target), (hidden, weight))
    for name, work in others.items():
        try:
            seconds[f"{name}, forward + backward"] = timed(work, rounds, device)
        except torch.OutOfMemoryError:
            rows.append(
                {"device": str(device), "shape": list(shape), "case": name, "seconds": None, "note": "out of memory"}
            )
    rows += [
        {"device": str(device), "shape": list(shape), "case": name, "seconds": value} for name, value in seconds.items()
    ]
    rows += [{"device": str(device), "shape": list(shape), "case": name, "mib": value} for name, value in extra.items()]
    label = "x".join(map(str, shape))
    goals = [
        goal(f"forward rate over the GEMM's, {label}", 0.8, seconds["gemm"] / seconds["forward"], at_most=False),
        goal(
            f"backward rate over three GEMMs', {label}", 0.8, 3 * seconds["gemm"] / seconds["backward"], at_most=False
        ),
    ]
    if extra and shape == GPU_SHAPES[0]:
        goals.append(goal("extra MiB forward, largest shape", 32, extra["forward_extra_mib"]))
        goals.append(goal("extra MiB backward, largest shape", 560, extra["backward_extra_mib"]))
    return rows, goals


def bandwidth(
    shape: tuple[int, int], device: torch.device, rounds: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """selective_logprob's forward against a copy of the same logits (which moves twice the bytes)."""
    from temper.kernels.selective_logprob import selective_logprob

    logits = torch.randn(shape, device=device, dtype=torch.bfloat16)
    index = torch.zeros(shape[0], dtype=torch.int64, device=device)
    size = logits.numel() * 2
    copy = 2 * size / timed(logits.clone, rounds, device)
    mine = size / timed(lambda: selective_logprob(logits, index), rounds, device)
    rows = [
        {"device": str(device), "case": name, "bytes_per_s": value}
        for name, value in (("copy", copy), ("selective_logprob", mine))
    ]
    return rows, [goal("selective_logprob bandwidth over a copy's", 0.85, mine / copy, at_most=False)]


def gpu(rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not torch.cuda.is_available():
        return [{"device": "gpu", "note": "not yet measured on a GPU"}], []
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name(device)}]
    goals: list[dict[str, Any]] = []
    for shape in GPU_SHAPES:
        more_rows, more_goals = heads(shape, device, rounds)
        rows, goals = [*rows, *more_rows], [*goals, *more_goals]
    more_rows, more_goals = bandwidth((8192, 151_936), device, rounds)
    return [*rows, *more_rows], [*goals, *more_goals]


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals of both parts."""
    parser = argparse.ArgumentParser(prog="bin/bench kernels", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    rows, goals = cpu(arguments.tokens, arguments.rounds)
    gpu_rows, gpu_goals = gpu(arguments.rounds)
    return {"rows": [*rows, *gpu_rows], "goals": [*goals, *gpu_goals]}


if __name__ == "__main__":
    print(json.dumps(run_case(json.loads(sys.argv[2]))))
