"""Tiny mixtures of experts of each family, and where they route tokens by themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

VOCABULARY = 11
Sequences = list[tuple[list[int], list[int]]]  # tokens, places of the trained ones
KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_moe as they are", "qwen3_moe half dense")
_make: Any = AutoModelForCausalLM.from_config


def config_of(kind: str, layers: int = 2, experts: int = 5, top_k: int = 2) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": top_k,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if kind == "mixtral":
        return MixtralConfig(**shape, num_local_experts=experts)
    shape |= {"num_experts": experts}
    if kind == "olmoe":
        return OlmoeConfig(**shape)
    shape |= {"moe_intermediate_size": 8}
    if kind == "qwen2_moe":
        return Qwen2MoeConfig(**shape, shared_expert_intermediate_size=12)
    return Qwen3MoeConfig(
        **shape,
        head_dim=4,
        norm_topk_prob=kind != "qwen3_moe as they are",
        mlp_only_layers=[0] if "dense" in kind else [],
    )


def model_of(kind: str, seed: int = 1, **sizes: int) -> Any:
    torch.manual_seed(seed)
    model = _make(config_of(kind, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def _keep(seen: list[Tensor], router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    seen.append(output[2])


def own_choice(model: Any, sequences: Sequences) -> list[np.ndarray]:
    """What the model itself routes each row to: [tokens, routers, k], the last token unknown."""
    found = []
    for tokens, _ in sequences:
        seen: list[Tensor] = []
        keep = partial(_keep, seen)
        handles = [router.register_forward_hook(keep) for router in routers(model)]
        with torch.no_grad():
            model(torch.tensor([tokens]))
        for handle in handles:
            handle.remove()
        experts = torch.stack(seen, 1).numpy().astype(np.int16)
        experts[-1] = -1
        found.append(experts)
    return found
