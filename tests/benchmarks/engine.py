"""Temper through SGLang: its cost beside a bare load generator, pauses of updates in flight, accuracy against the other engine.

``bin/bench engine --json FILE [--seconds 20] [--updates 50] [--models tiny,smollm2] [--accuracy demo,smollm2 --seeds 3
[--set KEY=VALUE ...]] [--add-to FILE]``. One real server at a time (`temper engine install`). The load generator posts the
same bodies to the same server and reads the JSON, no more; both run in this process, in turns. Every token of the updates
under load is checked: by replaying its mixed cache with the versions that the engine names, or, where running requests are
retracted at an update, by a whole forward under its version.
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
from temper.actor.engines.sglang_weights import packed
from temper.common import recipe as recipes
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import encode, stage
from temper.common.errors import EnvironmentFault
from temper.learner import models
from temper.learner.__main__ import cache_dir
from temper.learner.policy import bit_view

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from sglang_live import recomputed, replay

LINEAGE = 5
NEW_TOKENS = 64
CLOSE_NATS = 1e-4
RECOMPUTE = ["--engine.kv_on_swap=recompute"]
PAIRS = 9  # of turns a level
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
        self.gaps: list[float] = []  # of the probes
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
        self.gaps.append(self.engine.fleet.gap_nats)
        return self.engine.counts.last_pause_s

    async def retracting(self, folder: Path) -> SglangEngine:
        """Another engine on the same server, which retracts what runs at an update."""
        place = self.engine.fleet.servers[0].place
        key = folder / "admin.key"
        key.write_text(place.admin_key, encoding="ascii")
        recipe = recipes.load(RECIPES[self.name][0], [*RECIPES[self.name][1], "--engine.kind=sglang", *RECOMPUTE])
        engine = await make_engine(recipe, self.files, SglangHost(servers=(place.url,), admin_key_file=str(key)))
        assert isinstance(engine, SglangEngine)
        return engine

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


async def load(one: Callable[[int], Awaitable[int]], workers: int, each: int) -> tuple[float, float]:
    """Tokens/s of `workers` that call `one` `each` times in a row, and this process's CPU time, us a token."""
    begun, used = time.perf_counter(), time.process_time()

    async def work(worker: int) -> int:
        return sum([await one(worker * each + number) for number in range(each)])

    tokens = sum(await asyncio.gather(*(work(worker) for worker in range(workers))))
    return tokens / (time.perf_counter() - begun), (time.process_time() - used) / tokens * 1e6


