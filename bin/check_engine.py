"""`temper check engine RECIPE`: does the engine sample from what the learner computes?

The recipe's own model, engine, dtype and sampling: the engine generates for real prompts of the recipe's domains, the
learner's model recomputes the log-probabilities, at first and after each of three updates in flight. A gap above the
limit means that the importance ratios of training would start wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from temper.common.config import Recipe
from temper.common.errors import ConfigError

if TYPE_CHECKING:
    from temper.actor.engines.base import Engine, Generation, SamplingParams
    from temper.actor.text import Text
    from temper.common.bits import Weights

UPDATES = 3
STEP = 1e-3  # relative size of a parameter's change in one update
PROMPTS = 8
SAMPLES = 4
LIMIT_NATS = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}  # of the mean gap, by the coarser of both dtypes


@dataclass(frozen=True, slots=True)
class Gap:
    """Absolute differences of log-probabilities, in nats, over `tokens` sampled tokens."""

    tokens: int
    mean: float
    p99: float
    largest: float


def check_engine_command(recipe: Recipe, host_file: Path | None, cache_dir: Path) -> int:
    """Print one line a version; ConfigError if a mean gap is above the limit."""
    limit = LIMIT_NATS["float32"]
    for dtype in (recipe.model.serving_dtype, recipe.model.compute_dtype):
        limit = max(limit, LIMIT_NATS[dtype])
    gaps = asyncio.run(measure(recipe, host_file, cache_dir))
    for number, gap in enumerate(gaps):
        print(
            f"after {number} updates: mean {gap.mean:.2e}, p99 {gap.p99:.2e}, max {gap.largest:.2e} nats"
            f" over {gap.tokens} tokens"
        )
    worst = max(gap.mean for gap in gaps)
    if not worst <= limit:
        raise ConfigError(
            f"engine and learner disagree by {worst:.2e} nats a token, at most {limit:g} is fine: the engine does not"
            " serve these weights or does not sample as the recipe says"
        )
    print(f"engine: fine (mean gap at most {worst:.2e} nats, limit {limit:g})")
    return 0


async def measure(recipe: Recipe, host_file: Path | None, cache_dir: Path) -> list[Gap]:
    """The gap at first and after each update."""
    import torch
    from temper.actor.engines.factory import make_engine
    from temper.actor.host import load_host
    from temper.actor.text import Text
    from temper.learner import models

    torch.set_num_threads(recipe.daemons.threads_per_process)
    loaded = models.load(recipe.model, recipe.run.seed, cache_dir)
    text = Text(loaded.bundle_files)
    prompts = _prompts(recipe, text)
    engine = await make_engine(recipe, loaded.bundle_files, load_host(host_file).sglang)
    try:
        held = await _commit(engine, loaded.model, recipe, 0, None)
        gaps = [await _gap(engine, loaded.model, prompts, text, recipe)]
        for number in range(1, UPDATES + 1):
            _step(loaded.model, number)
            held = await _commit(engine, loaded.model, recipe, number, held)
            gaps.append(await _gap(engine, loaded.model, prompts, text, recipe))
        return gaps
    finally:
        await engine.close()


def _prompts(recipe: Recipe, text: Text) -> list[list[int]]:
    from temper.actor.catalog import load_domain

    domains = [(config, load_domain(config)) for config in recipe.domains]
    found = []
    for number in range(PROMPTS):
        config, domain = domains[number % len(domains)]
        found.append(text.prompt_ids(domain.tasks("train" if config.train else "eval", config.level, number).prompt))
    return found


async def _commit(engine: Engine, model: Any, recipe: Recipe, ordinal: int, base: Weights | None) -> Weights:
    import torch
    from temper.common.bits import TensorBits, seal
    from temper.common.delta import encode, stage
    from temper.learner.mixtures import divided
    from temper.learner.policy import bit_view

    name = recipe.model.serving_dtype
    dtype = getattr(torch, name)
    tensors = {
        part: TensorBits.of(bit_view(tensor), name)
        for key, p in model.named_parameters()
        for part, tensor in divided(key, p.detach().to(dtype, copy=True), model.config.model_type)
    }
    new = seal(ordinal, 1, tensors, base)
    await engine.apply(stage(encode(base, new), base))
    return new


def _step(model: Any, number: int) -> None:
    """A change of every parameter, about as large as an optimiser step's."""
    import torch

    torch.manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * STEP * parameter.abs().mean())


async def _gap(engine: Engine, model: Any, prompts: Sequence[list[int]], text: Text, recipe: Recipe) -> Gap:
    import torch
    from temper.actor.engines.base import GenerateRequest, SamplingParams
    from temper.common.domains import derive_seed

    s = recipe.sampling
    params = SamplingParams(s.temperature, s.top_p, s.top_k, s.min_p, s.max_new_tokens, text.stop_ids(s.stop))
    requests = [
        (prompt, GenerateRequest(prompt, _seeded(params, derive_seed("check engine", number, sample))))
        for number, prompt in enumerate(prompts)
        for sample in range(SAMPLES)
    ]
    made = await asyncio.gather(*(engine.generate(request) for _, request in requests))
    pairs = zip([prompt for prompt, _ in requests], made, strict=True)
    gaps = torch.cat([_differences(model, prompt, one, params, recipe) for prompt, one in pairs])
    return Gap(gaps.numel(), float(gaps.mean()), float(gaps.quantile(0.99)), float(gaps.max()))


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    from dataclasses import replace

    return replace(params, seed=seed, want_support=params.truncates)


def _differences(model: Any, prompt: list[int], made: Generation, params: SamplingParams, recipe: Recipe) -> Any:
    """|log-probability of the learner's model - the engine's| of each sampled token, over the same support."""
    import torch

    low = recipe.model.compute_dtype == "bfloat16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        logits = model(torch.tensor([prompt + made.ids])).logits[0, len(prompt) - 1 : -1].float()
    logits = logits / (params.temperature or 1.0)
    if made.support is not None:
        kept = torch.full_like(logits, -torch.inf)
        for row, ids in enumerate(made.support):
            kept[row, ids] = logits[row, ids]
        logits = kept
    table = torch.log_softmax(logits, -1)
    chosen = table.gather(1, torch.tensor(made.ids).unsqueeze(1)).squeeze(1)
    return (chosen - torch.tensor(made.logprobs)).abs()
