"""What an engine's caches hold: prefixes by their length, memory given back, lines that end a completion."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from temper.actor.domains.humaneval import body_of
from temper.actor.engines.base import GenerateRequest, SamplingParams
from temper.actor.engines.decoder import Decoder
from temper.actor.engines.lines import TokenLines
from temper.actor.engines.llama import Cache
from temper.actor.engines.shape import from_config
from temper.actor.engines.shelves import Shelves, length_for
from temper.actor.text import Text
from temper.common import recipe as recipes
from temper.common.bits import TensorBits, seal
from temper.common.delta import encode, stage
from temper.common.recipe_derived import leases_held
from temper.learner.models import micro

SHAPE = from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
)
PAGE = os.sysconf("SC_PAGE_SIZE")
PIECES = ["", "a", " ", "\n", "\n\n", " b", "\nc", "\n d", "\t", "e\n", " \n", "f\ng", "\n \nh"]


def held(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's pages that are in memory: those of the whole process come and go for other reasons, too."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first + 1)), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE


def test_a_cache_gives_the_memory_of_a_row_back() -> None:
    cache = Cache(SHAPE, 8, 4096)  # 128 MiB
    row = cache.all[:, :, 0].nbytes
    before = held(cache.all)
    cache.all.fill_(1.0)
    full = held(cache.all)
    assert full - before > 7 * row
    for index in range(1, 5):
        cache.free(index)
    assert full - held(cache.all) > 3.5 * row
    assert bool((cache.all[:, :, 0] == 1).all()) and bool((cache.all[:, :, 5:] == 1).all())
    cache.clear()
    assert held(cache.all) - before < row and not cache.all.any()


def test_a_cache_that_grows_copies_only_rows_in_use() -> None:
    cache = Cache(SHAPE, 8, 8)
    cache.all.fill_(2.0)
    cache.grow(64, 3)
    assert bool((cache.all[:, :, :3, :, :9] == 2).all()) and not cache.all[:, :, 3:].any()


@given(st.integers(1, 5000), st.integers(2, 5000))
def test_a_shelf_is_at_most_half_longer_than_its_prefixes(tokens: int, longest: int) -> None:
    tokens = min(tokens, longest)
    length = length_for(tokens, longest)
    assert tokens <= length <= longest
    assert length <= max(64, 1.5 * tokens)


def test_prefixes_of_a_shelf_lie_side_by_side() -> None:
    shelves = Shelves(SHAPE, 6, 512)
    for slot, tokens in enumerate((40, 200, 60, 130)):
        shelves.put(slot, tokens)
    (short, first), (long, _), (also_short, second) = (shelves.at(slot) for slot in range(3))
    assert short is also_short and short is not long and (first, second) == (0, 1)
    shelves.remove(0)
    shelves.remove(77)  # never had a place
    shelves.put(4, 33)
    assert shelves.at(4) == (short, 0)
    found = torch.randn(2, 2, 2, 5, 64)
    shelves.write(4, 3, found)
    assert torch.equal(shelves.read(4, 8)[..., 3:, :], found)
    shelves.wipe(4)
    assert not shelves.read(4, 8).any()


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12))
def test_a_line_in_column_0_ends_a_completion_where_the_body_ends(ids: list[int]) -> None:
    """Nothing of the body is lost, and nothing goes on for a token longer than needed."""
    lines = TokenLines.of(PIECES)
    whole, at_start, said = body_of("".join(PIECES[i] for i in ids)), torch.tensor([True]), ""
    for token in ids:
        said += PIECES[token]
        begun, at_start = lines.begins(at_start, torch.tensor([token]))
        outside = any(line[:1].strip() for line in said.split("\n"))
        assert bool(begun) == outside
        if outside:
            assert body_of(said) == whole
            return


def table_model(following: list[int]) -> Decoder:
    """An engine whose greedy next token is `following[last token]`."""
    made = Decoder(replace(SHAPE, tied=False), torch.float32, max_rows=3, length=24)
    named: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in made.weights.named.items()}
    named["model.norm.weight"] += 1
    named["model.embed_tokens.weight"][:, :8] = torch.eye(8)
    named["lm_head.weight"][following, :8] = torch.eye(8)
    tensors = {
        n: TensorBits("float32", tuple(t.shape), t.view(-1).view(torch.int32).numpy().view("u4"))
        for n, t in named.items()
    }
    made.commit(stage(list(encode(None, seal(0, 1, tensors, None))), None))
    return made


def test_rows_that_ask_for_it_end_at_a_line_in_column_0() -> None:
    lines = TokenLines.of(["<eos>", " x", "\n", "a", " y", "b", "c", "d"])
    with torch.inference_mode():
        made = table_model([1, 4, 3, 5, 2, 6, 7, 0])  # 1 -> 4 -> 2 -> 3 -> 5 ...: " x", " y", newline, "a", "b"
        for name, own in (("body", lines), ("whole", None)):
            params = SamplingParams(temperature=0.0, max_new_tokens=6, lines=own)
            made.submit(name, GenerateRequest([1], params))
        ended = {one.key: one.generation for one in iter_of(made)}
    assert ended["whole"].ids == [4, 2, 3, 5, 6, 7] and ended["whole"].finish_reason == "length"
    assert ended["body"].ids == [4, 2, 3] and ended["body"].finish_reason == "stop"


def iter_of(made: Decoder) -> list[Any]:
    found = []
    while made.busy:
        found += made.step()
    return found


def test_a_rested_engine_goes_on() -> None:
    with torch.inference_mode():
        made = table_model([1, 2, 3, 4, 5, 6, 7, 0])
        params = SamplingParams(temperature=0.0, max_new_tokens=3)
        for prompt in ([1], [1, 2, 3]):
            made.submit(str(prompt), GenerateRequest(prompt, params))
        first = {one.key: one.generation.ids for one in iter_of(made)}
        made.caches.rest()
        for prompt in ([1], [1, 2, 3]):
            made.submit(str(prompt), GenerateRequest(prompt, params))
        assert {one.key: one.generation.ids for one in iter_of(made)} == first


def test_a_tokens_text_is_what_it_adds() -> None:
    model = recipes.load("demo").model
    files = dict(micro(model, 0).bundle_files)
    lines = Text(files).lines()
    letter = Text(files).encode(next(c for c in model.vocabulary if c.strip()))[0]
    assert lines.empty[0] and lines.opens[letter] and not lines.ends[letter]


@pytest.mark.parametrize(("role", "expected"), [("actor", 8), ("eval", 32), ("learner", 0)])
def test_an_evaluator_gets_the_leases_that_fill_its_engine(role: str, expected: int) -> None:
    assert leases_held(recipes.load("smollm2"), role) == expected
