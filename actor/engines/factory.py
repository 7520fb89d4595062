"""The engine that a recipe asks for, on this host. The recipe is checked against what it can do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from temper.actor.engines.base import Engine, EngineCaps
from temper.actor.engines.embedded import EmbeddedEngine
from temper.actor.engines.sglang_home import completed
from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.actor.engines.sglang_models import check as check_served
from temper.actor.engines.sglang_models import record_width
from temper.common.config import Recipe
from temper.common.errors import ConfigError
from temper.common.log import log
from temper.common.lora import lora_of


async def make_engine(recipe: Recipe, files: Mapping[str, bytes], host: SglangHost) -> Engine:
    """A running engine without weights for the model in the bundle `files`. ConfigError if it can't do what is asked."""
    try:
        config: Any = json.loads(files["config.json"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the model bundle has no usable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config.json of the bundle holds {type(config).__name__}, expected an object")
    host = completed(host)
    sglang = chosen(recipe, host) == "sglang"
    engine = await _sglang(recipe, files, config, host) if sglang else _embedded(recipe, config)
    try:
        check_caps(recipe, engine.caps)
    except ConfigError:
        await engine.close()
        raise
    return engine


def check_caps(recipe: Recipe, caps: EngineCaps) -> None:
    """ConfigError if the recipe needs what an engine of these `caps` doesn't have."""
    sampling = recipe.sampling
    if (sampling.top_p < 1 or sampling.top_k or sampling.min_p) and not caps.support_ids:
        raise ConfigError(
            "sampling.top_p, top_k and min_p need an engine that names what truncation left; this one can't"
        )
    if recipe.engine.routed_experts and not caps.routed_experts:
        raise ConfigError("engine.routed_experts needs engine.kind = sglang: this engine can't say where tokens went")
    if recipe.run.deterministic and not (caps.seeded and caps.batch_invariant):
        raise ConfigError("run.deterministic needs engine.kind = embedded: this engine is not reproducible")
    if recipe.pacing.max_staleness > 0 and not caps.in_flight:
        raise ConfigError(
            "pacing.max_staleness > 0 needs an engine that takes weights while requests run; this one can't"
        )


def _embedded(recipe: Recipe, config: Mapping[str, Any]) -> Engine:
    return EmbeddedEngine(
        config,
        dtype=recipe.model.serving_dtype,
        max_rows=recipe.engine.max_rows,
        max_length_tokens=recipe.model.max_length_tokens,
        on_swap=recipe.engine.on_swap,
        kv_on_swap=recipe.engine.kv_on_swap,
        deterministic=recipe.run.deterministic,
        threads=recipe.daemons.threads_per_process,
        lora=lora_of(recipe.model),
    )


def chosen(recipe: Recipe, host: SglangHost) -> str:
    """embedded or sglang. ``auto`` is SGLang where there is a GPU and the host names SGLang's interpreter."""
    kind = recipe.engine.kind
    if kind == "sglang" and not host.usable:
        raise ConfigError(
            "engine.kind = sglang, but this host has none: run `temper engine install --cpu` (or --cuda), or start the"
            ' actor with --host FILE holding [actor.sglang] python = "/path/to/its/venv/bin/python"'
        )
    if kind != "auto":
        return kind
    if not torch.cuda.is_available():
        return "embedded"
    if host.usable:
        return "sglang"
    log(
        "this host has a GPU but its host file names no [actor.sglang] python: sampling with the embedded engine on CPU"
    )
    return "embedded"


async def _sglang(recipe: Recipe, files: Mapping[str, bytes], config: Mapping[str, Any], host: SglangHost) -> Engine:
    from temper.actor.engines.sglang import SglangEngine
    from temper.actor.engines.sglang_request import SUPPORT_LIMIT, TIES

    check_served(config)
    if recipe.engine.routed_experts and not record_width(config):
        raise ConfigError(
            f"engine.routed_experts = true, but the model is a {config.get('model_type')!r} without num_experts_per_tok: it"
            " routes nothing, set engine.routed_experts = false"
        )
    shape = ServerShape(
        recipe.model.serving_dtype,
        recipe.engine.max_rows,
        recipe.model.max_length_tokens,
        recipe.engine.routed_experts,
    )
    if recipe.sampling.top_k > SUPPORT_LIMIT - TIES:
        raise ConfigError(
            f"sampling.top_k = {recipe.sampling.top_k}: SGLang names at most {SUPPORT_LIMIT - TIES} ids of what truncation left"
        )
    recompute = recipe.engine.kv_on_swap == "recompute"
    engine = SglangEngine(
        host,
        shape,
        files,
        int(config.get("vocab_size", 0)),
        recompute=recompute,
        on_swap=recipe.engine.on_swap,
        lora=lora_of(recipe.model),
    )
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine
