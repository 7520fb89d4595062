"""A real model on real tasks: what SmolLM2-135M learns from the shipped recipe, and its speed and memory beside TRL.

``bin/bench smollm2 [--seeds 2] [--steps 60] [--peer-steps 3]``. Accuracy comes from whole `temper run smollm2` runs, each with a
seed of its own; so do step times (after the first evaluation is over) and every daemon's peak memory. TRL's GRPO trainer
then gets the prompts of the same schedule with the same sizes, stop token and learning rate, and both cores. Its rewards cost it
nothing (a comparison of two strings), while Temper's programs are executed in nsjail. About 25 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from temper.actor.text import Text
from temper.common import recipe as recipes
from temper.common.config import Recipe
from temper.common.domains import Domain
from temper.common.reports import Progress, ProgressReader
from temper.common.schedule import Schedule

FOLDER = Path(__file__).parent
GAIN = 0.15
SPEED = 2.0
MEMORY = 2 / 3
PEER = "TRL GRPOTrainer"
MICRO_BATCH = 32  # samples of TRL's forward and backward: all 128 at once take over 23 GB


def sibling(name: str) -> ModuleType:
    """The benchmark `name` beside this file."""
    spec = importlib.util.spec_from_file_location(f"temper_benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steady_step_s(lines: list[Progress]) -> float:
    """Seconds a step, over the steps that began after the first evaluation had ended (its evaluator shares the cores)."""
    begun = max((line.time_s for line in lines if line.kind == "eval" and line.when == "before"), default=0.0)
    steps = [line.time_s for line in lines if line.kind == "step" and line.time_s > begun]
    if len(steps) < 2:
        raise RuntimeError(f"{len(steps)} steps after the first evaluation: more --steps are needed for a step time")
    return (steps[-1] - steps[0]) / (len(steps) - 1)


def mix(recipe: Recipe, values: dict[str, float]) -> float:
    """Mean of the trained domains' `values`, weighted with their shares."""
    shares = {domain.name: domain.share for domain in recipe.domains if domain.train and domain.share > 0}
    return sum(share * values[name] for name, share in shares.items()) / sum(shares.values())


