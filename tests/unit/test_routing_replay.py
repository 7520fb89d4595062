"""Routing replay: the recorded experts are used, with the present router's weights, and nothing else changes.

The reference is a float64 copy of the model whose mixtures are written down here, run on each row alone.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common import metrics as names
from temper.common.config import Engine, Optimizer, Pacing, Recipe, Sampling
from temper.common.errors import ConfigError, ProtocolError
from temper.learner.batching import Rows, plan
from temper.learner.inbox import GroupData, SampleData
from temper.learner.policy import Policy
from temper.learner.reference_policy import frozen_copy
from temper.learner.routing_replay import Routing, install
from temper.learner.rows import collect
from temper.learner.step import Trainer
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))

from mixture_kit import KINDS, VOCABULARY, Sequences, config_of, model_of, own_choice, routers

_make: Any = AutoModelForCausalLM.from_config
TEMPERATURE = 0.7
CLOSE = 2e-5  # nats, and of a gradient's largest entry: float32 against float64


def rows_of(sequences: Sequences, experts: list[np.ndarray] | None = None) -> Rows:
    return Rows(
        np.asarray([token for tokens, _ in sequences for token in tokens], dtype=np.int32),
        np.cumsum([0, *(len(tokens) for tokens, _ in sequences)]),
        np.asarray([place for _, trained in sequences for place in trained], dtype=np.int64),
        np.cumsum([0, *(len(trained) for _, trained in sequences)]),
        None if experts is None else np.concatenate(experts).astype(np.int16),
    )


def drawn(seed: int = 0) -> Sequences:
    """Rows that share prompts and beginnings."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, n).tolist() for n in (3, 5)]
    found = []
    for i in range(10):
        completion = random.integers(0, 3, int(random.integers(2, 6))).tolist()
        tokens = prompts[i % 2] + completion
        found.append((tokens, list(range(len(prompts[i % 2]), len(tokens)))))
    return found


def others(model: Any, sequences: Sequences, seed: int = 0, known: float = 0.8) -> list[np.ndarray]:
    """Experts at random, some of them unknown."""
    random = np.random.default_rng(seed)
    count, size, k = len(routers(model)), routers(model)[0].num_experts, routers(model)[0].top_k
    found = []
    for tokens, _ in sequences:
        shape = (len(tokens), count)
        experts = random.permuted(np.broadcast_to(np.arange(size), (*shape, size)), axis=-1)[..., :k].astype(np.int16)
        experts[random.random(shape) > known] = -1
        experts[-1] = -1
        found.append(experts)
    return found


class ReferenceMixture(torch.nn.Module):
    """The mixture, a token and an expert at a time. `recorded`: [tokens, k] of the row, or None."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block
        self.recorded: np.ndarray | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        block, router = self.block, self.block.gate
        out = []
        for t, x in enumerate(hidden[0]):
            p = torch.softmax(router.weight @ x, 0)
            chosen = p.topk(router.top_k).indices.tolist()
            if self.recorded is not None and self.recorded[t][0] >= 0:
                chosen = self.recorded[t].tolist()
            total = sum(p[e] for e in chosen) if getattr(router, "norm_topk_prob", True) else 1.0
            y = torch.zeros_like(x)
            for e in chosen:
                gate, up = (block.experts.gate_up_proj[e] @ x).chunk(2)
                y = y + p[e] / total * (block.experts.down_proj[e] @ (gate * torch.sigmoid(gate) * up))
            if hasattr(block, "shared_expert"):
                y = y + torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
            out.append(y)
        return torch.stack(out)[None]


def reference(
    model: Any, sequences: Sequences, experts: list[np.ndarray] | None, weight: Tensor
) -> tuple[Tensor, dict]:
    """(log-probabilities f64[M], gradients by name) of sum(weight * log p), each row alone."""
    plain = copy.deepcopy(model).double()
    mixtures = []
    for layer in plain.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp = ReferenceMixture(layer.mlp)
            mixtures.append(layer.mlp)
    found = []
    for row, (tokens, trained) in enumerate(sequences):
        for place, mixture in enumerate(mixtures):
            mixture.recorded = None if experts is None else experts[row][:, place]
        logits = plain(input_ids=torch.tensor([tokens])).logits[0] / TEMPERATURE
        table = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        found.append(table[torch.tensor(trained, dtype=torch.int64) - 1])
    logprobs = torch.cat(found)
    (logprobs * weight).sum().backward()
    return logprobs.detach(), {
        n.replace(".block", ""): p.grad for n, p in plain.named_parameters() if p.grad is not None
    }


def replayed(
    model: Any,
    sequences: Sequences,
    experts: list[np.ndarray] | None,
    weight: Tensor,
    *,
    limit: int = 1000,
    checkpointing: bool = False,
    routed_experts: bool = True,
) -> tuple[Tensor, dict, tuple[int, int, int]]:
    """(log-probabilities f32[M], gradients by name, replay counts) of the learner's policy on packed rows."""
    copied = copy.deepcopy(model)
    policy = Policy(copied, checkpointing=checkpointing, routed_experts=routed_experts)
    rows = rows_of(sequences, experts)
    found = torch.zeros(len(rows.trained))
    counts = np.zeros(3, dtype=int)
    for batch in plan(rows, limit):
        out = policy.logprobs(batch, temperature=TEMPERATURE).logprob
        index = torch.from_numpy(batch.flat)
        (out * weight[index].float()).sum().backward()
        found[index] = out.detach()
        counts += policy.replay.counts() if policy.replay is not None else 0
    return found, {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}, tuple(counts.tolist())


