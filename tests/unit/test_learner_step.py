"""A step depends on its groups and the trainer's state alone, and continues exactly from a saved state."""

import dataclasses

import numpy as np
import pytest
import torch
from temper.common import metrics as names
from temper.common.config import Optimizer, Pacing, Recipe, Sampling
from temper.common.errors import ConfigError
from temper.learner.inbox import GroupData, SampleData
from temper.learner.objectives import TABLE
from temper.learner.step import Interrupted, Trainer
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = Recipe(
    pacing=Pacing(groups_per_step=4, samples_per_group=4, max_staleness=2, max_token_lag=3),
    sampling=Sampling(max_new_tokens=6),
    optimizer=Optimizer(learning_rate=1e-2, warmup_steps=2, tokens_per_microbatch=512),
)


def change(recipe=RECIPE, **sections):
    """The recipe with single values replaced: change(optimizer={"learning_rate": 1.0})."""
    return dataclasses.replace(
        recipe, **{name: dataclasses.replace(getattr(recipe, name), **values) for name, values in sections.items()}
    )


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def groups(seed: int = 0, count: int = 4, version: int = 0) -> list[GroupData]:
    """Groups of four samples, tokens and behaviour log-probabilities at random, sampled by versions up to `version`."""
    random = np.random.default_rng(seed)
    found = []
    for group_id in range(count):
        prompt = random.integers(1, 13, 4)
        samples = []
        for index in range(4):
            n = int(random.integers(2, 6))
            mask = np.asarray([False] * 4 + [True] * n)
            samples.append(
                SampleData(
                    index=index,
                    tokens=np.concatenate([prompt, random.integers(0, 13, n)]).astype(np.int32),
                    mask=mask,
                    behaviour_logprob=np.where(mask, random.normal(-2.5, 0.2, 4 + n), 0).astype(np.float32),
                    ordinal=np.full(4 + n, max(0, version - group_id % 2)),
                    reward=float(index == group_id % 4),
                    correct=index == group_id % 4,
                    components={"exact": 1.0},
                )
            )
        found.append(GroupData(group_id, "train", f"domain{group_id % 2}", 0, 0, tuple(samples)))
    return found


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: tensor.bits.tobytes() for name, tensor in trainer.serving_tensors().items()}


