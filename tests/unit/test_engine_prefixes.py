"""Prompts that rows share: stored once, begun where a known one ends, and never met by rows of other weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.actor.engines.base import GenerateRequest, Generation, SamplingParams
from temper.actor.engines.decoder import Decoder
from temper.actor.engines.prefixes import KEPT, Prefixes
from temper.actor.engines.shape import from_config
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))

import engine_kit as kit

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
SHAPE = from_config(CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]})
LENGTH = 157  # no multiple of anything that lengths are rounded up to
FEW_SHOT = [list(range(1, 61)), list(range(30, 90))]  # the beginnings of two domains' prompts


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


MODELS = [kit.model_of(seed, CONFIG) for seed in range(3)]


def commit(made: Decoder, ordinal: int, fill: float | None = None) -> None:
    """A full copy of MODELS[ordinal % 3] as version `ordinal`; every value is `fill` if one is given."""
    named = {name: p.detach().contiguous() for name, p in MODELS[ordinal % len(MODELS)].named_parameters()}
    if fill is not None:
        named = {name: torch.full_like(values, fill) for name, values in named.items()}
    made.commit(kit.update_to(kit.sealed(named, ordinal)))


def decoder(rows: int = 12, kv: Literal["keep", "recompute"] = "keep") -> Decoder:
    made = Decoder(SHAPE, torch.float32, max_rows=rows, length=LENGTH, kv_on_swap=kv)
    commit(made, 0)
    return made


def ask(ids: list[int], seed: int = 0, tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(ids, SamplingParams(seed=seed, max_new_tokens=tokens))


def error_of(prompt: list[int], generation: Generation, model: Any) -> float:
    """The largest difference from transformers' log-probabilities."""
    right = kit.forced(model, prompt, generation.ids)
    return float(np.abs(np.array(right) - generation.logprobs).max(initial=0.0))


REQUESTS = st.tuples(
    st.integers(0, 1),  # which few-shot examples
    st.integers(0, 60),  # how much of them
    st.lists(st.integers(1, 96), min_size=1, max_size=12),  # and what follows
    st.integers(1, 9),  # tokens
    st.integers(1, 4),  # samples
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(REQUESTS, max_size=3), st.integers(0, 5), st.booleans()), min_size=1, max_size=5))
def test_rows_are_what_they_would_be_alone(
    waves: list[tuple[list[tuple[int, int, list[int], int, int]], int, bool]],
) -> None:
    """Whatever is admitted together, shared, moved, cancelled or left over from earlier requests."""
    made = decoder()
    prompts: dict[Any, list[int]] = {}
    with torch.inference_mode():
        for wave, (requests, steps, cancel) in enumerate(waves):
            for number, (shot, size, tail, tokens, samples) in enumerate(requests):
                for index in range(samples):
                    key = (wave, number, index)
                    prompts[key] = FEW_SHOT[shot][:size] + tail
                    made.submit(key, ask(prompts[key], seed=hash(key) & 0xFFFF, tokens=tokens))
            ended: dict[Any, Generation] = {}
            for _ in range(steps):
                for one in made.step():
                    assert one.generation is not None, one.error
                    ended[one.key] = one.generation
            if cancel and made.running:
                made.cancel(next(iter(made.running)))
            for key, generation in ended.items():
                assert error_of(prompts[key], generation, MODELS[0]) < 1e-4
        ended = kit.finish(made)
        for key, generation in ended.items():
            assert error_of(prompts[key], generation, MODELS[0]) < 1e-4


def test_a_context_shorter_than_the_steps_of_the_cache() -> None:
    made = Decoder(SHAPE, torch.float32, max_rows=2, length=12)
    commit(made, 0)
    made.submit("whole", ask([5, 6], tokens=20))
    ended = kit.finish(made)["whole"]
    assert len(ended.ids) == 10 and error_of([5, 6], ended, MODELS[0]) < 1e-4


def test_the_examples_of_a_domain_are_computed_once() -> None:
    made = decoder()
    tails = [[91, n, 92] for n in range(5)]
    for number, tail in enumerate(tails):
        for index in range(2):
            made.submit((number, index), ask(FEW_SHOT[0] + tail, seed=index))
    kit.finish(made)
    assert made.caches.prefilled_tokens == 62 + 4 * 1  # the last token is each row's own first step
    made.submit("later", ask(FEW_SHOT[0] + [95, 4, 4]))
    made.submit("the same again", ask(FEW_SHOT[0] + tails[-1]))
    kit.finish(made)
    assert made.caches.prefilled_tokens == 66 + 2


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_no_new_row_meets_prefixes_of_old_weights(kv: Literal["keep", "recompute"]) -> None:
    made = decoder(kv=kv)
    prompt = FEW_SHOT[0] + [91, 5, 92]
    for index in range(3):
        made.submit(("old", index), ask(prompt, seed=index, tokens=12))
    for _ in range(4):
        made.step()
    commit(made, 1)
    for index in range(3):
        made.submit(("new", index), ask(prompt, seed=10 + index))
        made.submit(("other", index), ask(FEW_SHOT[0] + [93, index], seed=20 + index))
    ended = kit.finish(made)
    for index in range(3):
        old, new, other = ended["old", index], ended["new", index], ended["other", index]
        assert old.version_runs == [(77, 0, 4), (77, 1, 8)]
        assert error_of(prompt, new, MODELS[1]) < 1e-4
        assert error_of(FEW_SHOT[0] + [93, index], other, MODELS[1]) < 1e-4
        table = torch.log_softmax(MODELS[1](torch.tensor([prompt + old.ids])).logits[0], -1)
        right = np.array([float(table[len(prompt) - 1 + i, token]) for i, token in enumerate(old.ids)])[4:]
        difference = np.abs(right - old.logprobs[4:]).max()
        assert difference < 1e-4 if kv == "recompute" else difference > 1e-3


def test_values_that_are_not_finite_do_not_outlive_their_rows() -> None:
    made = decoder(rows=4)
    commit(made, 1, fill=float("nan"))
    for index in range(4):
        made.submit(index, ask(FEW_SHOT[0] + [91], seed=index))
    errors = [one.error for one in made.step()]
    assert len(errors) == 4 and all("not finite" in error for error in errors)
    commit(made, 2)
    prompts = {index: [*FEW_SHOT[index % 2][: 40 + 5 * index], 91] for index in range(4)}
    for index, prompt in prompts.items():
        made.submit(index, ask(prompt, seed=index))
    for index, generation in kit.finish(made).items():
        assert error_of(prompts[index], generation, MODELS[2]) < 1e-4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 3)), max_size=60), st.data())
def test_the_book_never_runs_out_of_slots(asked: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Any order of rows that begin and end and of new weights: slots stay apart, what has rows stays, the rest is bounded."""
    book, rows = Prefixes(8), []
    for action, number, count in asked:
        if action == 3:
            book.expire()
            assert book.find((number,) * 40) is None
        elif action == 2 and rows:
            book.release(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
        elif len(rows) + count <= 8:
            ids = (number,) * 40
            entry = book.find(ids) or book.take(ids)
            for _ in range(count):
                book.acquire(entry)
                rows.append(entry)
            assert book.find(ids) is entry
            assert book.longest((*ids, 1)) == (entry, 40)
        held = book.used()
        assert {id(entry) for entry in rows} == {id(entry) for entry in held}
        assert sum(entry.rows for entry in held) == len(rows)
        assert len({entry.slot for entry in held}) == len(held)
        assert len(book) <= len(held) + KEPT + 1
