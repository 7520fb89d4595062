"""Independent peers: what TRL and torchrl compute from the same ragged inputs, in float64, to 1e-9.

TRL's own code runs: its loss methods on a stand-in trainer that hands it our log-probabilities, and the lines of its
generation step that turn rewards into advantages or log-probabilities into importance weights. Their epsilons are passed
in (ours are knobs). torchrl gives V-trace and GAE. Where a peer rounds a constant to float32 on its way (a temperature, a
discount, n/(n - 1) of integer tensors), the tests choose constants that float32 holds exactly.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from temper.kernels.flags import PolicyFlags
from temper.kernels.policy_loss import PackedBatch, count_normalisers, policy_loss
from temper.kernels.reference import gae, kl, masked_returns, value_loss, vtrace
from temper.learner.advantages import GroupRewards, advantages
from temper.learner.objectives import TABLE, Objective, compile
from torch import Tensor

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
F64 = torch.float64
LENGTHS = (5, 2, 7, 1)
WIDTH = max(LENGTHS)


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl.trainer.grpo_trainer")


def padded(values: Tensor) -> Tensor:
    """[S, WIDTH] from packed [N], zeros behind."""
    rows = torch.split(values, list(LENGTHS))
    return torch.stack([torch.nn.functional.pad(row, (0, WIDTH - len(row))) for row in rows])


def inputs(seed: int = 0) -> tuple[PackedBatch, Tensor, Tensor, Tensor]:
    """(batch, pi, entropy, advantage per sequence): random ragged float64 with masked tokens inside sequences."""
    gen = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    mu = -3 * torch.rand(count, generator=gen, dtype=F64) - 0.1
    prox, pi, ref = (mu + 0.3 * torch.randn(count, generator=gen, dtype=F64) for _ in range(3))
    mask = torch.rand(count, generator=gen) < 0.8
    mask[[0, 5, 7, 14]] = True
    sample = torch.tensor([0.8, -0.6, 0.3, -1.1], dtype=F64)
    batch = PackedBatch(
        torch.zeros(count, dtype=torch.int32), torch.tensor([0, 5, 7, 14, 15]), mask, mu, prox, ref,
        sample.repeat_interleave(torch.tensor(LENGTHS)), torch.zeros(4, dtype=torch.int64), torch.zeros(count),
    )  # fmt: skip
    return batch, pi, torch.rand(count, generator=gen, dtype=F64), sample


def block_of(function: Any, first: str, last: str) -> str:
    """The lines of a function's source from the one that starts with `first` to the one with `last`, unindented."""
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i, line in enumerate(lines) if i >= start and line.strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def trl_weights(trl: Any, batch: PackedBatch, mode: str, low: float | None, high: float | None) -> Tensor:
    """TRL's importance weights prox/mu."""
    source = block_of(
        trl.GRPOTrainer._generate_and_score_completions,
        "mask = completion_mask if tool_mask is None",
        'f"Unknown vLLM importance sampling level',
    )
    source = source[: source.rindex("else:")]
    assert batch.prox is not None
    scope: dict[str, Any] = {
        "torch": torch,
        "math": __import__("math"),
        "completion_mask": padded(batch.mask.to(F64)),
        "tool_mask": None,
        "old_per_token_logps": padded(batch.prox),
        "sampling_per_token_logps": padded(batch.mu),
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
    }
    exec(source, scope)
    weights: Tensor = scope["vllm_importance_sampling_ratio"]
    return weights


