"""The files that describe a model beside its weights: which of them travel, and what is read in them. Pure.

They come from model folders and peers, so everything wrong with them is a `ConfigError` that names the file. Called by
the learner (which sends them), the actor (which takes no others) and `actor.text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from temper.common.errors import ConfigError

NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def object_in(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in the file `name`, {} where there is no such file. ConfigError if it holds anything else."""
    if name not in files:
        return {}
    try:
        value = json.loads(bytes(files[name]))
    except ValueError as error:
        raise ConfigError(f"{name} of the model is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} of the model holds {type(value).__name__}, expected an object")
    return value


def end_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """The end-of-sequence ids of a model: generation_config.json first, then config.json. ConfigError if there are none."""
    for name in ("generation_config.json", "config.json"):
        value = object_in(files, name).get("eos_token_id")
        if value is not None:
            found = value if isinstance(value, list) else [value]
            if not found or any(isinstance(token, bool) or not isinstance(token, int) for token in found):
                raise ConfigError(
                    f"{name} of the model has eos_token_id {value!r}, expected a token id or a list of them"
                )
            return tuple(found)
    raise ConfigError("the model names no eos_token_id in generation_config.json or config.json")
