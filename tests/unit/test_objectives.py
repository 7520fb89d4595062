"""Rows of the table, how a recipe resolves to one, and advantages against golden values."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch
from temper.common import config
from temper.common.errors import ConfigError
from temper.kernels.reference import masked_returns
from temper.learner.advantages import GroupRewards, advantages, group_means, token_advantages
from temper.learner.objective_rules import check, resolve
from temper.learner.objectives import PER_TOKEN, TABLE, Objective, compile

ASYNC, SYNC = config.Pacing(max_staleness=2), config.Pacing(max_staleness=0)
ROWS = list(TABLE)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_makes_sense_and_compiles(name: str) -> None:
    row = resolve(config.Objective(name=name), SYNC)
    flags = compile(row)
    assert (flags.loss, flags.base, flags.weight) == (row.loss, row.base, row.weight)
    assert row.name == name and row.source


@pytest.mark.parametrize("name", [n for n in ROWS if TABLE[n].correction == "none"])
def test_uncorrected_rows_are_refused_when_asynchronous(name: str) -> None:
    with pytest.raises(ConfigError, match="does not correct for stale samples"):
        resolve(config.Objective(name=name), ASYNC)
    assert resolve(config.Objective(name=name, allow_uncorrected=True), ASYNC).name == name


def test_presets_bound_exploded_ratios() -> None:
    for row in TABLE.values():
        if row.loss == "ppo":
            assert row.dual_clip > 0 or row.veto > 0 or row.level == "sequence", row.name


@pytest.mark.parametrize(
    "choices,message",
    [
        ({"name": "grop"}, "objective.name = 'grop' is not an objective; did you mean 'grpo'"),
        ({"name": "zzzz"}, "valid are ppo, grpo"),
        ({"advantage": "dr_gpro"}, "objective.advantage = 'dr_gpro' is not one; did you mean 'dr_grpo'"),
        ({"aggregation": "token_meen"}, "objective.aggregation = 'token_meen'.*'token_mean'"),
        ({"loss": "pp"}, "objective.loss = 'pp' is not one; did you mean 'ppo'"),
        ({"kl_coefficient": 0.1, "kl": "k3"}, "objective.kl = 'k3' is not one"),
        ({"name": "tis", "clip_low": 0.2}, "objective.clip_low has no effect: tis does not clip"),
        ({"name": "dapo", "weight_cap": 2.0}, "objective.weight_cap has no effect: dapo has no correction weight"),
        ({"weight_floor": 0.5}, "objective.weight_floor has no effect.*use correction mask or clip"),
        ({"dro_beta": 0.5}, "objective.dro_beta has no effect"),
        ({"std": "sample"}, "objective.std has no effect: decoupled_ppo divides by no deviation"),
        ({"lam": 0.9}, "objective.lam has no effect"),
        ({"component_weights": {"a": 1.0}}, "objective.component_weights has no effect"),
        ({"name": "dapo", "proximal": "recompute"}, "objective.proximal has no effect: dapo never looks at"),
        ({"kl": "k2"}, "objective.kl has no effect: decoupled_ppo has kl_coefficient = 0"),
        ({"weight_cap": -1.0}, "objective.weight_cap = -1.0"),
        ({"weight_cap": 0.5}, "objective.weight_cap = 0.5: expected at least 1"),
        (
            {"correction": "mask", "weight_floor": 1.5},
            r"objective.weight_floor..weight_cap = 1.5..5.0: the band must hold 1",
        ),
        ({"geometric_low": 1.1}, "objective.geometric_low..geometric_high = 1.1.*must hold 1"),
        ({"veto": 1.0}, "objective.veto = 1.0: expected below 1"),
        ({"dual_clip": 1.1}, r"objective.dual_clip = 1.1: expected more than 1 \+ clip_high"),
        ({"clip_low": 1.5}, "objective.clip_low = 1.5: expected at most 1"),
        ({"clip_high": nan}, "objective.clip_high = nan"),
        ({"kl_coefficient": -0.1}, "objective.kl_coefficient = -0.1"),
        ({"updates_per_step": 0}, "objective.updates_per_step = 0"),
        ({"name": "sft", "advantage": "grpo"}, "only sft has the advantage 'likelihood'"),
        ({"advantage": "likelihood"}, "demonstrations have neither rewards"),
        ({"advantage": "vtrace"}, "V-trace corrects inside the advantage"),
        ({"name": "vtrace", "loss": "ppo"}, "V-trace's advantage holds pi/mu already"),
        ({"name": "vtrace", "updates_per_step": 2}, "a second update on the same batch is uncorrected"),
        ({"name": "tis", "correction": "ratio"}, "which has no ratio: nothing would be corrected"),
        ({"weight_of": "pi"}, "counts pi/prox twice"),
        ({"name": "tis", "level": "sequence"}, "level = 'sequence' has no effect"),
        ({"name": "sft", "kl_coefficient": 0.1}, "sft' has no policy gradient"),
        ({"correction": "none"}, "does not correct for stale samples"),
    ],
)
def test_senseless_recipes_say_why(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config.Objective(**choices), ASYNC)  # type: ignore[arg-type]


def test_overrides_reach_the_flags() -> None:
    recipe = config.Objective(
        advantage="rloo", aggregation="seq_mean_token_sum", clip_low=0.1, clip_high=0.3, weight_cap=2.0, kl_coefficient=0.01,
        entropy_coefficient=0.002, updates_per_step=4,
    )  # fmt: skip
    row = resolve(recipe, ASYNC)
    flags = compile(row)
    assert row.advantage == "rloo" and flags.aggregation == "seq_mean_token_sum"
    assert (flags.clip_low, flags.clip_high, flags.weight_high) == (0.1, 0.3, 2.0)
    assert (flags.kl, flags.kl_coefficient, flags.entropy_coefficient) == ("k2", 0.01, 0.002)
    assert row.needs_prox and row.needs_reference and row.needs_entropy
    assert not TABLE["decoupled_ppo"].needs_prox and not TABLE["decoupled_ppo"].needs_reference


def test_choices_compose_freely() -> None:
    """GSPO's ratio, a masked weight, a KL that is not the row's, V-trace's lambda: rows that nobody has named."""
    recipe = config.Objective(
        name="dapo", level="sequence", correction="mask", weight_floor=0.5, weight_cap=2.0, aggregation="seq_mean_token_mean",
        advantage="rloo", kl_coefficient=0.1, kl="k3_weighted", veto=1e-3, updates_per_step=2, proximal="loglinear",
    )  # fmt: skip
    row = resolve(recipe, ASYNC)
    flags = compile(row)
    assert (flags.level, flags.base, flags.weight, flags.weight_low, flags.weight_high) == (
        "sequence",
        "prox",
        "mask",
        0.5,
        2,
    )
    assert flags.loglinear_prox and not row.needs_prox and flags.kl == "k3_weighted" and flags.veto == 1e-3
    assert resolve(config.Objective(name="vtrace", lam=0.9, gamma=0.99), ASYNC).lam == 0.9
    taken_off = resolve(config.Objective(kl_coefficient=0.1, kl="reward"), ASYNC)
    assert taken_off.kl == "none" and taken_off.kl_reward and taken_off.needs_reference


