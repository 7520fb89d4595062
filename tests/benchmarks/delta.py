"""What a version of the weights costs: bytes against a full copy, coding speed, and the pause of an actor.

``bin/bench delta [--steps 30] [--versions DIR] [--rates 1e-6 5e-6 1e-5] [--swaps 120]``

Bytes are of real consecutive versions: SmolLM2-135M in bf16 trained by the in-process loop (see `_weight_versions`), made on
first use (two minutes a rate on two quiet cores) and kept in DIR. Every step of every rate is encoded, staged and checked bit
for bit. Beside the
format stand simpler ones on the same versions, and two entropies: of which values of a tensor changed and by how many
steps, and of the same when the exponent of the value is known. Speeds are of one thread, in CPU time, best of three, beside
a copy of the same bytes; applying ends with the values written. Memory is what coding holds at its peak beside the versions
and the chunks. The pause is what the embedded engine's decode loop stands still for while 32 generations run; updates are
fetched forth and back over six steps, each decoded beside sampling, as an actor does it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import zstandard
from temper.common import coding, delta
from temper.common.bits import Weights, digest_of, seal
from temper.common.float_bits import classes, steps
from temper.common.weight_chain import read_chain
from temper.common.weight_format import table_of

GOALS = {1e-6: 260.0, 5e-6: 120.0, 1e-5: 80.0}
GENERATIONS = 32
KEPT = 6  # first steps of a rate that speed and pause are measured on
Row = dict[str, Any]


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"temper_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def entropy_bits(counts: np.ndarray) -> float:
    """Bits to code as many symbols of each kind, in the best static code."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def entropies(old: Weights, new: Weights) -> tuple[float, float]:
    """Bytes of (which values of each tensor changed and by how many steps; the same, each exponent for itself)."""
    plain = known = 0.0
    for name, tensor in new.tensors.items():
        before, dtype = old.tensors[name].bits, tensor.dtype
        where = np.flatnonzero(before != tensor.bits)
        by = steps(before[where], tensor.bits[where], dtype)
        plain += entropy_bits(np.array([where.size, before.size - where.size]))
        plain += entropy_bits(np.unique(by, return_counts=True)[1])
        members = np.bincount(classes(before, dtype), minlength=256)
        kinds = classes(before[where], dtype)
        for kind in np.unique(kinds):
            mine = by[kinds == kind]
            known += entropy_bits(np.array([mine.size, members[kind] - mine.size]))
            known += entropy_bits(np.unique(mine, return_counts=True)[1])
    return plain / 8, known / 8


def simpler(old: Weights, new: Weights) -> dict[str, int]:
    """Bytes of simpler formats for the same step."""
    zstd = zstandard.ZstdCompressor(level=3)
    sizes = {"zstd-3 of all bits": 0, "xor + zstd-3": 0, "int32 index + value": 0, "gaps + bit delta + zstd-3": 0}
    for name, tensor in new.tensors.items():
        before, after = old.tensors[name].bits, tensor.bits
        where = np.flatnonzero(before != after)
        gaps = np.diff(where, prepend=-1)
        small = gaps < 255
        coded = np.where(small, gaps, 255).astype(np.uint8).tobytes() + gaps[~small].astype(np.uint32).tobytes()
        by = (after[where] - before[where]).tobytes()
        sizes["zstd-3 of all bits"] += len(zstd.compress(after.tobytes()))
        sizes["xor + zstd-3"] += len(zstd.compress((before ^ after).tobytes()))
        sizes["int32 index + value"] += 6 * where.size
        sizes["gaps + bit delta + zstd-3"] += len(zstd.compress(coded)) + len(zstd.compress(by))
    return sizes


