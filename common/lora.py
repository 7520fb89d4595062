"""Low-rank adapters: what a recipe asks for and what their tensors are called. Pure.

A linear layer MODULE with weight W [out, in] gets A = MODULE.lora_A.weight [rank, in] and B = MODULE.lora_B.weight
[out, rank] (the names of peft, without its prefix) and computes W x + (alpha / rank) B (A x). W never changes: a version
of the weights holds all three, so its deltas hold adapters only. Used by learner, engines and `temper export`.
"""

from __future__ import annotations

from dataclasses import dataclass

from temper.common.config import LORA_TARGETS, Model

WEIGHT = ".weight"
DOWN = ".lora_A.weight"
UP = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of `rank` on every linear layer whose last name is in `targets`; `scale` = alpha / rank."""

    rank: int
    scale: float
    targets: frozenset[str] = frozenset(LORA_TARGETS)

    def on(self, module: str) -> bool:
        """Whether the layer `module` (model.layers.3.self_attn.q_proj) has an adapter."""
        return module.rsplit(".", 1)[-1] in self.targets


def lora_of(model: Model) -> Lora | None:
    """The adapters of a recipe; None if it trains the whole model."""
    if not model.lora_rank:
        return None
    return Lora(model.lora_rank, model.lora_alpha / model.lora_rank, frozenset(model.lora_targets))


def adapted(name: str) -> str | None:
    """The weight that the adapter tensor `name` belongs to (MODULE.weight); None if it is not one of an adapter."""
    for suffix in (DOWN, UP):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + WEIGHT
    return None


def parts(weight: str) -> tuple[str, str]:
    """The names of the adapter (A, B) of MODULE.weight."""
    module = weight.removesuffix(WEIGHT)
    return module + DOWN, module + UP
