"""The embedded engine's arithmetic: Philox against published vectors, the sampler against its distribution, the
forward passes against transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from temper.actor.engines.llama import Cache, Llama, empty_weights
from temper.actor.engines.philox import philox4x32, uniforms
from temper.actor.engines.sampler import Truncation, sample, sample_truncated
from temper.actor.engines.shape import from_config
from temper.common.errors import ConfigError
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=32),
}


_make: Any = AutoModelForCausalLM.from_config


def reference(config: PretrainedConfig) -> Any:
    """A random model of `config` with every parameter (norms and biases too) away from its default."""
    torch.manual_seed(7)
    model = _make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


def engine_copy(model: Any, length: int, dtype: torch.dtype = torch.float32) -> Llama:
    """The same weights in the embedded engine's layout."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    shape = from_config(config)
    weights = empty_weights(shape, dtype)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.named.keys()
    for name, parameter in parameters.items():
        weights.named[name].copy_(parameter.detach())
    return Llama(shape, weights, length)


def test_philox_gives_the_published_vectors() -> None:
    def words(*values: int) -> tuple[Any, ...]:
        return tuple(np.array([value], np.uint64) for value in values)

    zero = philox4x32(words(0, 0, 0, 0), words(0, 0))
    assert [int(w[0]) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox4x32(words(*[0xFFFFFFFF] * 4), words(*[0xFFFFFFFF] * 2))
    assert [int(w[0]) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = philox4x32(words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), words(0xA4093822, 0x299F31D0))
    assert [int(w[0]) for w in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniforms_depend_on_seed_and_position_only() -> None:
    whole = uniforms([5, 2**63 + 1], np.array([0, 0]), 40)
    for start in range(1, 9):
        part = uniforms([2**63 + 1, 5], np.array([start, 2 * start]), 10)
        assert (part[0] == whole[1, start : start + 10]).all()
        assert (part[1] == whole[0, 2 * start : 2 * start + 10]).all()
    assert (whole >= 0).all() and (whole < 1).all() and not (whole[0] == whole[1]).any()


def row(values: list[float]) -> Tensor:
    return torch.tensor([values])


def limits(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Truncation:
    return Truncation(torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))


def test_golden_logprobs_of_temperature_and_top_p() -> None:
    half = sample(row([2.0, 0.0]) / 2.0, row([0.0]))
    assert int(half.tokens) == 0
    assert float(half.logprobs) == pytest.approx(-0.313262, abs=1e-6)
    nucleus = sample_truncated(row([math.log(p) for p in (0.5, 0.3, 0.2)]), row([0.1]), limits(top_p=0.8))
    assert int(nucleus.tokens) == 0
    assert float(nucleus.logprobs) == pytest.approx(-0.470004, abs=1e-6)
    assert nucleus.ids is not None and nucleus.keep is not None
    assert nucleus.ids[nucleus.keep].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (limits(top_k=2), {1, 3}),
        (limits(top_p=0.45), {1, 3}),
        (limits(top_p=0.3), {1}),
        (limits(min_p=0.5), {1, 3, 0}),
        (limits(top_k=3, top_p=0.65, min_p=0.7), {1, 3}),
        (limits(top_k=1), {1}),
        (limits(top_p=1e-6), {1}),
    ],
)
def test_each_truncation_keeps_what_it_says(given: Truncation, kept: set[int]) -> None:
    probabilities = [0.2, 0.4, 0.1, 0.3]
    seen: dict[int, float] = {}
    for uniform in np.linspace(0, 1 - 2**-24, 200):
        got = sample_truncated(row([math.log(p) for p in probabilities]), row([float(uniform)]), given)
        assert got.ids is not None and got.keep is not None
        assert set(got.ids[got.keep].tolist()) == kept
        seen[int(got.tokens)] = float(got.logprobs)
    mass = sum(probabilities[token] for token in kept)
    assert seen.keys() == kept
    for token, logprob in seen.items():
        assert logprob == pytest.approx(math.log(probabilities[token] / mass), abs=1e-5)