async def measure_bytes(rate: float, steps_made: AsyncIterator[Any]) -> tuple[Row, list[Any]]:
    """(row, the first steps): of every step bytes, ratio, density; entropies of every tenth, simpler formats of every fifteenth."""
    sizes: list[int] = []
    density: list[float] = []
    plain: list[float] = []
    known: list[float] = []
    rivals: list[dict[str, int]] = []
    kept: list[Any] = []
    full = 0
    async for step in steps_made:
        number, tally = len(sizes), step.tally
        sizes.append(tally.nbytes)
        density.append(tally.density)
        full = step.new.nbytes
        if number < KEPT:
            kept.append(step)
        if number % 10 == 1:
            bounds = entropies(step.old, step.new)
            plain.append(bounds[0] / tally.nbytes)
            known.append(bounds[1] / tally.nbytes)
        if number % 15 == 1:
            rivals.append(simpler(step.old, step.new))
    mean = float(np.mean(sizes))
    row = {
        "rate": rate,
        "steps": len(sizes),
        "density": round(float(np.mean(density)), 5),
        "bytes_mean": int(mean),
        "bytes_min": min(sizes),
        "bytes_max": max(sizes),
        "ratio": round(full / mean, 1),
        "entropy_bytes": int(mean * np.mean(plain)),
        "of_entropy": round(1 / float(np.mean(plain)), 3),
        "entropy_by_exponent_bytes": int(mean * np.mean(known)),
        "of_entropy_by_exponent": round(1 / float(np.mean(known)), 3),
        **{name: int(np.mean([rival[name] for rival in rivals])) for name in rivals[0]},
    }
    return row, kept


