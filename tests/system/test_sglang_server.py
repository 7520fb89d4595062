"""The SGLang engine against the real server, on CPU: the same log-probabilities as transformers, over updates in flight.

Needs `temper engine install --cpu`; without it these tests are skipped, and say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from temper.actor.engines.base import Cancel, GenerateRequest, Generation, SamplingParams
from temper.actor.engines.sglang import SglangEngine
from temper.actor.engines.sglang_home import completed, installed
from temper.actor.engines.sglang_process import ServerShape, SglangHost
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import encode, stage
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(400),
    pytest.mark.skipif(installed() is None, reason="SGLang is not installed: temper engine install --cpu"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES, head_dim=32)}
PROMPT = [5, 6, 7, 8]
_make: Any = AutoModelForCausalLM.from_config


def model_of(config: Any) -> Any:
    torch.manual_seed(3)
    model = _make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def changed(model: Any, number: int) -> None:
    """A step: three tensors change, one of them fused in the engine."""
    torch.manual_seed(number)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("0.self_attn.k_proj.weight", "1.mlp.up_proj.weight", "model.norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.05)


def sealed(model: Any, ordinal: int, base: Weights | None = None) -> Weights:
    tensors = {name: TensorBits.of(p.detach().numpy().copy()) for name, p in model.named_parameters()}
    return seal(ordinal, 5, tensors, base)


def gap(model: Any, made: Generation, temperature: float = 1.0, first: int | None = None) -> float:
    """Largest difference to transformers' log-probabilities, over the first `first` tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + made.ids])).logits[0] / temperature
    worst = 0.0
    for at, (token, logprob) in enumerate(zip(made.ids[:first], made.logprobs, strict=False)):
        row = logits[len(PROMPT) - 1 + at]
        if made.support is not None:
            row = torch.full_like(row, -torch.inf).index_copy_(
                0, torch.tensor(made.support[at]), row[torch.tensor(made.support[at])]
            )
        worst = max(worst, abs(float(torch.log_softmax(row, -1)[token]) - logprob))
    return worst


def ask(**params: Any) -> GenerateRequest:
    return GenerateRequest(PROMPT, SamplingParams(**({"max_new_tokens": 12} | params)))


@contextlib.asynccontextmanager
async def served(config: Any, folder: Path) -> AsyncIterator[SglangEngine]:
    settings = config.to_dict() | {"architectures": [type(model_of(config)).__name__]}
    host = completed(SglangHost(environment={"OMP_NUM_THREADS": "1"}, log_dir=str(folder)))
    files = {"config.json": json.dumps(settings).encode()}
    engine = SglangEngine(host, ServerShape("float32", 16, 256), files, 64, recompute=False)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_sampling_and_updates_in_flight(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        model = model_of(CONFIGS[name])
        async with served(CONFIGS[name], tmp_path) as engine:
            held = sealed(model, 0)
            assert await engine.apply(stage(list(encode(None, held)), None)) == held.version.digest
            many = await asyncio.gather(*(engine.generate(ask(seed=seed)) for seed in range(20)))
            assert max(gap(model, one) for one in many) < 1e-5
            assert len({tuple(one.ids) for one in many}) > 10
            assert all(one.version_runs == [(5, 0, len(one.ids))] for one in many)
            assert gap(model, await engine.generate(ask(temperature=0.6)), 0.6) < 1e-5
            truncated = await engine.generate(ask(temperature=1.3, top_k=6, top_p=0.9, want_support=True))
            assert truncated.support is not None and max(map(len, truncated.support)) <= 6
            assert gap(model, truncated, 1.3) < 1e-5
            greedy = await engine.generate(ask(temperature=0.0))
            stop = greedy.ids[1]
            stopped = await engine.generate(ask(temperature=0.0, stop_token_ids=(stop,)))
            assert stopped.finish_reason == "stop" and stopped.ids == greedy.ids[: greedy.ids.index(stop) + 1]
            for ordinal in (1, 2, 3):
                running = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=150, seed=s))) for s in range(6)]
                await engine.generate(ask(max_new_tokens=3))  # the others are under way
                before = model_of(CONFIGS[name])
                before.load_state_dict(model.state_dict())
                changed(model, ordinal)
                new = sealed(model, ordinal, held)
                update = stage(list(encode(held, new)), held)
                assert len(update.changed) == 3
                await engine.apply(update)
                fresh = await asyncio.gather(*(engine.generate(ask(seed=s)) for s in range(4)))
                assert all(one.version_runs == [(5, ordinal, len(one.ids))] for one in fresh)
                assert max(gap(model, one) for one in fresh) < 1e-5
                for one in await asyncio.gather(*running):
                    lineage, first, count = one.version_runs[0]
                    assert (lineage, first) == (5, ordinal - 1) and gap(before, one, first=count) < 1e-5
                held = new
            cancel = Cancel()
            long = asyncio.ensure_future(engine.generate(ask(max_new_tokens=240), cancel))
            await engine.generate(ask(max_new_tokens=3))
            cancel.set()
            assert (await long).finish_reason in ("abort", "stop")

    asyncio.run(scenario())


def test_a_killed_server_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        model = model_of(CONFIGS["llama"])
        async with served(CONFIGS["llama"], tmp_path) as engine:
            held = sealed(model, 0)
            await engine.apply(stage(list(encode(None, held)), None))
            under_way = [asyncio.ensure_future(engine.generate(ask(max_new_tokens=200, seed=s))) for s in range(4)]
            await engine.generate(ask(max_new_tokens=3))
            assert engine._server._process is not None
            os.killpg(engine._server._process.pid, signal.SIGKILL)
            for one in await asyncio.gather(*under_way):
                assert gap(model, one) < 1e-5 and {o for _, o, _ in one.version_runs} == {0}
            assert engine.restarts == 1

    asyncio.run(scenario())