def weights_for(sequences: Sequences, seed: int = 0) -> Tensor:
    count = sum(len(trained) for _, trained in sequences)
    return torch.from_numpy(np.random.default_rng(seed).normal(size=count))


def assert_close(found: dict, wanted: dict) -> None:
    for name, gradient in wanted.items():
        scale = max(float(gradient.abs().max()), 1e-2)
        # an expert of no token may have a gradient of zeros or none
        error = float((found.get(name, torch.zeros_like(gradient)).double() - gradient).abs().max()) / scale
        assert error < 50 * CLOSE, (name, error)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_replaying_the_models_own_choice_changes_no_bit(kind: str, checkpointing: bool) -> None:
    model, sequences = model_of(kind), drawn()
    weight = weights_for(sequences)
    plain, gradients, _ = replayed(model, sequences, None, weight, checkpointing=checkpointing)
    own = own_choice(model, sequences)
    for experts in (own, [each[..., ::-1] for each in own]):  # the order in which an engine names them is its own
        same, others, counts = replayed(model, sequences, experts, weight, checkpointing=checkpointing)
        assert torch.equal(same, plain)
        assert gradients.keys() == others.keys()
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
        assert counts[0] == 0 and counts[1] == counts[2] > 0


@pytest.mark.parametrize(("limit", "checkpointing"), [(1000, False), (14, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_experts_give_what_the_mixture_written_down_gives(kind: str, limit: int, checkpointing: bool) -> None:
    model, sequences = model_of(kind), drawn()
    experts, weight = others(model, sequences), weights_for(sequences)
    wanted, gradients = reference(model, sequences, experts, weight)
    found, own, counts = replayed(model, sequences, experts, weight, limit=limit, checkpointing=checkpointing)
    assert torch.allclose(found.double(), wanted, rtol=0, atol=CLOSE)
    assert_close(own, gradients)
    assert 0 < counts[0] < counts[1] < counts[2]
    without = reference(model, sequences, None, weight)[0]
    assert (wanted - without).abs().max() > 0.05  # the experts matter, so this test can fail
    for name, gradient in gradients.items():
        if name.endswith("mlp.gate.weight"):
            assert own[name].abs().max() > 0 and gradient.abs().max() > 0  # it reaches every router


def test_a_layer_that_is_recomputed_replays_the_record_of_its_own_pass() -> None:
    """A second micro-batch, or another model, may run between a forward and its backward."""
    model, sequences = model_of("qwen3_moe"), drawn()
    experts, weight = others(model, sequences), weights_for(sequences)
    policy = Policy(copy.deepcopy(model), checkpointing=True, routed_experts=True)
    _, wanted, _ = replayed(model, sequences, experts, weight)
    (batch,) = plan(rows_of(sequences, experts), 1000)
    (another,) = plan(rows_of(sequences, others(model, sequences, seed=7)), 1000)
    out = policy.logprobs(batch, temperature=TEMPERATURE).logprob
    with torch.no_grad():
        policy.logprobs(another, temperature=TEMPERATURE)
        frozen_copy(policy).logprobs(another, temperature=TEMPERATURE)
    (out * weight[torch.from_numpy(batch.flat)].float()).sum().backward()
    for name, parameter in policy.model.named_parameters():
        if name in wanted:
            assert torch.allclose(parameter.grad, wanted[name], rtol=0, atol=1e-6), name


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_and_any_record(data: st.DataObject) -> None:
    experts = data.draw(st.integers(2, 6), "experts")
    top_k = data.draw(st.integers(1, experts), "top_k")
    layers = data.draw(st.integers(1, 3), "layers")
    model = model_of(data.draw(st.sampled_from(KINDS[:5])), layers=layers, experts=experts, top_k=top_k)
    sequences: Sequences = []
    for _ in range(data.draw(st.integers(1, 5), "rows")):
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=7))
        sequences.append((tokens, sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1))))))
    weight = weights_for(sequences)
    if not len(weight):
        return
    record = others(
        model, sequences, seed=data.draw(st.integers(0, 99)), known=data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    )
    wanted, gradients = reference(model, sequences, record, weight)
    limit = data.draw(st.integers(1, 40), "limit")
    found, own, _ = replayed(model, sequences, record, weight, limit=limit)
    assert torch.allclose(found.double(), wanted, rtol=0, atol=5 * CLOSE)
    assert_close(own, gradients)


