"""The head and the loss: time and peak memory against the naive path, and on a GPU against GEMMs and fused kernels.

``bin/bench kernels --json FILE [--rounds 3] [--tokens 4096]``. CPU: every case runs in a process of its own, one thread, the
naive path (logits, float32 log-softmax, gather) beside ours; the best of the rounds counts, peaks are resident memory above
the inputs. GPU: see `_kernels_gpu`; without a GPU the row says so.
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

sys.path.insert(0, str(Path(__file__).parent))
try:
    import _kernels_gpu
    from _kernels_gpu import goal, naive
finally:
    del sys.path[0]  # or this file would be taken for Hugging Face's `kernels` by whoever looks for that

HIDDEN, VOCABULARY = 576, 49_152
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals of both parts."""
    parser = argparse.ArgumentParser(prog="bin/bench kernels", allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    rows, goals = cpu(arguments.tokens, arguments.rounds)
    gpu_rows, gpu_goals = _kernels_gpu.measure(arguments.rounds)
    return {"rows": [*rows, *gpu_rows], "goals": [*goals, *gpu_goals]}


if __name__ == "__main__":
    print(json.dumps(run_case(json.loads(sys.argv[2]))))
