"""RMSNorm with a backward of its own: half of the memory passes of the module that transformers runs.

The residual stream stays in its dtype, statistics are computed in it; under autocast the result is cast once, not once for
every linear layer that reads it. Called by `policy`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

KINDS = tuple(f"{of}RMSNorm" for of in ("Llama", "Qwen2", "Qwen3", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe"))


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, cast to `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        normed, upstream = x * scale, gradient.to(x.dtype)
        product = normed * upstream
        d_weight = product.sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None
        inner = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        d_x = torch.mul(upstream, weight, out=product).sub_(normed.mul_(inner)).mul_(scale)
        return d_x, d_weight, None, None


def fuse_norms(model: PreTrainedModel) -> None:
    """Let every RMSNorm of `model` compute this way; its parameters and names stay."""
    for module in model.modules():
        if type(module).__name__ in KINDS:
            module.forward = _forward_of(module)


def _forward_of(module: Any) -> Any:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        kind = hidden_states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype
        x = hidden_states.to(module.weight.dtype)
        result: torch.Tensor = _RmsNorm.apply(x, module.weight, module.variance_epsilon, dtype)  # type: ignore[no-untyped-call]
        return result

    return forward