def learn(seed: int, folder: Path, overrides: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """One whole run: its row, a row for each domain, and its curve."""
    recipe = recipes.load("smollm2")
    run_dir = folder / f"seed-{seed}"
    summary = sibling("demo").run_temper("smollm2", run_dir, f"--run.seed={seed}", *overrides)
    lines = ProgressReader(run_dir).read()
    trained = {domain.name for domain in recipe.domains if domain.train and domain.share > 0}
    domains = [
        {
            "what": "domain" if name in trained else "floor",
            "seed": seed,
            "domain": name,
            "before": round(row["accuracy_before"], 3),
            "interval_before": [round(end, 3) for end in row["interval_before"]],
            "after": round(row["accuracy_after"], 3),
            "interval_after": [round(end, 3) for end in row["interval_after"]],
            "solved_before": row["solved_before"],
            "solved_after": row["solved_after"],
            "tasks": row["tasks"],
            "eval_samples": row["eval_samples"],
        }
        for name, row in summary["domains"].items()
    ]
    step_s = steady_step_s(lines)
    samples = recipe.pacing.groups_per_step * recipe.pacing.samples_per_group
    ends = {when: {row["domain"]: row[when] for row in domains} for when in ("before", "after")}
    row = {
        "what": "Temper, all daemons",
        "seed": seed,
        "steps": summary["steps"],
        "mix_before": round(mix(recipe, ends["before"]), 3),
        "mix_after": round(mix(recipe, ends["after"]), 3),
        "wall_s": summary["wall_s"],
        "step_s": round(step_s, 2),
        "samples_per_s": round(samples / step_s, 2),
        "peak_bytes": summary["peak_bytes"],
        "peak_bytes_all": sum(summary["peak_bytes"].values()),
        "tokens_sampled": summary["tokens_sampled"],
        "zero_variance_groups": summary["groups"].get("zero_variance", 0),
    }
    curve = {
        "what": "curve",
        "seed": seed,
        "lines": [
            {"kind": line.kind, "time_s": line.time_s, "step": line.step, "when": line.when, "accuracy": line.accuracy}
            for line in lines
            if line.kind in ("step", "eval")
        ],
    }
    return row, domains, curve


def peer(folder: Path, steps: int) -> dict[str, Any]:
    """TRL's row: the same model and the prompts of the same schedule."""
    from temper.learner import smollm2

    recipe = recipes.load("smollm2")
    model = smollm2.convert(Path(os.environ.get("TEMPER_CACHE", Path.home() / ".cache" / "temper")))
    text = Text({path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".jinja")})
    shares = {domain.name: (0, domain.share) for domain in recipe.domains if domain.train and domain.share > 0}
    made: dict[str, Domain] = {
        domain.name: importlib.import_module(domain.module).make(domain.options)
        for domain in recipe.domains
        if domain.name in shares
    }
    schedule = Schedule(recipe.run.seed)
    tasks = []
    for _ in range(recipe.pacing.groups_per_step * steps):
        lease = schedule.next("train", shares)
        domain = made[lease.domain]
        task = domain.tasks("train", lease.level, lease.task_seed)
        tasks.append((task.prompt if isinstance(task.prompt, str) else text.render(task.prompt), domain, task))
    job = {
        "model": str(model),
        "threads": os.cpu_count(),
        "bf16": True,
        "groups": recipe.pacing.groups_per_step,
        "samples_per_group": recipe.pacing.samples_per_group,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "stop_token_ids": [text.encode(stop)[0] for stop in recipe.sampling.stop],
        "micro_batch": MICRO_BATCH,
        "steps": steps,
        "learning_rate": recipe.optimizer.learning_rate,
        "prompts": [prompt for prompt, _, _ in tasks],
        "answers": [(domain.demonstration(task) or "").split("\n")[0].strip() for _, domain, task in tasks],
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-P", str(FOLDER / "_peer_trl.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    samples = recipe.pacing.groups_per_step * recipe.pacing.samples_per_group
    return {
        "what": f"{PEER}, bf16, all cores, micro-batches of {MICRO_BATCH}, rewards for nothing",
        "step_s": round(figures["step_s"], 2),
        "samples_per_s": round(samples / figures["step_s"], 2),
        "peak_bytes_all": figures["peak_bytes"],
        "steps": figures["steps"],
    }


def peer_of(result: Path) -> dict[str, Any]:
    """TRL's row of an earlier result."""
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return next(row for row in rows if row["what"].startswith(PEER))


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals."""
    parser = argparse.ArgumentParser(prog="bin/bench smollm2", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=2, help="whole runs, each with a seed of its own")
    parser.add_argument("--steps", type=int, default=60, help="RL steps of each run")
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks a domain, two samples each")
    parser.add_argument("--peer-steps", type=int, default=3, help="steps of TRL")
    parser.add_argument(
        "--peer-of", type=Path, help="take TRL's row from this earlier result instead: it takes minutes a step"
    )
    arguments = parser.parse_args(argv)
    overrides = [f"--run.max_steps={arguments.steps}", f"--eval.tasks_per_domain={arguments.tasks}"]
    runs, domains, curves = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(arguments.seeds):
            row, of_domains, curve = learn(seed, folder, overrides)
            runs.append(row)
            domains += of_domains
            curves.append(curve)
            print(f"seed {seed}: {row['mix_before']} -> {row['mix_after']}, {row['step_s']} s a step", file=sys.stderr)
        peer_row = peer(folder, arguments.peer_steps) if arguments.peer_of is None else peer_of(arguments.peer_of)
    gains = [round(row["mix_after"] - row["mix_before"], 3) for row in runs]
    worse = [
        f"{row['domain']}, seed {row['seed']}"
        for row in domains
        if row["what"] == "domain" and row["after"] < row["interval_before"][0]
    ]
    faster = peer_row["step_s"] / statistics.mean(row["step_s"] for row in runs)
    memory = max(row["peak_bytes_all"] for row in runs) / peer_row["peak_bytes_all"]
    goals = [
        {
            "name": "every seed: held-out accuracy over the mix, gain",
            "goal": f">= {GAIN}",
            "value": min(gains),
            "met": min(gains) >= GAIN,
        },
        {"name": "domains that are worse than their interval before", "goal": "none", "value": worse, "met": not worse},
        {"name": "steps/s, to TRL's", "goal": f">= {SPEED}", "value": round(faster, 2), "met": faster >= SPEED},
        {
            "name": "peak memory of all daemons, to TRL's",
            "goal": f"<= {MEMORY:.2f}",
            "value": round(memory, 2),
            "met": memory <= MEMORY,
        },
    ]
    return {"rows": [*runs, peer_row, *domains, *curves], "goals": goals}
