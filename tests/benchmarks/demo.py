"""The demo over fresh seeds, and what its daemons cost: steady samples/s beside the bare in-process loop and TRL.

``bin/bench demo [--seeds 5] [--steps 150] [--staleness S]``. Accuracy comes from whole `temper demo` runs, S steps off policy.
Speed is measured on the rule domain alone (TRL has no sandbox): the same micro model, 16 prompts x 16 samples of at most 4
tokens, all three in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from temper.actor.domains import reverse
from temper.common import recipe as recipes
from temper.common.config import Recipe
from temper.common.schema import SandboxJob, Verdict

FOLDER = Path(__file__).parent
SPEED_RECIPE = """
[run]
name = "speed"
max_steps = {steps}
checkpoint_every_steps = 0
[model]
path = "micro"
vocabulary = "abcdefghijklmnopqrstuvwxyz0123456789+-*>"
max_length_tokens = 16
[pacing]
max_staleness = 2
[sampling]
max_new_tokens = 4
[warm_start]
max_steps = 100
until_likelihood = 0.3
learning_rate = 2e-3
[eval]
tasks_per_domain = 20
[engine]
kind = "embedded"
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


class NoGrader:
    """The rule domain executes nothing."""

    async def run(self, job: SandboxJob) -> Verdict:
        raise AssertionError(f"unexpected job {job.job_id}")


def sibling(name: str) -> ModuleType:
    """A helper module beside this file."""
    spec = importlib.util.spec_from_file_location(f"temper_benchmark{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_temper(recipe: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    """One whole run as a user starts it; its summary."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "temper.cli.main",
        "run",
        recipe,
        "--run",
        str(run_dir),
        "--json",
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


async def bare_loop(recipe: Recipe, folder: Path) -> float:
    """Samples/s of the in-process loop."""
    async with sibling("_inprocess").Loop(recipe, NoGrader(), folder) as loop:
        await loop.warm()
        await loop.measure(20)
        rate: float = await loop.measure(recipe.run.max_steps)
        return rate


def trl(recipe: Recipe, folder: Path, steps: int) -> dict[str, Any]:
    """TRL's figures on the same model and prompts, in a process of its own."""
    from temper.learner import models

    loaded = models.load(recipe.model, recipe.run.seed, folder)
    model = folder / "model"
    loaded.model.save_pretrained(model)
    for name, data in loaded.bundle_files.items():
        (model / name).write_bytes(data)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    domain = reverse.make({})
    tasks = [domain.tasks("train", 0, seed) for seed in range(512)]
    job = {
        "model": str(model),
        "threads": os.cpu_count(),
        "bf16": False,
        "groups": recipe.pacing.groups_per_step,
        "samples_per_group": recipe.pacing.samples_per_group,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "steps": steps,
        "learning_rate": recipe.optimizer.learning_rate,
        "prompts": [task.prompt for task in tasks],
        "answers": [task.private for task in tasks],
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-P", str(FOLDER / "_peer_trl.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def staleness(steps: int, recipe: Recipe) -> list[str]:
    """Overrides for samples that are old: as many groups are sampled at once as may be ahead of the learner."""
    groups = (steps + 1) * recipe.pacing.groups_per_step
    rows = groups * recipe.pacing.samples_per_group
    return [f"--pacing.max_staleness={steps}", f"--engine.leases_in_flight={groups}", f"--engine.max_rows={rows}"]


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals."""
    parser = argparse.ArgumentParser(prog="bin/bench demo", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5, help="whole demo runs, each with a seed of its own")
    parser.add_argument("--steps", type=int, default=150, help="steps of the speed comparison")
    parser.add_argument(
        "--staleness", type=int, help="steps that the demo's samples may be behind; the recipe's if left out"
    )
    arguments = parser.parse_args(argv)
    stale = [] if arguments.staleness is None else staleness(arguments.staleness, recipes.load("demo"))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(arguments.seeds):
            summary = run_temper("demo", folder / f"demo-{seed}", f"--run.seed={100 + seed}", *stale)
            domains = {f"{key}_after": round(value["accuracy_after"], 3) for key, value in summary["domains"].items()}
            before = {f"{key}_before": round(value["accuracy_before"], 3) for key, value in summary["domains"].items()}
            rows.append(
                {
                    "what": "demo",
                    "seed": 100 + seed,
                    **before,
                    **domains,
                    "lag_mean": round(summary["lag_mean"], 2),
                    "wall_s": round(summary["wall_s"], 1),
                }
            )
        path = folder / "speed.toml"
        path.write_text(SPEED_RECIPE.format(steps=arguments.steps))
        recipe = recipes.load(str(path))
        bare = asyncio.run(bare_loop(recipe, folder))
        daemons = float(run_temper(str(path), folder / "speed")["samples_per_s"])
        peer = trl(recipe, folder, arguments.steps)
    rows += [
        {"what": "bare in-process loop, 1 thread", "samples_per_s": round(bare)},
        {"what": "Temper, all daemons", "samples_per_s": round(daemons), "to_bare": round(daemons / bare, 2)},
        {"what": "TRL GRPOTrainer", "samples_per_s": round(peer["samples_per_s"]), "peak_bytes": peer["peak_bytes"]},
    ]
    demos = [row for row in rows if row["what"] == "demo"]
    goals = [
        {
            "name": "every seed: reverse accuracy",
            "goal": ">= 0.9",
            "value": min((row["reverse_after"] for row in demos), default=None),
            "met": bool(demos) and all(row["reverse_after"] >= 0.9 for row in demos),
        },
        {
            "name": "every seed: tinycode accuracy",
            "goal": ">= 0.85",
            "value": min((row["tinycode_after"] for row in demos), default=None),
            "met": bool(demos) and all(row["tinycode_after"] >= 0.85 for row in demos),
        },
    ]
    return {"rows": rows, "goals": goals}
