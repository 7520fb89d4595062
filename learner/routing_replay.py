"""Routing replay: each layer of a mixture uses the experts that the engine used for the token when it sampled.

Engine and learner round differently, and weights move while a sample waits: a token may then go to other experts, and the
two log-probabilities that a ratio compares are of different networks. Here the recorded experts are used again, with gate
weights from the present router at those experts, so that gradients reach the router. Rollout Routing Replay (R3):
arXiv 2510.11370; the same idea for the proximal policy: GSPO, arXiv 2507.18071.

Guarantees: where the model itself chooses the recorded experts, in whatever order, or nothing is recorded (-1), its own
choice is used and nothing changes by a bit; the record travels with a layer's arguments, so that a layer that is recomputed
in backward replays the same; a copy of the model replays only what it is given. Records are checked before they get here: see
`checked`. Called by `policy` and `inbox`.

Legend: N tokens of a message, T of a micro-batch, L layers of which R have a router, E experts of which k are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from temper.common.errors import ConfigError, ProtocolError
from temper.common.wire import FRAME_LIMIT_BYTES
from torch import Tensor, nn

Array = NDArray[Any]

ROUTERS = ("MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""They choose the k largest of a softmax over all experts, and weigh them by it, normalised or not."""
NAME = "routed_experts"
ROUTER = "router_of_layer"


@dataclass(frozen=True, slots=True)
class Routing:
    """What a model's records look like: i16[N, layers * top_k], layer by layer; only `routed` layers have a router."""

    layers: int
    routed: tuple[int, ...]
    top_k: int
    experts: int

    def check_length(self, tokens: int) -> None:
        """ConfigError if the record of a sample of `tokens` fits no message."""
        each = 2 * self.layers * self.top_k
        if tokens * each > FRAME_LIMIT_BYTES:
            raise ConfigError(
                f"engine.routed_experts: model.max_length_tokens = {tokens} tokens with a record of {each} bytes each, at most "
                f"{FRAME_LIMIT_BYTES} travel in a message: set it to {FRAME_LIMIT_BYTES // each} or less"
            )

    def checked(self, records: Array, tokens: int) -> Array:
        """i16[N, R, k] of the layers that route. ProtocolError unless `records` is whole: of each token and layer k
        different experts that the model has, or k times -1."""
        width = self.layers * self.top_k
        if records.dtype != np.int16 or records.shape != (tokens, width):
            raise ProtocolError(
                f"{NAME} is {records.dtype}{list(records.shape)}, expected int16[{tokens}, {width}]: {self.layers} layers, "
                f"{self.top_k} experts per token; does the engine serve this model?"
            )
        found = records.reshape(tokens, self.layers, self.top_k)[:, list(self.routed)]
        unknown = found == -1
        wrong = ((found < 0) & ~unknown) | (found >= self.experts)
        ordered = np.sort(found, -1)
        twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
        some = unknown.any(-1) & ~unknown.all(-1)
        for bad, what in (
            (wrong.any(-1), f"expected 0..{self.experts - 1}, or -1 where unknown"),
            (some, "known in part: expected all of a layer or none"),
            (twice, "an expert twice"),
        ):
            if bad.any():
                token, place = np.argwhere(bad)[0].tolist()
                held = found[token, place].tolist()
                raise ProtocolError(f"{NAME} of token {token}, layer {self.routed[place]}, are {held}: {what}")
        return found


class Replay:
    """The experts i16[T, R, k] recorded for one micro-batch."""

    def __init__(self, experts: Array, device: torch.device) -> None:
        self._experts = torch.from_numpy(experts).to(device)
        self._replaced: dict[int, Tensor] = {}

    def of(self, place: int, own: Tensor) -> tuple[Tensor, Tensor]:
        """(experts i64[T, k], replaced bool[T]) in router number `place`, which chose `own` i64[T, k] itself."""
        recorded = self._experts[:, place].long()
        other = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & (recorded[:, 0] >= 0)
        self._replaced[place] = other.sum()
        return torch.where(other[:, None], recorded, own), other

    def counts(self) -> tuple[int, int, int]:
        """Pairs of token and layer: that were replaced, that have a record, all."""
        known = int((self._experts[..., 0] >= 0).sum())
        size = self._experts.shape[0] * self._experts.shape[1]
        return sum(int(count) for count in self._replaced.values()), known, size


def install(model: Any) -> Routing:
    """Let `model`'s routers replay the `replay` that its layers are called with; without one they choose themselves.
    ConfigError for a model without routers, or with others than these."""
    asked = f"engine.routed_experts = true, but model.path is a {model.config.model_type!r}"
    kinds = {type(module).__name__ for module in model.modules() if type(module).__name__.endswith("Router")}
    if not kinds:
        raise ConfigError(f"{asked}, which is dense and routes nothing: set engine.routed_experts = false")
    if not kinds <= set(ROUTERS):
        raise ConfigError(
            f"{asked} with routers {', '.join(sorted(kinds))}; replayed are {', '.join(ROUTERS)}: set "
            "engine.routed_experts = false"
        )
    layers, shape = model.base_model.layers, (0, 0)
    routed: list[int] = []
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if type(module).__name__ in ROUTERS:
                # Attention comes before the mixture and gets what the layer was called with, when it is recomputed too. It
                # knows the router in a way that is no submodule, and that follows a copy of the model to the copy's router.
                layer.self_attn.__dict__[ROUTER] = module
                layer.self_attn.register_forward_pre_hook(partial(_hand_over, place=len(routed)), with_kwargs=True)
                module.register_forward_hook(_replayed)
                routed.append(number)
                shape = int(module.top_k), int(module.num_experts)
    return Routing(len(layers), tuple(routed), *shape)


def _hand_over(attention: nn.Module, arguments: Any, named: dict[str, Any], *, place: int) -> None:
    attention.__dict__[ROUTER].replayed = (named.get("replay"), place)


def _replayed(router: nn.Module, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
    """(logits, weights, experts) of the router, with the recorded experts where there are other ones."""
    replay, place = router.__dict__.pop("replayed", (None, 0))
    if replay is None:
        return output
    logits, weights, own = output
    experts, other = replay.of(place, own)
    chosen = torch.softmax(logits, -1, dtype=torch.float).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always does
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, torch.where(other[:, None], chosen.to(weights.dtype), weights), experts