def test_a_kl_in_the_loss_with_the_wrong_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match="wrong gradient"):
        check(replace(TABLE["dapo"], kl="k3", kl_coefficient=0.1), asynchronous=True)


GOLDEN = {
    "grpo": ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
    "dr_grpo": ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    "rloo": ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    "maxrl": ([1, 0, 0, 0], [3, -1, -1, -1]),
    "passk": ([1, 0.25, 0, 0], [0.75, 0, 0, 0]),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_advantages(kind: str) -> None:
    rewards, expected = GOLDEN[kind]
    (found,) = advantages(Objective("x", "", advantage=kind), [GroupRewards(rewards)])  # type: ignore[arg-type]
    assert found == pytest.approx(expected, abs=1e-6)


def test_population_std() -> None:
    (found,) = advantages(Objective("x", "", std="population"), [GroupRewards([1, 0, 0, 0])])
    assert found == pytest.approx([1.732047, -0.577349, -0.577349, -0.577349], abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "maxrl", "batch_std", "opo", "passk"])
def test_no_variance_gives_exactly_zero(kind: str) -> None:
    row = Objective("x", "", advantage=kind)  # type: ignore[arg-type]
    noise = 0.1 + 0.2 - 0.3
    groups = [
        GroupRewards([0.3, 0.3 + noise, 0.3], (1, 2, 3)),
        GroupRewards([5.0], (3,)),
        GroupRewards([0.0, 0.0], (1, 1)),
    ]
    assert advantages(row, groups) == [[0.0] * 3, [0.0], [0.0] * 2]


def test_a_small_difference_is_not_noise() -> None:
    (found,) = advantages(Objective("x", ""), [GroupRewards([1.00000, 1.00001])])
    assert found == pytest.approx([-0.6195, 0.6195], abs=1e-4)


