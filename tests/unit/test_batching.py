"""Packing: the prefix tree covers every row exactly once, and its loss and gradient equal those of each row alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.learner.batching import Row, plan
from temper.learner.policy import Policy, tree_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM


def rows_of(sequences: list[tuple[list[int], list[int]]]) -> list[Row]:
    rows, start = [], 0
    for tokens, trained in sequences:
        rows.append(Row(np.asarray(tokens, dtype=np.int32), np.asarray(trained, dtype=np.int64), start))
        start += len(trained)
    return rows


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
            mask = bucket.mask()
            seen = np.arange(bucket.keys.shape[1]) <= column if mask is None else mask[row, column]
            return batch.input_ids[bucket.keys[row][seen]].tolist()
        offset += size
    raise AssertionError(f"position {position} has no attention output")


@settings(max_examples=200, deadline=None)
@given(sequences(), st.integers(1, 30))
def test_every_trained_token_sees_exactly_its_own_row(sequences, limit):
    rows = rows_of(sequences)
    seen = []
    for batch in plan(rows, limit):
        assert batch.packed_tokens <= max(limit, *(row.computed for row in rows))
        for n, number in enumerate(batch.rows):
            span = slice(batch.cu_seqlens[n], batch.cu_seqlens[n + 1])
            for target, predict, flat in zip(batch.target[span], batch.predict[span], batch.flat[span], strict=True):
                position = int(rows[number].trained[flat - rows[number].start])
                assert target == rows[number].tokens[position]
                assert batch.positions[predict] == position - 1
                assert path_of(batch, int(predict)) == rows[number].tokens[:position].tolist()
                seen.append(int(flat))
    assert sorted(seen) == list(range(sum(len(row.trained) for row in rows)))


@settings(max_examples=50, deadline=None)
@given(sequences(), st.randoms(use_true_random=False))
def test_the_layout_does_not_depend_on_the_order_of_rows(sequences, random):
    rows = rows_of(sequences)
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    for one, other in zip(plan(rows, 12), plan([rows[i] for i in shuffled], 12), strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert sorted(one.flat.tolist()) == sorted(other.flat.tolist())


def test_a_shared_prompt_is_computed_once():
    rows = rows_of([([1, 2, 3, 4, 5 + i, 9], [4, 5]) for i in range(4)])
    (batch,) = plan(rows, 1000)
    assert (
        batch.packed_tokens == 4 + 4
    )  # the prompt once, one computed completion token each (the last predicts nothing)
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
    return exact_norms(model.double())


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
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tree_loss_and_gradient_equal_training_each_row_alone(kind, limit, checkpointing):
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 11, n).tolist() for n in (3, 5)]
    sequences = []
    for i in range(12):
        prompt = prompts[i % 2]
        completion = random.integers(0, 3, int(random.integers(1, 6))).tolist()
        trained = [len(prompt) + j for j in range(len(completion)) if random.random() < 0.8]
        sequences.append((prompt + completion, trained))
    rows = rows_of(sequences)
    count = sum(len(row.trained) for row in rows)
    weight = torch.from_numpy(random.normal(size=count))

    plain = micro(kind)
    alone = torch.zeros(count, dtype=torch.float64)
    for row in rows:
        logits = plain(input_ids=torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0] / 0.7
        logprobs = torch.log_softmax(logits[:-1], -1).gather(
            1, torch.from_numpy(row.tokens[1:].astype(np.int64))[:, None]
        )
        alone[row.start : row.start + len(row.trained)] = logprobs[row.trained - 1, 0]
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
    tree = tree_of(batch, torch.device("cpu"))
    assert batch.restore is None and tree.buckets[0].keys is None and tree.buckets[0].mask is None
