"""The embedded engine behind its thread: the loop stays free, every request ends, a dead engine says so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from temper.actor.engines.base import Cancel, GenerateRequest, Generation
from temper.actor.engines.embedded import EmbeddedEngine
from temper.common.bits import Weights
from temper.common.delta import encode, stage
from temper.common.errors import ConfigError, EngineError
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))

import engine_kit as kit

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=65536,
    tie_word_embeddings=True,
)
JSON = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}


def engine(**changes: Any) -> EmbeddedEngine:
    options: dict[str, Any] = {"dtype": "float32", "max_rows": 4, "max_length_tokens": 64} | changes
    return EmbeddedEngine(JSON, **options)


def version(ordinal: int) -> Weights:
    return kit.version_of(kit.model_of(ordinal, CONFIG), ordinal, lineage=5)


def test_generate_apply_and_close() -> None:
    async def scenario() -> None:
        made = engine()
        early = asyncio.ensure_future(made.generate(kit.ask([1, 2], seed=1)))
        digest = await made.apply(kit.update_to(version(0)))
        assert made.version is not None and made.version.digest == digest
        many = await asyncio.gather(early, *(made.generate(kit.ask([1, 2], seed=s)) for s in range(2, 12)))
        assert [len(one.ids) for one in many] == [8] * 11
        assert all(one.version_runs == [(5, 0, 8)] for one in many)
        assert made.counts.sampled_tokens == 88 and made.counts.swaps == 1
        assert made.caps.seeded and made.caps.in_flight and made.caps.support_ids and not made.caps.batch_invariant
        await made.close()
        with pytest.raises(EngineError, match="closed"):
            await made.generate(kit.ask([1]))

    asyncio.run(scenario())


def test_the_loop_is_free_while_the_engine_decodes() -> None:
    """A counter on the loop goes on while a long generation runs."""

    async def scenario() -> None:
        made = engine(max_length_tokens=64)
        await made.apply(kit.update_to(version(0)))
        running = asyncio.ensure_future(made.generate(kit.ask([1], max_new_tokens=60)))
        turns = 0
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        assert len((await running).ids) == 60 and turns > 60
        await made.close()

    asyncio.run(scenario())


def test_cancel_gives_the_partial_result_and_a_cancelled_caller_frees_its_row() -> None:
    async def scenario() -> None:
        made = engine(max_rows=2, max_length_tokens=20_000)
        await made.apply(kit.update_to(version(0)))
        cancel = Cancel()
        running = asyncio.ensure_future(made.generate(kit.ask([1], max_new_tokens=19_000), cancel))
        await asyncio.sleep(0)  # it is submitted first
        await made.generate(kit.ask([2], max_new_tokens=4))
        cancel.set()
        partial = await running
        assert partial.finish_reason == "abort" and 3 <= len(partial.ids) < 19_000
        abandoned = asyncio.ensure_future(made.generate(kit.ask([1], max_new_tokens=19_000)))
        await asyncio.sleep(0)
        abandoned.cancel()
        fill = [made.generate(kit.ask([2], max_new_tokens=2)) for _ in range(2)]
        assert [len(one.ids) for one in await asyncio.gather(*fill)] == [2, 2] and abandoned.cancelled()
        already = Cancel()
        already.set()
        none = await made.generate(kit.ask([1]), already)
        assert none.finish_reason == "abort" and none.ids == []
        await made.close()

    asyncio.run(scenario())


def test_close_returns_what_runs_as_aborted() -> None:
    async def scenario() -> list[Generation]:
        made = engine(max_rows=2, max_length_tokens=20_000)
        await made.apply(kit.update_to(version(0)))
        running = [asyncio.ensure_future(made.generate(kit.ask([1], max_new_tokens=19_000)))]
        running.append(asyncio.ensure_future(made.generate(kit.ask([1], max_new_tokens=4))))
        running += [asyncio.ensure_future(made.generate(kit.ask([s], max_new_tokens=19_000))) for s in (2, 3)]
        await running.pop(1)
        await made.close()
        return await asyncio.gather(*running)

    ended = asyncio.run(scenario())
    assert [one.finish_reason for one in ended] == ["abort"] * 3
    assert len(ended[0].ids) >= 3 and ended[2].ids == []


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (kit.ask([]), "prompt of 0 tokens"),
        (kit.ask([1] * 64), "prompt of 64 tokens"),
        (kit.ask([40]), "outside 0..39"),
        (kit.ask([1], max_new_tokens=0), "max_new_tokens"),
        (kit.ask([1], temperature=-1.0), "temperature"),
        (kit.ask([1], top_p=0.0), "top_p"),
        (kit.ask([1], seed=-1), "seed"),
    ],
)
def test_impossible_requests_are_refused(request_: GenerateRequest, named: str) -> None:
    async def scenario() -> None:
        made = engine()
        with pytest.raises(EngineError, match=named):
            await made.generate(request_)
        await made.close()

    asyncio.run(scenario())


def test_a_failed_thread_fails_all_requests_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        made = engine()
        await made.apply(kit.update_to(version(0)))

        def broken(*arguments: object) -> None:
            raise RuntimeError("bad memory")

        monkeypatch.setattr(made._decoder.model, "decode", broken)
        results = await asyncio.gather(*(made.generate(kit.ask([1])) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, EngineError) and "bad memory" in str(one) for one in results)
        assert isinstance(made.failure, RuntimeError)
        with pytest.raises(EngineError, match="bad memory"):
            await made.generate(kit.ask([1]))
        with pytest.raises(EngineError, match="bad memory"):
            await made.apply(kit.update_to(version(1)))
        await made.close()

    asyncio.run(scenario())


def test_a_refused_update_leaves_the_engine_running() -> None:
    async def scenario() -> None:
        made = engine()
        await made.apply(kit.update_to(version(0)))
        base, new = version(3), version(4)
        with pytest.raises(EngineError, match="fetch a full copy"):
            await made.apply(stage(list(encode(base, new)), base))
        assert len((await made.generate(kit.ask([1]))).ids) == 8
        await made.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "int8"}, "serving_dtype"),
        ({"max_length_tokens": 70_000}, "max_length_tokens"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": 10**7, "max_length_tokens": 60_000}, "GiB: lower one of them"),
    ],
)
def test_impossible_engines_are_configuration_errors(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        engine(**changes)
