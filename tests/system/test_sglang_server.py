"""The SGLang engine against the real server on CPU: the distribution sampled from, updates in flight, failures.

A server for each model, started side by side: the demo's own Llama (so that `temper check engine` fits it), a Qwen3, a Qwen3
with a mixture of experts, and other mixtures for what is a matter of theirs.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from temper.actor.engines.base import Cancel, GenerateRequest, Generation
from temper.actor.engines.sglang_answer import Answer
from temper.actor.engines.sglang_request import body_of
from temper.actor.engines.sglang_weights import packed
from temper.cli.check import main as check_main
from temper.common import recipe as recipes
from temper.common.errors import EngineError
from temper.learner import models
from temper.learner.batching import Rows, plan
from temper.learner.policy import Policy
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parent))

from sglang_live import LENGTH, LINEAGE, Live, ask, gap, need_sglang, recomputed, replay

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
CLOSE = 1e-5  # nats
DEMO = [f"--model.max_length_tokens={LENGTH}"]
_make: Any = AutoModelForCausalLM.from_config


def shaken(model: Any) -> Any:
    """Weights that give distinct distributions."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def llama() -> tuple[Any, dict[str, bytes]]:
    loaded = models.load(recipes.load("demo", DEMO).model, 0, Path("/nonexistent"))
    return shaken(loaded.model), loaded.bundle_files


def qwen3() -> tuple[Any, dict[str, bytes]]:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    model = shaken(_make(config))
    settings = config.to_dict() | {"architectures": [type(model).__name__]}
    return model, {"config.json": json.dumps(settings).encode()}


def mixture(kind: str = "qwen3_moe") -> tuple[Any, dict[str, bytes]]:
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "olmoe" else 2,
        "max_position_embeddings": LENGTH,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    config: Any
    if kind == "mixtral":
        config = MixtralConfig(**shape, num_local_experts=8)
    elif kind == "olmoe":
        config = OlmoeConfig(**shape, num_experts=8)
    else:
        config = Qwen3MoeConfig(**shape, head_dim=32, moe_intermediate_size=32, num_experts=8, norm_topk_prob=True)
    model = shaken(_make(config))
    settings = config.to_dict() | {"architectures": [type(model).__name__]}
    return model, {"config.json": json.dumps(settings).encode()}


MIXTURES = {"mixture": mixture, "mixtral": partial(mixture, "mixtral"), "olmoe": partial(mixture, "olmoe")}
MODELS = {"llama": llama, "qwen3": qwen3, **MIXTURES}
llama_only = pytest.mark.parametrize("live", ["llama"], indirect=True)  # what is no matter of the architecture


@pytest.fixture(scope="module")
def lives(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Live]]]:
    """The servers of the tests that are to run, all of them starting."""
    need_sglang()
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = dict.fromkeys(item.callspec.params["live"] for item in here)
    with ThreadPoolExecutor(len(names)) as pool:
        folders = {name: tmp_path_factory.mktemp(name) for name in names}
        # built one by one: transformers is not made for threads
        built = {name: MODELS[name]() for name in names}
        made = {name: pool.submit(Live, *built[name], folders[name], experts=name in MIXTURES) for name in names}
        yield made
        for each in made.values():
            if each.exception() is None:
                each.result().close()


@pytest.fixture(scope="module", params=["llama", "qwen3", "mixture"])
def live(request: pytest.FixtureRequest, lives: dict[str, Future[Live]]) -> Live:
    """One server for all tests of a model."""
    return lives[request.param].result()


def test_log_probabilities_are_those_of_the_distribution_sampled(live: Live) -> None:
    async def scenario() -> None:
        engine, model, ordinal = live.engine, live.model, live.ordinal
        many = await asyncio.gather(*(engine.generate(ask(seed=seed)) for seed in range(20)))
        assert max(gap(model, ask(), one) for one in many) < CLOSE
        assert len({tuple(one.ids) for one in many}) > 10  # distinct samples of one prompt
        assert all(one.version_runs == [(LINEAGE, ordinal, len(one.ids))] for one in many)
        for params in (
            {"temperature": 0.6},
            {"temperature": 1.3, "top_k": 6, "want_support": True},
            {"top_p": 0.8, "want_support": True},
            {"temperature": 0.7, "min_p": 0.1, "want_support": True},
            {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "want_support": True},
        ):
            made = await engine.generate(ask(**params))
            assert gap(model, ask(**params), made) < CLOSE, params
            if params.get("want_support"):
                assert made.support is not None and min(map(len, made.support)) < live.vocabulary
        greedy = await engine.generate(ask(temperature=0.0))
        assert greedy.finish_reason == "length" and len(greedy.ids) == 12
        stop = greedy.ids[1]
        stopped = await engine.generate(ask(temperature=0.0, stop_token_ids=(stop,)))
        assert stopped.finish_reason == "stop" and stopped.ids == greedy.ids[: greedy.ids.index(stop) + 1]

    live.run(scenario())