def trl_loss(
    trainer: Any, batch: PackedBatch, pi: Tensor, entropy: Tensor, sample: Tensor, **choices: Any
) -> tuple[Tensor, Tensor]:
    """(loss, gradient with respect to pi) of TRL's `_compute_loss`."""
    leaf = pi.clone().requires_grad_()
    mask = padded(batch.mask.to(F64))
    assert batch.prox is not None and batch.ref is not None
    weights = choices.get("weights")
    args = SimpleNamespace(
        delta=choices.get("delta"), use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.125,
        steps_per_generation=1,
    )  # fmt: skip
    same = SimpleNamespace(
        num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
    )  # fmt: skip
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(leaf), padded(entropy), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=choices.get("opsm"),
        get_off_policy_mask=getattr(trainer, "get_off_policy_mask", None),
        importance_sampling_level=choices.get("level", "token"),
        beta=choices.get("beta", 0.0),
        args=args,
        loss_type=choices.get("loss_type", "grpo"),
        epsilon_low=choices.get("low", 0.2),
        epsilon_high=choices.get("high", 0.28),
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        current_gradient_accumulation_steps=1,
        max_completion_length=choices.get("max_length", 9),
        accelerator=same,
        _entropy_bonus_enabled=choices.get("entropy_coefficient", 0.0) != 0,
        use_adaptive_entropy=False,
        entropy_coef=choices.get("entropy_coefficient", 0.0),
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=True),
    )
    rows = {
        "prompt_ids": torch.zeros(4, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(4, 1),
        "completion_ids": torch.zeros(4, WIDTH, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": sample,
        "old_per_token_logps": padded(batch.prox),
        "sampling_per_token_logps": padded(batch.mu),
        "ref_per_token_logps": padded(batch.ref),
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(stand_in, None, rows)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


def ours(
    batch: PackedBatch, pi: Tensor, entropy: Tensor, flags: PolicyFlags, length: float = 9
) -> tuple[Tensor, Tensor]:
    leaf = pi.clone().requires_grad_()
    normalisers = count_normalisers(batch.mask, batch.cu_seqlens, length)
    loss, _ = policy_loss(batch, leaf, flags, normalisers, entropy=entropy)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad


BASE = PolicyFlags(clip_low=0.2, clip_high=0.28)
SEQUENCES = "seq_mean_token_mean"
CASES: dict[str, tuple[PolicyFlags, dict[str, Any]]] = {
    "grpo": (replace(BASE, aggregation=SEQUENCES), {}),
    "dr_grpo": (replace(BASE, aggregation="seq_mean_token_sum_norm"), {"loss_type": "dr_grpo"}),
    "dapo": (BASE, {"loss_type": "dapo"}),
    "ppo token mean": (replace(BASE, clip_high=0.2), {"loss_type": "bnpo", "high": 0.2}),
    "gspo": (
        replace(BASE, level="sequence", clip_low=3e-4, clip_high=4e-4, aggregation=SEQUENCES),
        {"level": "sequence", "low": 3e-4, "high": 4e-4},
    ),
    "cispo": (replace(BASE, loss="cispo", clip_low=1.0), {"loss_type": "cispo", "high": 1.28}),
    "sapo": (replace(BASE, loss="sapo", tau_negative=1.125, aggregation=SEQUENCES), {"loss_type": "sapo"}),
    "dual clip": (replace(BASE, dual_clip=1.3, aggregation=SEQUENCES), {"delta": 1.3}),
    "opsm": (replace(BASE, opsm_delta=0.05, aggregation=SEQUENCES), {"opsm": 0.05}),
    "kl k3": (replace(BASE, kl="k3", kl_coefficient=0.3, aggregation=SEQUENCES), {"beta": 0.3}),
    "entropy bonus": (replace(BASE, entropy_coefficient=0.1), {"loss_type": "dapo", "entropy_coefficient": 0.1}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_equal_trl(trl: Any, name: str, seed: int) -> None:
    flags, choices = CASES[name]
    batch, pi, entropy, sample = inputs(seed)
    loss, grad = trl_loss(trl.GRPOTrainer, batch, pi, entropy, sample, **choices)
    found, gradient = ours(batch, pi, entropy, flags)
    assert torch.allclose(found, loss, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, grad, rtol=1e-9, atol=1e-12)


WEIGHTS = {
    "decoupled, tis as a factor": ("token_truncate", None, 1.2, {"weight": "truncate"}),
    "icepop, mis as a factor": ("token_mask", 0.8, 1.2, {"weight": "mask", "weight_low": 0.8}),
    "seq_is": ("sequence_truncate", None, 1.2, {"weight": "truncate", "weight_level": "sequence"}),
    "sequence mask": ("sequence_mask", 0.8, 1.2, {"weight": "mask", "weight_low": 0.8, "weight_level": "sequence"}),
    "two-sided clip": ("token_truncate", 0.9, 1.2, {"weight": "clip", "weight_low": 0.9}),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_correction_weights_equal_trl(trl: Any, name: str, seed: int) -> None:
    mode, low, high, choices = WEIGHTS[name]
    batch, pi, entropy, sample = inputs(seed)
    weights = trl_weights(trl, batch, mode, low, high)
    loss, grad = trl_loss(trl.GRPOTrainer, batch, pi, entropy, sample, weights=weights)
    found, gradient = ours(batch, pi, entropy, replace(BASE, aggregation=SEQUENCES, weight_high=high, **choices))
    assert torch.allclose(found, loss, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gmpo_equals_trl(trl: Any, seed: int) -> None:
    gmpo = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
    batch, pi, entropy, sample = inputs(seed)
    loss, grad = trl_loss(gmpo.GMPOTrainer, batch, pi, entropy, sample, low=0.4, high=0.4)
    found, gradient = ours(batch, pi, entropy, replace(compile(TABLE["gmpo"]), base="prox"))
    assert torch.allclose(found, loss, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, grad, rtol=1e-9, atol=1e-12)


REWARDS = [
    [1.0, 0.0, 0.25, 1.0, 0.5],
    [0.5, 0.1, None, 0.0, None],
    [1.0, 0.0, 0.0, 0.0, 0.0],
    [0.3, 0.7, 0.9, 0.2, 0.4],
    [None, None, 1.0, 0.0, None],
    [None, None, None, None, 1.0],
]  # 5, 3, 5, 5, 2 and 1 scored, and 17 in the batch of groups 1, 3, 4, 5: n/(n - 1) is exact


def trl_advantages(trainer: Any, first: str, last: str, rewards: list[list[Any]], **attributes: Any) -> list[float]:
    """The advantages that TRL's lines give, flat."""
    import trl.trainer.grpo_trainer as module

    source = block_of(trainer._generate_and_score_completions, first, last)
    columns = rewards if isinstance(rewards[0][0], list) else [[[r] for r in group] for group in rewards]
    flat = torch.tensor(
        [[float("nan") if r is None else r for r in row] for group in columns for row in group], dtype=F64
    )
    scope: dict[str, Any] = {
        "torch": torch,
        "nanstd": module.nanstd,
        "rewards_per_func": flat,
        "num_generations": len(columns[0]),
        "device": "cpu",
        "mode": "train",
        "self": SimpleNamespace(
            reward_weights=attributes.pop("reward_weights", torch.ones(1, dtype=F64)),
            reward_funcs=[None] * flat.shape[1],
            **attributes,
        ),
    }
    exec(source, scope)
    found: list[float] = scope["advantages"].tolist()
    return found


SCALES = {"grpo": "group", "dr_grpo": "none", "batch_std": "batch"}


@pytest.mark.parametrize("kind", SCALES)
def test_group_advantages_equal_trl(trl: Any, kind: str) -> None:
    rewards = [*REWARDS[:1], *REWARDS[2:5]] if kind == "batch_std" else REWARDS
    expected = trl_advantages(
        trl.GRPOTrainer, "unscorable_mask =", "advantages = torch.nan_to_num", rewards,
        multi_objective_aggregation="sum_then_normalize", scale_rewards=SCALES[kind],
    )  # fmt: skip
    row = Objective("x", "", advantage=kind, epsilon=1e-4)  # type: ignore[arg-type]
    found = [a or 0.0 for group in advantages(row, [GroupRewards(r) for r in rewards]) for a in group]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_rloo_equals_trl(trl: Any) -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer

    expected = trl_advantages(
        RLOOTrainer, "unscorable_mask =", "advantages = torch.nan_to_num", REWARDS,
        normalize_advantages=False, beta=0.0, reward_clip_range=None,
    )  # fmt: skip
    row = Objective("x", "", advantage="rloo")
    found = [a or 0.0 for group in advantages(row, [GroupRewards(r) for r in REWARDS]) for a in group]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_components_equal_trl_before_its_batch_normalisation(trl: Any) -> None:
    """TRL whitens the summed components over the batch once more: so do we here, with its epsilon."""
    gen = torch.Generator().manual_seed(0)
    values = torch.rand(3, 3, 2, generator=gen, dtype=F64)
    weights = torch.tensor([1.0, 0.5], dtype=F64)
    expected = trl_advantages(
        trl.GRPOTrainer, "unscorable_mask =", "advantages = torch.nan_to_num", values.tolist(),
        multi_objective_aggregation="normalize_then_sum", scale_rewards="group", reward_weights=weights,
    )  # fmt: skip
    row = Objective("x", "", advantage="per_component", epsilon=1e-4, component_weights={"a": 1.0, "b": 0.5})
    groups = [
        GroupRewards([0.0] * 3, components=[{"a": float(c[0]), "b": float(c[1])} for c in group]) for group in values
    ]
    found = torch.tensor(advantages(row, groups), dtype=F64).flatten()
    found = (found - found.mean()) / (found.std() + 1e-4)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.fixture(scope="module")
def functional() -> Any:
    return pytest.importorskip("torchrl.objectives.value.functional")


@pytest.mark.parametrize("gamma,rho,c", [(1.0, 1.0, 1.0), (0.875, 1.5, 1.0), (0.96875, 1.0, 0.75)])
def test_vtrace_equals_torchrl(functional: Any, gamma: float, rho: float, c: float) -> None:
    gen = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    d, reward, value = (torch.randn(count, generator=gen, dtype=F64) for _ in range(3))
    bootstrap = torch.randn(len(LENGTHS), generator=gen, dtype=F64)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    found, v = vtrace(0.4 * d, reward, value, cu, gamma=gamma, rho_bar=rho, c_bar=c, bootstrap=bootstrap)
    for s, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        part = slice(start, end)
        after = torch.cat([value[start + 1 : end], bootstrap[s : s + 1]])
        done = torch.zeros(end - start, 1, dtype=torch.bool)
        advantage, target = functional.vtrace_advantage_estimate(
            gamma, (0.4 * d)[part, None], torch.zeros(end - start, 1, dtype=F64), value[part, None], after[:, None],
            reward[part, None], done, done, torch.tensor(rho, dtype=F64), torch.tensor(c, dtype=F64),
        )  # fmt: skip
        assert torch.allclose(found[part], advantage[:, 0], rtol=1e-9, atol=1e-12)
        assert torch.allclose(v[part], target[:, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.875, 0.9375), (0.96875, 0.0)])
def test_gae_equals_torchrl(functional: Any, gamma: float, lam: float) -> None:
    gen = torch.Generator().manual_seed(2)
    count = sum(LENGTHS)
    reward, value = (torch.randn(count, generator=gen, dtype=F64) for _ in range(2))
    bootstrap = torch.randn(len(LENGTHS), generator=gen, dtype=F64)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    found, returns = gae(reward, value, cu, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for s, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        part = slice(start, end)
        after = torch.cat([value[start + 1 : end], bootstrap[s : s + 1]])
        done = torch.zeros(end - start, 1, dtype=torch.bool)
        advantage, target = functional.generalized_advantage_estimate(
            gamma, lam, value[part, None], after[:, None], reward[part, None], done, done
        )
        assert torch.allclose(found[part], advantage[:, 0], rtol=1e-9, atol=1e-12)
        assert torch.allclose(returns[part], target[:, 0], rtol=1e-9, atol=1e-12)


SCORES = {
    "tis": ({"weight_high": 1.1}, 1.1),
    "aipo": ({"weight_high": 1.3}, 1.3),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("seed", [0, 1])
def test_truncated_scores_equal_trls_cispo_against_the_behaviour_policy(trl: Any, name: str, seed: int) -> None:
    """-sg[min(pi/mu, C)] A log pi is TRL's cispo loss when its old policy is the one that sampled."""
    choices, cap = SCORES[name]
    batch, pi, entropy, sample = inputs(seed)
    behaved = replace(batch, prox=batch.mu)
    loss, grad = trl_loss(trl.GRPOTrainer, behaved, pi, entropy, sample, loss_type="cispo", high=cap)
    found, gradient = ours(batch, pi, entropy, replace(compile(TABLE[name]), **choices))
    assert torch.allclose(found, loss, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind,high", [("GRPOLoss", 0.2), ("DAPO", 0.28)])
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_clipped_losses_equal_torchrl(kind: str, high: float, aggregation: str) -> None:
    """torchrl's CISPOLoss is left out: it differentiates the clipped ratio itself, which the paper (and TRL) don't."""
    module = pytest.importorskip("torchrl.objectives.llm.grpo")
    loss = getattr(module, kind)
    batch, pi, entropy, _ = inputs(3)
    assert batch.prox is not None
    stand_in = SimpleNamespace(
        _clip_bounds=(torch.tensor(-0.2, dtype=F64).log1p(), torch.tensor(high, dtype=F64).log1p()),
        aggregation=aggregation,
        reduction="mean",
        _reduce_loss=lambda value, mask, **_: value[mask].mean(0),
    )
    leaf = pi.clone().requires_grad_()
    rows, _ = loss._compute_policy_objective(
        stand_in, padded(leaf - batch.prox)[..., None], padded(batch.advantage)[..., None]
    )
    expected = loss._aggregate_loss_value(stand_in, rows, padded(batch.mask.to(F64)).bool()).sum()
    (grad,) = torch.autograd.grad(expected, leaf)
    flags = PolicyFlags(
        clip_high=high, aggregation="token_mean" if aggregation == "token_mean" else "seq_mean_token_mean"
    )
    found, gradient = ours(batch, pi, entropy, flags)
    assert torch.allclose(found, expected.detach(), rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, grad, rtol=1e-9, atol=1e-12)


def test_k3_equals_torchrl() -> None:
    module = pytest.importorskip("torchrl.objectives.llm.distillation")
    gen = torch.Generator().manual_seed(4)
    pi, ref = (-3 * torch.rand(20, generator=gen, dtype=F64) for _ in range(2))
    assert torch.allclose(kl("k3", pi, ref, pi), module.k3_kl_token_estimate(ref, pi), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_critics_loss_equals_torchrl(clip: float) -> None:
    utils = pytest.importorskip("torchrl.objectives.utils")
    gen = torch.Generator().manual_seed(5)
    value, old, target = (torch.randn(30, generator=gen, dtype=F64) for _ in range(3))
    leaf = value.clone().requires_grad_()
    each = utils.distance_loss(target, leaf, loss_function="l2")
    if clip:
        each, _ = utils._clip_value_loss(old, leaf, torch.tensor(clip, dtype=F64), target, each, "l2")
    mine = value.clone().requires_grad_()
    found = value_loss(mine, old, target, clip)
    assert torch.allclose(2 * found, each, rtol=1e-9, atol=1e-12)
    (one,), (other,) = torch.autograd.grad(2 * found.sum(), mine), torch.autograd.grad(each.sum(), leaf)
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.875])
def test_returns_equal_torchrl(functional: Any, gamma: float) -> None:
    """The token returns of reinforce++ and of step rewards."""
    gen = torch.Generator().manual_seed(6)
    reward = torch.randn(sum(LENGTHS), generator=gen, dtype=F64)
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    done = torch.zeros(sum(LENGTHS), 1, dtype=torch.bool)
    done[cu[1:] - 1] = True
    found = masked_returns(reward, torch.ones_like(done[:, 0]), cu, gamma)
    assert torch.allclose(found, functional.reward2go(reward[:, None], done, gamma)[:, 0], rtol=1e-9, atol=1e-12)


def test_group_advantages_equal_torchrl() -> None:
    """MCAdvantage's (r - mean)/std."""
    module = pytest.importorskip("torchrl.objectives.llm.grpo")
    rewards = [0.25, 1.0, 0.5, 0.0, 0.75]
    source = block_of(module.MCAdvantage._trajectory_advantage, "advantage = (returns", "advantage = (returns")
    scope: dict[str, Any] = {"returns": torch.tensor(rewards, dtype=F64)}
    exec(source, scope)
    (found,) = advantages(Objective("x", "", advantage="grpo", epsilon=0.0), [GroupRewards(rewards)])
    assert found == pytest.approx(scope["advantage"].tolist(), rel=1e-9, abs=1e-12)


def test_the_table_claims_only_what_is_tested_here() -> None:
    """Rows that name a peer are among the cases above: by their loss, weight or advantage."""
    tested = {*CASES, *WEIGHTS, *SCALES, *SCORES, "gmpo", "rloo", "vtrace", "gae", "reinforce++"}
    words = {word for name in tested for word in name.replace(",", "").split()}
    aliases = {"ppo_critic": "ppo", "decoupled_ppo": "decoupled", "impala": "vtrace"}
    for row in TABLE.values():
        if "TRL" in row.confirmed or "torchrl" in row.confirmed:
            assert aliases.get(row.name, row.name) in words, row.name
