"""A deterministic run through broker, actor and learner equals the in-process loop bit for bit."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from temper.common import recipe as recipes
from temper.common.schema import SandboxJob, Verdict
from temper.learner.checkpoint import load as load_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RECIPE = """
[run]
name = "deterministic"
seed = 11
max_steps = 10
deterministic = true

[model]
path = "micro"
vocabulary = "abcdefgh>"
hidden_size = 32
intermediate_size = 64
max_length_tokens = 12

[pacing]
groups_per_step = 4
samples_per_group = 8
max_staleness = 0

[sampling]
max_new_tokens = 6

[objective]
name = "dr_grpo"

[warm_start]
max_steps = 100
until_likelihood = 0.3

[eval]
tasks_per_domain = 10
samples_per_task = 2

[engine]
kind = "embedded"
max_rows = 32

[daemons]
sandboxes = 0

[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
options = { letters = "abcdefgh", length = 2 }
"""


class NoGrader:
    """The reverse domain executes nothing."""

    async def run(self, job: SandboxJob) -> Verdict:
        raise AssertionError(f"unexpected job {job.job_id}")


def inprocess() -> Any:
    """The in-process loop of the benchmarks."""
    path = Path(__file__).parents[1] / "benchmarks" / "_inprocess.py"
    spec = importlib.util.spec_from_file_location("temper_inprocess", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def by_hand(path: Path, cache: Path) -> dict[str, bytes]:
    """Masters after the recipe's steps, in this process."""
    recipe = recipes.load(str(path))
    async with inprocess().Loop(recipe, NoGrader(), cache) as loop:
        await loop.warm()
        for _ in range(recipe.run.max_steps):
            await loop.step()
        tensors, _ = loop.trainer.state()
    return {name: bytes(value.numpy().tobytes()) for name, value in tensors.items() if name.startswith("model.")}


def test_ten_steps_equal_the_in_process_loop_bit_for_bit(fleet: Any, tmp_path: Path) -> None:
    path = tmp_path / "deterministic.toml"
    path.write_text(RECIPE)
    fleet.broker(str(path))
    fleet.learner()
    fleet.peer("actor-1", "temper.actor")
    fleet.evaluator()
    assert fleet.wait_exit("learner", 240) == 0, fleet.logs()
    expected = asyncio.run(by_hand(path, tmp_path))
    summary = fleet.summary()
    assert summary.steps == 10
    saved = load_checkpoint(Path(summary.checkpoint)).tensors
    found = {name: value.numpy().tobytes() for name, value in saved.items() if name.startswith("model.")}
    assert found.keys() == expected.keys()
    different = [name for name in expected if found[name] != expected[name]]
    rewards = [line.reward["reverse"] for line in fleet.progress() if line.kind == "step"]
    assert any(0.0 < reward < 1.0 for reward in rewards), "no step had anything to learn from"
    assert not different, f"{len(different)} of {len(expected)} tensors differ, first {different[:3]}"
