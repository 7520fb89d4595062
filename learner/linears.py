"""Linear layers and the gated MLP in the compute dtype, on weights that are rounded once a version.

Autocast rounds every fp32 master again for each micro-batch, and autograd keeps four intermediate results of a gated MLP;
here the rounded weights are made once and shared (forward, backward, the head, the published version), and two of the four
are recomputed. Products, sums and roundings are those of autocast. CPU only; called by `policy`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen2MoeMLP", "Qwen3MoeMLP")


class Rounded:
    """Parameters in `dtype`, cast again only after they changed. What is handed out is never written to."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kept: dict[Tensor, tuple[int, Tensor]] = {}

    def of(self, parameter: Tensor) -> Tensor:
        """`parameter` in the dtype, detached, in memory of its own."""
        kept = self._kept.get(parameter)
        if kept is None or kept[0] != parameter._version:
            kept = self._kept[parameter] = parameter._version, parameter.detach().to(self.dtype, copy=True)
        return kept[1]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """x [..., in] in `low`'s dtype times low [out, in]; the gradient of `weight`, whose rounding `low` is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, low: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, low)
        return F.linear(x, low, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, low = ctx.saved_tensors
        upstream = _flat(gradient)
        d_x = (upstream @ low).view(x.shape) if ctx.needs_input_grad[0] else None
        d_weight = upstream.T @ _flat(x) if ctx.needs_input_grad[1] else None
        d_bias = upstream.sum(0) if ctx.needs_input_grad[3] else None
        return d_x, d_weight, None, d_bias


class _Mlp(torch.autograd.Function):
    """(silu(x gate^T) * (x up^T)) down^T; keeps x and the two products, makes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        gate_low, up_low, down_low = weights[3:]
        gate, up = F.linear(x, gate_low), F.linear(x, up_low)
        ctx.save_for_backward(x, gate, up, *weights[3:])
        return F.linear(F.silu(gate).mul_(up), down_low)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, gate, up, gate_low, up_low, down_low = ctx.saved_tensors
        x, gate, up = _flat(x), _flat(gate), _flat(up)
        upstream = _flat(gradient)
        active = F.silu(gate)
        d_product = upstream @ down_low
        d_down = upstream.T @ (active * up) if ctx.needs_input_grad[3] else None
        d_up = active.mul_(d_product)
        d_gate = torch.ops.aten.silu_backward(d_product.mul_(up), gate)
        d_x = (d_gate @ gate_low).addmm_(d_up, up_low).view(gradient.shape) if ctx.needs_input_grad[0] else None
        d_weights = [
            d.T @ x if needed else None for d, needed in zip((d_gate, d_up), ctx.needs_input_grad[1:3], strict=True)
        ]
        return d_x, *d_weights, d_down, None, None, None


def fuse_linears(model: PreTrainedModel, rounded: Rounded) -> None:
    """Let every plain linear layer and gated MLP of `model` compute this way under autocast to `rounded.dtype`; parameters
    and names stay, and a call outside of autocast is left to torch."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _linear_forward(module, rounded)  # type: ignore[method-assign]
        elif type(module).__name__ in MLPS and _plain(module):
            module.forward = _mlp_forward(module, rounded)


def _plain(mlp: Any) -> bool:
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return mlp.config.hidden_act == "silu" and all(type(layer) is nn.Linear and layer.bias is None for layer in layers)


def _applies(rounded: Rounded) -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == rounded.dtype


def _linear_forward(module: nn.Linear, rounded: Rounded) -> Any:
    def forward(input: Tensor) -> Tensor:
        if not _applies(rounded):
            return F.linear(input, module.weight, module.bias)
        bias = None if module.bias is None else module.bias.to(rounded.dtype)
        x = input.to(rounded.dtype)
        out: Tensor = _Linear.apply(x, module.weight, rounded.of(module.weight), bias)  # type: ignore[no-untyped-call]
        return out

    return forward


def _mlp_forward(module: Any, rounded: Rounded) -> Any:
    theirs = type(module).forward.__get__(module)

    def forward(x: Tensor) -> Tensor:
        if not _applies(rounded):
            given: Tensor = theirs(x)
            return given
        weights = [layer.weight for layer in (module.gate_proj, module.up_proj, module.down_proj)]
        low = [rounded.of(weight) for weight in weights]
        out: Tensor = _Mlp.apply(x.to(rounded.dtype), *weights, *low)  # type: ignore[no-untyped-call]
        return out

    return forward
