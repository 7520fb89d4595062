"""Llama, Qwen2 and Qwen3 inference as plain functions over one set of fused weights.

The weights live once, in fused tensors (qkv, gate_up) whose row ranges are contiguous views under their Hugging Face
names, so that an exact delta is applied by overwriting. The math is transformers' (RMSNorm in fp32, rotary embedding by
halves, grouped-query attention, optional qkv bias and qk norm); the residual stream, attention and cached keys and values
are fp32 whatever the weights' dtype, which is faster on a CPU and more exact. Called by `decoder`; nothing here knows
about requests.

Shapes: N rows, L layers, H query heads, K key/value heads, G = H / K, D head size, T cache length, P prompts, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from temper.actor.engines.shape import ModelShape, inverse_frequencies
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tensors; absent biases and norms are None."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors, and `named`: the canonical Hugging Face name of each parameter -> contiguous view of its storage."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    named: Mapping[str, Tensor]


def empty_weights(shape: ModelShape, dtype: torch.dtype) -> Weights:
    """Zeroed weights of `shape`; tied heads share the embedding and have no name of their own."""
    named: dict[str, Tensor] = {}

    def new(name: str, *size: int) -> Tensor:
        named[name] = torch.zeros(*size, dtype=dtype)
        return named[name]

    def fused(prefix: str, parts: Mapping[str, int], columns: int, kind: str) -> Tensor:
        rows = sum(parts.values())
        whole = torch.zeros((rows, columns) if kind == "weight" else (rows,), dtype=dtype)
        start = 0
        for part, size in parts.items():
            named[f"{prefix}.{part}.{kind}"] = whole[start : start + size]
            start += size
        return whole

    h, d, inner = shape.hidden_size, shape.head_dim, shape.intermediate_size
    heads = {"q_proj": shape.heads * d, "k_proj": shape.kv_heads * d, "v_proj": shape.kv_heads * d}
    mlp = {"gate_proj": inner, "up_proj": inner}
    embed = new("model.embed_tokens.weight", shape.vocab_size, h)
    layers = []
    for index in range(shape.layers):
        at = f"model.layers.{index}"
        layers.append(
            Layer(
                input_norm=new(f"{at}.input_layernorm.weight", h),
                qkv=fused(f"{at}.self_attn", heads, h, "weight"),
                qkv_bias=fused(f"{at}.self_attn", heads, h, "bias") if shape.qkv_bias else None,
                q_norm=new(f"{at}.self_attn.q_norm.weight", d) if shape.qk_norm else None,
                k_norm=new(f"{at}.self_attn.k_norm.weight", d) if shape.qk_norm else None,
                out=new(f"{at}.self_attn.o_proj.weight", h, shape.heads * d),
                out_bias=new(f"{at}.self_attn.o_proj.bias", h) if shape.out_bias else None,
                post_norm=new(f"{at}.post_attention_layernorm.weight", h),
                gate_up=fused(f"{at}.mlp", mlp, h, "weight"),
                gate_up_bias=fused(f"{at}.mlp", mlp, h, "bias") if shape.mlp_bias else None,
                down=new(f"{at}.mlp.down_proj.weight", h, inner),
                down_bias=new(f"{at}.mlp.down_proj.bias", h) if shape.mlp_bias else None,
            )
        )
    norm = new("model.norm.weight", h)
    head = embed if shape.tied else new("lm_head.weight", shape.vocab_size, h)
    return Weights(embed, tuple(layers), norm, head, named)


class Cache:
    """Keys and values, f32[L, 2, N, K, T, D]; position p of row n is valid once written."""

    def __init__(self, shape: ModelShape, rows: int, length: int) -> None:
        self.rows, self.length, self.kv_heads, self.head_dim = rows, length, shape.kv_heads, shape.head_dim
        self.all = torch.zeros(shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
        self.flat = [(layer[0].view(-1, self.head_dim), layer[1].view(-1, self.head_dim)) for layer in self.all]
        merged = (rows * shape.kv_heads, length, shape.head_dim)
        self.merged = [(layer[0].view(merged), layer[1].view(merged)) for layer in self.all]
        self.first = torch.arange(rows * shape.kv_heads).view(rows, shape.kv_heads) * length

    def copy_rows(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `source` i64[M] over rows `target` i64[M]."""
        self.all[:, :, target, :, :length] = self.all[:, :, source, :, :length]


