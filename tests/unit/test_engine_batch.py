"""Continuous batching: what a row yields does not depend on its neighbours, swaps are clean, every end is reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from temper.actor.engines.decoder import Decoder
from temper.actor.engines.overwrite import bits
from temper.common.bits import TensorBits, seal
from temper.common.errors import EngineError

sys.path.insert(0, str(Path(__file__).parent))

from engine_kit import LENGTH, SHAPE, ask, finish, forced, model_of, sealed, two_versions, update_to, version_of


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def decoder(
    model: Any = None,
    *,
    rows: int = 8,
    kv: Literal["keep", "recompute"] = "keep",
    deterministic: bool = False,
) -> Decoder:
    made = Decoder(SHAPE, torch.float32, max_rows=rows, length=LENGTH, kv_on_swap=kv, deterministic=deterministic)
    if model is not None:
        made.commit(update_to(version_of(model, 0)))
    return made


def test_greedy_equals_transformers() -> None:
    model = model_of(1)
    made = decoder(model)
    prompts = [[3, 5, 7], [9], [11, 2, 2, 4, 60, 1]]
    for index, prompt in enumerate(prompts):
        made.submit(index, ask(prompt, temperature=0.0, max_new_tokens=12))
    ended = finish(made)
    for index, prompt in enumerate(prompts):
        with torch.inference_mode(False), torch.no_grad():
            want = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert ended[index].ids == want[0, len(prompt) :].tolist()
        assert ended[index].logprobs == [0.0] * 12
        assert ended[index].finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampled_logprobs_equal_transformers(temperature: float) -> None:
    model = model_of(2)
    made = decoder(model, rows=5)
    prompts = {index: [1 + index % 3] * (1 + index % 4) for index in range(17)}
    for index, prompt in prompts.items():
        made.submit(index, ask(prompt, temperature=temperature, seed=index, max_new_tokens=3 + index))
    ended = finish(made)
    assert ended.keys() == prompts.keys()
    for index, prompt in prompts.items():
        got = ended[index]
        assert len(got.ids) == 3 + index
        assert got.logprobs == pytest.approx(forced(model, prompt, got.ids, temperature), abs=1e-5)
        assert got.version_runs == [(77, 0, 3 + index)]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}, {"top_k": 9}], ids=["whole", "top-p", "top-k"])
def test_a_row_is_the_same_alone_and_in_a_crowd(cut: dict[str, Any]) -> None:
    model = model_of(3)
    alone = decoder(model)
    alone.submit("it", ask([4, 5, 6], seed=123, max_new_tokens=20, **cut))
    crowd = decoder(model)
    others: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}]
    for index in range(30):
        crowd.submit(index, ask([index % 7, 8], seed=index, max_new_tokens=1 + index % 9, **others[index % 5]))
        if index == 11:
            crowd.submit("it", ask([4, 5, 6], seed=123, max_new_tokens=20, **cut))
    want, got = finish(alone)["it"], finish(crowd)["it"]
    assert got.ids == want.ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)


def test_deterministic_mode_gives_the_same_bits_whatever_runs_beside() -> None:
    model = model_of(4)
    results = []
    for crowd in (0, 3, 25):
        made = decoder(model, rows=16, deterministic=True)
        for index in range(crowd):
            made.submit(index, ask([index % 5] * (1 + index % 6), seed=index, max_new_tokens=1 + index % 7))
        finish(made, steps=crowd // 5)
        for sibling in range(4):
            made.submit(f"it-{sibling}", ask([4, 5, 6], seed=sibling, max_new_tokens=20))
        ended = finish(made)
        results.append([(ended[f"it-{s}"].ids, ended[f"it-{s}"].logprobs) for s in range(4)])
    assert results[0] == results[1] == results[2]


def test_a_continuation_draws_what_the_whole_would_have_drawn() -> None:
    model = model_of(5)
    made = decoder(model)
    made.submit("whole", ask([7, 7], seed=9, max_new_tokens=20))
    whole = finish(made)["whole"]
    made.submit("rest", ask([7, 7, *whole.ids[:9]], seed=9, max_new_tokens=11))
    assert finish(made)["rest"].ids == whole.ids[9:]


def test_siblings_differ_and_their_prompt_is_prefilled_once() -> None:
    made = decoder(model_of(6), rows=16)
    for index in range(16):
        made.submit(index, ask([1, 2, 3, 4, 5], seed=index))
    ended = finish(made)
    assert made.caches.prefilled_tokens == 4
    assert len({tuple(generation.ids) for generation in ended.values()}) > 10
    made.submit("first", ask([1, 2, 3, 4, 5], seed=99, max_new_tokens=9))
    made.step()
    made.submit("later", ask([1, 2, 3, 4, 5], seed=98))
    finish(made)
    assert made.caches.prefilled_tokens == 8  # "later" copied from the running sibling


def test_stop_tokens_end_a_row_and_are_part_of_it() -> None:
    made = decoder(model_of(1))
    made.submit("free", ask([3, 5, 7], temperature=0.0, max_new_tokens=12))
    free = finish(made)["free"].ids
    stop = free[5]
    made.submit("stopped", ask([3, 5, 7], temperature=0.0, max_new_tokens=12, stop_token_ids=(60, stop)))
    got = finish(made)["stopped"]
    assert got.ids == free[: free.index(stop) + 1]
    assert got.finish_reason == "stop"


def test_the_context_ends_a_row() -> None:
    made = decoder(model_of(1))
    made.submit("long", ask([1] * (LENGTH - 3), max_new_tokens=100))
    got = finish(made)["long"]
    assert len(got.ids) == 3 and got.finish_reason == "length"


def test_cancelling_returns_the_partial_result_and_leaves_the_others() -> None:
    made = decoder(model_of(2), rows=2)
    for key in ("a", "b", "c"):
        made.submit(key, ask([5, 6], seed=3, max_new_tokens=10))
    for _ in range(4):
        assert not made.step()
    made.cancel("a")
    made.cancel("c")
    made.cancel("unknown")
    ended = finish(made)
    assert [ended[key].finish_reason for key in "abc"] == ["abort", "length", "abort"]
    assert ended["a"].ids == ended["b"].ids[:4] and len(ended["a"].logprobs) == 4
    assert ended["c"].ids == [] and ended["c"].version_runs == []


def test_support_is_reported_only_when_asked_for() -> None:
    made = decoder(model_of(3))
    made.submit("asked", ask([5, 6], seed=3, top_k=4, want_support=True))
    made.submit("silent", ask([5, 6], seed=3, top_k=4))
    made.submit("plain", ask([5, 6], seed=3))
    ended = finish(made)
    support = ended["asked"].support
    assert support is not None and [len(ids) for ids in support] == [4] * 8
    assert all(token in ids for token, ids in zip(ended["asked"].ids, support, strict=True))
    assert ended["silent"].ids == ended["asked"].ids and ended["silent"].support is None
    assert ended["plain"].support is None


# ---------------------------------------------------------------- weights


def test_a_delta_makes_the_engine_bit_identical_to_a_full_copy() -> None:
    _, _, first, second = two_versions()
    made = decoder()
    assert made.commit(update_to(first)) == first.version.digest
    delta = update_to(second, first)
    assert any(patch.kind == "sparse" for patch in delta.changed)
    assert made.commit(delta) == second.version.digest
    assert made.commit(delta) == second.version.digest  # overwriting again is harmless
    for name, tensor in made.weights.named.items():
        assert (bits(tensor) == second.tensors[name].bits).all(), name
    assert sealed(made.weights.named, 1).version.digest == second.version.digest


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_swap_in_flight_is_clean(kv: Literal["keep", "recompute"]) -> None:
    old, new, first, second = two_versions()
    made = decoder(kv=kv)
    made.commit(update_to(first))
    prompt = [9, 8, 7]
    made.submit("running", ask(prompt, seed=4, max_new_tokens=12))
    for _ in range(5):
        made.step()
    made.commit(update_to(second, first))
    made.submit("fresh", ask(prompt, seed=5, max_new_tokens=6))
    ended = finish(made)
    running, fresh = ended["running"], ended["fresh"]
    assert running.version_runs == [(77, 0, 5), (77, 1, 7)]
    assert running.logprobs[:5] == pytest.approx(forced(old, prompt, running.ids)[:5], abs=1e-5)
    after = forced(new, prompt, running.ids)[5:]
    if kv == "recompute":
        assert running.logprobs[5:] == pytest.approx(after, abs=1e-5)
    else:
        assert np.abs(np.array(running.logprobs[5:]) - after).max() > 1e-3  # its cache is of the old weights
    assert fresh.version_runs == [(77, 1, 6)]
    assert fresh.logprobs == pytest.approx(forced(new, prompt, fresh.ids), abs=1e-5)


def test_requests_wait_for_the_first_weights() -> None:
    made = decoder()
    made.submit("early", ask([1, 2]))
    assert made.step() == [] and made.busy
    made.commit(update_to(version_of(model_of(1), 3)))
    assert finish(made)["early"].version_runs == [(77, 3, 8)]


def test_updates_that_do_not_fit_change_nothing() -> None:
    _, _, first, second = two_versions()
    made = decoder()
    with pytest.raises(EngineError, match="fetch a full copy"):
        made.commit(update_to(second, first))
    made.commit(update_to(first))
    before = {name: bits(tensor).copy() for name, tensor in made.weights.named.items()}
    third = seal(2, 77, dict(second.tensors) | {"lm_head.weight": second.tensors["model.embed_tokens.weight"]})
    for wrong, named in (
        (update_to(third), "lm_head.weight"),
        (update_to(sealed({"model.norm.weight": torch.ones(32)}, 2)), "absent"),
        (update_to(seal(2, 77, {name: _half(t) for name, t in first.tensors.items()})), "serving dtype"),
    ):
        with pytest.raises(EngineError, match=named):
            made.commit(wrong)
    assert made.version == first.version
    assert all((bits(tensor) == before[name]).all() for name, tensor in made.weights.named.items())


def _half(tensor: TensorBits) -> TensorBits:
    return TensorBits("float16", tensor.shape, np.zeros(tensor.bits.size, np.uint16))


def test_weights_that_are_not_finite_fail_the_row_and_not_the_engine() -> None:
    good = version_of(model_of(1), 0)
    tensors = dict(good.tensors)
    tensors["model.norm.weight"] = TensorBits("float32", (32,), np.full(32, 0x7FC00000, np.uint32))
    bad = seal(1, 77, tensors, good)
    made = decoder()
    made.commit(update_to(bad))
    made.submit("x", ask([1, 2]))
    ended = made.step()
    assert ended[0].generation is None and "not finite" in ended[0].error
    made.commit(update_to(seal(2, 77, dict(good.tensors), bad), bad))
    made.submit("y", ask([1, 2]))
    assert len(finish(made)["y"].ids) == 8