async def throughput(served: Served, levels: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Rows: Temper's and the bare generator's tokens/s, in pairs of turns whose order alternates; the median of the pairs'
    ratios, and what a token costs each of them in CPU time."""
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
            await load(ours, workers, 1)
            rate, _ = await load(ours, workers, 2)
            each = max(round(rate * seconds / PAIRS / NEW_TOKENS / workers), 1)
            found: dict[Any, list[tuple[float, float]]] = {ours: [], bare: []}
            for turn in range(PAIRS):
                for one in (ours, bare) if turn % 2 else (bare, ours):
                    found[one].append(await load(one, workers, each))
            ratios = [mine / other for (mine, _), (other, _) in zip(found[ours], found[bare], strict=True)]
            (temper_rate, temper_us), (bare_rate, bare_us) = (np.median(found[one], 0) for one in (ours, bare))
            rows.append(
                {
                    "what": f"throughput, {served.name}",
                    "concurrent": workers,
                    "pairs": PAIRS,
                    "requests_a_turn": workers * each,
                    "temper_tokens_per_s": round(float(temper_rate), 1),
                    "bare_tokens_per_s": round(float(bare_rate), 1),
                    "share": round(statistics.median(ratios), 4),
                    "least_share": round(min(ratios), 4),
                    "largest_share": round(max(ratios), 4),
                    "temper_cpu_us_per_token": round(float(temper_us), 1),
                    "bare_cpu_us_per_token": round(float(bare_us), 1),
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


async def updates_under_load(served: Served, updates: int, what: str, check: Callable[..., float]) -> dict[str, Any]:
    """A row: requests and tokens over `updates` updates in flight; failures; the largest gap of any token by `check`."""
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
    worst = max(check(versions, request, one) for request, one in made)
    return {
        "what": f"updates under load, {served.name}, {what}",
        "updates": updates,
        "requests": len(made),
        "failed": len(failed),
        "first_failure": failed[0] if failed else "",
        "tokens": sum(len(one.ids) for _, one in made),
        "requests_over_several_versions": sum(len(one.version_runs) > 1 for _, one in made),
        "most_versions_of_one": max(len(one.version_runs) for _, one in made),
        "largest_gap_nats": float(f"{worst:.2e}"),
    }


async def probes(served: Served) -> dict[str, Any]:
    """A row: how far the server's log-probabilities are from ours after right updates, and with one tensor wrong."""
    fleet = served.engine.fleet
    probe, version, client = fleet._probe, served.engine.version, fleet.servers[0].client
    assert probe is not None and version is not None
    expected = await probe.expect()
    layers, wrong = served.model.config.num_hidden_layers, {}

    async def give(names: Sequence[tuple[str, str]]) -> None:
        pushed = [(name, fleet.mirror.tensor(source)) for name, source in names]
        body = {
            "serialized_named_tensors": packed(pushed, shared=False),
            "flush_cache": False,
        }
        for path, content in (("begin", {}), ("", body), ("end", {})):
            command = f"/{path}_weight_update" if path else "/update_weights_from_tensor"
            await client.command(command, content, timeout_s=60)

    for layer, other in ((0, layers - 1), (layers // 2, 0), (layers - 1, 0)):
        at, far = f"model.layers.{layer}", f"model.layers.{other}"
        gate, up = f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"
        for what, names in (
            ("gate and up exchanged", [(gate, up), (up, gate)]),
            ("another layer's down", [(f"{at}.mlp.down_proj.weight", f"{far}.mlp.down_proj.weight")]),
            ("another layer's k", [(f"{at}.self_attn.k_proj.weight", f"{far}.self_attn.k_proj.weight")]),
            ("another layer's o", [(f"{at}.self_attn.o_proj.weight", f"{far}.self_attn.o_proj.weight")]),
        ):
            await give(names)
            wrong[f"{what}, layer {layer}"] = float((await probe._ask(client, version) - expected).abs().mean())
            await give([(name, name) for name, _ in names])
    await probe.check(client, version)
    least = min(wrong, key=lambda what: wrong[what])
    return {
        "what": f"probe, {served.name}",
        "dtype": served.recipe.model.serving_dtype,
        "limit_nats": float(f"{probe.limit:.2e}"),
        "right_updates": len(served.gaps),
        "largest_right_nats": float(f"{max(served.gaps):.2e}"),
        "wrong_updates": len(wrong),
        "least_wrong_nats": float(f"{wrong[least]:.2e}"),
        "least_wrong": least,
    }


def accuracy(name: str, engine: str, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """A row: one whole run of a recipe with an engine; `settings` ("pacing.groups_per_step=8") change the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "temper.cli.main", "run", name, "--json", f"--engine.kind={engine}"]
        command += ["--run", f"{folder}/run", f"--run.seed={seed}", "--eval.timeout_s=1200"]
        command += [f"--{setting}" for setting in settings]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    if any(value["accuracy_after"] is None for value in summary["domains"].values()):
        raise RuntimeError(f"{' '.join(command)}: a domain was not evaluated: {summary['domains']}")
    after = {f"{key}_after": round(value["accuracy_after"], 4) for key, value in summary["domains"].items()}
    return {
        "what": " ".join(["accuracy,", name, *settings]),
        "engine": engine,
        "seed": seed,
        "steps": summary["steps"],
        "mean_after": round(statistics.mean(after.values()), 4),
        **after,
        "wall_s": round(summary["wall_s"], 1),
    }


def interval(rows: Sequence[dict[str, Any]], what: str) -> tuple[float, float, float]:
    """Mean difference sglang - embedded over the seeds that ran with both, and its 95 % interval (paired t)."""
    by = {(row["engine"], row["seed"]): row["mean_after"] for row in rows if row["what"] == what}
    differences = [
        by["sglang", seed] - by["embedded", seed] for kind, seed in by if kind == "sglang" and ("embedded", seed) in by
    ]
    mean = statistics.mean(differences) if differences else float("nan")
    if len(differences) < 2:
        return mean, float("-inf"), float("inf")
    half = STUDENT[min(len(differences) - 1, 9)] * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


async def retracted(served: Served, updates: int) -> dict[str, Any]:
    """`updates_under_load` through an engine that retracts what runs."""
    with tempfile.TemporaryDirectory() as folder:
        keeping, served.engine = served.engine, await served.retracting(Path(folder))
        try:
            await served.publish(whole=True)
            return await updates_under_load(served, updates, "caches recomputed", recomputed)
        finally:
            await served.engine.close()
            served.engine = keeping
            await served.publish(whole=True)


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the live server, one model after the other."""
    rows: list[dict[str, Any]] = []
    for name in filter(None, arguments.models.split(",")):
        served = Served(name)
        try:
            await served.start()
            if name == "tiny":
                rows += await throughput(served, [int(n) for n in arguments.concurrent.split(",")], arguments.seconds)
                rows.append(await updates_under_load(served, arguments.updates, "caches kept", replay))
                rows.append(await retracted(served, arguments.updates))
            rows += await pauses(served, arguments.updates if name == "tiny" else max(arguments.updates // 5, 2))
            rows.append(await probes(served))
        finally:
            await served.engine.close()
    return rows


def goals_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rows say about the goals."""
    goals = []
    for row in rows:
        if "share" in row:
            name = f"tokens/s to a bare load generator at {row['concurrent']} concurrent"
            goals.append({"name": name, "goal": ">= 0.97", "value": row["share"], "met": row["share"] >= 0.97})
        if "failed" in row:
            kept = row["what"].rsplit(", ", 1)[1]
            name = f"failed requests over {row['updates']} updates under load, {kept}"
            goals.append({"name": name, "goal": "0", "value": row["failed"], "met": row["failed"] == 0})
            gap = row["largest_gap_nats"]
            name = f"every token's version: largest gap to the learner's model under it, {kept}, nats"
            goals.append({"name": name, "goal": f"<= {CLOSE_NATS}", "value": gap, "met": gap <= CLOSE_NATS})
        if "limit_nats" in row:
            right, limit, wrong = row["largest_right_nats"], row["limit_nats"], row["least_wrong_nats"]
            goals.append(
                {
                    "name": f"{row['what']}, {row['dtype']}: right updates below the limit, wrong ones above, nats",
                    "goal": f"< {limit} <",
                    "value": f"{right}, {wrong}",
                    "met": right < limit < wrong,
                }
            )
    for what in dict.fromkeys(row["what"] for row in rows if "mean_after" in row):
        mean, low, high = interval(rows, what)
        seeds = len({row["seed"] for row in rows if row["what"] == what})
        text = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}], {seeds} seeds"
        goals.append(
            {
                "name": f"{what}: sglang - embedded, 95 % interval holds 0",
                "goal": "0 inside",
                "value": text,
                "met": low <= 0 <= high,
            }
        )
        domains = sorted(
            key for row in rows if row["what"] == what for key in row if key.endswith("_after") and key != "mean_after"
        )
        for domain in dict.fromkeys(domains) if what.startswith("accuracy, demo") else ():
            least = min(
                (row[domain] for row in rows if (row["what"], row.get("engine")) == (what, "sglang")), default=0.0
            )
            name = f"{what}: sglang, every seed, {domain.removesuffix('_after')}"
            goals.append({"name": name, "goal": ">= 0.9", "value": least, "met": least >= 0.9})
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
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to those recipes")
    parser.add_argument("--first-seed", type=int, default=100, help="of those runs")
    parser.add_argument("--engines", default="embedded,sglang", help="that those runs sample with")
    parser.add_argument(
        "--add-to", type=Path, help="an earlier result: its rows stay where they are not measured again"
    )
    arguments = parser.parse_args(argv)
    if not completed(SglangHost()).usable:
        raise EnvironmentFault("SGLang is not installed: run `temper engine install --cpu`")
    torch.set_num_threads(1)
    rows = uvloop.run(measure(arguments))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for name, seed in itertools.product(filter(None, arguments.accuracy.split(",")), seeds):
        rows += [accuracy(name, engine, seed, arguments.set) for engine in arguments.engines.split(",")]
    if arguments.add_to is not None:
        earlier = json.loads(arguments.add_to.read_text(encoding="utf-8"))["rows"]
        new = {key_of(row) for row in rows}
        rows = [row for row in earlier if key_of(row) not in new] + rows
    return {"rows": rows, "goals": goals_of(rows)}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about."""
    return tuple(row.get(name) for name in ("what", "concurrent", "engine", "seed"))
