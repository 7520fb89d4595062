"""The probe after a commit: an independent implementation passes in every dtype, one with a tensor in the wrong place never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from temper.actor.engines.sglang_probe import Probe
from temper.actor.engines.sglang_weights import Mirror
from temper.common.bits import TensorBits, seal
from temper.common.delta import encode, stage
from temper.common.errors import EngineError
from temper.learner.policy import bit_view
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

LINEAGE = 5
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_hidden_layers=4, tie_word_embeddings=False),
    "deep": LlamaConfig(**SIZES, num_hidden_layers=24, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, num_hidden_layers=4, tie_word_embeddings=True),
}
_make: Any = AutoModelForCausalLM.from_config


class Other:
    """A server whose forward is transformers', which rounds in places where ours does not."""

    def __init__(self, model: Any) -> None:
        self.model = model

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        ids = torch.tensor([body["input_ids"]])
        with torch.no_grad():
            table = torch.log_softmax(self.model(ids).logits[0, :-1].float(), -1)
        found = table.gather(1, ids[0, 1:, None])[:, 0].tolist()
        entries = [
            [None, body["input_ids"][0], None],
            *([x, y, None] for x, y in zip(found, body["input_ids"][1:], strict=True)),
        ]
        meta = {"weight_versions": [{"version": f"{LINEAGE}:0", "start": 0, "end": 1}], "input_token_logprobs": entries}
        return {"output_ids": [1], "meta_info": meta}


def sides(name: str, dtype: str, seed: int) -> tuple[Probe, Any, Any]:
    """A probe over a model's weights, the model, and their version."""
    torch.manual_seed(seed)
    model = _make(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = model.to(getattr(torch, dtype)).eval()
    tensors = {key: TensorBits.of(bit_view(p.detach().clone()), dtype) for key, p in model.named_parameters()}
    held = seal(0, LINEAGE, tensors, None)
    mirror = Mirror()
    mirror.overwrite(stage(list(encode(None, held)), None))
    probe = Probe.of(CONFIGS[name].to_dict() | {"architectures": [type(model).__name__]}, mirror, dtype, 64)
    assert probe is not None
    return probe, model, held.version


def exchange(one: str, other: str) -> Callable[[Any], None]:
    """Two tensors in each other's place."""

    def do(model: Any) -> None:
        first, second = model.get_parameter(one), model.get_parameter(other)
        kept = first.detach().clone()
        first.copy_(second)
        second.copy_(kept)

    return do


def stays(name: str) -> Callable[[Any], None]:
    """A tensor that is what it was at the start: random."""

    def do(model: Any) -> None:
        parameter = model.get_parameter(name)
        parameter.copy_(torch.randn_like(parameter) * 0.05)

    return do


FAULTS = {
    "gate and up exchanged": exchange("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    "k and v exchanged": exchange("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"),
    "another layer's": exchange("model.layers.1.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"),
    "skipped": stays("model.layers.2.self_attn.o_proj.weight"),
    "not retied": stays("model.embed_tokens.weight"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_another_right_implementation_passes_with_room(name: str, dtype: str) -> None:
    async def scenario() -> None:
        for seed in range(3):
            probe, model, version = sides(name, dtype, seed)
            client: Any = Other(model)
            gap = await probe.check(client, version)
            assert gap < probe.limit / 2 and (dtype == "float32" or gap > 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_tensor_in_the_wrong_place_is_found(name: str, dtype: str, fault: str) -> None:
    async def scenario() -> None:
        probe, model, version = sides(name, dtype, 0)
        with torch.no_grad():
            FAULTS[fault](model)
        client: Any = Other(model)
        with pytest.raises(EngineError, match="other log-probabilities"):
            await probe.check(client, version)

    asyncio.run(scenario())
