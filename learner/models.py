"""Where a model comes from: made by the recipe (micro), shipped by a package (smollm2), or a local folder.

`load` gives the transformers model with fp32 masters and the bundle: every file that an engine needs beside the weights
(config, tokenizer, chat template). `trust_remote_code` is never set, and only safetensors files are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from temper.common.config import Model
from temper.common.errors import ConfigError
from temper.common.model_files import NAMES, end_ids, object_in
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

ARCHITECTURES = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
)
END = "<eos>"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A trainable model: fp32 parameters, and the files that describe it to engines."""

    model: PreTrainedModel
    bundle_files: Mapping[str, bytes]
    name: str
    eos_ids: tuple[int, ...]


def load(model: Model, seed: int, cache_dir: Path) -> LoadedModel:
    """The model of a recipe; ConfigError when it is missing or not one that Temper trains."""
    if model.path == "micro":
        return micro(model, seed)
    if model.path == "smollm2":
        from temper.learner.smollm2 import convert

        return from_folder(convert(cache_dir))
    return from_folder(Path(model.path).expanduser())


def from_folder(folder: Path) -> LoadedModel:
    """A local Hugging Face folder with safetensors weights."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path {str(folder)!r}: no config.json there; give a local Hugging Face folder, 'micro' or 'smollm2'"
        )
    files = {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
    named = object_in(files, "config.json").get("architectures")
    architecture = named[0] if isinstance(named, list) and named else "unknown"
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model.path {str(folder)!r}: architecture {architecture}, expected one of {', '.join(ARCHITECTURES)}"
        )
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path {str(folder)!r}: no *.safetensors files there; convert the weights first")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"model.path {str(folder)!r}: no tokenizer.json there (a fast tokenizer is needed)")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.path {str(folder)!r}: its weights cannot be loaded: {error}") from error
    return LoadedModel(loaded, files, folder.name, end_ids(files))


def micro(model: Model, seed: int) -> LoadedModel:
    """A small Llama over single characters, its weights drawn from `seed`."""
    characters = list(dict.fromkeys(model.vocabulary))
    if not characters:
        raise ConfigError("model.vocabulary is empty: the micro model needs its characters, one token each")
    if len(characters) != len(model.vocabulary):
        raise ConfigError(f"model.vocabulary {model.vocabulary!r} names a character twice")
    config = LlamaConfig(
        vocab_size=len(characters) + 1,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        max_position_embeddings=model.max_length_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        attention_bias=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    files = {
        "config.json": json.dumps(config.to_dict(), sort_keys=True).encode(),
        "tokenizer.json": json.dumps(character_tokenizer(characters), sort_keys=True).encode(),
    }
    name = "micro-" + hashlib.blake2b(files["config.json"] + files["tokenizer.json"], digest_size=4).hexdigest()
    return LoadedModel(made, files, name, (0,))


def character_tokenizer(characters: list[str]) -> dict[str, Any]:
    """A tokenizer.json with one token a character and ``<eos>`` as id 0; unknown characters are an error to encode."""
    vocabulary = {END: 0} | {character: index for index, character in enumerate(characters, start=1)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": END},
    }
