"""Packing: the prefix tree covers every row exactly once, and its loss and gradient equal those of each row alone."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.learner import batching
from temper.learner.attention import tree_of
from temper.learner.batching import Rows, plan, segments
from temper.learner.policy import Policy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


def rows_of(sequences: list[tuple[list[int], list[int]]]) -> Rows:
    return Rows(
        np.asarray([token for tokens, _ in sequences for token in tokens], dtype=np.int32),
        np.cumsum([0, *(len(tokens) for tokens, _ in sequences)]),
        np.asarray([place for _, trained in sequences for place in trained], dtype=np.int64),
        np.cumsum([0, *(len(trained) for _, trained in sequences)]),
    )


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    found = []
    for _ in range(draw(st.integers(1, 9))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
        trained = draw(st.sets(st.integers(1, len(tokens) - 1)))
        found.append((tokens, sorted(trained)))
    return found


def path_of(batch, position: int) -> list[int]:
    """Token ids that a packed position sees, itself included, from the attention plan."""
    offset = 0
    flat = int(position if batch.restore is None else batch.restore[position])
    for bucket in batch.buckets:
        size = bucket.queries.size
        if flat < offset + size:
            row, column = divmod(flat - offset, bucket.queries.shape[1])
            assert bucket.queries[row, column] == position
            causal = np.arange(bucket.keys.shape[1]) <= column
            keys = bucket.keys[row][causal if bucket.mask is None else bucket.mask[row, column]]
            return batch.input_ids[keys[np.argsort(batch.positions[keys])]].tolist()
        offset += size
    raise AssertionError(f"position {position} has no attention output")


@settings(max_examples=200, deadline=None)
@given(sequences(), st.integers(1, 30))
def test_every_trained_token_sees_exactly_its_own_row(sequences, limit):
    rows = rows_of(sequences)
    seen = []
    for batch in plan(rows, limit):
        assert batch.packed_tokens <= max(limit, rows.computed.max())
        for n, number in enumerate(batch.rows):
            span = slice(batch.cu_seqlens[n], batch.cu_seqlens[n + 1])
            for target, predict, flat in zip(batch.target[span], batch.predict[span], batch.flat[span], strict=True):
                position, tokens = int(rows.trained[flat]), sequences[number][0]
                assert target == tokens[position]
                assert batch.positions[predict] == position - 1
                assert path_of(batch, int(predict)) == tokens[:position]
                seen.append(int(flat))
    assert sorted(seen) == list(range(len(rows.trained)))


@settings(max_examples=50, deadline=None)
@given(sequences(), st.randoms(use_true_random=False))
def test_the_layout_does_not_depend_on_the_order_of_rows(sequences, random):
    rows = rows_of(sequences)
    shuffled = list(range(len(sequences)))
    random.shuffle(shuffled)
    others = rows_of([sequences[i] for i in shuffled])
    for one, other in zip(plan(rows, 12), plan(others, 12), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.positions.tolist() == other.positions.tolist()
        assert one.predict.tolist() == other.predict.tolist() or sorted(one.predict) == sorted(other.predict)


def test_a_shared_prompt_is_computed_once():
    rows = rows_of([([1, 2, 3, 4, 5 + i, 9], [4, 5]) for i in range(4)])
    (batch,) = plan(rows, 1000)
    # the prompt once, one computed completion token each: the last predicts nothing
    assert batch.packed_tokens == 4 + 4
    assert batch.row_tokens == 24


def micro(kind: str) -> PreTrainedModel:
    shape = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    return model.double()


def exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' RMSNorm computes in float32 whatever it is given; torch's own keeps float64."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, norm)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("limit", [1000, 14])
@pytest.mark.parametrize(("checkpointing", "by_segment"), [(False, False), (True, False), (False, True)])
def test_tree_loss_and_gradient_equal_training_each_row_alone(kind, limit, checkpointing, by_segment, monkeypatch):
    if by_segment:  # attention segment by segment instead of over whole trees
        monkeypatch.setattr(batching, "ITEM_CELLS", -(1 << 20))
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 11, n).tolist() for n in (3, 5)]
    sequences = []
    for i in range(12):
        prompt = prompts[i % 2]
        completion = random.integers(0, 3, int(random.integers(1, 6))).tolist()
        trained = [len(prompt) + j for j in range(len(completion)) if random.random() < 0.8]
        sequences.append((prompt + completion, trained))
    rows = rows_of(sequences)
    count = len(rows.trained)
    weight = torch.from_numpy(random.normal(size=count))

    plain = exact_norms(micro(kind))
    alone = torch.zeros(count, dtype=torch.float64)
    for row, (tokens, trained) in enumerate(sequences):
        ids = torch.tensor(tokens)
        logits = plain(input_ids=ids[None]).logits[0] / 0.7
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        alone[rows.cu_seqlens[row] : rows.cu_seqlens[row + 1]] = logprobs[torch.tensor(trained, dtype=torch.int64) - 1]
    (alone * weight).sum().backward()

    model = micro(kind)
    policy = Policy(model, compute_dtype=torch.float32, checkpointing=checkpointing)
    packed = torch.zeros(count, dtype=torch.float64)
    for batch in plan(rows, limit):
        out = policy.logprobs(batch, temperature=0.7).logprob
        index = torch.from_numpy(batch.flat)
        (out * weight[index]).sum().backward()
        packed[index] = out.detach()
    assert torch.allclose(packed, alone.detach(), rtol=0, atol=1e-9)
    for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-9), name


def test_full_equal_rows_need_no_gathering():
    (batch,) = plan(rows_of([([i, 1, 2], [1, 2]) for i in range(5)]), 100)
    tree = tree_of(batch, torch.device("cpu"), torch.float32)
    assert batch.restore is None and tree.buckets[0].keys is None and tree.buckets[0].bias is None


def test_long_rows_of_a_group_are_divided_into_segments_and_short_ones_are_not():
    """Attention over a whole tree costs the square of its tokens: a long shared prompt is worth calls of its own."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 99, 200).tolist()
    long = [(prompt + random.integers(0, 99, 150).tolist(), list(range(200, 350))) for _ in range(8)]
    short = [([7, 8, 9, *random.integers(0, 99, 3).tolist()], [3, 4, 5]) for _ in range(8)]
    (batch,) = plan(rows_of(long + short), 1 << 20)
    whole = [bucket for bucket in batch.buckets if bucket.keys is bucket.queries]
    apart = [bucket for bucket in batch.buckets if bucket.keys is not bucket.queries]
    assert sum(bucket.queries.size for bucket in whole) < 40 and sum(len(bucket.queries) for bucket in apart) == 9
    assert batch.packed_tokens == 200 + 8 * 149 + whole[0].queries.size


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_segments_cover_every_cell_of_sorted_rows_once(texts):
    texts.sort()
    shared = [0] + [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
        for x, y in itertools.pairwise(texts)
    ]
    cells = {}
    for low, high, begin, end in segments([len(text) for text in texts], shared):
        assert len({tuple(text[:end]) for text in texts[low:high]}) == 1
        for row in range(low, high):
            for position in range(begin, end):
                assert (row, position) not in cells
                cells[row, position] = low
    assert len(cells) == sum(map(len, texts))
    prefixes = {tuple(text[: i + 1]) for text in texts for i in range(len(text))}
    assert len({(low, position) for (_, position), low in cells.items()}) == len(prefixes)
