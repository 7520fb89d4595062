"""A real SGLang server on CPU, for the tests around it: started once a model, on an event loop of its own, killed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from temper.actor.engines.base import GenerateRequest, Generation, SamplingParams
from temper.actor.engines.sglang import SglangEngine
from temper.actor.engines.sglang_home import completed, installed
from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import StagedUpdate, encode, stage
from temper.learner.mixtures import published
from transformers import DynamicCache

T = TypeVar("T")
LENGTH = 256
ROWS = 16
SLOW_S = 0.05
FLAGS = ("--load-snapshot-publish-interval", "1")  # what `running` reads is of the last step
LINEAGE = 5
CHANGED = ("0.self_attn.k_proj.weight", "1.mlp.up_proj.weight", "1.mlp.experts.gate_up_proj", "model.norm.weight")


def need_sglang() -> None:
    """Skip with `bin/test --no-engine`, and only then."""
    if os.environ.get("TEMPER_NO_ENGINE"):
        pytest.skip("bin/test --no-engine")
    if installed() is None:
        pytest.fail(
            "SGLang is not installed: run `bin/temper engine install --cpu` (bin/test alone does it), or leave these tests"
            " out with bin/test --no-engine",
            pytrace=False,
        )


class Live:
    """An engine with its server, and the model whose weights it is given."""

    def __init__(
        self, model: Any, files: dict[str, bytes], folder: Path, *, experts: bool = False, **host: Any
    ) -> None:
        self.model, self.files, self.folder, self._experts = model, files, folder, experts
        self.vocabulary = int(json.loads(files["config.json"])["vocab_size"])
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sglang tests", daemon=True)
        self._thread.start()
        self.host = completed(
            SglangHost(environment={"OMP_NUM_THREADS": "1"}, log_dir=str(folder), flags=FLAGS, **host)
        )
        self.engine = self.run(self._make(self.host), 700)
        self.held: Weights | None = None
        self.ordinal = -1
        self.run(self.publish())

    def run(self, work: Coroutine[Any, Any, T], limit_s: float = 400.0) -> T:
        """The result of `work`, run on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, limit_s), self.loop).result(limit_s + 5)

    async def _make(self, host: SglangHost, *, recompute: bool = False) -> SglangEngine:
        shape = ServerShape("float32", ROWS, LENGTH, self._experts)
        engine = SglangEngine(host, shape, self.files, self.vocabulary, recompute=recompute)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def running(self, rows: int) -> None:
        """Wait until the server says that it samples that many rows."""
        client, found = self.engine.fleet.servers[0].client, None
        while found != rows:
            found = (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"]

    @contextlib.asynccontextmanager
    async def under_way(
        self, requests: Sequence[GenerateRequest], engine: SglangEngine | None = None, *, killed: bool = False
    ) -> AsyncIterator[list[asyncio.Task[Generation]]]:
        """The requests, each with its first tokens sampled and, since the server is slowed down meanwhile, far from its
        last. `killed`: by then the server is another one."""
        client = self.engine.fleet.servers[0].client
        await self.running(0)
        await client.post("/slow_down", {"forward_sleep_time": SLOW_S})
        try:
            running = [asyncio.create_task((engine or self.engine).generate(each)) for each in requests]
            await self.running(len(running))
            yield running
        finally:
            if not killed:
                await client.post("/slow_down", {"forward_sleep_time": None})

    async def attached(self, *, recompute: bool = False, **host: Any) -> SglangEngine:
        """Another engine on the same server."""
        place = self.engine.fleet.servers[0].place
        key = self.folder / "admin.key"
        key.write_text(place.admin_key)
        host = {"servers": (place.url,), "admin_key_file": str(key)} | host
        return await self._make(SglangHost(**host), recompute=recompute)

    def update(self, *, whole: bool = False) -> StagedUpdate:
        """The model's present weights as the next version, and how to get there."""
        self.ordinal += 1
        tensors = {name: TensorBits.of(tensor.numpy().copy()) for name, tensor in self._checkpoint().items()}
        base = None if whole else self.held
        self.held = seal(self.ordinal, LINEAGE, tensors, base)
        return stage(list(encode(base, self.held)), base)

    def _checkpoint(self) -> dict[str, torch.Tensor]:
        return published({name: p.detach() for name, p in self.model.named_parameters()}, self.model.config.model_type)

    async def publish(self) -> StagedUpdate:
        """Give the engine the model's present weights."""
        update = self.update()
        assert await self.engine.apply(update) == update.digest
        return update

    def change(self) -> None:
        """A step: a few tensors change, some of them fused in the engine."""
        torch.manual_seed(100 + self.ordinal)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.endswith(CHANGED):
                    parameter.add_(torch.randn_like(parameter) * 0.05)

    def close(self) -> None:
        """End the server."""
        self.run(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def ask(prompt: Sequence[int] = (5, 6, 7, 8), **params: Any) -> GenerateRequest:
    """A request for a few tokens."""
    return GenerateRequest(list(prompt), SamplingParams(**({"max_new_tokens": 12} | params)))


def gap(model: Any, request: GenerateRequest, made: Generation, first: int | None = None) -> float:
    """Largest difference to transformers' log-probabilities, over the first `first` tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([[*request.ids, *made.ids]])).logits[0] / (request.sampling.temperature or 1.0)
    worst = 0.0
    for at, (token, logprob) in enumerate(zip(made.ids[:first], made.logprobs, strict=False)):
        row = logits[len(request.ids) - 1 + at]
        if made.support is not None:
            kept = torch.tensor(made.support[at])
            row = torch.full_like(row, -torch.inf).index_copy_(0, kept, row[kept])
        worst = max(worst, abs(float(torch.log_softmax(row, -1)[token]) - logprob))
    return worst


def replay(models: Mapping[int, Any], request: GenerateRequest, made: Generation) -> float:
    """Largest difference to log-probabilities replayed over the mixed cache: each token's forward runs under the version
    that sampled it, over keys and values that earlier versions left (`models`: ordinal -> model)."""
    cache = DynamicCache()
    waiting, at, worst = list(request.ids), 0, 0.0
    for _, ordinal, count in made.version_runs:
        tokens = made.ids[at : at + count]
        fed = waiting + tokens[:-1]
        with torch.no_grad():
            out = models[ordinal](torch.tensor([fed]), cache=cache, use_cache=True)
        rows = out.logits[0, len(waiting) - 1 :] / request.sampling.temperature
        table = torch.log_softmax(rows, -1)
        chosen = table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(made.logprobs[at : at + count])).abs().max()))
        waiting, at = tokens[-1:], at + count
    return worst


def recomputed(models: Mapping[int, Any], request: GenerateRequest, made: Generation) -> float:
    """Largest difference to log-probabilities of a whole forward under the version that sampled each token: what they are
    where keys and values were computed again after an update (`models`: ordinal -> model)."""
    at, worst = 0, 0.0
    for _, ordinal, count in made.version_runs:
        tokens = made.ids[at : at + count]
        with torch.no_grad():
            logits = models[ordinal](torch.tensor([[*request.ids, *made.ids[: at + count]]])).logits[0]
        rows = logits[len(request.ids) + at - 1 : -1] / request.sampling.temperature
        chosen = torch.log_softmax(rows, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(made.logprobs[at : at + count])).abs().max()))
        at += count
    return worst