def test_updates_in_flight_keep_the_log_probabilities_right(live: Live) -> None:
    async def scenario() -> None:
        engine, model = live.engine, live.model
        for _ in range(3):
            requests = [ask(max_new_tokens=150, seed=seed) for seed in range(6)]
            async with live.under_way(requests) as running:
                before, old = copy.deepcopy(model), live.ordinal
                live.change()
                update = await live.publish()
            assert 3 <= len(update.changed) < len(live.held.tensors)
            fresh = await asyncio.gather(*(engine.generate(ask(seed=seed)) for seed in range(4)))
            assert all(one.version_runs == [(LINEAGE, old + 1, len(one.ids))] for one in fresh)
            assert max(gap(model, ask(), one) for one in fresh) < CLOSE
            for each, one in zip(requests, await asyncio.gather(*running), strict=True):
                assert [run[:2] for run in one.version_runs] == [(LINEAGE, old), (LINEAGE, old + 1)]
                assert len(one.ids) == 150
                assert replay({old: before, old + 1: model}, each, one) < CLOSE  # every token, over the kept cache
        assert engine.fleet.gap_nats < CLOSE

    live.run(scenario())


def test_a_new_request_meets_no_keys_of_old_weights(live: Live) -> None:
    """A key/prefix cache of old weights is reused -> the first token's log-probability after a swap is a fresh engine's."""

    async def scenario() -> None:
        prompt = [1 + at % 20 for at in range(120)]
        for _ in range(2):
            await live.engine.generate(ask(prompt, max_new_tokens=2))  # leaves its keys in the prefix cache
            live.change()
            await live.publish()
            made = await live.engine.generate(ask(prompt, max_new_tokens=2))
            assert gap(live.model, ask(prompt), made) < CLOSE

    live.run(scenario())


