"""Mixtures of experts in the learner: their experts in the compute dtype, and the names of their tensors in a checkpoint.

transformers holds the experts of a layer as one tensor; checkpoints and engines know a tensor of each expert. Called by
`policy`, `trainer_state` and `temper export`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS = "temper_grouped"
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class _Cast:
    """An experts module whose weights are in `dtype`."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to(self._dtype) if isinstance(found, torch.nn.Parameter) else found


def _experts(module: Any, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """transformers' grouped products. Autocast does not know these: it would leave the weights in fp32, and the engine
    has them rounded."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        module = _Cast(module, torch.get_autocast_dtype(kind))
    result: Tensor = grouped_mm_experts_forward(module, hidden, experts, weights)
    return result


def group_experts(model: Any) -> None:
    """Let the experts of `model`, where it has any, compute this way."""
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        model.set_experts_implementation(EXPERTS)


def published(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """`tensors` under their names in a checkpoint; what is divided shares memory with the whole."""
    return {part: tensor for name, whole in tensors.items() for part, tensor in divided(name, whole, model_type)}


def divided(name: str, tensor: Tensor, model_type: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that the parameter `name` is: itself, or those of each expert in it (gate and up
    projection lie in one)."""
    mixtral = model_type == "mixtral"
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        pieces = {"down_proj": expert}
        if kind == "gate_up_proj":
            pieces = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
        for part, piece in pieces.items():
            yield f"{prefix}.{number}.{MIXTRAL[part] if mixtral else part}.weight", piece


ExpertsInterface.register(EXPERTS, _experts)
