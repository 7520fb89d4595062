"""Real consecutive versions of a real model, for `bin/bench delta`: SmolLM2-135M in bf16 under AdamW with fp32 masters.

The in-process loop trains it with the functions that the daemons use (its own samples, a reasoning-gym dataset, the
recipe `smollm2` with fewer and shorter groups and a constant learning rate) and writes every version to a weight log,
from which the benchmark reads them back. A log that is complete is not made again.

    python -P tests/benchmarks/_weight_versions.py DIR --rate 1e-6 --steps 30
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from temper.broker.weights import WeightStore
from temper.common import delta
from temper.common import recipe as recipes
from temper.common.bits import TensorBits, Weights
from temper.common.schema import Chunk, Manifest, Publish

RUN = "delta-benchmark"
RECIPE = """
[run]
name = "delta-benchmark"
max_steps = 1000
[model]
path = "smollm2"
serving_dtype = "bfloat16"
compute_dtype = "bfloat16"
max_length_tokens = 256
[pacing]
groups_per_step = 4
samples_per_group = 8
[sampling]
max_new_tokens = 8
stop = ["\\n"]
[objective]
advantage = "dr_grpo"
[optimizer]
learning_rate = {rate}
warmup_steps = 0
final_share = 1.0
[engine]
kind = "embedded"
max_rows = 32
[[domains]]
name = "letter_counting"
module = "temper.actor.domains.reasoning"
options = {{ dataset = "letter_counting", style = "few_shot", shots = 4, levels = [{{ min_words = 3, max_words = 6 }}] }}
"""


def _inprocess() -> ModuleType:
    spec = importlib.util.spec_from_file_location("temper_inprocess", Path(__file__).with_name("_inprocess.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def put(store: WeightStore, base: Weights | None, new: Weights) -> None:
    """Append base -> new (or a snapshot) to the log."""
    tally = delta.Tally()
    chunks = list(delta.encode(base, new, tally=tally))
    of = base.version if base else None
    store.begin(RUN, Publish(Manifest(new.version, of, len(chunks), tally.nbytes, new.nbytes, tally.density)))
    for i, chunk in enumerate(chunks):
        digest = hashlib.blake2b(chunk, digest_size=16).hexdigest()
        store.chunk(RUN, Chunk(new.version.ordinal, base is None, i, digest), memoryview(chunk))
    assert store.newest() == new.version


async def make(directory: Path, rate: float, steps: int, cache: Path) -> None:
    """Train `steps` steps at `rate` and log versions 0 .. steps in `directory`, unless they are there."""
    done = directory / "steps"
    if done.is_file() and int(done.read_text()) >= steps:
        return
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    store = WeightStore(directory, RUN)
    recipe_file = directory / "recipe.toml"
    recipe_file.write_text(RECIPE.format(rate=rate), encoding="utf-8")
    module = _inprocess()
    async with module.Loop(recipes.load(str(recipe_file)), None, cache) as loop:
        last = loop.weights
        put(store, None, last)
        for step in range(steps):
            begun = time.perf_counter()
            await loop.step()
            put(store, last, loop.weights)
            last = loop.weights
            print(f"rate {rate} step {step + 1}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    done.write_text(f"{steps}\n", encoding="utf-8")


def read(directory: Path) -> Iterator[Weights]:
    """The versions of a log that differ from the one before, in order. Each has arrays of its own."""
    store = WeightStore(directory, RUN)
    newest = store.newest()
    assert newest is not None, f"no weight log in {directory}"
    weights: Weights | None = None
    for ordinal in range(newest.ordinal + 1):
        route = store.route(weights.version if weights else None, ordinal)
        if weights is not None and not route.chain.entries:
            continue  # a step without any contrast moved nothing
        update = delta.stage([frame for _, frame in route.messages()], weights)
        weights = delta.overwrite(_copy(weights), update)
        yield weights


def _copy(weights: Weights | None) -> Weights | None:
    if weights is None:
        return None
    tensors = {name: TensorBits(t.dtype, t.shape, t.bits.copy()) for name, t in weights.tensors.items()}
    return Weights(weights.version, tensors, dict(weights.digests))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "temper")
    given = parser.parse_args()
    asyncio.run(make(given.directory, given.rate, given.steps, given.cache))
