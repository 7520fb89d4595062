"""The vocabulary divided over the ranks of a process group gives what one process gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from temper.kernels.linear_logprob import linear_logprob

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
gen = torch.Generator().manual_seed(0)
hidden = torch.randn(21, 8, generator=gen, dtype=torch.float64).requires_grad_()
weight = torch.randn(40, 8, generator=gen, dtype=torch.float64).requires_grad_()
bias = torch.randn(40, generator=gen, dtype=torch.float64).requires_grad_()
target = torch.randint(0, 35, (21,), generator=gen)
target[::5] = -100
rows = [sorted({max(int(t), 0), 3, 30}) if i % 3 else [] for i, t in enumerate(target)]
sizes = torch.tensor([len(row) for row in rows])
support = (torch.tensor([i for row in rows for i in row]), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
mix = torch.randn(3, 21, generator=gen, dtype=torch.float64)
own = slice(rank * 40 // world, (rank + 1) * 40 // world)
for kept in (None, support):
    options = dict(temperature=0.7, softcap=6.0, valid_vocab=35, entropy="grad", return_lse=True, support=kept)
    grads = []
    for w, b, group in ((weight, bias, None), (weight[own], bias[own], dist.group.WORLD)):
        out = linear_logprob(hidden, w, target, bias=b, group=group, **options)
        values = torch.stack([out.logprob, out.entropy, out.lse])
        grads.append((values, *torch.autograd.grad((mix * values).sum(), (hidden, weight, bias))))
    whole, part = grads
    assert torch.allclose(whole[0], part[0], atol=1e-12)
    assert torch.allclose(whole[1], part[1], atol=1e-12)
    for one, other in zip(whole[2:], part[2:]):
        assert torch.allclose(one[own], other[own], atol=1e-12) and not other[: own.start].any() and not other[own.stop :].any()
try:
    linear_logprob(hidden, weight[: 10 + rank], target, group=dist.group.WORLD)
except ValueError as error:
    assert "weight: found shards of 10 to 11 rows" in str(error), error
else:
    raise AssertionError("uneven shards were taken")
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
