"""Any local Llama or Qwen folder by model.path: loaded, sampled by the embedded engine, trained, served again."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from temper.common import recipe as recipes
from temper.common.config import Model
from temper.common.schema import SandboxJob, Verdict
from temper.learner import models
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

RECIPE = """
[run]
max_steps = 2
[model]
path = "FOLDER"
max_length_tokens = 12
[pacing]
groups_per_step = 4
samples_per_group = 4
max_staleness = 0
[sampling]
max_new_tokens = 5
[objective]
name = "dr_grpo"
[warm_start]
max_steps = 30
until_likelihood = 0.9
[eval]
tasks_per_domain = 3
samples_per_task = 1
[engine]
kind = "embedded"
max_rows = 16
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
options = { letters = "abcd", length = 1 }
"""
SIZES = {
    "vocab_size": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}


class NoGrader:
    """The reverse domain executes nothing."""

    async def run(self, job: SandboxJob) -> Verdict:
        raise AssertionError(f"unexpected job {job.job_id}")


def loop_class() -> Any:
    """The in-process loop of the benchmarks."""
    path = Path(__file__).parents[1] / "benchmarks" / "_inprocess.py"
    spec = importlib.util.spec_from_file_location("temper_inprocess", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Loop


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_local_folder_is_sampled_and_trained(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    torch.manual_seed(3)
    MODELS[kind]().save_pretrained(folder)
    tokenizer = models.micro(Model(vocabulary="abcd>", hidden_size=8, heads=2), 0).bundle_files["tokenizer.json"]
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (tmp_path / "local.toml").write_text(RECIPE.replace("FOLDER", str(folder)))
    recipe = recipes.load(str(tmp_path / "local.toml"))

    async def run() -> tuple[list[Any], float, Any]:
        async with loop_class()(recipe, NoGrader(), tmp_path) as loop:
            likelihood = await loop.warm()
            return [await loop.step() for _ in range(2)], likelihood, await loop.evaluate()

    reports, likelihood, accuracy = asyncio.run(run())
    assert likelihood > 0.3, "it learnt nothing from demonstrations"
    assert accuracy["reverse"].samples == 3
    for report in reports:
        assert report.metrics["learner/samples/trained"][0] == 16
        gap = report.mean("learner/engine/logprob_gap_nats")
        if gap is not None:  # no gradient, no forward: all groups may agree
            assert gap < 1e-5, "engine and learner compute different log-probabilities"
    assert any(report.mean("learner/engine/logprob_gap_nats") is not None for report in reports)
