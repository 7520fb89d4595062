"""A whole run whose actors sample through real SGLang servers; the actor's server is killed in the middle of it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from temper.common import metrics as names
from temper.learner.models import character_tokenizer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from sglang_live import need_sglang

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]
SHORT = (
    "--engine.kind=sglang",
    "--run.max_steps=20",
    "--warm_start.max_steps=20",
    "--pacing.groups_per_step=4",
    "--pacing.samples_per_group=4",
    "--pacing.weights_timeout_s=30",
    "--eval.tasks_per_domain=4",
    "--eval.samples_per_task=1",
    "--eval.timeout_s=900",
    "--engine.max_rows=16",
)


MIXTURE = """
[run]
name = "mixture"
max_steps = 12
[model]
path = "{model}"
max_length_tokens = 16
[pacing]
groups_per_step = 4
samples_per_group = 4
max_staleness = 2
weights_timeout_s = 30
[sampling]
max_new_tokens = 8
[objective]
name = "decoupled_ppo"
kl_coefficient = 0.01
[optimizer]
learning_rate = 1e-3
[warm_start]
max_steps = 20
[eval]
tasks_per_domain = 4
samples_per_task = 1
timeout_s = 900
[engine]
kind = "sglang"
max_rows = 16
routed_experts = {routed_experts}
[daemons]
sandboxes = 0
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


def mixture_in(folder: Path) -> Path:
    """A tiny random Qwen3 with a mixture of experts, as transformers saves it, and a tokenizer of characters."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=28,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=0,
    )
    model: Any = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    characters = [*"abcdefghijklmnopqrstuvwxyz>"]
    (folder / "tokenizer.json").write_text(json.dumps(character_tokenizer(characters)))
    return folder


def test_a_run_of_a_mixture_replays_its_routing(fleet: Any, audit: Any, tmp_path: Path) -> None:
    """Its weights reach the server as tensors of each expert, its samples say where tokens went, and the learner goes there."""
    need_sglang()
    recipe = tmp_path / "mixture.toml"
    recipe.write_text(MIXTURE.format(model=mixture_in(tmp_path / "model"), routed_experts="true"))
    fleet.broker(str(recipe))
    fleet.learner()
    fleet.peer("actor-1", "temper.actor")
    fleet.evaluator()
    for name in ("learner", "broker", "actor-1", "eval-1"):
        assert fleet.wait_exit(name, 900) == 0, fleet.logs()
    summary = fleet.summary()
    assert summary.exit_code == 0 and summary.steps == 12
    assert audit(fleet.run_dir) == {"trained": 12 * 4}
    board = EventAccumulator(summary.tensorboard)
    board.Reload()

    def drawn(name: str) -> list[float]:
        return [event.value for event in board.Scalars(name)]

    assert len(drawn(names.LEARNER_RECORDED)) == 12 and min(drawn(names.LEARNER_RECORDED)) == 1.0
    assert all(0 <= share < 0.5 for share in drawn(names.LEARNER_REPLACED))
    assert drawn(names.LEARNER_REPLACED)[0] < 0.01  # sampled by the same weights, up to ties
    assert max(drawn(names.LEARNER_GAP)) < 1e-4
    assert "malformed" not in fleet.daemons["learner"].text()


def test_asking_a_dense_model_for_its_routing_ends_the_run_with_the_reason(fleet: Any) -> None:
    fleet.broker("demo", *SHORT, "--engine.routed_experts=true")
    fleet.learner()
    assert fleet.wait_exit("learner", 120) == 2, fleet.logs()
    assert "is a 'llama', which is dense and routes nothing: set engine.routed_experts = false" in fleet.logs()


def test_a_run_samples_through_sglang_and_survives_its_servers_death(fleet: Any, audit: Any) -> None:
    need_sglang()
    fleet.broker("demo", *SHORT)
    fleet.learner()
    fleet.peer("sandbox-1", "temper.sandbox")
    fleet.peer("actor-1", "temper.actor")
    fleet.wait_log("actor-1", r"READY", 700)
    fleet.evaluator()
    fleet.wait_step(3, 300)
    (log,) = {Path(found) for found in re.findall(r"started \(pid \d+\), log (\S+)", fleet.daemons["actor-1"].text())}
    assert "fired up" in log.read_text()
    server = next(
        child
        for child in psutil.Process(fleet.daemons["actor-1"].process.pid).children()
        if "launch_server" in " ".join(child.cmdline())
    )
    os.killpg(server.pid, signal.SIGKILL)
    for name in ("learner", "broker", "actor-1", "sandbox-1", "eval-1"):
        assert fleet.wait_exit(name, 900) == 0, fleet.logs()
    assert "killed by SIGKILL" in fleet.daemons["actor-1"].text()
    summary = fleet.summary()
    assert summary.exit_code == 0 and summary.steps == 20 and summary.accuracy_after is not None
    states = audit(fleet.run_dir)
    assert states["trained"] == 20 * 4
    assert not server.is_running()
    assert "disagree by" not in fleet.daemons["learner"].text()  # the alarm of engine and learner apart
