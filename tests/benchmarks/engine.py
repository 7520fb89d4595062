"""Temper through SGLang: its cost beside a bare load generator, pauses of updates in flight, accuracy against the other engine.

``bin/bench engine --json FILE [--seconds 20] [--updates 50] [--models tiny,smollm2] [--accuracy demo,smollm2 --seeds 3
[--steps N]]``. One real server at a time (`temper engine install`). The load generator posts the same bodies to the same
server and reads the JSON, no more; both run in this process, in turns. Every token of the updates under load is checked by
replaying its mixed cache with the versions that the engine names.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import uvloop
from temper.actor.engines.base import GenerateRequest, SamplingParams
from temper.actor.engines.factory import make_engine
from temper.actor.engines.sglang import SglangEngine
from temper.actor.engines.sglang_home import completed
from temper.actor.engines.sglang_host import SglangHost
from temper.actor.engines.sglang_request import body_of
from temper.common import recipe as recipes
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import encode, stage
from temper.common.errors import EnvironmentFault
from temper.learner import models
from temper.learner.__main__ import cache_dir
from temper.learner.policy import bit_view

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from sglang_live import replay

LINEAGE = 5
NEW_TOKENS = 64
CLOSE_NATS = 1e-4
# two-sided 95 % quantiles of Student's t by degrees of freedom
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
RECIPES = {
    "tiny": ("demo", ["--model.max_length_tokens=256", "--engine.max_rows=40"]),
    "smollm2": ("smollm2", ["--model.max_length_tokens=256", "--engine.max_rows=16"]),
}


class Served:
    """A model behind the real server."""

    def __init__(self, name: str) -> None:
        source, overrides = RECIPES[name]
        self.name = name
        self.recipe = recipes.load(source, [*overrides, "--engine.kind=sglang"])
        loaded = models.load(self.recipe.model, 0, cache_dir())
        self.model, self.files = loaded.model.eval(), loaded.bundle_files
        self.held: Weights | None = None
        self.ordinal = -1
        self.engine: SglangEngine

    async def start(self) -> None:
        engine = await make_engine(self.recipe, self.files, completed(SglangHost(environment={"OMP_NUM_THREADS": "1"})))
        assert isinstance(engine, SglangEngine)
        self.engine = engine
        await self.publish()

    async def publish(self, *, whole: bool = False) -> float:
        """The model's weights as the next version; seconds of the pause."""
        dtype = getattr(torch, self.recipe.model.serving_dtype)
        name = self.recipe.model.serving_dtype
        tensors = {
            key: TensorBits.of(bit_view(p.detach().to(dtype).clone()), name) for key, p in self.model.named_parameters()
        }
        self.ordinal += 1
        base = None if whole else self.held
        self.held = seal(self.ordinal, LINEAGE, tensors, base)
        await self.engine.apply(stage(list(encode(base, self.held)), base))
        return self.engine.counts.last_pause_s

    def step(self, number: int, share: float) -> int:
        """Change `share` of the tensors a little; how many."""
        torch.manual_seed(number)
        parameters = list(self.model.parameters())
        chosen = parameters[:: max(round(1 / share), 1)]
        with torch.no_grad():
            for parameter in chosen:
                parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.abs().mean())
        return len(chosen)

    def request(self, number: int, new_tokens: int = NEW_TOKENS) -> GenerateRequest:
        """A prompt of its own; no stop tokens, so that lengths are equal."""
        ids = [1 + (number * 7 + at) % (self.model.config.vocab_size - 2) for at in range(12)]
        return GenerateRequest(ids, SamplingParams(max_new_tokens=new_tokens, seed=number))


async def load(one: Callable[[int], Awaitable[int]], workers: int, seconds: float) -> float:
    """Tokens/s of `workers` that call `one` again and again."""
    numbers, tokens, until = itertools.count(), 0, time.perf_counter() + seconds

    async def work() -> None:
        nonlocal tokens
        while time.perf_counter() < until:
            tokens += await one(next(numbers))

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(workers)))
    return tokens / (time.perf_counter() - begun)


