"""What a Hugging Face `config.json` says about a Llama, Qwen2 or Qwen3 model, checked.

Anything that the embedded engine would compute differently from transformers is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from temper.common.errors import ConfigError
from torch import Tensor

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a decoder. `rope` holds the rotary parameters (rope_theta, rope_type, factors)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_position: int
    rope: Mapping[str, Any]


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a parsed config.json; ConfigError names what is not supported."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: architecture {architecture}, the embedded engine runs {', '.join(ARCHITECTURES)}; use sglang"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {config['hidden_act']!r}, the embedded engine knows 'silu'")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError("config.json: sliding-window attention, which the embedded engine does not have; use sglang")
    if config.get("quantization_config"):
        raise ConfigError("config.json: quantised weights; the embedded engine needs plain ones")
    try:
        return _read(config, architecture)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json of {architecture}: {type(error).__name__} {error}") from error


def _read(config: Mapping[str, Any], architecture: str) -> ModelShape:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    attention_bias = bool(config.get("attention_bias", False)) and not qwen2
    default_dim = 128 if qwen3 else hidden // heads
    shape = ModelShape(
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or default_dim),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and not (qwen2 or qwen3),
        qk_norm=qwen3,
        max_position=int(config.get("max_position_embeddings", 2048)),
        rope=rope_parameters(config),
    )
    if min(shape.vocab_size, hidden, shape.intermediate_size, shape.layers, heads, shape.head_dim) < 1:
        raise ValueError("a size below 1")
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise ValueError(f"{heads} heads over {shape.kv_heads} key/value heads of size {shape.head_dim}")
    inverse_frequencies(shape)
    return shape


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`."""
    found = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"config.json: rope_type {found['rope_type']!r}, the embedded engine knows default, linear, llama3"
        )
    if float(found.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor, which the embedded engine does not have; use sglang")
    return found


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """f32[D / 2] rotary frequencies, in transformers' arithmetic."""
    d, rope = shape.head_dim, shape.rope
    frequencies = 1.0 / (float(rope["rope_theta"]) ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    if rope["rope_type"] == "default":
        return frequencies
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    middle = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(middle, smoothed, scaled)
