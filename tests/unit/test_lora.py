"""Low-rank adapters: trained alone, published as adapters, sampled from as they are, saved, resumed and merged on export."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from temper.actor.engines.base import GenerateRequest, SamplingParams
from temper.actor.engines.embedded import EmbeddedEngine
from temper.actor.engines.sglang_weights import Mirror
from temper.cli import export as exporting
from temper.common import delta
from temper.common import recipe as recipes
from temper.common.bits import Weights, seal
from temper.common.config import LORA_TARGETS, Model, Recipe
from temper.common.errors import ConfigError
from temper.common.lora import adapted, lora_of
from temper.common.weight_format import unpack
from temper.learner import checkpoint
from temper.learner.adapters import attach, merged
from temper.learner.models import micro
from temper.learner.session import Session
from temper.learner.step import Trainer
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

import test_learner_step as kit

VOCABULARY = "abcdefghijkl"
MODEL = Model(vocabulary=VOCABULARY, hidden_size=16, intermediate_size=32, heads=2, lora_rank=3, lora_alpha=6.0)


def recipe(**model: Any) -> Recipe:
    """The step tests' recipe with adapters on the micro model."""
    fields = {name: getattr(MODEL, name) for name in MODEL.__slots__} | model
    return kit.change(model=fields)


def trainer(steps: int = 0, **model: Any) -> Trainer:
    made = Trainer(micro(MODEL, 0).model, recipe(**model), 10)
    for step in range(steps):
        made.train_step(kit.groups(step), step)
    return made


def sealed(made: Trainer, base: Weights | None = None) -> Weights:
    return seal(made.steps_done, 7, made.serving_tensors(), base)


