"""What keeps a learner's step small: weights rounded once, recomputed activations, gradients that are added in place."""

import dataclasses

import numpy as np
import pytest
import torch
from temper.common.config import Optimizer as OptimizerConfig
from temper.common.config import Recipe
from temper.kernels.linear_logprob import linear_logprob
from temper.learner import attention, batching, linears
from temper.learner.batching import Rows, plan
from temper.learner.optimizer import Optimizer
from temper.learner.policy import Policy, bit_view
from temper.learner.reference_policy import frozen_copy
from temper.learner.step import Trainer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

BF16 = torch.bfloat16
SIZES = dict(
    vocab_size=53,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def qwen2() -> Qwen2ForCausalLM:
    """With biases."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))


def rows(seed: int = 0) -> Rows:
    """Twelve rows, some of which begin alike."""
    random = np.random.default_rng(seed)
    shared = [random.integers(0, 53, n) for n in (0, 9, 23)]
    sequences = [
        np.concatenate([shared[i % 3], random.integers(0, 53, int(random.integers(3, 12)))]) for i in range(12)
    ]
    trained = [np.arange(max(1, len(s) - 3), len(s)) for s in sequences]
    return Rows(
        np.concatenate(sequences).astype(np.int32),
        np.cumsum([0, *map(len, sequences)]),
        np.concatenate(trained),
        np.cumsum([0, *map(len, trained)]),
    )


ROWS = rows()


def gradients(policy: Policy, tokens: int = 10_000) -> dict[str, torch.Tensor]:
    """Of a weighted sum of the log-probabilities, over micro-batches."""
    for batch in plan(ROWS, tokens):
        out = policy.logprobs(batch, temperature=1.0).logprob
        (out * torch.linspace(-1, 1, len(ROWS.trained))[torch.from_numpy(batch.flat)]).sum().backward()
    found = {name: p.grad.clone() for name, p in policy.named_masters().items() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - g.double()).norm() / g.double().norm()) for name, g in other.items())


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=False), qwen2])
def test_gradients_in_bfloat16_are_those_of_autocast_and_near_float64s(make, monkeypatch):
    ours = Policy(make(), compute_dtype=BF16)
    assert ours.rounded is not None
    found, in_parts = gradients(ours), gradients(ours, 20)
    exact = gradients(Policy(make().double(), compute_dtype=torch.float32))
    monkeypatch.setattr(linears, "_applies", lambda rounded: False)
    theirs = gradients(Policy(make(), compute_dtype=BF16))
    assert distance(theirs, exact) < 0.05
    assert distance(found, exact) < 1.2 * distance(theirs, exact)
    assert distance(in_parts, found) < 0.03


def test_the_forward_pass_is_autocasts_bit_for_bit(monkeypatch):
    batch = plan(rows(), 10_000)[0]
    policy = Policy(llama(), compute_dtype=BF16)
    ours = policy.logprobs(batch, temperature=0.7).logprob
    monkeypatch.setattr(linears, "_applies", lambda rounded: False)
    assert torch.equal(ours, policy.logprobs(batch, temperature=0.7).logprob)


def test_a_frozen_copy_computes_with_its_own_weights():
    policy = Policy(llama(), compute_dtype=BF16)
    batch = plan(rows(), 10_000)[0]
    reference = frozen_copy(policy)
    with torch.no_grad():
        before = reference.logprobs(batch, temperature=1.0).logprob
        assert torch.equal(before, policy.logprobs(batch, temperature=1.0).logprob)
        for p in policy.named_masters().values():
            p.mul_(1.1)
        assert torch.equal(before, reference.logprobs(batch, temperature=1.0).logprob)
        assert not torch.equal(before, policy.logprobs(batch, temperature=1.0).logprob)


def test_weights_are_rounded_again_only_after_they_changed():
    recipe = dataclasses.replace(
        Recipe(), model=dataclasses.replace(Recipe().model, compute_dtype="bfloat16", serving_dtype="bfloat16")
    )
    trainer = Trainer(llama(), recipe, 10)
    first, again = trainer.serving_tensors(), trainer.serving_tensors()
    kept = {name: tensor.bits.copy() for name, tensor in first.items()}
    assert all(np.shares_memory(first[name].bits, again[name].bits) for name in first)
    for parameter in trainer.policy.named_masters().values():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.update(0.1)
    later = trainer.serving_tensors()
    for name, parameter in trainer.policy.named_masters().items():
        assert np.array_equal(first[name].bits, kept[name])  # what was handed out stays
        assert np.array_equal(later[name].bits, bit_view(parameter.detach().to(BF16)).reshape(-1))
        assert not np.array_equal(later[name].bits, kept[name])


def test_the_update_is_torchs_adamw_bit_for_bit():
    torch.manual_seed(0)
    shapes = {"a": (7, 5), "b": (3,), "unused": (2,)}
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    config = OptimizerConfig(max_gradient_norm=0.0, weight_decay=0.1, beta1=0.8, beta2=0.95)
    optimizer = Optimizer(ours, config)
    torchs = torch.optim.AdamW(
        theirs.values(), lr=0.0, betas=(0.8, 0.95), eps=config.epsilon, weight_decay=0.1, fused=True
    )
    for step in range(4):
        for name in ("a", "b"):
            ours[name].grad = torch.randn_like(ours[name])
            theirs[name].grad = ours[name].grad.clone()
        torchs.param_groups[0]["lr"] = 0.1 / (step + 1)
        torchs.step()
        assert optimizer.update(0.1 / (step + 1)).applied
        assert all(p.grad is None for p in ours.values())
        for name in shapes:
            assert torch.equal(ours[name], theirs[name])
    state = optimizer.state()
    assert state.keys() == {f"{name}.{key}" for name in ("a", "b") for key in ("step", "exp_avg", "exp_avg_sq")}
    assert torch.equal(state["a.exp_avg_sq"], torchs.state[theirs["a"]]["exp_avg_sq"])


def test_a_gradient_given_to_the_head_is_added_to():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8).bfloat16(), torch.randn(30, 8, requires_grad=True)
    target = torch.arange(9)

    def backward(**given):
        h = hidden.clone().requires_grad_()
        linear_logprob(h, weight, target, **given).logprob.sum().backward()
        return h.grad

    wanted = backward()
    total = torch.ones_like(weight)
    found, weight_grad = backward(rounded=weight.detach().bfloat16(), weight_gradient=total), weight.grad
    assert torch.equal(found, wanted)
    assert torch.allclose(total - 1, weight_grad, atol=1e-5)
    with pytest.raises(ValueError, match=r"rounded: found torch.float32\[30, 8\], expected torch.bfloat16"):
        linear_logprob(hidden, weight, target, rounded=weight.detach())
    with pytest.raises(ValueError, match=r"weight_gradient: found torch.bfloat16"):
        linear_logprob(hidden, weight, target, weight_gradient=weight.detach().bfloat16())


@pytest.mark.parametrize("cells", [1 << 24, 15_000])  # all of a bucket at once, or item by item
def test_attention_along_trees_is_float64s_within_bfloat16(cells, monkeypatch):
    monkeypatch.setattr(attention, "CELLS", cells)
    monkeypatch.setattr(batching, "LAUNCH_CELLS", 0)
    batches = plan(rows(), 60)
    monkeypatch.setattr(batching, "ITEM_CELLS", 0)  # by segment rather than by tree
    batches += plan(rows(), 60) + plan(rows(3), 10_000)
    assert any(batch.restore is not None for batch in batches) and any(len(batch.buckets) > 1 for batch in batches)
    for batch in batches:
        torch.manual_seed(1)
        shapes = [(1, heads, batch.packed_tokens, 16) for heads in (6, 2, 2)]
        low = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
        high = [x.detach().double().requires_grad_() for x in low]
        found, wanted = [], []
        for inputs, results in ((low, found), (high, wanted)):
            tree = attention.tree_of(batch, torch.device("cpu"), inputs[0].dtype)
            out, _ = attention.tree_attention(None, *inputs, None, 0.25, tree=tree)
            assert (out.grad_fn.next_functions[0][0].name() == "_TreeOnCpuBackward") == (inputs is low)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out.dtype)
            results += [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == BF16 and one.shape == other.shape
            assert float((one.double() - other).norm() / other.norm()) < 1e-2
