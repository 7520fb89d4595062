"""Models: the micro model is its seed's, the shipped one really speaks, and a wrong folder is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from temper.common.config import Model
from temper.common.errors import ConfigError
from temper.learner import models, smollm2
from tokenizers import Tokenizer

MICRO = Model(path="micro", vocabulary="abc>")


def test_the_micro_model_is_a_function_of_its_seed() -> None:
    first, same, other = (models.micro(MICRO, seed) for seed in (1, 1, 2))
    for a, b in zip(first.model.state_dict().values(), same.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.model.model.embed_tokens.weight, other.model.model.embed_tokens.weight)
    assert first.name == same.name


def test_making_a_model_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    models.micro(MICRO, 1)
    assert torch.equal(torch.rand(3), expected)


def test_characters_are_tokens_and_decode_to_themselves() -> None:
    tokenizer = Tokenizer.from_str(models.micro(MICRO, 0).bundle_files["tokenizer.json"].decode())
    ids = tokenizer.encode("cab>").ids
    assert ids == [3, 1, 2, 4]
    assert tokenizer.decode([*ids, 0]) == "cab>"


@pytest.mark.parametrize("vocabulary", ["", "aba"])
def test_a_wrong_vocabulary_is_named(vocabulary: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocabulary"):
        models.micro(Model(vocabulary=vocabulary), 0)


def test_a_missing_or_foreign_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        models.load(Model(path=str(tmp_path / "none")), 0, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        models.load(Model(path=str(tmp_path)), 0, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="safetensors"):
        models.load(Model(path=str(tmp_path)), 0, tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("config.json", b"{", "config.json of the model is not JSON"),
        ("config.json", b"[]", "expected an object"),
        ("config.json", b'{"architectures": 3}', "architecture unknown, expected one of"),
        ("model.safetensors", b"nothing of the kind", "its weights cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    made = models.micro(Model(vocabulary="ab", hidden_size=8, heads=2, layers=1, intermediate_size=8), 0)
    made.model.save_pretrained(tmp_path)
    for file, content in made.bundle_files.items():
        (tmp_path / file).write_bytes(content)
    assert models.from_folder(tmp_path).eos_ids == (0,)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        models.from_folder(tmp_path)


def test_unpermute_inverts_the_interleaving_of_rotary_halves() -> None:
    heads, head_dim, width = 3, 8, 5
    plain = np.arange(heads * head_dim * width, dtype=np.float32).reshape(heads * head_dim, width)
    stored = plain.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(plain.shape)
    assert not np.array_equal(stored, plain)
    assert np.array_equal(smollm2.unpermute(stored, heads), plain)


def test_the_shipped_model_becomes_a_plain_folder_that_speaks(tmp_path: Path) -> None:
    folder = smollm2.convert(tmp_path)
    assert smollm2.verify(folder)
    loaded = models.from_folder(folder)
    assert loaded.eos_ids == (2,)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is").ids
    with torch.no_grad():
        logits = loaded.model(torch.tensor([ids])).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert (smollm2.convert(tmp_path) / "model.safetensors").stat().st_mtime_ns == made, "the cache was not used"
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    assert not smollm2.verify(folder)
    assert smollm2.verify(smollm2.convert(tmp_path)), "a damaged cache was not made again"
