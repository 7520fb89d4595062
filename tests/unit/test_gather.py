"""Shards of two real processes are gathered tensor by tensor into the version that one process would publish."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from temper.learner.gather import serving

RANK = """
import sys, weakref
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from temper.common.bits import TensorBits, seal
from temper.learner.gather import serving
from temper.learner.policy import bit_view
from transformers import LlamaConfig, LlamaForCausalLM

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=51, hidden_size=16, intermediate_size=36, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True))

def digest(named, keeps=True):
    found = {name: TensorBits.of(bit_view(t), "bfloat16") for name, t in serving(named, torch.bfloat16, keeps=keeps)}
    return (len(found), seal(1, 1, found).version.digest) if keeps else (len(found), "")

alone = digest(dict(model.named_parameters()))
mesh = init_device_mesh("cpu", (2,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
named = dict(model.named_parameters())
sharded = [p for p in named.values() if isinstance(p, DTensor) and p.to_local().numel() < p.numel()]
assert len(sharded) == len(named), (len(sharded), len(named))

living, most, gathered = weakref.WeakSet(), 0, DTensor.full_tensor
def counted(self, **options):
    global most
    whole = gathered(self, **options)
    living.add(whole)
    most = max(most, len(living))
    return whole
DTensor.full_tensor = counted
together = digest(named, keeps=rank == 0)
if rank == 1:  # keeps nothing: never more than one whole tensor at a time
    assert most == 1, most
print(rank, *alone, *together, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.system
def test_two_ranks_publish_what_one_process_would(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out = [process.communicate(timeout=90) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], out
    first, second = (text.split() for text, _ in out)
    assert first[1:3] == first[3:5] == second[1:3]  # as many tensors and the same digest, alone and together
    assert second[3] == "0"


def test_tied_parameters_are_gathered_once_and_nothing_is_shared_with_the_masters() -> None:
    tied = torch.nn.Parameter(torch.ones(3, 2))
    named = {"embed.weight": tied, "head.weight": tied, "norm.weight": torch.nn.Parameter(torch.ones(2))}
    found = dict(serving(named, torch.float32))
    assert list(found) == ["embed.weight", "norm.weight"]
    with torch.no_grad():
        tied.zero_()
    assert found["embed.weight"].eq(1).all()
    assert list(serving(named, torch.float32, keeps=False)) == []