def test_only_adapters_are_trained_and_every_target_has_one() -> None:
    made = trainer()
    named, trained = made.policy.named_masters(), made.policy.trained_masters()
    assert len(trained) == 2 * 2 * len(LORA_TARGETS) and all(adapted(name) in named for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert set(made.optimizer.named) == set(trained)
    before = {name: p.detach().clone() for name, p in named.items()}
    made.train_step(kit.groups(0), 0)
    changed = {name for name, p in made.policy.named_masters().items() if not torch.equal(p, before[name])}
    assert changed and changed <= set(trained)
    some = trainer(lora_targets=("q_proj", "down_proj")).policy.trained_masters()
    assert {name.split(".")[-3] for name in some} == {"q_proj", "down_proj"}


def test_before_the_first_step_the_model_is_the_one_without_adapters() -> None:
    plain, made = micro(MODEL, 0).model, trainer()
    ids = torch.tensor([[1, 5, 3, 2]])
    assert torch.equal(_logits(made, ids), plain(ids).logits)


def _logits(made: Trainer, ids: torch.Tensor) -> torch.Tensor:
    """Of the plain model that the trainer's merged weights make."""
    return _plain(made)(ids).logits


def _plain(made: Trainer) -> Any:
    model: Any = micro(MODEL, 1).model
    assert made.lora is not None
    tensors = merged({name: p.detach() for name, p in made.policy.named_masters().items()}, made.lora.scale)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


def test_a_delta_holds_adapters_only_and_the_frozen_rest_is_not_hashed_again() -> None:
    made = trainer()
    first = sealed(made)
    made.train_step(kit.groups(0), 0)
    second = sealed(made, first)
    names = sorted(second.tensors)
    chunks = list(delta.encode(first, second))
    touched = {names[record.tensor] for chunk in chunks for record in unpack(chunk)[0].records}
    assert touched and all(adapted(name) for name in touched)
    frozen = [name for name in names if not adapted(name)]
    assert frozen and all(second.tensors[name] is first.tensors[name] for name in frozen)
    assert delta.stage(chunks, first).digest == second.version.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_and_learner_agree_on_log_probabilities(dtype: str) -> None:
    """The engine computes adapters beside the weights: in fp32 as the merged model of transformers to rounding, in bf16 as
    the learner under autocast does."""

    async def scenario() -> None:
        made = trainer(2, serving_dtype=dtype, compute_dtype=dtype)
        with torch.no_grad():
            for name, parameter in made.policy.trained_masters().items():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
        config = json.loads(micro(MODEL, 0).bundle_files["config.json"])
        engine = EmbeddedEngine(config, dtype=dtype, max_rows=4, max_length_tokens=32, lora=lora_of(made.recipe.model))
        weights = sealed(made)
        assert await engine.apply(delta.stage(list(delta.encode(None, weights)), None)) == weights.version.digest
        for seed in range(3):
            sampling = SamplingParams(max_new_tokens=12, seed=seed)
            got = await engine.generate(GenerateRequest([1, 4, 2, 7], sampling))
            ids = torch.tensor([[1, 4, 2, 7, *got.ids]])
            with torch.no_grad():
                table = torch.log_softmax(_plain(made)(ids).logits[0].float(), -1)
            want = [float(table[3 + i, token]) for i, token in enumerate(got.ids)]
            assert got.logprobs == pytest.approx(want, abs=2e-5 if dtype == "float32" else 5e-2)
        await engine.close()

    asyncio.run(scenario())


def test_a_checkpoint_resumes_bit_for_bit_and_exports_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    loaded = micro(MODEL, 0)
    session = Session(loaded.model, recipe())
    for step in range(2):
        session.train_step(kit.groups(step))
    run = tmp_path / "run"
    checkpoint.write(run / "checkpoints", session.checkpoint("run", 1), 2)
    resumed = Session(micro(MODEL, 9).model, recipe())
    resumed.restore(checkpoint.load_newest(run / "checkpoints"))
    for one in (session, resumed):
        one.train_step(kit.groups(3))
    assert kit.weights(session.trainer) == kit.weights(resumed.trainer)
    (run / "bundle").mkdir()
    for name, data in loaded.bundle_files.items():
        (run / "bundle" / name).write_bytes(data)
    assert exporting.export(run, tmp_path / "out", run / "bundle", None, "float32") == 2
    restored = Session(micro(MODEL, 3).model, recipe())
    restored.restore(checkpoint.load_newest(run / "checkpoints"))
    folder: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    folder.eval()
    ids = torch.tensor([[1, 5, 3, 2]])
    with torch.no_grad():
        torch.testing.assert_close(folder(ids).logits, _logits(restored.trainer, ids), rtol=0, atol=1e-6)
        assert not torch.allclose(folder(ids).logits, loaded_logits(ids), atol=1e-4)
    with pytest.raises(ConfigError, match="another model"):
        Session(micro(MODEL, 0).model, recipe(lora_rank=2)).restore(checkpoint.load_newest(run / "checkpoints"))


def loaded_logits(ids: torch.Tensor) -> torch.Tensor:
    return micro(MODEL, 0).model(ids).logits


def test_sglang_gets_merged_weights_and_only_those_whose_adapter_changed() -> None:
    made = trainer(1)
    first = sealed(made)
    mirror = Mirror(made.lora)
    served = mirror.overwrite(delta.stage(list(delta.encode(None, first)), None))
    assert sorted(served) == sorted(mirror.names) and not any(adapted(name) for name in served)
    with torch.no_grad():
        made.policy.named_masters()["model.layers.1.mlp.up_proj.lora_B.weight"].add_(0.25)
    second = sealed(made, first)
    assert mirror.overwrite(delta.stage(list(delta.encode(first, second)), first)) == [
        "model.layers.1.mlp.up_proj.weight"
    ]
    assert made.lora is not None
    want = merged({name: p.detach() for name, p in made.policy.named_masters().items()}, made.lora.scale)
    for name in mirror.names:
        torch.testing.assert_close(mirror.tensor(name), want[name], rtol=0, atol=1e-6)


def test_adapters_that_do_not_fit_are_configuration_errors() -> None:
    lora = lora_of(MODEL)
    assert lora is not None and lora.scale == 2.0 and lora_of(Model()) is None
    with pytest.raises(ConfigError, match="no such linear layer"):
        attach(torch.nn.Sequential(torch.nn.Linear(2, 2)), lora, 0)
    with pytest.raises(ConfigError, match=r"lora_alpha has no effect: model.lora_rank is 0"):
        recipes.load("demo", ["--model.lora_alpha=8"])
    with pytest.raises(ConfigError, match=r"lora_targets = \['lm_head'\]: expected some of q_proj"):
        recipes.load("demo", ["--model.lora_rank=4", '--model.lora_targets=["lm_head"]'])
    assert recipes.load("demo", ["--model.lora_rank=4", '--model.lora_targets=["q_proj"]']).model.lora_rank == 4
