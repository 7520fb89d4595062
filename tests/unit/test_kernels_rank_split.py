"""Loss, gradient and metrics of sequences spread over the ranks of a process group are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from dataclasses import replace
import torch
import torch.distributed as dist
from temper.kernels.linear_logprob import linear_logprob
from temper.kernels.policy_loss import METRICS, Normalisers, PackedBatch, count_normalisers, policy_loss
from temper.kernels.reference import m2_cutoff
from temper.learner.objectives import TABLE, compile

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
gen = torch.Generator().manual_seed(0)
lengths = torch.tensor([2, 8, 0, 5, 1, 6, 3])
cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
count = int(cu[-1])
hidden = torch.randn(count, 6, generator=gen, dtype=torch.float64)
weight = torch.randn(11, 6, generator=gen, dtype=torch.float64).requires_grad_()
target = torch.randint(0, 11, (count,), generator=gen)
mu = -3 * torch.rand(count, generator=gen, dtype=torch.float64)
mask = torch.rand(count, generator=gen) < 0.8
advantage = torch.randn(7, generator=gen, dtype=torch.float64).repeat_interleave(lengths)
lag = torch.randint(0, 3, (count,), generator=gen)


def part(sequences):
    where = torch.tensor([i for s in sequences for i in range(int(cu[s]), int(cu[s + 1]))], dtype=torch.int64)
    sizes = lengths[torch.tensor(sequences, dtype=torch.int64)]
    edges = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return where, edges


def step(sequences, flags, normalisers):
    where, edges = part(sequences)
    pi = linear_logprob(hidden[where], weight, target[where]).logprob
    batch = PackedBatch(
        target[where], edges, mask[where], mu[where], mu[where] * 0.9, mu[where] * 1.1, advantage[where],
        torch.zeros(len(sequences), dtype=torch.int64), lag[where],
    )
    loss, metrics = policy_loss(batch, pi, flags, normalisers)
    (grad,) = torch.autograd.grad(loss, weight)
    return torch.cat([loss.detach()[None], grad.flatten(), torch.stack([torch.stack(m) for m in metrics.values()]).flatten()])


own = {0: [1, 2, 5], 1: [0, 3, 4, 6]}[rank]
for name, row in TABLE.items():
    flags = replace(compile(row), kl="k2", kl_coefficient=0.1)
    where, edges = part(own)
    mine = count_normalisers(mask[where], edges, 8)
    sizes = torch.tensor([mine.tokens, mine.sequences], dtype=torch.float64)
    dist.all_reduce(sizes)
    cutoff = float("inf")
    if flags.m2_tau < float("inf"):
        pi = linear_logprob(hidden, weight.detach(), target).logprob
        cutoff = m2_cutoff((pi - mu)[mask], flags.m2_tau)
    normalisers = Normalisers(float(sizes[0]), float(sizes[1]), 8, cutoff)
    found = step(own, flags, normalisers)
    dist.all_reduce(found)
    whole = step(list(range(7)), flags, normalisers)
    assert (normalisers.tokens, normalisers.sequences) == (float(mask.sum()), count_normalisers(mask, cu, 8).sequences)
    assert torch.allclose(found, whole, rtol=1e-11, atol=1e-12), (name, float((found - whole).abs().max()))
# a rank without a single sequence gives zeros for every metric, so that reductions meet
empty = step([], compile(TABLE["dapo"]), Normalisers(1, 1, 1))
assert empty.shape == found.shape and not empty.any()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", str(program), str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out[-4000:]
