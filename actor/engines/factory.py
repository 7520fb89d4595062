"""The engine that a recipe asks for, on this host. The recipe is checked against what it can do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from temper.actor.engines.embedded import EmbeddedEngine
from temper.common.config import Recipe
from temper.common.errors import ConfigError


def make_engine(recipe: Recipe, files: Mapping[str, bytes]) -> EmbeddedEngine:
    """An engine without weights for the model in the bundle `files`. ConfigError if it can't run it."""
    if recipe.engine.kind == "sglang":
        raise ConfigError("engine.kind = sglang: this version has only the embedded engine; use embedded or auto")
    try:
        config: Any = json.loads(files["config.json"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the model bundle has no usable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config.json of the bundle holds {type(config).__name__}, expected an object")
    return EmbeddedEngine(
        config,
        dtype=recipe.model.serving_dtype,
        max_rows=recipe.engine.max_rows,
        max_length_tokens=recipe.model.max_length_tokens,
        kv_on_swap=recipe.engine.kv_on_swap,
        deterministic=recipe.run.deterministic,
        threads=recipe.daemons.threads_per_process,
    )