def test_rows_share_what_has_the_same_experts_and_no_more() -> None:
    experts = np.zeros((4, 6, 1, 2), np.int16)
    experts[..., 1] = 1
    sequences: Sequences = [([1, 2, 3, 4, 5 + i, 9], [4, 5]) for i in range(4)]
    (batch,) = plan(rows_of(sequences, list(experts)), 1000)
    assert batch.packed_tokens == 4 + 4
    experts[3, 2] = [[4, 5]]  # one of them read the third token of the prompt with other experts
    (batch,) = plan(rows_of(sequences, list(experts)), 1000)
    assert batch.packed_tokens == 4 + 4 + 2
    assert batch.experts is not None
    for token, position, chosen in zip(batch.input_ids, batch.positions, batch.experts, strict=True):
        assert chosen.tolist() == [[0, 1]] or (token, position, chosen.tolist()) == (3, 2, [[4, 5]])


def test_experts_compute_with_rounded_weights_as_an_engine_does() -> None:
    model, sequences = model_of("qwen3_moe"), drawn()
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".experts." in name:
                parameter.copy_(parameter.bfloat16())
    (batch,) = plan(rows_of(sequences), 1000)
    exact, same = (
        Policy(each, compute_dtype=torch.bfloat16).logprobs(batch, temperature=1.0).logprob.detach()
        for each in (model, rounded)
    )
    assert torch.equal(exact, same)
    plain = [Policy(each).logprobs(batch, temperature=1.0).logprob for each in (model, rounded)]
    assert not torch.equal(*plain)  # in float32 the rounding shows


# ---------------------------------------------------------------- steps

RECIPE = Recipe(
    pacing=Pacing(groups_per_step=2, samples_per_group=4, max_staleness=3, max_token_lag=4),
    sampling=Sampling(max_new_tokens=6, temperature=TEMPERATURE),
    optimizer=Optimizer(learning_rate=3e-2, warmup_steps=1, tokens_per_microbatch=40),
    engine=Engine(kind="sglang", routed_experts=True),
)


def groups_of(model: Any, version: int, record: str = "own", seed: int = 0) -> list[GroupData]:
    """Two groups that `model`, as `version`, sampled: its log-probabilities, and its own or other experts."""
    random = np.random.default_rng(seed)
    found = []
    for group_id in range(2):
        prompt = random.integers(1, VOCABULARY, 4).tolist()
        sequences: Sequences = []
        for _ in range(4):
            tokens = prompt + random.integers(0, VOCABULARY, int(random.integers(2, 6))).tolist()
            sequences.append((tokens, list(range(4, len(tokens)))))
        experts = own_choice(model, sequences) if record == "own" else others(model, sequences, seed=group_id)
        logprobs = reference(model, sequences, experts, weights_for(sequences))[0].numpy()
        samples, at = [], 0
        for index, ((tokens, trained), own) in enumerate(zip(sequences, experts, strict=True)):
            behaviour = np.zeros(len(tokens), np.float32)
            behaviour[trained] = logprobs[at : at + len(trained)]
            at += len(trained)
            samples.append(
                SampleData(
                    index=index,
                    tokens=np.asarray(tokens, np.int32),
                    mask=np.asarray([False] * 4 + [True] * len(trained)),
                    behaviour_logprob=behaviour,
                    ordinal=np.full(len(tokens), version),
                    reward=float(index == group_id),
                    correct=index == group_id,
                    experts=own if record != "none" else None,
                )
            )
        found.append(GroupData(group_id, "train", "one", 0, 0, tuple(samples)))
    return found