@pytest.mark.parametrize("missing", [None, nan])
def test_unscored_samples_are_outside_the_baseline(missing: float | None) -> None:
    (found,) = advantages(Objective("x", "", advantage="dr_grpo"), [GroupRewards([1, 0, 1, missing])])
    assert found[3] is None
    assert found[:3] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_opo_weighs_its_baseline_by_length() -> None:
    (found,) = advantages(Objective("x", "", advantage="opo"), [GroupRewards([1, 0], (1, 3))])
    assert found == pytest.approx([0.75, -0.25])
    with pytest.raises(ValueError, match="lengths"):
        advantages(Objective("x", "", advantage="opo"), [GroupRewards([1, 0])])


def test_batch_std_divides_by_the_batch() -> None:
    groups = [GroupRewards([1, 0]), GroupRewards([0, 0])]
    found = advantages(Objective("x", "", advantage="batch_std", epsilon=0.0), groups)
    std = torch.tensor([1.0, 0, 0, 0]).std().item()
    assert found[0] == pytest.approx([0.5 / std, -0.5 / std]) and found[1] == [0.0, 0.0]


def test_ema_uses_the_running_mean() -> None:
    assert advantages(Objective("x", "", advantage="ema"), [GroupRewards([1.0], baseline=0.25)]) == [[0.75]]


def test_components_are_normalised_one_by_one() -> None:
    group = GroupRewards([1, 1, None], components=[{"a": 1, "b": 0}, {"a": 0, "b": 100}, {"a": 9, "b": 9}])
    row = Objective("x", "", advantage="per_component", epsilon=0.0, component_weights={"a": 1.0, "b": 0.5})
    (found,) = advantages(row, [group])
    unit = 0.5 / torch.tensor([1.0, 0.0]).std().item()
    assert found[:2] == pytest.approx([unit - 0.5 * unit, -unit + 0.5 * unit]) and found[2] is None


def test_reinforce_baseline_whitens_over_tokens() -> None:
    groups = [GroupRewards([1, 0], (2, 1)), GroupRewards([0.5, None], (1, 4))]
    found = advantages(Objective("x", "", advantage="reinforce++_baseline"), groups)
    tokens = torch.tensor([0.5, 0.5, -0.5, 0.0], dtype=torch.float64)
    white = (tokens - tokens.mean()) / (tokens.std(correction=0) + 1e-8)
    assert found[0] == pytest.approx([white[0].item(), white[2].item()])
    assert found[1][0] == pytest.approx(white[3].item()) and found[1][1] is None


def test_gamma_does_not_decay_through_masked_tokens() -> None:
    mask = torch.tensor([True, False, True])
    found = masked_returns(torch.tensor([0.0, 0, 1]), mask, torch.tensor([0, 3]), 0.5)
    assert found.tolist() == [0.5, 0.0, 1.0]


def test_reinforce_returns_are_whitened_over_the_mask() -> None:
    row = Objective("x", "", advantage="reinforce++", gamma=0.5)
    mask, cu = torch.tensor([1, 0, 1, 1], dtype=torch.bool), torch.tensor([0, 3, 4])
    found = token_advantages(row, torch.tensor([1.0, 0.0]), mask, cu)
    raw = torch.tensor([0.5, 1.0, 0.0])
    white = (raw - raw.mean()) / raw.std(correction=0)
    assert torch.allclose(found[mask], white, atol=1e-6) and found[1] == 0


def test_vtrace_of_token_runs_skips_masked_tokens() -> None:
    row = TABLE["vtrace"]
    mask = torch.tensor([0, 1, 0, 1, 1], dtype=torch.bool)
    d = torch.tensor([nan, 0.3, nan, -0.2, -0.5])
    groups = [GroupRewards([1.0, 0.0])]
    value = torch.tensor(group_means(groups)[0][:1])
    found = token_advantages(row, torch.tensor([1.0]), mask, torch.tensor([0, 5]), value=value, d=d)
    plain = token_advantages(
        row, torch.tensor([1.0]), torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]), value=value, d=d[mask]
    )
    assert torch.equal(found[mask], plain) and not found[~mask].any()
    with pytest.raises(ValueError, match="value, d"):
        token_advantages(row, torch.tensor([1.0]), mask, torch.tensor([0, 5]))


def test_step_rewards_are_added_as_returns() -> None:
    row = replace(TABLE["dapo"], gamma=0.5)
    mask = torch.tensor([0, 1, 1], dtype=torch.bool)
    steps = torch.tensor([0.0, 0.0, 1.0])
    found = token_advantages(row, torch.tensor([2.0]), mask, torch.tensor([0, 3]), step_rewards=steps)
    assert found.tolist() == [0.0, 2.5, 3.0]


def test_likelihood_is_one_everywhere() -> None:
    assert advantages(TABLE["sft"], [GroupRewards([None, None])]) == [[1.0, 1.0]]
    assert TABLE["sft"].advantage not in PER_TOKEN


def test_resolving_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; import temper.learner.objective_rules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
