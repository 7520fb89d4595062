"""Mixtures of experts are loaded, published and exported under the names that their checkpoints have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from temper.actor.engines.sglang_models import check
from temper.actor.engines.shape import from_config

sys.path.insert(0, str(Path(__file__).parent))

from mixture_kit import KINDS, config_of, model_of
from temper.cli import export as exporting
from temper.common.config import Model, Recipe
from temper.common.errors import ConfigError
from temper.learner import checkpoint, models
from temper.learner.mixtures import published
from temper.learner.session import Session
from temper.learner.step import Trainer


def folder_of(kind: str, path: Path) -> Any:
    """A model saved by transformers, with a tokenizer."""
    model = model_of(kind)
    model.save_pretrained(path)
    tokenizer = models.character_tokenizer(list("abcdefghij"))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_named_and_divided_as_transformers_saves_them(kind: str, tmp_path: Path) -> None:
    model = folder_of(kind, tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    ours = published({name: p.detach() for name, p in model.named_parameters()}, model.config.model_type)
    assert ours.keys() == theirs.keys() and any(".experts.4." in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_folder_is_loaded_published_and_exported(kind: str, tmp_path: Path) -> None:
    folder_of(kind, tmp_path / "model")
    theirs = load_file(tmp_path / "model" / "model.safetensors")
    loaded = models.from_folder(tmp_path / "model")
    session = Session(loaded.model, Recipe())
    tensors = session.serving_tensors()
    assert {name: bits.bits.tobytes() for name, bits in tensors.items()} == {
        name: tensor.numpy().tobytes() for name, tensor in theirs.items()
    }
    checkpoint.write(tmp_path / "run" / "checkpoints", session.checkpoint("run", 1), 1)
    (tmp_path / "run" / "bundle").mkdir()
    for name, data in loaded.bundle_files.items():
        (tmp_path / "run" / "bundle" / name).write_bytes(data)
    exporting.export(tmp_path / "run", tmp_path / "out", tmp_path / "run" / "bundle", None, "float32")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == theirs.keys() and all(torch.equal(exported[name], theirs[name]) for name in theirs)
    again = models.from_folder(tmp_path / "out").model
    for (name, one), (_, other) in zip(loaded.model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_with_adapters_the_experts_are_frozen_and_cast_once() -> None:
    recipe = Recipe(model=Model(lora_rank=2))
    trainer = Trainer(model_of("qwen3_moe"), recipe, 10)
    first, again = trainer.serving_tensors(), trainer.serving_tensors()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert again[name] is first[name] and first.keys() == again.keys()
    assert any("lora_B" in key for key in first)


def test_the_embedded_engine_says_who_runs_mixtures() -> None:
    config = config_of("qwen3_moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    with pytest.raises(ConfigError, match=r"architecture Qwen3MoeForCausalLM, the embedded engine runs .*; use sglang"):
        from_config(config)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "qwen3_moe",
            {"mlp_only_layers": [0]},
            r"Qwen3MoeForCausalLM: mlp_only_layers = \[0\], decoder_sparse_step = 1",
        ),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "SGLang gives every layer of it experts"),
        ("olmoe", {"norm_topk_prob": True}, "does not normalise"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: SGLang does not clip"),
    ],
)
def test_mixtures_that_sglang_computes_otherwise_are_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    named = {"qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "olmoe": "Olmoe"}[kind] + "ForCausalLM"
    config = config_of(kind).to_dict() | {"architectures": [named]}
    check(config)
    with pytest.raises(ConfigError, match=says):
        check(config | changes)