def test_order_of_arrival_changes_no_bit():
    one, other = Trainer(model(), RECIPE, 10), Trainer(model(), RECIPE, 10)
    batch = groups()
    one.train_step(batch, 0)
    other.train_step([dataclasses.replace(g, samples=g.samples[::-1]) for g in batch[::-1]], 0)
    assert weights(one) == weights(other) != weights(Trainer(model(), RECIPE, 10))


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"sft"}))
def test_micro_batches_change_nothing_but_rounding(name):
    recipe = change(objective={"name": name}, pacing={"max_staleness": 0})
    small = change(recipe, optimizer={"tokens_per_microbatch": 10})
    one, other = Trainer(model(), recipe, 10), Trainer(model(), small, 10)
    first, second = one.train_step(groups(), 0), other.train_step(groups(), 0)
    for (key, p), (_, q) in zip(one.policy.named_masters().items(), other.policy.named_masters().items(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4, msg=key)
    assert first.mean(names.LEARNER_GRADIENT) == pytest.approx(second.mean(names.LEARNER_GRADIENT), rel=1e-4)
    for key in (names.LEARNER_KL_BEHAVIOUR, names.LEARNER_ENTROPY, names.LEARNER_GAP):
        assert first.mean(key) == pytest.approx(second.mean(key), rel=1e-4)


def test_a_saved_state_continues_bit_for_bit():
    recipe = change(objective={"updates_per_step": 2, "kl_coefficient": 0.1})
    whole = Trainer(model(), recipe, 10)
    for step in range(2):
        whole.train_step(groups(step), step)
    tensors, scalars = whole.state()
    tensors = {name: value.clone() for name, value in tensors.items()}
    for step in range(2, 4):
        whole.train_step(groups(step), step)
    resumed = Trainer(model(seed=5), recipe, 10)
    resumed.load(tensors, scalars)
    reports = [resumed.train_step(groups(step), step) for step in range(2, 4)]
    assert weights(resumed) == weights(whole)
    assert resumed.steps_done == 4 and reports[0].mean(names.LEARNER_KL_REFERENCE) > 0


def test_a_state_of_another_model_is_refused_by_name():
    trainer = Trainer(model(), RECIPE, 10)
    tensors, scalars = trainer.state()
    tensors["model.model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"model.norm.weight is \(3,\), expected \(16,\)"):
        trainer.load(tensors, scalars)
    del tensors["model.model.norm.weight"]
    with pytest.raises(ConfigError, match="parameters differ"):
        trainer.load(tensors, scalars)


def test_old_tokens_lose_their_gradient_and_their_sample_stays_in_the_baseline():
    batch = groups()
    old = dataclasses.replace(batch[0].samples[0], ordinal=np.zeros_like(batch[0].samples[0].ordinal))
    fresh = [
        dataclasses.replace(g, samples=tuple(dataclasses.replace(s, ordinal=s.ordinal + 9) for s in g.samples))
        for g in batch
    ]
    stale = [dataclasses.replace(fresh[0], samples=(old, *fresh[0].samples[1:])), *fresh[1:]]
    report = Trainer(model(), RECIPE, 10).train_step(stale, 9)
    total = sum(s.generated for g in batch for s in g.samples)
    assert report.metrics[names.LEARNER_STALE] == (old.generated, total)
    assert report.metrics["learner/samples/masked"] == (1.0, 1.0)
    assert report.metrics["learner/reward/domain0"] == (2.0, 8.0)
    assert report.mean(names.LEARNER_LAG_MAX) == 0
    # its reward moved the others' baseline: without the sample the same three would all have reward 0
    assert report.mean(names.LEARNER_ADVANTAGE) > 0


def test_unscored_samples_are_outside_baseline_and_loss():
    batch = groups()
    errored = dataclasses.replace(batch[0].samples[3], reward=None, correct=None, outcome="infra")
    group = dataclasses.replace(batch[0], samples=(*batch[0].samples[:3], errored))
    trainer = Trainer(model(), change(objective={"name": "dr_grpo", "allow_uncorrected": True}), 10)
    report = trainer.train_step([group], 0)
    assert report.metrics["learner/samples/unscored"] == (1.0, 1.0)
    assert report.metrics["learner/reward/domain0"] == (1.0, 3.0)
    lonely = dataclasses.replace(group, samples=(group.samples[0], errored))
    assert trainer.train_step([lonely], 1).void == {0: "infra"}


def test_groups_without_variance_have_no_gradient_and_are_not_computed():
    flat = [
        dataclasses.replace(g, samples=tuple(dataclasses.replace(s, reward=1.0, correct=True) for s in g.samples))
        for g in groups()
    ]
    trainer = Trainer(model(), RECIPE, 10)
    before = weights(trainer)
    report = trainer.train_step(flat, 0)
    assert weights(trainer) == before
    assert names.LEARNER_PACKED not in report.metrics
    assert report.metrics["learner/groups/zero_variance"][0] == 4 and report.trained == [0, 1, 2, 3]


def test_the_head_sees_completion_tokens_alone(monkeypatch):
    from temper.learner import policy

    rows = []
    head = policy.linear_logprob

    def counting(hidden, *arguments, **keywords):
        rows.append(len(hidden))
        return head(hidden, *arguments, **keywords)

    monkeypatch.setattr(policy, "linear_logprob", counting)
    found = groups()
    Trainer(model(), RECIPE, 10).train_step(found, 0)
    sampled = sum(sample.generated for group in found for sample in group.samples)
    everything = sum(len(sample.tokens) for group in found for sample in group.samples)
    assert sum(rows) == sampled < everything


def test_dynamic_sampling_leaves_such_groups_out_with_the_reason():
    recipe = change(pacing={"dynamic_sampling": True})
    batch = groups()
    flat = dataclasses.replace(batch[1], samples=tuple(dataclasses.replace(s, correct=True) for s in batch[1].samples))
    report = Trainer(model(), recipe, 10).train_step([batch[0], flat], 0)
    assert report.void == {1: "no contrast"} and report.trained == [0]
    assert report.metrics["learner/groups/void_no_contrast"] == (1.0, 1.0)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    trainer = Trainer(model(), RECIPE, 10)
    hook = trainer.policy.head.register_hook(lambda gradient: gradient * float("nan"))
    before = weights(trainer)
    report = trainer.train_step(groups(), 0)
    assert weights(trainer) == before and report.metrics[names.LEARNER_SKIPPED] == (1.0, 1.0)
    hook.remove()
    report = trainer.train_step(groups(), 1)
    assert weights(trainer) != before and report.metrics[names.LEARNER_SKIPPED] == (0.0, 1.0)


def test_one_update_needs_no_proximal_pass_and_its_ratio_is_one():
    report = Trainer(model(), RECIPE, 10).train_step(groups(), 0)
    assert report.mean(names.LEARNER_RATIO) == 1.0 and report.mean(names.LEARNER_CLIP) == 0.0


def test_a_batch_can_be_split_into_several_updates():
    recipe = change(objective={"updates_per_step": 2}, optimizer={"warmup_steps": 0})
    report = Trainer(model(), recipe, 10).train_step(groups(), 0)
    assert report.metrics[names.LEARNER_GRADIENT][1] == 2
    assert report.mean(names.LEARNER_RATIO) != 1.0


def test_log_probabilities_follow_the_engine_when_policies_agree():
    """Behaviour log-probabilities taken from the learner's own forward: the gap and every correction vanish."""
    trainer = Trainer(model(), change(sampling={"temperature": 0.7}), 10)
    batch = []
    for group in groups():
        samples = []
        for sample in group.samples:
            ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
            logits = model()(input_ids=ids).logits[0].detach() / 0.7
            logprob = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
            mu = np.where(sample.mask, np.concatenate([[0], logprob]), 0).astype(np.float32)
            samples.append(dataclasses.replace(sample, behaviour_logprob=mu))
        batch.append(dataclasses.replace(group, samples=tuple(samples)))
    report = trainer.train_step(batch, 0)
    assert report.mean(names.LEARNER_GAP) < 1e-5
    assert report.metrics[names.LEARNER_GAP][1] == sum(s.generated for g in batch for s in g.samples)
    assert report.mean("learner/lag_share/00") == 1.0
    assert report.mean(names.LEARNER_KL_BEHAVIOUR) == pytest.approx(0, abs=1e-5)


def test_supervised_warm_start_raises_the_likelihood_of_whole_demonstrations():
    recipe = change(warm_start={"learning_rate": 1e-2})
    trainer = Trainer(model(), recipe, 10)
    demos = [
        dataclasses.replace(g, lane="demo", samples=tuple(dataclasses.replace(s, reward=None) for s in g.samples))
        for g in groups()
    ]
    with torch.no_grad():
        expected = []
        for sample in (s for g in demos for s in g.samples):
            ids = torch.from_numpy(sample.tokens.astype(np.int64))
            logprob = torch.log_softmax(model()(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            expected.append(float(logprob[torch.from_numpy(sample.mask[1:])].sum().exp()))
    seen = [trainer.warm_step(demos).mean(names.LEARNER_LIKELIHOOD) for _ in range(30)]
    assert seen[0] == pytest.approx(np.mean(expected), rel=1e-4)
    assert seen[-1] > 5 * seen[0]
    assert (trainer.warm_steps_done, trainer.steps_done) == (30, 0)


def test_a_domain_that_has_the_likelihood_asked_for_leaves_the_warm_start_to_the_others():
    recipe = change(warm_start={"learning_rate": 1e-2, "until_likelihood": 0.3, "max_steps": 100})
    demos = [
        dataclasses.replace(
            g, lane="demo", domain="ab"[i % 2], samples=tuple(dataclasses.replace(s, reward=None) for s in g.samples)
        )
        for i, g in enumerate(groups())
    ]
    both, one = Trainer(model(), recipe, 10), Trainer(model(), recipe, 10)
    one.warm_likelihood = {"a": 0.9, "b": 0.0}
    before = weights(one)
    both.warm_step(demos)
    one.warm_step(demos)
    assert weights(one) != before and weights(one) != weights(both)
    assert set(both.warm_likelihood) == {"a", "b"} and all(0 < value < 0.3 for value in both.warm_likelihood.values())
    done = Trainer(model(), recipe, 10)
    done.warm_likelihood = {"a": 0.9, "b": 0.9}
    done.warm_step(demos)
    assert weights(done) == before  # nobody is behind: no gradient
    assert done.warm_likelihood["a"] < 0.9  # but it is measured all the same


def test_serving_tensors_are_cast_once_and_not_touched_by_the_next_step():
    recipe = change(model={"serving_dtype": "bfloat16"})
    trainer = Trainer(model(), recipe, 10)
    tensors = trainer.serving_tensors()
    copies = {name: tensor.bits.copy() for name, tensor in tensors.items()}
    trainer.train_step(groups(), 0)
    assert all((tensors[name].bits == copies[name]).all() for name in tensors)
    weight = model().model.norm.weight.detach().to(torch.bfloat16)
    assert tensors["model.norm.weight"].dtype == "bfloat16" and tensors["model.norm.weight"].shape == (16,)
    assert tensors["model.norm.weight"].bits.tobytes() == weight.view(torch.int16).numpy().tobytes()
    assert "lm_head.weight" not in tensors  # tied: it travels once


def test_masters_take_updates_that_bfloat16_would_lose():
    recipe = change(
        model={"serving_dtype": "bfloat16", "compute_dtype": "bfloat16"},
        optimizer={"learning_rate": 1e-4, "warmup_steps": 0, "final_share": 1.0},
    )
    trainer = Trainer(model(), recipe, 100)
    start = trainer.policy.model.model.norm.weight.detach().clone()
    for step in range(30):
        trainer.train_step(groups(step), step)
    moved = (trainer.policy.model.model.norm.weight.detach() - start).abs()
    assert trainer.policy.model.model.norm.weight.dtype == torch.float32
    assert 0 < float(moved.max()) < 2**-8  # below the spacing of bfloat16 at 1, kept by the masters


def test_truncated_sampling_is_normalised_over_the_same_support():
    trainer = Trainer(model(), RECIPE, 10)
    sample = groups()[0].samples[0]
    n = len(sample.tokens)
    support = [
        sorted({int(t), (int(t) + 1) % 13}) if m else [] for t, m in zip(sample.tokens, sample.mask, strict=True)
    ]
    cut = dataclasses.replace(
        sample,
        support_ids=np.asarray([i for ids in support for i in ids], np.int32),
        support_cu=np.cumsum([0, *(len(ids) for ids in support)], dtype=np.int64),
    )
    logits = model()(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0].detach()
    mu = np.zeros(n, np.float32)
    for t in np.flatnonzero(sample.mask):
        kept = torch.log_softmax(logits[t - 1, support[t]], -1)
        mu[t] = float(kept[support[t].index(int(sample.tokens[t]))])
    group = groups()[0]
    mixed = dataclasses.replace(group, samples=(dataclasses.replace(cut, behaviour_logprob=mu), *group.samples[1:]))
    report = trainer.train_step([mixed], 0)
    whole = Trainer(model(), RECIPE, 10).train_step([group], 0)
    share = sample.generated / sum(s.generated for s in group.samples)
    assert report.mean(names.LEARNER_GAP) < whole.mean(names.LEARNER_GAP) * (1 - share / 10)


def test_the_gap_to_the_engine_is_measured_on_samples_of_one_version_alone():
    """Keys of older weights may stand behind a token of the newest version: such samples say nothing about the engine."""
    batch = groups()[:1]
    swapped = batch[0].samples[1]
    ordinal = np.full_like(swapped.ordinal, 4)
    ordinal[-1] = 5
    samples = [dataclasses.replace(s, ordinal=np.full_like(s.ordinal, 5)) for s in batch[0].samples]
    samples[1] = dataclasses.replace(swapped, ordinal=ordinal)
    report = Trainer(model(), RECIPE, 10).train_step([dataclasses.replace(batch[0], samples=tuple(samples))], 5)
    alone = sum(s.generated for i, s in enumerate(samples) if i != 1)
    assert report.metrics[names.LEARNER_GAP][1] == alone
    shares = [report.mean(f"learner/lag_share/{lag:02}") for lag in (0, 1)]
    assert sum(shares) == pytest.approx(1.0) and shares[1] > 0


@pytest.mark.parametrize("advantage", ["", "ema"])
def test_an_interrupted_step_leaves_everything_as_it_was(advantage):
    recipe = change(objective={"advantage": advantage})
    trainer, other = Trainer(model(), recipe, 10), Trainer(model(), recipe, 10)
    for one in (trainer, other):
        one.train_step(groups(0), 0)
    seen = []

    def stop(gradient: torch.Tensor) -> None:
        seen.append(gradient.shape)
        trainer.interrupt.set()

    hook = trainer.policy.model.model.norm.weight.register_hook(stop)  # in backward: the layers are still to come
    with pytest.raises(Interrupted):
        trainer.train_step(groups(1), 1)
    hook.remove()
    assert seen and weights(trainer) == weights(other) and trainer.steps_done == 1
    trainer.interrupt.clear()
    for one in (trainer, other):
        one.train_step(groups(1), 1)
    assert weights(trainer) == weights(other) and trainer.baselines == other.baselines