def trainer_of(recipe: Recipe = RECIPE, **objective: Any) -> Trainer:
    recipe = dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, **objective))
    return Trainer(model_of("qwen3_moe"), recipe, 10)


def test_a_step_compares_log_probabilities_of_the_network_that_sampled() -> None:
    """Other experts than the policy's own on every sample: engine and learner agree all the same, and only with replay."""
    groups = groups_of(model_of("qwen3_moe"), 0, "other")
    report = trainer_of(name="decoupled_ppo").train_step(groups, 0)
    assert report.mean(names.LEARNER_GAP) < CLOSE
    assert 0.3 < report.mean(names.LEARNER_REPLACED) <= 1 and 0.5 < report.mean(names.LEARNER_RECORDED) < 1
    without = dataclasses.replace(RECIPE, engine=Engine())
    apart = trainer_of(without, name="decoupled_ppo").train_step(groups, 0)
    assert apart.mean(names.LEARNER_GAP) > 0.02
    assert apart.mean(names.LEARNER_REPLACED) is None


def test_the_proximal_policy_replays_and_the_reference_policy_chooses_itself() -> None:
    model = model_of("qwen3_moe")
    groups = groups_of(model, 0, "other")
    still = dataclasses.replace(RECIPE, optimizer=dataclasses.replace(RECIPE.optimizer, learning_rate=1e-12))
    objective = {
        "name": "decoupled_ppo",
        "kl_coefficient": 0.1,
        "updates_per_step": 2,
    }  # so that it has a forward of its own
    trainer = trainer_of(still, **objective)
    report = trainer.train_step(groups, 0)
    # no update moves anything: the proximal policy is the policy, and what sampled
    flat = trainer._flat(collect(groups, 0, 4), TEMPERATURE)
    assert flat.prox is not None and torch.allclose(flat.prox, flat.mu, rtol=0, atol=CLOSE)
    assert report.mean(names.LEARNER_RATIO) == pytest.approx(1.0, abs=1e-5)
    assert report.mean(names.LEARNER_WEIGHT) == pytest.approx(1.0, abs=1e-4)
    assert report.mean(names.LEARNER_KL_REFERENCE) > 1e-3  # the same weights, routed by themselves
    same = trainer_of(still, **objective).train_step(groups_of(model, 0), 0)
    assert same.mean(names.LEARNER_KL_REFERENCE) == pytest.approx(0.0, abs=1e-6)


def test_a_copy_of_the_policy_uses_its_own_routers() -> None:
    policy = Policy(model_of("qwen3_moe"), routed_experts=True)
    (batch,) = plan(rows_of(drawn()), 1000)
    frozen = frozen_copy(policy)
    before = frozen.logprobs(batch, temperature=1.0).logprob
    with torch.no_grad():
        for router in routers(policy.model):
            router.weight.neg_()
    assert torch.equal(frozen.logprobs(batch, temperature=1.0).logprob, before)
    assert not torch.equal(policy.logprobs(batch, temperature=1.0).logprob, before)