@llama_only
def test_an_abort_keeps_what_there_was_and_another_one_goes_on(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:

    async def scenario() -> None:
        engine, client = live.engine, live.engine.fleet.servers[0].client
        cancel, request, answers = Cancel(), ask(max_new_tokens=200, temperature=1.5), []
        sends = engine._requests.ask

        async def noted(*arguments: Any, **named: Any) -> Answer:
            answers.append(await sends(*arguments, **named))
            return answers[-1]

        monkeypatch.setattr(engine._requests, "ask", noted)
        async with live.under_way([request]) as (other,):
            mine = asyncio.create_task(engine.generate(request, cancel))
            await live.running(2)
            cancel.set()
            aborted = await mine
            assert aborted.finish_reason == "abort" and 0 < len(aborted.ids) < 200
            assert gap(live.model, request, aborted) < CLOSE
            answers.clear()
            await client.post("/abort_request", {"abort_all": True})  # nobody here asked for that
        whole = await other
        assert [answer.finish_reason for answer in answers] == ["abort", "length"] and answers[0].ids
        assert whole.finish_reason == "length" and len(whole.ids) == 200
        assert gap(live.model, request, whole) < CLOSE

    live.run(scenario())


@llama_only
def test_a_closed_engine_leaves_nothing_running_and_returns_what_there_was(live: Live) -> None:
    async def scenario() -> None:
        engine = await live.attached()
        await engine.apply(live.update(whole=True))
        requests, client = (
            [ask(max_new_tokens=200, seed=seed) for seed in range(2)],
            live.engine.fleet.servers[0].client,
        )
        async with live.under_way(requests, engine) as running:
            foreign = body_of("foreign", requests[0].sampling, requests[0].ids, 200, "foreign")
            kept = asyncio.create_task(client.post("/generate", foreign))
            await live.running(3)
            await engine.close()
            for request, made in zip(requests, await asyncio.gather(*running), strict=True):
                assert made.finish_reason == "abort" and 0 < len(made.ids) < 200
                assert gap(live.model, request, made) < CLOSE
            await live.running(1)
        assert len((await kept)["output_ids"]) == 200
        await live.engine.apply(live.update(whole=True))

    live.run(scenario())


@llama_only
@pytest.mark.parametrize("way", ["retract", "copy", "disk"])
def test_other_ways_to_bring_weights(live: Live, way: str, tmp_path: Path) -> None:
    """Retracted instead of in place; copied into the request instead of shared; from disk."""

    async def scenario() -> None:
        host = {"transfer": "disk", "disk_dir": str(tmp_path)} if way == "disk" else {}
        host |= {"transfer": "copy"} if way == "copy" else {}
        engine = await live.attached(recompute=way == "retract", **host)
        try:
            await engine.apply(live.update(whole=True))
            request, before = ask(max_new_tokens=120), copy.deepcopy(live.model)
            async with live.under_way([request], engine) as (running,):
                live.change()
                update = live.update()
                assert await engine.apply(update) == update.digest
            made = await engine.generate(ask())
            assert gap(live.model, ask(), made) < CLOSE
            old = await running
            assert [run[:2] for run in old.version_runs] == [(LINEAGE, live.ordinal - 1), (LINEAGE, live.ordinal)]
            check = recomputed if way == "retract" else replay
            assert check({live.ordinal - 1: before, live.ordinal: live.model}, request, old) < CLOSE
        finally:
            await engine.close()
        await live.engine.apply(live.update(whole=True))

    live.run(scenario())


@llama_only
def test_weights_that_are_not_what_they_should_be_are_found(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reading three tensors back may miss, the probe's log-probabilities show."""

    async def scenario() -> None:
        fleet = live.engine.fleet
        server, version = fleet.servers[0], live.engine.version
        assert version is not None and fleet._probe is not None
        assert await fleet._probe.check(server.client, version) < CLOSE
        name = "model.layers.1.mlp.down_proj.weight"
        wrong = fleet.mirror.tensor(name) * 1.5
        body = {
            "serialized_named_tensors": packed([(name, wrong)], shared=False),
            "weight_version": f"{LINEAGE}:{live.ordinal}",
            "flush_cache": False,
        }
        for path, content in (
            ("begin_weight_update", {}), ("update_weights_from_tensor", body), ("end_weight_update", {})
        ):  # fmt: skip
            await server.client.command(f"/{path}", content, timeout_s=60)
        with pytest.raises(EngineError, match="computes other log-probabilities"):
            await fleet._probe.check(server.client, version)
        await live.engine.apply(live.update(whole=True))
        assert gap(live.model, ask(), await live.engine.generate(ask())) < CLOSE
        # a commit that the probe refuses: what ran loses what it sampled since, and goes on under the full copy
        before, requests = copy.deepcopy(live.model), [ask(max_new_tokens=200, seed=seed) for seed in range(3)]
        async with live.under_way(requests) as running:
            live.change()
            with monkeypatch.context() as patched:
                patched.setattr(fleet._probe, "limit", -1.0)
                with pytest.raises(EngineError, match="computes other log-probabilities"):
                    await live.engine.apply(live.update())
        await live.engine.apply(live.update(whole=True))
        old, new = (LINEAGE, live.ordinal - 2), (LINEAGE, live.ordinal)
        for each, made in zip(requests, await asyncio.gather(*running), strict=True):
            assert [run[:2] for run in made.version_runs] == [old, new] and len(made.ids) == 200
            assert recomputed({old[1]: before, new[1]: live.model}, each, made) < CLOSE

    live.run(scenario())


@llama_only
def test_check_engine_compares_the_real_server_over_updates(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = live.engine.fleet.servers[0].place
    (tmp_path / "key").write_text(place.admin_key)
    host = tmp_path / "host.toml"
    host.write_text(f'[actor.sglang]\nservers = ["{place.url}"]\nadmin_key_file = "{tmp_path / "key"}"\n')
    sampling = ["--sampling.temperature=0.8", "--sampling.top_p=0.9"]
    arguments = ["engine", "demo", "--engine.kind=sglang", "--engine.max_rows=8", *DEMO, *sampling, "--host", str(host)]
    try:
        assert check_main(arguments) == 0
    finally:
        live.run(live.engine.apply(live.update(whole=True)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [f"after {n} updates" for n in range(4)]
    assert lines[4].startswith("engine: fine") and float(lines[4].split()[6]) < CLOSE


@pytest.mark.parametrize("live", ["mixture"], indirect=True)
def test_experts_are_those_that_the_learners_model_routes_to(live: Live) -> None:
    """For every token that was fed, prompt and sampled ones, after an update too."""

    async def scenario() -> None:
        for _ in range(2):
            request = ask(want_experts=True, max_new_tokens=20)
            made = await live.engine.generate(request)
            assert gap(live.model, request, made) < CLOSE and made.experts is not None
            fed = [*request.ids, *made.ids][:-1]
            with torch.no_grad():
                routers = live.model(torch.tensor([fed]), output_router_logits=True).router_logits
            wanted = torch.stack([logits.topk(2).indices.sort(-1).values for logits in routers], 1)
            found = torch.from_numpy(made.experts).long().view(len(fed), len(routers), 2).sort(-1).values
            assert torch.equal(found, wanted) and len(found.unique()) > 2
            live.change()
            await live.publish()

    live.run(scenario())


@pytest.mark.parametrize("live", list(MIXTURES), indirect=True)
def test_the_learner_replays_what_the_server_routed(live: Live) -> None:
    """The learner's packed forward with the recorded experts gives the server's log-probabilities and, with the same
    weights, chooses the same experts itself; with other routers only the replay keeps it from choosing others."""

    async def scenario() -> tuple[Any, list[GenerateRequest], list[Generation]]:
        live.change()
        await live.publish()
        prompts = [(5, 6, 7, 8), (5, 6, 7, 9, 10), (11, 12)]
        requests = [ask(prompts[seed % 3], seed=seed, want_experts=True, max_new_tokens=24) for seed in range(12)]
        made = await asyncio.gather(*(live.engine.generate(request) for request in requests))
        return copy.deepcopy(live.model), requests, list(made)

    model, requests, made = live.run(scenario())
    tokens = [[*request.ids, *one.ids] for request, one in zip(requests, made, strict=True)]
    records = []
    for ids, one in zip(tokens, made, strict=True):
        assert one.experts is not None and one.experts.shape == (len(ids) - 1, 2 * 2)
        records.append(np.concatenate([one.experts, np.full((1, 4), -1, np.int16)]))
    policy = Policy(model, routed_experts=True)
    assert policy.routing is not None
    trained = [range(len(request.ids), len(ids)) for request, ids in zip(requests, tokens, strict=True)]
    rows = Rows(
        np.concatenate(tokens).astype(np.int32),
        np.cumsum([0, *map(len, tokens)]),
        np.concatenate(trained).astype(np.int64),
        np.cumsum([0, *map(len, trained)]),
        policy.routing.checked(np.concatenate(records), sum(map(len, tokens))),
    )
    (batch,) = plan(rows, 1 << 20)
    sampled = torch.tensor([value for one in made for value in one.logprobs])[torch.from_numpy(batch.flat)]

    def replayed() -> tuple[float, tuple[int, int, int]]:
        with torch.no_grad():
            found = policy.logprobs(batch, temperature=1.0).logprob
        assert policy.replay is not None
        return float((found - sampled).abs().max()), policy.replay.counts()

    apart, (replaced, recorded, size) = replayed()
    assert apart < CLOSE and replaced == 0 and recorded == size == 2 * batch.packed_tokens
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(1 + 0.3 * torch.randn_like(layer.mlp.gate.weight))
    elsewhere, (replaced, recorded, _) = replayed()
    assert 0.02 * recorded < replaced < recorded and elsewhere > CLOSE


@llama_only
def test_sigkill_of_the_server_mid_generation_loses_nothing(live: Live) -> None:
    """kill -9 of the scheduler with rollouts in flight: the server is replaced, gets its weights, every request ends whole."""

    async def scenario() -> None:
        engine = live.engine
        live.change()
        await live.publish()
        requests = [ask(max_new_tokens=200, seed=seed, temperature=1.2) for seed in range(4)]
        process = engine.fleet.servers[0].place._process  # type: ignore[union-attr]
        assert process is not None
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        restarts = engine.counts.restarts
        async with live.under_way(requests, killed=True) as running:
            (scheduler,) = (each for each in family if "sglang::scheduler" in " ".join(each.cmdline()))
            os.kill(scheduler.pid, signal.SIGKILL)
            assert not any(each.done() for each in running)
        for each, one in zip(requests, await asyncio.gather(*running), strict=True):
            assert one.finish_reason == "length" and len(one.ids) == 200
            assert gap(live.model, each, one) < CLOSE
            assert {ordinal for _, ordinal, _ in one.version_runs} == {live.ordinal}
        assert engine.counts.restarts == restarts + 1
        psutil.wait_procs(family, timeout=10)
        assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    live.run(scenario(), 600)
