"""Real consecutive versions of a real model, for `bin/bench delta`: SmolLM2-135M in bf16 under AdamW with fp32 masters.

The in-process loop trains it with the functions that the daemons use (its own samples, a reasoning-gym dataset, the
recipe `smollm2` with fewer and shorter groups and a constant learning rate). Every version goes to a weight log; one that
is complete is read back, not made again. Steps whose groups showed no contrast move nothing and are not counted.

    python -P tests/benchmarks/_weight_versions.py DIR --rate 1e-6 --steps 30
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType

from temper.broker.weights import WeightStore
from temper.common import delta
from temper.common import recipe as recipes
from temper.common.bits import TensorBits, Weights
from temper.common.schema import Chunk, Manifest, Publish

RUN = "delta-benchmark"
THREADS = 2
FRUITLESS_STEPS = 20  # in a row without a change of the weights
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
groups_per_step = 2
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
[daemons]
threads_per_process = 2
[[domains]]
name = "letter_counting"
module = "temper.actor.domains.reasoning"
options = {{ dataset = "letter_counting", style = "few_shot", shots = 2, levels = [{{ min_words = 3, max_words = 6 }}] }}
[[domains]]
name = "chain_sum"
module = "temper.actor.domains.reasoning"
options = {{ dataset = "chain_sum", style = "few_shot", shots = 2, levels = [{{ max_terms = 2, min_digits = 1, max_digits = 2 }}] }}
"""


def _inprocess() -> ModuleType:
    spec = importlib.util.spec_from_file_location("temper_inprocess", Path(__file__).with_name("_inprocess.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training: the versions before and after, the coded entry that leads from one to the other, decoded and
    verified already, and what coding it said of itself."""

    old: Weights
    new: Weights
    chunks: list[bytes]
    tally: delta.Tally


def coded(old: Weights | None, new: Weights) -> tuple[list[bytes], delta.Tally, delta.StagedUpdate]:
    """The entry old -> new, checked by decoding it."""
    tally = delta.Tally()
    chunks = list(delta.encode(old, new, threads=THREADS, tally=tally))
    update = delta.stage(chunks, old, threads=THREADS)
    assert update.digest == new.version.digest
    return chunks, tally, update


def put(store: WeightStore, base: Weights | None, new: Weights, chunks: list[bytes], tally: delta.Tally) -> None:
    """Append base -> new (or a snapshot) to the log."""
    of = base.version if base else None
    store.begin(RUN, Publish(Manifest(new.version, of, len(chunks), tally.nbytes, new.nbytes, tally.density)))
    for i, chunk in enumerate(chunks):
        digest = hashlib.blake2b(chunk, digest_size=16).hexdigest()
        store.chunk(RUN, Chunk(new.version.ordinal, base is None, i, digest), memoryview(chunk))
    assert store.newest() == new.version


async def steps(directory: Path, rate: float, count: int, cache: Path) -> AsyncIterator[Step]:
    """`count` steps at learning rate `rate`: from the log in `directory`, or trained now and logged there. Fewer, if the
    policy comes to where nothing is left to learn."""
    done = directory / "steps"
    if done.is_file() and int(done.read_text()) >= count:
        for old, new in islice(pairwise(read(directory)), count):
            chunks, tally, _ = coded(old, new)
            yield Step(old, new, chunks, tally)
        return
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    store = WeightStore(directory, RUN)
    recipe_file = directory / "recipe.toml"
    recipe_file.write_text(RECIPE.format(rate=rate), encoding="utf-8")
    module = _inprocess()

    class Recorder(module.Loop):  # type: ignore[misc, name-defined]
        """Publishes into the log too."""

        weights: Weights | None
        made: Step | None

        async def publish(self) -> None:
            old, new = self.weights, self.serving_weights()
            if old is None or old.version.digest != new.version.digest:
                chunks, tally, update = coded(old, new)
                assert await self.engine.apply(update) == new.version.digest
                put(store, old, new, chunks, tally)
                self.weights = new
                self.made = None if old is None else Step(old, new, chunks, tally)

    async with Recorder(recipes.load(str(recipe_file)), None, cache) as loop:
        for step in range(count):
            begun, loop.made = time.perf_counter(), None
            for _ in range(FRUITLESS_STEPS):
                await loop.step()
                if loop.made is not None:
                    break
            else:
                print(f"rate {rate}: no group has contrast any more after {step} steps", file=sys.stderr, flush=True)
                break
            print(f"rate {rate} step {step + 1}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
            yield loop.made
    done.write_text(f"{count}\n", encoding="utf-8")


def read(directory: Path) -> Iterator[Weights]:
    """The versions of a log that differ from the one before, in order. Each has arrays of its own."""
    store = WeightStore(directory, RUN)
    newest = store.newest()
    assert newest is not None, f"no weight log in {directory}"
    weights: Weights | None = None
    for ordinal in range(newest.ordinal + 1):
        route = store.route(weights.version if weights else None, ordinal)
        if weights is not None and not route.chain.entries:
            continue  # a step that moved nothing
        update = delta.stage([frame for _, frame in route.messages()], weights)
        weights = delta.overwrite(_copy(weights), update)
        yield weights


def _copy(weights: Weights | None) -> Weights | None:
    if weights is None:
        return None
    tensors = {name: TensorBits(t.dtype, t.shape, t.bits.copy()) for name, t in weights.tensors.items()}
    return Weights(weights.version, tensors, dict(weights.digests))


async def _make(directory: Path, rate: float, count: int, cache: Path) -> None:
    async for _ in steps(directory, rate, count, cache):
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "temper")
    given = parser.parse_args()
    asyncio.run(_make(given.directory, given.rate, given.steps, given.cache))
