"""What the tests of the embedded engine share: a small model of random weights, its versions, and what transformers says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from temper.actor.engines.base import GenerateRequest, Generation, SamplingParams
from temper.actor.engines.decoder import Decoder
from temper.actor.engines.overwrite import bits
from temper.actor.engines.shape import from_config
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import StagedUpdate, encode, stage
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

CONFIG = Qwen2Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
LENGTH = 40
SHAPE = from_config(CONFIG.to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
_make: Any = AutoModelForCausalLM.from_config


def model_of(seed: int, config: PretrainedConfig = CONFIG) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(seed)
        model = _make(config).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        return model


def sealed(parameters: Mapping[str, Tensor], ordinal: int, base: Weights | None = None, lineage: int = 77) -> Weights:
    tensors = {
        name: TensorBits("float32", tuple(tensor.shape), bits(tensor).copy()) for name, tensor in parameters.items()
    }
    return seal(ordinal, lineage, tensors, base)


def version_of(model: Any, ordinal: int, base: Weights | None = None, lineage: int = 77) -> Weights:
    return sealed({name: p.detach().contiguous() for name, p in model.named_parameters()}, ordinal, base, lineage)


def update_to(new: Weights, base: Weights | None = None) -> StagedUpdate:
    return stage(list(encode(base, new)), base)


def ask(ids: list[int], **params: Any) -> GenerateRequest:
    return GenerateRequest(ids, SamplingParams(**({"max_new_tokens": 8} | params)))


def finish(made: Decoder, *, steps: int = 1000) -> dict[Any, Generation]:
    ended: dict[Any, Generation] = {}
    for _ in range(steps):
        if not made.busy:
            break
        for one in made.step():
            assert one.generation is not None, one.error
            ended[one.key] = one.generation
    return ended


def forced(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """transformers' log-probabilities of `ids` after `prompt`."""
    logits = model(torch.tensor([prompt + ids])).logits[0] / temperature
    table = torch.log_softmax(logits, -1)
    return [float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]


def two_versions() -> tuple[Any, Any, Weights, Weights]:
    """v0, and v1 that differs in a third of every tensor (qkv and gate/up are fused in the engine)."""
    old, new = model_of(11), model_of(12)
    with torch.inference_mode(False), torch.no_grad():
        pairs = zip(old.parameters(), new.parameters(), strict=True)
        for index, (before, after) in enumerate(pairs):
            keep = torch.rand(before.shape, generator=torch.Generator().manual_seed(index)) < 0.66
            after.copy_(torch.where(keep, before, after))
    first = version_of(old, 0)
    return old, new, first, version_of(new, 1, first)