def test_a_support_wider_than_the_first_candidates_is_found() -> None:
    logits = torch.zeros(1, 2000)
    got = sample_truncated(logits, row([0.999999]), limits(top_p=0.5))
    assert got.keep is not None and abs(int(got.keep.sum()) - 1000) <= 1
    assert float(got.logprobs) == pytest.approx(-math.log(1000), abs=2e-3)


def test_frequencies_match_the_processed_distribution() -> None:
    """Chi-square over 20,000 draws; 0.999 quantile of 5 degrees of freedom is 20.5, of 2 it is 13.8."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.0, 0.2]])
    count = 20_000
    uniform = torch.from_numpy(uniforms(list(range(count)), np.full(count, 11), 1))
    drawn = sample(logits.repeat(count, 1), uniform).tokens
    expected = torch.softmax(logits[0], -1) * count
    assert float(((torch.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum()) < 20.5
    many = Truncation(torch.full((count,), 3), torch.ones(count), torch.zeros(count))
    kept = sample_truncated(logits.expand(count, -1), uniform, many)
    mass = torch.softmax(logits[0, [0, 1, 5]], -1) * count
    seen = torch.bincount(kept.tokens, minlength=6)[[0, 1, 5]]
    assert int(seen.sum()) == count
    assert float(((seen - mass) ** 2 / mass).sum()) < 13.8


def test_the_largest_uniform_never_picks_a_token_without_mass() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    got = sample(logits.clone(), row([1 - 2**-24]))
    assert int(got.tokens) == 1


def test_a_large_vocabulary_is_searched_block_by_block_with_the_same_result() -> None:
    """4,096 candidates: the same draws as the plain cumulative sum, never a token without mass."""
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, 100:400] = -torch.inf
    logits[:, -300:] = -torch.inf
    for values in (uniforms(list(range(64)), np.full(64, 5), 1), np.full((64, 1), 1 - 2.0**-24), np.zeros((64, 1))):
        uniform = torch.from_numpy(values.astype(np.float32))
        got = sample(logits.clone(), uniform)
        cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
        slack = 1e-6
        at = got.tokens.unsqueeze(1)
        assert (cumulative.gather(1, at) > uniform - slack).all()
        assert (torch.where(at > 0, cumulative.gather(1, (at - 1).clamp(min=0)), 0.0) < uniform + slack).all()
        assert torch.isfinite(logits.gather(1, at)).all()
        expected = torch.log_softmax(logits.double(), -1).gather(1, at).squeeze(1)
        torch.testing.assert_close(got.logprobs.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_equal_transformers(name: str) -> None:
    """Prefill of six tokens, then decoding the rest one by one, against one forward of transformers."""
    model = reference(CONFIGS[name])
    length, first = 20, 6
    engine = engine_copy(model, length)
    ids = torch.randint(0, 97, (3, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = torch.log_softmax(model(ids).logits, -1)
        cache = Cache(engine.shape, 4, length)
        cache.all[:, :, :3, :, :first] = engine.prefill(ids[:, :first])
        for position in range(first, length):
            positions = torch.full((3,), position)
            logits = engine.decode(ids[:, position], positions, cache, position + 1)
            torch.testing.assert_close(torch.log_softmax(logits, -1), expected[:, position], atol=1e-5, rtol=0)


def test_bfloat16_stays_close_to_its_own_float32() -> None:
    model = reference(CONFIGS["llama"])
    low, high = engine_copy(model, 16, torch.bfloat16), engine_copy(model, 16)
    with torch.inference_mode():
        for name, tensor in low.weights.named.items():
            high.weights.named[name].copy_(tensor)
        rows = []
        for engine in (low, high):
            cache = Cache(engine.shape, 2, 16)
            cache.all[:, :, :, :, :5] = engine.prefill(torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]))
            rows.append(engine.decode(torch.tensor([11, 12]), torch.tensor([5, 5]), cache, 16))
    gap = (torch.log_softmax(rows[0], -1) - torch.log_softmax(rows[1], -1)).abs()
    assert 0 < float(gap.max()) < 0.15


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"hidden_size": "many"}, "hidden_size|invalid literal"),
    ],
)
def test_what_would_be_computed_differently_is_refused(change: dict[str, Any], named: str) -> None:
    config = CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]} | change
    with pytest.raises(ConfigError, match=named):
        from_config(config)
