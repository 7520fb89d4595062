"""Low-rank adapters in the learner: linear layers that train a small correction of a frozen weight.

Guarantees: only adapters have gradients, their masters are fp32; before the first step the model computes what it did
without them (B starts at 0); `merged` gives plain weights that transformers loads. The sum is made of the same operations
as in the embedded engine, which computes adapters beside the weights too. Called by `step` and `temper export`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from temper.common.errors import ConfigError
from temper.common.lora import Lora, adapted, parts
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Linear):
    """x [..., in] -> x W^T (+ bias) + scale (x A^T) B^T; W and bias are those of `linear`, frozen."""

    def __init__(self, linear: nn.Linear, lora: Lora, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = lora.scale
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, device="meta")
        bound = math.sqrt(1.0 / self.in_features)
        down = torch.empty(lora.rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A.weight = nn.Parameter(down.to(device))
        self.lora_B.weight = nn.Parameter(torch.zeros(self.out_features, lora.rank, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        return torch.add(F.linear(input, self.weight, self.bias), self.lora_B(self.lora_A(input)), alpha=self.scale)


def attach(model: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze `model` and give its target layers adapters, drawn from `seed`. ConfigError if it has no such layer."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    chosen = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and lora.on(name)]
    if not chosen:
        raise ConfigError(f"model.lora_targets {sorted(lora.targets)}: the model has no such linear layer")
    for name in chosen:
        parent, _, last = name.rpartition(".")
        holder: Any = model.get_submodule(parent)
        setattr(holder, last, LoraLinear(getattr(holder, last), lora, generator))


def merged(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """`tensors` without adapters: each adapted weight is W + scale B A, in fp32."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if adapted(name) is not None:
            continue
        down, up = parts(name)
        found[name] = (
            tensor.float() + scale * (tensors[up].float() @ tensors[down].float()) if up in tensors else tensor
        )
    return found
