"""Models that SGLang would load and compute otherwise than transformers does, told by their config.json. Values only.

Nothing later would find it in a mixture: commits are verified by reading weights back, and what is wrong here is the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from temper.common.errors import ConfigError


def record_width(config: Mapping[str, Any]) -> int:
    """Routed experts that SGLang names for each token, dense layers' too; 0 for a model that has none."""
    return int(config.get("num_hidden_layers") or 0) * int(config.get("num_experts_per_tok") or 0)


def check(config: Mapping[str, Any]) -> None:
    """ConfigError if the tested SGLang samples from another model than the learner's (0.5.23, `models/*.py` there)."""
    architecture = (config.get("architectures") or ["none"])[0]
    problem = ""
    if architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        dense, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        if dense or every != 1:
            problem = (
                f"mlp_only_layers = {dense}, decoder_sparse_step = {every}: SGLang gives every layer of it experts, and"
                " those of a dense layer would be random"
            )
    elif architecture == "OlmoeForCausalLM":
        if config.get("norm_topk_prob"):
            problem = "norm_topk_prob = true: SGLang does not normalise the weights of its experts"
        elif config.get("clip_qkv") is not None:
            problem = f"clip_qkv = {config['clip_qkv']}: SGLang does not clip"
    if problem:
        raise ConfigError(f"config.json of {architecture}: {problem}")
