"""What new weights mean for running generations: go on, stop and resume, or end first; and no new request meets old caches."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from temper.actor.engines.base import Generation, OnSwap
from temper.actor.engines.decoder import Decoder
from temper.actor.engines.embedded import EmbeddedEngine

sys.path.insert(0, str(Path(__file__).parent))

import engine_kit as kit

PROMPT = [9, 8, 7]
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def decoder(on_swap: OnSwap, **options: Any) -> Decoder:
    return Decoder(kit.SHAPE, torch.float32, max_rows=4, length=64, on_swap=on_swap, **options)


@pytest.mark.parametrize("prompt", [PROMPT, [i % 60 for i in range(45)]], ids=["copied", "shared"])
def test_abort_stops_rows_at_the_swap_and_they_resume_from_their_tokens_under_the_new_weights(
    prompt: list[int],
) -> None:
    old, new, first, second = kit.two_versions()
    made = decoder("abort")
    made.commit(kit.update_to(first))
    for key in range(6):  # two of them wait for a row
        made.submit(key, kit.ask(prompt, seed=key, max_new_tokens=12))
    for _ in range(5):
        assert not made.step()
    made.commit(kit.update_to(second, first))
    assert not made.running and len(made.pending) == 6
    for _ in range(3):
        made.step()
    made.commit(kit.update_to(second, first))  # a retry of the same version is no new run of it
    ended = kit.finish(made)
    for key in range(4):
        got: Generation = ended[key]
        assert got.version_runs == [(77, 0, 5), (77, 1, 7)] and got.finish_reason == "length"
        assert got.logprobs[:5] == pytest.approx(kit.forced(old, prompt, got.ids)[:5], abs=1e-5)
        assert got.logprobs[5:] == pytest.approx(kit.forced(new, prompt, got.ids)[5:], abs=1e-5)
    for key in (4, 5):
        assert ended[key].version_runs == [(77, 1, 12)]


def test_a_row_stopped_at_a_swap_draws_what_it_would_have_drawn() -> None:
    _, _, first, _ = kit.two_versions()
    whole, stopped = decoder("in_flight"), decoder("abort")
    for made in (whole, stopped):
        made.commit(kit.update_to(first))
        made.submit("it", kit.ask(PROMPT, seed=3, max_new_tokens=12, top_k=5, want_support=True))
        for step in range(4):
            made.step()
            if step == 2:
                made.commit(kit.update_to(first))
    want, got = kit.finish(whole)["it"], kit.finish(stopped)["it"]
    assert got.ids == want.ids and got.support == want.support and got.version_runs == [(77, 0, 12)]


def test_a_row_that_is_cancelled_while_it_waits_again_keeps_what_it_had() -> None:
    _, _, first, second = kit.two_versions()
    made = decoder("abort")
    made.commit(kit.update_to(first))
    made.submit("it", kit.ask(PROMPT, seed=3, max_new_tokens=12))
    for _ in range(4):
        made.step()
    made.commit(kit.update_to(second, first))
    made.cancel("it")
    (ended,) = made.step()
    assert ended.generation is not None and ended.generation.finish_reason == "abort"
    assert len(ended.generation.ids) == 4 and ended.generation.version_runs == [(77, 0, 4)]


def test_drain_lets_running_rows_end_under_their_version_and_new_ones_begin_under_the_next() -> None:
    async def scenario() -> None:
        _, new, first, second = kit.two_versions()
        config = kit.CONFIG.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
        engine = EmbeddedEngine(config, dtype="float32", max_rows=2, max_length_tokens=kit.LENGTH, on_swap="drain")
        await engine.apply(kit.update_to(first))
        stepped, gate = threading.Event(), threading.Event()
        step = engine._decoder.step

        def held() -> Any:
            ended = step()
            if engine._decoder.running:
                stepped.set()
                gate.wait(DEADLINE_S)
            return ended

        engine._decoder.step = held  # type: ignore[method-assign]
        early = [asyncio.create_task(engine.generate(kit.ask(PROMPT, seed=i, max_new_tokens=30))) for i in range(3)]
        assert await asyncio.to_thread(stepped.wait, DEADLINE_S)  # two rows run, the third waits for a row
        swap = asyncio.create_task(engine.apply(kit.update_to(second, first)))
        late = asyncio.create_task(engine.generate(kit.ask(PROMPT, seed=9, max_new_tokens=6)))
        await asyncio.sleep(0)
        gate.set()
        assert await swap == second.version.digest
        runs = [(await task).version_runs for task in early]
        assert sorted(runs) == [[(77, 0, 30)], [(77, 0, 30)], [(77, 1, 30)]]
        got = await late
        assert got.version_runs == [(77, 1, 6)]
        assert got.logprobs == pytest.approx(kit.forced(new, PROMPT, got.ids), abs=1e-5)
        assert engine.counts.swaps == 2
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("on_swap", ["in_flight", "abort"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_the_first_token_after_a_swap_has_a_fresh_engines_logprob(on_swap: OnSwap, kv: Any) -> None:
    """Field failure: a key/prefix cache of old weights is reused."""
    _, _, first, second = kit.two_versions()
    made, fresh = decoder(on_swap, kv_on_swap=kv), decoder("in_flight")
    made.commit(kit.update_to(first))
    made.submit("running", kit.ask(PROMPT, seed=1, max_new_tokens=20))  # its prompt is cached while it runs
    for _ in range(3):
        made.step()
    made.commit(kit.update_to(second, first))
    fresh.commit(kit.update_to(second))
    for one in (made, fresh):
        one.submit("new", kit.ask(PROMPT, seed=2, max_new_tokens=4))
    got, want = kit.finish(made)["new"], kit.finish(fresh)["new"]
    assert got.ids == want.ids and got.logprobs == pytest.approx(want.logprobs, abs=1e-6)