async def throughput(served: Served, levels: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Rows: Temper's and the bare generator's tokens/s in turns, and the median of their ratios."""
    engine = served.engine
    place, version = engine.fleet.servers[0].place, f"{LINEAGE}:{served.ordinal}"
    numbers = itertools.count()
    rows = []
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=100), headers={"Authorization": f"Bearer {place.admin_key}"}
    ) as session:

        async def ours(number: int) -> int:
            return len((await engine.generate(served.request(number))).ids)

        async def bare(number: int) -> int:
            request = served.request(number)
            body = body_of(f"bare-{next(numbers):012d}", request.sampling, request.ids, NEW_TOKENS, version)
            async with session.post(place.url + "/generate", json=body) as answer:
                return len((await answer.json())["output_ids"])

        for workers in levels:
            await load(ours, workers, min(seconds / 4, 2.0))
            pairs = []
            for turn in range(4):
                order = (ours, bare) if turn % 2 else (bare, ours)
                measured = {each: await load(each, workers, seconds / 4) for each in order}
                pairs.append((measured[ours], measured[bare]))
            rows.append(
                {
                    "what": f"throughput, {served.name}",
                    "concurrent": workers,
                    "temper_tokens_per_s": round(statistics.median(pair[0] for pair in pairs), 1),
                    "bare_tokens_per_s": round(statistics.median(pair[1] for pair in pairs), 1),
                    "share": round(statistics.median(pair[0] / pair[1] for pair in pairs), 4),
                }
            )
    return rows


async def pauses(served: Served, updates: int) -> list[dict[str, Any]]:
    """Rows: pause of updates in flight, an eighth of the tensors changed against all of them."""
    rows = []
    for what, share, whole in (("an eighth of the tensors", 1 / 8, False), ("full copy", 1.0, True)):
        stopping = asyncio.Event()

        async def busy(number: int, stopping: asyncio.Event = stopping) -> None:
            while not stopping.is_set():
                await served.engine.generate(served.request(number, 100))

        running = [asyncio.ensure_future(busy(number)) for number in range(8)]
        found, walls = [], []
        for number in range(updates):
            served.step(number, share)
            begun = time.perf_counter()
            found.append(await served.publish(whole=whole))
            walls.append(time.perf_counter() - begun)
            await asyncio.sleep(0.05)
        stopping.set()
        await asyncio.gather(*running)
        rows.append(
            {
                "what": f"pause, {served.name}, {what}",
                "updates": updates,
                "pause_p50_ms": round(float(np.percentile(found, 50)) * 1e3, 1),
                "pause_p99_ms": round(float(np.percentile(found, 99)) * 1e3, 1),
                "staged_to_served_p50_ms": round(float(np.percentile(walls, 50)) * 1e3, 1),
            }
        )
    return rows


async def updates_under_load(served: Served, updates: int) -> dict[str, Any]:
    """A row: requests and tokens over `updates` updates in flight; failures; the largest replayed gap of any token."""
    versions = {served.ordinal: copy.deepcopy(served.model)}
    stopping, failed, made = asyncio.Event(), [], []

    async def busy(worker: int) -> None:
        for number in itertools.count():
            if stopping.is_set():
                return
            request = served.request(worker * 1000 + number, 40 + 20 * worker)
            try:
                made.append((request, await served.engine.generate(request)))
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")

    running = [asyncio.ensure_future(busy(worker)) for worker in range(8)]
    for number in range(updates):
        await asyncio.sleep(0.1)
        served.step(1000 + number, 1 / 4)
        versions[served.ordinal + 1] = copy.deepcopy(served.model)
        await served.publish()
    stopping.set()
    await asyncio.gather(*running)
    worst = max(replay(versions, request, one) for request, one in made)
    return {
        "what": f"updates under load, {served.name}",
        "updates": updates,
        "requests": len(made),
        "failed": len(failed),
        "first_failure": failed[0] if failed else "",
        "tokens": sum(len(one.ids) for _, one in made),
        "requests_over_several_versions": sum(len(one.version_runs) > 1 for _, one in made),
        "most_versions_of_one": max(len(one.version_runs) for _, one in made),
        "largest_gap_nats": float(f"{worst:.2e}"),
    }


def accuracy(name: str, seeds: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Rows: whole runs of a recipe with each engine, the same seeds."""
    rows = []
    for seed, kind in itertools.product(range(seeds), ("embedded", "sglang")):
        command = [sys.executable, "-P", "-m", "temper.cli.main", "run", name, "--json", f"--engine.kind={kind}"]
        command += ["--run", str(folder / f"{name}-{seed}-{kind}"), f"--run.seed={100 + seed}", "--eval.timeout_s=1200"]
        command += [f"--run.max_steps={steps}"] if steps else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        summary = json.loads(done.stdout)
        if any(value["accuracy_after"] is None for value in summary["domains"].values()):
            raise RuntimeError(f"{' '.join(command)}: a domain was not evaluated: {summary['domains']}")
        after = {f"{key}_after": round(value["accuracy_after"], 4) for key, value in summary["domains"].items()}
        rows.append(
            {
                "what": f"accuracy, {name}",
                "engine": kind,
                "seed": 100 + seed,
                "steps": summary["steps"],
                "mean_after": round(statistics.mean(after.values()), 4),
                **after,
                "wall_s": round(summary["wall_s"], 1),
            }
        )
    return rows


def interval(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float, float]:
    """Mean difference sglang - embedded over seeds, and its 95 % interval (paired t)."""
    by = {(row["engine"], row["seed"]): row["mean_after"] for row in rows if row["what"] == f"accuracy, {name}"}
    differences = [by["sglang", seed] - by["embedded", seed] for kind, seed in by if kind == "sglang"]
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, float("-inf"), float("inf")
    half = STUDENT[min(len(differences) - 1, 9)] * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the live server, one model after the other."""
    rows: list[dict[str, Any]] = []
    for name in filter(None, arguments.models.split(",")):
        served = Served(name)
        try:
            await served.start()
            if name == "tiny":
                rows += await throughput(served, [int(n) for n in arguments.concurrent.split(",")], arguments.seconds)
                rows.append(await updates_under_load(served, arguments.updates))
            rows += await pauses(served, arguments.updates if name == "tiny" else max(arguments.updates // 5, 2))
        finally:
            await served.engine.close()
    return rows


def goals_of(rows: Sequence[dict[str, Any]], recipes_run: Sequence[str]) -> list[dict[str, Any]]:
    """What the rows say about the goals."""
    goals = []
    for row in rows:
        if "share" in row:
            name = f"tokens/s to a bare load generator at {row['concurrent']} concurrent"
            goals.append({"name": name, "goal": ">= 0.97", "value": row["share"], "met": row["share"] >= 0.97})
        if "failed" in row:
            name = f"failed requests over {row['updates']} updates under load"
            goals.append({"name": name, "goal": "0", "value": row["failed"], "met": row["failed"] == 0})
            gap = row["largest_gap_nats"]
            name = "every token's version: largest gap to its replayed mixed cache, nats"
            goals.append({"name": name, "goal": f"<= {CLOSE_NATS}", "value": gap, "met": gap <= CLOSE_NATS})
    for name in recipes_run:
        mean, low, high = interval(rows, name)
        text = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
        goals.append(
            {
                "name": f"{name}: accuracy of sglang - embedded, 95 % interval holds 0",
                "goal": "0 inside",
                "value": text,
                "met": low <= 0 <= high,
            }
        )
    least = [row["reverse_after"] for row in rows if row.get("engine") == "sglang" and "reverse_after" in row]
    if least:
        goals.append({"name": "demo, sglang: reverse", "goal": ">= 0.9", "value": min(least), "met": min(least) >= 0.9})
    return goals


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals."""
    parser = argparse.ArgumentParser(prog="bin/bench engine", allow_abbrev=False)
    parser.add_argument("--models", default="tiny,smollm2", help="whose server is measured; empty: none")
    parser.add_argument("--concurrent", default="1,8,32", help="requests at once")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each level, both sides together twice that")
    parser.add_argument(
        "--updates", type=int, default=50, help="updates in flight (a fifth of it for smollm2's pauses)"
    )
    parser.add_argument("--accuracy", default="", help="recipes whose accuracy is compared: demo, smollm2")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe and engine")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0: the recipe's own")
    arguments = parser.parse_args(argv)
    if not completed(SglangHost()).usable:
        raise EnvironmentFault("SGLang is not installed: run `temper engine install --cpu`")
    torch.set_num_threads(1)
    rows = uvloop.run(measure(arguments))
    recipes_run = list(filter(None, arguments.accuracy.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        for name in recipes_run:
            rows += accuracy(name, arguments.seeds, arguments.steps, Path(folder))
    return {"rows": rows, "goals": goals_of(rows, recipes_run)}