def cpu_seconds(work: Callable[[], Any], repeat: int = 3) -> float:
    """CPU time of `work`, best of `repeat`."""
    best = float("inf")
    for _ in range(repeat):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def peak_mb(work: Callable[[], Any]) -> float:
    """What `work` allocates at its peak."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / 1e6, 1)


def measure_speed(rate: float, old: Weights, new: Weights) -> Row:
    """GB of model per second and core."""
    gigabytes = new.nbytes / 1e9
    chunks = list(delta.encode(old, new))

    target = {name: tensor.bits.copy() for name, tensor in old.tensors.items()}

    def apply() -> None:
        chain = read_chain(chunks, old.version.digest, table_of(old))
        for i, pieces in chain.pieces.items():
            name, dtype, _ = chain.table[i]
            bits = old.tensors[name].bits
            for record, coded in pieces:
                part = slice(record.start, record.start + record.count)
                patch = coding.decode(coded, bits[part], record.count, bits.dtype, dtype)
                target[name][part][slice(None) if patch.indices is None else patch.indices] = patch.values

    def stage_and_apply() -> None:
        for patch in delta.stage(chunks, old).changed:
            target[patch.name][slice(None) if patch.indices is None else patch.indices] = patch.values

    def seal_and_encode() -> None:
        list(delta.encode(old, seal(new.version.ordinal, 1, new.tensors, old)))

    def copies() -> dict[str, np.ndarray]:
        return {name: tensor.bits.copy() for name, tensor in old.tensors.items()}

    same = {name: type(tensor)(tensor.dtype, tensor.shape, tensor.bits.copy()) for name, tensor in old.tensors.items()}
    return {
        "speed_at_rate": rate,
        "memcpy_gb_s": round(gigabytes / cpu_seconds(copies), 2),
        "blake2b_gb_s": round(gigabytes / cpu_seconds(lambda: [digest_of(t.bits) for t in new.tensors.values()]), 2),
        "encode_gb_s": round(gigabytes / cpu_seconds(lambda: list(delta.encode(old, new))), 2),
        "encode_with_digest_gb_s": round(gigabytes / cpu_seconds(seal_and_encode), 2),
        "apply_gb_s": round(gigabytes / cpu_seconds(apply), 2),
        "apply_with_digest_gb_s": round(gigabytes / cpu_seconds(stage_and_apply), 2),
        "unchanged_gb_s": round(gigabytes / cpu_seconds(lambda: list(delta.encode(old, seal(9, 1, same, old)))), 2),
        "encode_peak_mb": peak_mb(lambda: sum(len(chunk) for chunk in delta.encode(old, new))),
        "apply_peak_mb": peak_mb(stage_and_apply),
    }


async def measure_pause(folder: Path, made: list[Any], swaps: int) -> Row:
    """Pauses of the embedded engine for `swaps` commits, forth and back over the steps `made`, and for a full copy, with
    generations running."""
    from temper.actor.engines.base import GenerateRequest, SamplingParams
    from temper.actor.engines.embedded import EmbeddedEngine

    forth = [(step.old, step.chunks) for step in made]
    back = [(step.new, list(delta.encode(step.new, step.old))) for step in reversed(made)]
    there_and_back = forth + back
    config = json.loads((folder / "config.json").read_text())
    engine = EmbeddedEngine(config, dtype="bfloat16", max_rows=GENERATIONS, max_length_tokens=2048)
    await engine.apply(delta.stage(delta.encode(None, made[0].old), None))
    rng = np.random.default_rng(0)

    async def generate() -> None:
        while True:
            ids = rng.integers(100, 40_000, 16).tolist()
            sampling = SamplingParams(temperature=1.0, max_new_tokens=1024, seed=int(rng.integers(1 << 31)))
            await engine.generate(GenerateRequest(ids, sampling))

    running = [asyncio.create_task(generate()) for _ in range(GENERATIONS)]
    pauses: list[float] = []
    while len(pauses) < swaps:
        old, chunks = there_and_back[len(pauses) % len(there_and_back)]
        update = await asyncio.to_thread(delta.stage, chunks, old)
        assert await engine.apply(update) == update.digest
        pauses.append(engine.counts.last_pause_s)
    sampled = engine.counts.steps
    at = there_and_back[len(pauses) % len(there_and_back)][0]
    await engine.apply(await asyncio.to_thread(delta.stage, delta.encode(None, at), None))
    whole = engine.counts.last_pause_s
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    milliseconds = np.array(pauses) * 1e3
    return {
        "swaps": swaps,
        "generations": GENERATIONS,
        "decode_steps": sampled,
        "pause_p50_ms": round(float(np.percentile(milliseconds, 50)), 1),
        "pause_p99_ms": round(float(np.percentile(milliseconds, 99)), 1),
        "pause_max_ms": round(float(milliseconds.max()), 1),
        "pause_full_copy_ms": round(whole * 1e3, 1),
    }


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals."""
    parser = argparse.ArgumentParser(prog="bin/bench delta")
    home = Path.home() / ".cache" / "temper"
    parser.add_argument("--versions", type=Path, default=home / "delta-versions")
    parser.add_argument("--cache", type=Path, default=home)
    parser.add_argument("--rates", type=float, nargs="+", default=list(GOALS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--swaps", type=int, default=104, help="0 leaves the pause out")
    given = parser.parse_args(argv)
    if given.steps < 2:
        parser.error("--steps: at least 2, the second is the first that is measured in full")
    maker = _module("_weight_versions")
    rows: list[Row] = []
    goals: list[dict[str, Any]] = []

    def goal(name: str, value: float, at_least: float | None = None, below: float | None = None) -> None:
        met = value >= at_least if at_least is not None else below is not None and value < below
        wanted = f">= {at_least}" if at_least is not None else f"< {below}"
        goals.append({"name": name, "goal": wanted, "value": value, "met": met})

    some: list[Any] = []
    for rate in given.rates:
        steps_made = maker.steps(given.versions / f"{rate:g}", rate, given.steps, given.cache)
        row, kept = asyncio.run(measure_bytes(rate, steps_made))
        some = some or kept
        rows.append(row)
        if rate in GOALS:
            goal(f"ratio to a full bf16 copy at learning rate {rate:g}", row["ratio"], GOALS[rate])
        speed = measure_speed(rate, kept[-1].old, kept[-1].new)
        rows.append(speed)
        for name, least in (
            ("encode", 1.0),
            ("apply", 1.0),
            ("encode_with_digest", 0.45),
            ("apply_with_digest", 0.45),
        ):
            goal(f"{name} at {rate:g}, GB/s a core", speed[f"{name}_gb_s"], least)
    if given.swaps:
        from temper.learner.smollm2 import convert

        pause = asyncio.run(measure_pause(convert(given.cache), some, given.swaps))
        rows.append(pause)
        goal(f"pause of an actor at a swap, p99 over {given.swaps}, ms", pause["pause_p99_ms"], below=50.0)
    return {"rows": rows, "goals": goals}