def test_records_of_older_versions_are_replayed_for_as_long_as_their_samples_may_be_trained() -> None:
    trainer = trainer_of(name="ppo")
    groups = groups_of(model_of("qwen3_moe"), 0)
    reports = [trainer.train_step(groups, version) for version in range(4)]
    shares = [report.mean(names.LEARNER_REPLACED) for report in reports]
    assert shares[0] == 0.0 and shares[3] > 0.0  # the policy has moved and would route otherwise
    assert [report.mean(names.LEARNER_LAG_MAX) for report in reports] == [0, 1, 2, 3]
    # what the last step's forward saw are the present weights with the experts of version 0
    sequences = [(s.tokens.tolist(), list(range(4, len(s.tokens)))) for g in groups for s in g.samples]
    experts = [s.experts for g in groups for s in g.samples if s.experts is not None]
    present = model_of("qwen3_moe")
    present.load_state_dict(trainer.policy.model.state_dict())
    wanted = reference(present, sequences, experts, weights_for(sequences))[0]
    rows = rows_of(sequences, experts)
    for batch in plan(rows, 1000):
        found = trainer.policy.logprobs(batch, temperature=TEMPERATURE).logprob.detach()
        assert torch.allclose(found.double(), wanted[torch.from_numpy(batch.flat)], rtol=0, atol=CLOSE)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            LlamaConfig(
                vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
            ),
            "engine.routed_experts = true, but model.path is a 'llama', which is dense and routes nothing: set",
        ),
        (
            Glm4MoeConfig(
                vocab_size=11,
                hidden_size=16,
                intermediate_size=24,
                moe_intermediate_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                n_routed_experts=4,
                num_experts_per_tok=2,
                first_k_dense_replace=0,
            ),
            "'glm4_moe' with routers Glm4MoeTopkRouter; replayed are MixtralTopKRouter, OlmoeTopKRouter, Qwen2Moe",
        ),
    ],
)
def test_models_whose_routing_cannot_be_replayed_are_refused_at_the_start(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        install(_make(config))
    if config.model_type == "llama":
        with pytest.raises(ConfigError, match=says):
            Trainer(_make(config), RECIPE, 10)


def test_samples_whose_record_fits_no_message_are_refused_at_the_start() -> None:
    recipe = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, max_length_tokens=1 << 22))
    with pytest.raises(ConfigError, match=r"4194304 tokens.* 8 bytes each.*at most 16777216 travel"):
        Trainer(model_of("qwen3_moe"), recipe, 10)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window": 8}, "sliding-window attention over 8"),
        ({"router_jitter_noise": 0.1}, "noise = 0.1, expected 0"),
    ],
)
def test_mixtures_that_would_be_computed_wrongly_are_refused(changes: dict[str, Any], says: str) -> None:
    config = config_of("mixtral")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=says):
        Policy(_make(config))


ROUTING = Routing(layers=3, routed=(0, 2), top_k=2, experts=4)
GOOD = np.array([[0, 1, 7, 7, 2, 3], [-1, -1, 9, -9, 3, 0]], np.int16)  # the layer between is dense: anything


def test_a_record_is_taken_layer_by_layer() -> None:
    assert ROUTING.checked(GOOD, 2).tolist() == [[[0, 1], [2, 3]], [[-1, -1], [3, 0]]]
    model = model_of("qwen3_moe half dense", layers=3)
    assert install(model) == Routing(layers=3, routed=(1, 2), top_k=2, experts=5)


def changed(place: tuple[int, int], value: int) -> np.ndarray:
    found = GOOD.copy()
    found[place] = value
    return found


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (GOOD[:, :4], r"is int16\[2, 4\], expected int16\[2, 6\]: 3 layers, 2 experts per token; does the engine"),
        (GOOD[:1], r"is int16\[1, 6\], expected int16\[2, 6\]"),
        (GOOD.astype(np.int32), r"is int32\[2, 6\], expected int16"),
        (GOOD.astype(np.float32), r"is float32\[2, 6\], expected int16"),
        (GOOD.reshape(-1), r"is int16\[12\], expected"),
        (np.zeros((0, 6), np.int16), r"is int16\[0, 6\], expected"),
        (changed((1, 4), 4), r"of token 1, layer 2, are \[4, 0\]: expected 0\.\.3, or -1 where unknown"),
        (changed((0, 0), -2), r"of token 0, layer 0, are \[-2, 1\]: expected 0\.\.3"),
        (changed((0, 0), 32767), r"of token 0, layer 0, are \[32767, 1\]: expected"),
        (changed((1, 0), 3), r"of token 1, layer 0, are \[3, -1\]: known in part"),
        (changed((0, 5), 2), r"of token 0, layer 2, are \[2, 2\]: an expert twice"),
    ],
)
def test_broken_records_are_refused_with_the_reason(record: np.ndarray, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        ROUTING.checked(record, 2)
