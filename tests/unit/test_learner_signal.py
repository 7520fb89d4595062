"""What a step learns from beside plain rewards: references that move, steered KL, a critic, penalties for length."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from temper.common import metrics as names
from temper.common.config import Objective, Optimizer, Pacing, Recipe, Reference, Sampling
from temper.common.errors import ConfigError
from temper.common.recipe import load
from temper.kernels.reference import gae, value_loss
from temper.learner.advantages import critic_advantages, overlong_penalty
from temper.learner.inbox import GroupData, SampleData
from temper.learner.objectives import TABLE
from temper.learner.reference_policy import ReferencePolicy, steer
from temper.learner.rows import collect
from temper.learner.signal import step_advantages
from temper.learner.step import Trainer
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = Recipe(
    pacing=Pacing(groups_per_step=4, samples_per_group=4, max_staleness=2, max_token_lag=3),
    sampling=Sampling(max_new_tokens=6),
    optimizer=Optimizer(learning_rate=1e-2, warmup_steps=0, tokens_per_microbatch=512),
)


def change(**sections):
    return dataclasses.replace(
        RECIPE, **{name: dataclasses.replace(getattr(RECIPE, name), **values) for name, values in sections.items()}
    )


def trainer(recipe: Recipe, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Trainer(LlamaForCausalLM(shape), recipe, 100)


def groups(seed: int = 0, rewards=(1.0, 0.0, 0.0, 0.5)) -> list[GroupData]:
    random = np.random.default_rng(seed)
    found = []
    for group_id in range(4):
        prompt, samples = random.integers(1, 13, 4), []
        for index in range(4):
            n = index + 2
            mask = np.asarray([False] * 4 + [True] * n)
            samples.append(
                SampleData(
                    index=index,
                    tokens=np.concatenate([prompt, random.integers(0, 13, n)]).astype(np.int32),
                    mask=mask,
                    behaviour_logprob=np.where(mask, random.normal(-2.5, 0.1, 4 + n), 0).astype(np.float32),
                    ordinal=np.zeros(4 + n),
                    reward=rewards[index],
                    correct=rewards[index] == 1.0,
                    components={"exact": rewards[index]},
                )
            )
        found.append(GroupData(group_id, "train", "domain", 0, 0, tuple(samples)))
    return found


def snapshot(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_masters().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["frozen", "ema", "reset"])
def test_the_reference_moves_as_its_kind_says(kind):
    recipe = change(
        objective={"kl_coefficient": 0.1}, reference={"kind": kind, "ema_decay": 0.75, "reset_every_steps": 2}
    )
    learner = trainer(recipe)
    start = snapshot(learner.policy)
    expected = start
    for step in range(1, 4):
        learner.train_step(groups(step), 0)
        now = snapshot(learner.policy)
        if kind == "ema":
            expected = {name: expected[name].lerp(now[name], 0.25) for name in now}
        elif kind == "reset" and step == 2:
            expected = now
        assert equal(snapshot(learner.reference.policy(learner.policy)), expected)
    assert not equal(now, start)


def test_the_reference_is_reset_when_held_out_accuracy_rises():
    recipe = change(
        objective={"kl_coefficient": 0.1},
        reference={"kind": "reset_on_gain", "reset_gain": 0.05},
        eval={"every_steps": 1},
    )
    learner = trainer(recipe)
    start = snapshot(learner.policy)
    expected = start
    for step, accuracy in enumerate((0.5, 0.54, 0.56, 0.58, None, 0.62)):
        if accuracy is not None:
            learner.reference.evaluated(accuracy)
        learner.train_step(groups(step), 0)
        if accuracy in (0.56, 0.62):  # above the best so far, .5 and .56, by more than .05
            expected = snapshot(learner.policy)
        assert equal(snapshot(learner.reference.policy(learner.policy)), expected), accuracy
    tensors, scalars = learner.state()
    resumed = trainer(recipe, seed=3)
    resumed.load({name: value.clone() for name, value in tensors.items()}, scalars)
    assert resumed.reference.best == 0.62


def components(weights: dict[str, float]) -> tuple[Recipe, list[GroupData]]:
    """Samples whose component "a" follows the reward and whose "b" is its opposite."""
    recipe = change(
        objective={
            "name": "ppo",
            "advantage": "per_component",
            "component_weights": weights,
            "allow_uncorrected": False,
        }
    )
    batch = [
        dataclasses.replace(
            g, samples=tuple(dataclasses.replace(s, components={"a": s.reward, "b": 1 - s.reward}) for s in g.samples)
        )
        for g in groups()
    ]
    return recipe, batch


def test_components_are_weighed_in_a_step():
    recipe, batch = components({"a": 1.0, "b": 0.25})
    found = signal(recipe, batch)[1]
    alone = signal(components({"a": 1.0})[0], batch)[1]
    assert float(alone.abs().max()) > 0.5
    assert torch.allclose(found, 0.75 * alone, atol=1e-6)  # b's advantage is the negative of a's
    weights = []
    for share in (1.0, 0.5):
        learner = trainer(components({"a": share, "b": share})[0])
        before = snapshot(learner.policy)
        learner.train_step(batch, 0)
        weights.append(equal(snapshot(learner.policy), before))
    assert weights == [True, True]  # opposite components of equal weight cancel: nothing to learn
    learner = trainer(recipe)
    before = snapshot(learner.policy)
    learner.train_step(batch, 0)
    assert not equal(snapshot(learner.policy), before)


def test_step_rewards_move_the_tokens_before_them_and_no_others():
    recipe = change(objective={"name": "ppo", "advantage": "dr_grpo", "gamma": 0.5})
    batch = groups(rewards=(1.0, 0.0, 0.0, 0.0))
    plain = signal(recipe, batch)[1]
    first = batch[0].samples[0]
    last = first.generated - 1
    rewarded = dataclasses.replace(first, step_rewards=[(0, 2.0), (last, 4.0)])
    found = signal(recipe, [dataclasses.replace(batch[0], samples=(rewarded, *batch[0].samples[1:])), *batch[1:]])[1]
    expected = torch.zeros_like(plain)
    expected[: last + 1] = torch.tensor([4.0 * 0.5 ** (last - t) for t in range(last + 1)])
    expected[0] += 2.0
    assert torch.allclose(found - plain, expected, atol=1e-6)
    one, other = trainer(recipe), trainer(recipe)
    one.train_step(batch, 0)
    other.train_step([dataclasses.replace(batch[0], samples=(rewarded, *batch[0].samples[1:])), *batch[1:]], 0)
    assert not equal(snapshot(one.policy), snapshot(other.policy))


@pytest.mark.parametrize("objective", [
    {"name": "ppo", "advantage": "per_component"},
    {"name": "ppo_critic"},
    {"name": "impala"},
    {"name": "decoupled_ppo", "updates_per_step": 2},
    {"name": "decoupled_ppo_loglinear", "updates_per_step": 2},
    {"name": "m2po", "kl_coefficient": 0.1},
    {"name": "ppo", "entropy_coefficient": 0.01, "kl_coefficient": 0.1, "kl": "reward"},
])  # fmt: skip
def test_micro_batches_and_order_change_nothing_but_rounding(objective):
    batch = [
        dataclasses.replace(
            g,
            samples=tuple(
                dataclasses.replace(s, step_rewards=[(1, 0.25 * s.index)], components={"a": s.reward, "b": s.index % 2})
                for s in g.samples
            ),
        )
        for g in groups(3)
    ]
    found = []
    for tokens, order in ((512, 1), (10, 1), (64, -1)):
        learner = trainer(change(objective=objective, optimizer={"tokens_per_microbatch": tokens}))
        for _ in range(2):
            learner.train_step(batch[::order], 0)
        found.append(snapshot(learner.policy))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=3e-4, msg=name)


def test_the_coefficient_is_steered_to_its_target_and_bounded():
    assert steer(0.1, 0.05, 0.05, 20) == 0.1
    assert steer(0.1, 9.0, 0.05, 20) == pytest.approx(0.1 * math.exp(1 / 20))
    assert steer(0.1, 0.0, 0.05, 20) == pytest.approx(0.1 * math.exp(-1 / 20))
    recipe = change(objective={"kl_coefficient": 0.1}, reference={"kl_target_nats": 1e-9, "kl_horizon_steps": 5})
    learner = trainer(recipe)
    first = learner.train_step(groups(1), 0)
    used = [first.mean(names.LEARNER_KL_COEFFICIENT)]
    for step in range(2, 4):
        used.append(learner.train_step(groups(step), 0).mean(names.LEARNER_KL_COEFFICIENT))
    assert used[0] == pytest.approx(0.1) and used[2] == pytest.approx(used[1] * math.exp(0.2))
    kept = ReferencePolicy(Reference(), 0.1)
    kept.after_step(learner.policy, 1, 5.0)  # no target: fixed
    assert kept.coefficient == 0.1


def test_reference_and_coefficient_continue_from_a_checkpoint():
    recipe = change(
        objective={"kl_coefficient": 0.1},
        reference={"kind": "ema", "ema_decay": 0.5, "kl_target_nats": 0.01, "kl_horizon_steps": 2},
    )
    whole = trainer(recipe)
    for step in range(2):
        whole.train_step(groups(step), 0)
    tensors, scalars = whole.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    resumed = trainer(recipe, seed=3)
    resumed.load(tensors, scalars)
    for learner in (whole, resumed):
        learner.train_step(groups(7), 0)
    assert equal(snapshot(whole.policy), snapshot(resumed.policy))
    assert whole.reference.coefficient == resumed.reference.coefficient != 0.1


@pytest.mark.parametrize("name", ["ppo_critic", "impala"])
def test_a_critic_learns_the_rewards_and_continues_from_a_checkpoint(name):
    recipe = change(objective={"name": name}, critic={"learning_rate": 0.05, "clip": 0.0})
    learner = trainer(recipe)
    losses = [learner.train_step(groups(0, (1.0, 1.0, 1.0, 1.0)), 0).mean(names.LEARNER_VALUE_LOSS) for _ in range(40)]
    assert losses[0] > 0.2 and losses[-1] < 0.1 * losses[0]
    tensors, scalars = learner.state()
    tensors = {key: value.clone() for key, value in tensors.items()}
    assert any(key.startswith("critic.optimizer.weight") for key in tensors)
    resumed = trainer(recipe, seed=3)
    resumed.load(tensors, scalars)
    for one in (learner, resumed):
        one.train_step(groups(2), 0)
    assert equal(snapshot(learner.policy), snapshot(resumed.policy))
    assert learner.critic is not None and resumed.critic is not None
    assert torch.equal(learner.critic.weight, resumed.critic.weight)


def test_critic_advantages_are_gae_on_the_last_tokens_reward():
    cu, value = torch.tensor([0, 2, 2, 5]), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    row = dataclasses.replace(TABLE["ppo_critic"], gamma=0.9, lam=0.8)
    found, target = critic_advantages(row, torch.tensor([1.0, 9.0, 2.0]), cu, value, d=torch.zeros(5))
    rewards = torch.tensor([0, 1, 0, 0, 2.0], dtype=torch.float64)
    expected, returns = gae(rewards, value.double(), cu, gamma=0.9, lam=0.8)
    assert torch.allclose(found.double(), expected) and torch.allclose(target.double(), returns)


def test_a_clipped_value_loss_takes_the_worse():
    value, old, target = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])
    assert float(value_loss(value, old, target, 0.0)) == 0.0
    assert float(value_loss(value, old, target, 0.2)) == pytest.approx(0.32)


def test_soft_length_penalty_golden_values():
    found = [overlong_penalty(n, 16, 4) for n in (3, 12, 13, 14, 16, 17)]
    assert found == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]


def signal(recipe: Recipe, batch: list[GroupData], **arrays):
    data = collect(batch, 0, 8, overlong_filter=recipe.objective.overlong == "mask")
    from temper.learner.objective_rules import resolve

    objective = resolve(recipe.objective, recipe.pacing)
    mu = torch.from_numpy(data.behaviour_logprob)
    inputs = {"prox": mu, "reference": None, "value": None, "kl_coefficient": 0.0, **arrays}
    return data, step_advantages(objective, recipe, data, {}, mu=mu, **inputs).advantage


def test_a_penalty_for_length_shapes_the_reward_before_the_baseline():
    recipe = change(objective={"overlong": "penalise", "overlong_buffer_tokens": 2}, sampling={"max_new_tokens": 5})
    data, found = signal(recipe, groups()[:1])
    rewards = np.asarray([1.0, 0.0, 0.0 - 0.5, 0.5 - 1.0])  # 2, 3, 4 and 5 generated tokens
    expected = np.repeat(rewards - rewards.mean(), data.trained)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_samples_at_the_limit_can_lose_their_gradient_and_keep_their_reward():
    batch = groups()[:1]
    long = dataclasses.replace(batch[0].samples[3], finish_reason="length")
    batch = [dataclasses.replace(batch[0], samples=(*batch[0].samples[:3], long))]
    data, found = signal(change(objective={"overlong": "mask"}), batch)
    assert data.trained.tolist() == [2, 3, 4, 0]
    np.testing.assert_allclose(found[:2].numpy(), 1.0 - 0.375, atol=1e-6)


def test_kl_is_taken_off_the_reward():
    batch = groups()[:1]
    count = 14
    drift = torch.linspace(0, 1, count)
    mu = torch.from_numpy(collect(batch, 0, 8).behaviour_logprob)
    recipe = change(objective={"kl": "reward", "kl_coefficient": 0.1})
    data, found = signal(recipe, batch, reference=mu - drift, kl_coefficient=0.1)
    sums = np.add.reduceat(drift.numpy(), data.cu_seqlens[:-1])
    rewards = np.asarray([1.0, 0.0, 0.0, 0.5]) - 0.1 * sums
    np.testing.assert_allclose(found.numpy(), np.repeat(rewards - rewards.mean(), data.trained), atol=1e-6)


@pytest.mark.parametrize(
    "override,message",
    [
        ("--critic.clip=0.1", "no value head"),
        ("--reference.kind=ema", "kl_coefficient is 0"),
        ("--objective.overlong_buffer_tokens=2", "only overlong = penalise"),
        ("--objective.overlong=penalise", "overlong_buffer_tokens = 0: expected 1"),
    ],
)
def test_keys_without_effect_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load("demo", [override])
    assert load("demo", ["--objective.kl_coefficient=0.1", "--reference.kind=ema", "--reference.ema_decay=0.9"])
    assert Objective().overlong == "keep"
