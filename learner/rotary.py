"""The attention modules' forward on packed tokens, with rotary positions in a third of the memory passes.

Transformers turns queries and keys with temporaries of their size for every operation, in fp32 under autocast; here each
is turned in one function with a backward of its own, in the same precision: fp32 inside, one rounding at the end. A call
without a tree (the model's own `generate`) is left to transformers. Called by `policy`.
"""

from __future__ import annotations

from typing import Any

import torch
from temper.learner.attention import tree_attention
from transformers import PreTrainedModel

KINDS = tuple(f"{of}Attention" for of in ("Llama", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe"))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
    """x [T, heads, D] turned by cos, sin [T, 1, D / 2]: channel i goes with channel i + D / 2."""
    wide = x.to(cos.dtype)
    a, b = wide.chunk(2, -1)
    out = torch.empty_like(wide)
    left, right = out.chunk(2, -1)
    torch.mul(a, cos, out=left).addcmul_(b, sin, value=-direction)
    torch.mul(b, cos, out=right).addcmul_(a, sin, value=direction)
    return out.to(x.dtype)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1.0), None, None


def fuse_rotary(model: PreTrainedModel) -> None:
    """Let every attention module of `model` compute this way; its parameters and names stay."""
    for module in model.modules():
        if type(module).__name__ in KINDS:
            module.forward = _forward_of(module)


def _forward_of(module: Any) -> Any:
    theirs = type(module).forward.__get__(module)
    plain = torch.nn.Identity()
    q_norm, k_norm = getattr(module, "q_norm", plain), getattr(module, "k_norm", plain)

    def forward(hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, None]:
        tree = arguments.get("tree")
        if tree is None:
            given: tuple[torch.Tensor, None] = theirs(hidden_states, **arguments)
            return given
        heads = (hidden_states.shape[1], -1, module.head_dim)
        cos, sin = (x[0, :, None, : module.head_dim // 2] for x in arguments["position_embeddings"])
        q = _Turn.apply(q_norm(module.q_proj(hidden_states).view(heads)), cos, sin)  # type: ignore[no-untyped-call]
        k = _Turn.apply(k_norm(module.k_proj(hidden_states).view(heads)), cos, sin)  # type: ignore[no-untyped-call]
        v = module.v_proj(hidden_states).view(heads)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = tree_attention(module, q, k, v, None, module.scaling, tree=tree)
        return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    return forward