class Llama:
    """The forward passes. Must be called under ``torch.inference_mode``."""

    def __init__(self, shape: ModelShape, weights: Weights, length: int) -> None:
        self.shape, self.weights = shape, weights
        angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(shape)[None, :]
        sine = angles.sin()
        self.cos_TD = torch.cat([angles.cos()] * 2, -1)
        self.sin_TD = torch.cat([-sine, sine], -1)
        self.position_T = torch.arange(length)

    def decode(self, tokens_N: Tensor, positions_N: Tensor, cache: Cache, length: int) -> Tensor:
        """One token a row: f32 logits [N, V] after `tokens_N` at `positions_N`, rows 0..N-1 of `cache`.

        Writes their keys and values; attends to positions <= its own among the first `length`.
        """
        s = self.shape
        n, heads, kv, d = tokens_N.shape[0], s.heads, s.kv_heads, s.head_dim
        x = F.embedding(tokens_N, self.weights.embed).float()
        dtype = self.weights.embed.dtype
        cos, sin = self.cos_TD[positions_N].unsqueeze(1), self.sin_TD[positions_N].unsqueeze(1)
        hidden = self.position_T[:length] > positions_N.unsqueeze(1)
        mask = torch.zeros(n, length).masked_fill_(hidden, -torch.inf)
        mask = mask.unsqueeze(1).expand(n, kv, length).reshape(n * kv, 1, length)
        slots = (cache.first[:n] + positions_N.unsqueeze(1)).view(-1)
        scale = d**-0.5
        for layer, (keys, values), (all_k, all_v) in zip(self.weights.layers, cache.flat, cache.merged, strict=True):
            qkv = self._qkv(layer, _norm(x, layer.input_norm, s.rms_eps), (n, heads + 2 * kv, d))
            turned = self._rotate(qkv[:, : heads + kv], cos, sin)
            keys.index_copy_(0, slots, turned[:, heads:].reshape(n * kv, d))
            values.index_copy_(0, slots, qkv[:, heads + kv :].reshape(n * kv, d).float())
            query = turned[:, :heads].reshape(n * kv, heads // kv, d)
            scores = torch.baddbmm(mask, query, all_k[: n * kv, :length].transpose(1, 2), alpha=scale)
            mixed = torch.bmm(torch.softmax(scores, -1), all_v[: n * kv, :length]).view(n, heads * d).to(dtype)
            x = _linear_add(x, mixed, layer.out, layer.out_bias)
            x = self._mlp(layer, x)
        return self._head(x)

    def prefill(self, tokens_PS: Tensor) -> Tensor:
        """Keys and values f32[L, 2, P, K, S, D] of whole prompts from position 0, right-padded to S (causal, so the
        padding reaches nothing before it)."""
        s = self.shape
        prompts, size = tokens_PS.shape
        heads, kv, d = s.heads, s.kv_heads, s.head_dim
        x = F.embedding(tokens_PS, self.weights.embed).float()
        dtype = self.weights.embed.dtype
        cos, sin = self.cos_TD[:size].unsqueeze(1), self.sin_TD[:size].unsqueeze(1)
        found = torch.empty(s.layers, 2, prompts, kv, size, d)
        last = s.layers - 1
        for index, layer in enumerate(self.weights.layers):
            normed = _norm(x, layer.input_norm, s.rms_eps)
            qkv = self._qkv(layer, normed, (prompts, size, heads + 2 * kv, d))
            turned = self._rotate(qkv[:, :, : heads + kv], cos, sin)
            found[index, 0] = turned[:, :, heads:].transpose(1, 2)
            found[index, 1] = qkv[:, :, heads + kv :].transpose(1, 2)
            if index == last:
                break
            query = turned[:, :, :heads].transpose(1, 2)
            mixed = F.scaled_dot_product_attention(
                query, found[index, 0], found[index, 1], is_causal=True, enable_gqa=heads != kv
            )
            mixed = mixed.transpose(1, 2).reshape(prompts, size, heads * d).to(dtype)
            x = self._mlp(layer, _linear_add(x, mixed, layer.out, layer.out_bias))
        return found

    def _qkv(self, layer: Layer, normed: Tensor, size: tuple[int, ...]) -> Tensor:
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(size)
        if layer.q_norm is None or layer.k_norm is None:
            return qkv
        s = self.shape
        cut = s.heads + s.kv_heads
        query, key, value = qkv[..., : s.heads, :], qkv[..., s.heads : cut, :], qkv[..., cut:, :]
        query = _norm(query, layer.q_norm, s.rms_eps)
        key = _norm(key, layer.k_norm, s.rms_eps)
        return torch.cat((query, key, value), -2)

    def _rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding by halves, in f32."""
        heads = heads.float()
        return torch.addcmul(heads * cos, heads.roll(self.shape.head_dim // 2, -1), sin)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        s = self.shape
        both = F.linear(_norm(x, layer.post_norm, s.rms_eps), layer.gate_up, layer.gate_up_bias)
        gate, up = both[..., : s.intermediate_size], both[..., s.intermediate_size :]
        return _linear_add(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _head(self, x: Tensor) -> Tensor:
        s = self.shape
        return F.linear(_norm(x, self.weights.norm, s.rms_eps), self.weights.head).float()


def _linear_add(x: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + value @ weight.T (+ bias), f32."""
    return x + F.linear(value, weight, bias)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in f32, rounded to the weight's dtype before the weight is applied."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype).mul_(weight)
