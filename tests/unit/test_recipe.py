"""Recipes: what loads, what is refused and with which words, and that nothing is lost on the way through JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.common import recipe as recipes
from temper.common.config import DomainConfig, Pacing, Recipe
from temper.common.errors import ConfigError
from temper.common.recipe_checks import DOMAIN_INERT, DOMAIN_RANGES, INERT, RANGES
from temper.common.recipe_derived import DomainSampling, capacity_groups, derived_table, domain_sampling

MINIMAL = """
[model]
vocabulary = "abc"
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


@pytest.fixture
def write(tmp_path: Path) -> typing.Callable[[str], str]:
    def _write(text: str) -> str:
        path = tmp_path / "my.toml"
        path.write_text(text)
        return str(path)

    return _write


def test_minimal_recipe_takes_the_defaults(write: typing.Callable[[str], str]) -> None:
    recipe = recipes.load(write(MINIMAL))
    assert recipe.pacing == Pacing()
    assert recipe.domains == (DomainConfig("reverse", "temper.actor.domains.reverse"),)


def test_overrides_win_and_need_no_quotes(write: typing.Callable[[str], str]) -> None:
    recipe = recipes.load(
        write(MINIMAL),
        [
            "--run.max_steps=7",
            "--run.name=my-run",
            "--optimizer.learning_rate=1e-4",
            "--pacing.batch_order=lease",
            '--sampling.stop=["a"]',
            "--run.deterministic=false",
            "--objective.weight_cap=2",
            "--domains.reverse.level=3",
            "--domains.reverse.options.letters=4",
        ],
    )
    assert (recipe.run.max_steps, recipe.run.name, recipe.optimizer.learning_rate) == (7, "my-run", 1e-4)
    assert (recipe.pacing.batch_order, recipe.sampling.stop, recipe.objective.weight_cap) == ("lease", ("a",), 2.0)
    assert (recipe.domains[0].level, recipe.domains[0].options) == (3, {"letters": 4})


def test_json_round_trip(write: typing.Callable[[str], str], tmp_path: Path) -> None:
    recipe = recipes.load(write(MINIMAL), ["--run.seed=5", "--domains.reverse.options.x=[1, 2]"])
    assert recipes.from_json(recipes.to_json(recipe)) == recipe
    stored = tmp_path / "recipe.json"
    stored.write_text(recipes.to_json(recipe))
    assert recipes.load(str(stored)) == recipe
    assert recipes.load(str(stored), ["--run.seed=6"]).run.seed == 6


BAD_TEXT = [
    ("[pacing]\ngroup_per_step = 3", ["my.toml", "unknown key pacing.group_per_step", "pacing.groups_per_step"]),
    ("[pacing]\nmax_steps = 3", ["unknown key pacing.max_steps", "did you mean run.max_steps"]),
    ("[pacng]\ngroups_per_step = 3", ["unknown section pacng", "did you mean pacing"]),
    ("[run]\nmax_steps = true", ["run.max_steps = true is a boolean, expected an integer"]),
    ("[run]\nmax_steps = 2.5", ["run.max_steps = 2.5 is a number, expected an integer"]),
    ('[run]\nmax_steps = "5"', ['run.max_steps = "5" is text, expected an integer']),
    ('[run]\ndurability = "ful"', ["run.durability", "one of full, memory", "did you mean full"]),
    ('[sampling]\nstop = "x"', ["sampling.stop", "expected a list of texts"]),
    ("run = 3", ["run is an integer, expected a table"]),
    ("[run\nmax_steps = 3", ["my.toml", "line"]),
    ("[optimizer]\nlearning_rate = nan", ["optimizer.learning_rate = nan"]),
    ("[optimizer]\nmax_gradient_norm = inf", ["optimizer.max_gradient_norm = inf", "finite"]),
    ("[optimizer]\nlearning_rate = 0", ["optimizer.learning_rate = 0", "> 0"]),
    ("[sampling]\ntemperature = 0", ["sampling.temperature = 0", "greedy"]),
    ("[sampling]\ntop_p = 1.5", ["sampling.top_p = 1.5", "<= 1"]),
    ("[pacing]\nmax_staleness = 9", ["max_token_lag = 8 is below pacing.max_staleness = 9"]),
    ("[sampling]\nmax_new_tokens = 32", ["leaves no room for a prompt"]),
    ("[warm_start]\nlearning_rate = 0.1", ["warm_start.learning_rate has no effect", "remove it"]),
    ("[sandbox]\nwall_s = 1.0", ["sandbox.wall_s has no effect", "needs_sandbox"]),
    ("[sandbox]\njail_per_test = true", ["sandbox.jail_per_test has no effect", "needs_sandbox"]),
    ("[daemons]\nsandboxes = 2", ["daemons.sandboxes has no effect", "needs_sandbox"]),
    ("[pacing]\nmax_staleness = 0\nmax_token_lag = 3", ["pacing.max_token_lag has no effect"]),
    ('[pacing]\nmax_staleness = 0\nbatch_order = "completion"', ["pacing.batch_order has no effect"]),
    ("[run]\ndeterministic = true", ["deterministic needs pacing.max_staleness = 0"]),
    (
        '[engine]\nkind = "embedded"\nrouted_experts = true',
        ["routed_experts needs engine.kind = sglang, found embedded"],
    ),
    ("[run]\nstall_timeout_s = 1.0", ["run.stall_timeout_s = 1 is below pacing.lease_timeout_s"]),
    ("[pacing]\nsamples_per_group = 1", ["no baseline"]),
    ("[objective]\nupdates_per_step = 17", ["every update needs a group"]),
    ("[optimizer]\ntokens_per_microbatch = 8", ["does not hold one sequence"]),
    ('[run]\nname = "../x"', ["run.name"]),
    ('[objective]\nkl_coefficient = 0.1\n[reference]\nkind = "reset_on_gain"', ["reset_on_gain", "eval.every_steps"]),
    ("[objective]\nkl_coefficient = 0.1\n[reference]\nreset_gain = 0.1", ["reference.reset_gain has no effect"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_TEXT, ids=[words[0][:40] for _, words in BAD_TEXT])
def test_bad_recipe_names_key_and_cure(write: typing.Callable[[str], str], text: str, words: list[str]) -> None:
    merged = MINIMAL + text if "[model]" not in text else text
    if text == "run = 3":
        merged = text + MINIMAL
    with pytest.raises(ConfigError) as caught:
        recipes.load(write(merged))
    message = str(caught.value)
    assert all(word in message for word in ["my.toml", *words]), message
    assert "\n" not in message


BAD_MODEL = [
    ("[model]\n", ["needs model.vocabulary"]),
    ('[model]\nvocabulary = "aba"\n', ["'a' twice"]),
    ('[model]\nvocabulary = "ab"\nhidden_size = 30\n', ["model.heads = 4"]),
    ('[model]\npath = "smollm2"\nlayers = 3\n', ["model.layers has no effect"]),
    ('[model]\npath = "smollm2"\n[sampling]\ntop_p = 0.9\n', ["sampling.top_k to at most 4096"]),
    ('[model]\npath = "smollm2"\n[sampling]\ntop_k = 5000\n', ["sampling.top_k = 5000", "4096"]),
    ('[model]\npath = "smollm2"\n[sampling]\nmin_p = 0.0001\n', ["min_p = 0.0001", "4096"]),
]


@pytest.mark.parametrize("text", ["top_p = 0.9\ntop_k = 4096", "min_p = 0.01", "top_k = 50"])
def test_truncated_sampling_with_a_bounded_support(write: typing.Callable[[str], str], text: str) -> None:
    from temper.common.recipe_checks import SUPPORT_LIMIT
    from temper.kernels import flags

    assert SUPPORT_LIMIT == flags.SUPPORT_LIMIT
    recipes.load(write(f'[model]\npath = "smollm2"\n[sampling]\n{text}\n[[domains]]\nname = "r"\nmodule = "a.b"\n'))


@pytest.mark.parametrize(("text", "words"), BAD_MODEL)
def test_bad_model(write: typing.Callable[[str], str], text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load(write(text + '[[domains]]\nname = "r"\nmodule = "a.b"\n'))
    assert all(word in str(caught.value) for word in words), caught.value


BAD_DOMAINS = [
    ("", ["no [[domains]]"]),
    ("[domains]\nname = 'x'", ["expected [[domains]]"]),
    ("[[domains]]\nmodule = 'a.b'", ["domains[0] has no name"]),
    ("[[domains]]\nname = 'x'", ["domains.x has no module"]),
    ("[[domains]]\nname = 'x/y'\nmodule = 'a.b'", ["domain 'x/y'"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a b'", ["domains.x.module = 'a b'"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a'\n[[domains]]\nname = 'x'\nmodule = 'b'", ["two domains are called x"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a'\nshare = 0", ["domains.x.share = 0", "> 0"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a'\nshares = 2", ["unknown key domains.x.shares", "domains.x.share?"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a'\ntrain = false", ["at least one must be trained"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a'\nwarm_start_share = 2.0", ["domains.x.warm_start_share has no effect"]),
    ("[[domains]]\nname = 'x'\nmodule = 'a'\nstop = 'y'", ["domains.x.stop", "a list of texts"]),
    (
        "[[domains]]\nname = 'x'\nmodule = 'a'\nneeds_sandbox = true\n[pacing]\nlease_timeout_s = 5\n[sandbox]\nwall_s = 5",
        ["pacing.lease_timeout_s = 5 leaves no time for grading", "sandbox.wall_s = 5"],
    ),
    (
        "[warm_start]\nmax_steps = 1\n[[domains]]\nname = 'x'\nmodule = 'a'\n"
        "[[domains]]\nname = 'y'\nmodule = 'a'\ntrain = false\nwarm_start_share = 2.0",
        ["domains.y.warm_start_share has no effect", "train = false"],
    ),
]


@pytest.mark.parametrize(("text", "words"), BAD_DOMAINS)
def test_bad_domains(write: typing.Callable[[str], str], text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load(write('[model]\nvocabulary = "abc"\n' + text))
    assert all(word in str(caught.value) for word in words), caught.value


BAD_OVERRIDES = [
    ("--pacing.group_per_step=3", ["unknown key pacing.group_per_step", "pacing.groups_per_step"]),
    ("--pacng.groups_per_step=3", ["unknown section pacng", "pacing"]),
    ("--run.max_steps=many", ['run.max_steps = "many" is text, expected an integer']),
    ("--run.max_steps", ["expected --section.key=value"]),
    ("--run=3", ["expected --section.key=value"]),
    ("--run.max_steps.x=3", ["expected --run.KEY=value"]),
    ("--domains.revers.share=2", ["no domain revers", "did you mean reverse"]),
    ("--domains.reverse.name=x", ["unknown key domains.reverse.name"]),
    ("--warm_start.groups_per_step=2", ["the command line: warm_start.groups_per_step has no effect"]),
]


@pytest.mark.parametrize(("override", "words"), BAD_OVERRIDES)
def test_bad_override(write: typing.Callable[[str], str], override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.load(write(MINIMAL), [override])
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_override_may_switch_off_what_the_file_configures(write: typing.Callable[[str], str]) -> None:
    text = MINIMAL + "[warm_start]\nmax_steps = 10\nlearning_rate = 0.1\n"
    assert recipes.load(write(text), ["--warm_start.max_steps=0"]).warm_start.max_steps == 0


def test_unknown_name_lists_the_nearest_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe is called 'zzz'"):
        recipes.load("zzz")
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot read the recipe: No such file"):
        recipes.load(str(tmp_path / "missing.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        recipes.load(str(folder))


def test_every_shipped_recipe_loads() -> None:
    for name in recipes.names():
        recipe = recipes.load(name)
        assert recipe.run.name == name
        assert recipes.from_json(recipes.to_json(recipe)) == recipe


def test_tables_name_only_real_keys_and_every_number_has_a_range() -> None:
    keys = {
        f"{section}.{field.name}": hint
        for section, kind in recipes.SECTIONS.items()
        for field in dataclasses.fields(kind)
        for hint in [typing.get_type_hints(kind)[field.name]]
    }
    assert set(RANGES) | set(INERT) <= set(keys)
    numbers = {path for path, hint in keys.items() if hint in (int, float, float | None)}
    assert numbers == set(RANGES)
    assert set(DOMAIN_RANGES) | set(DOMAIN_INERT) <= {field.name for field in dataclasses.fields(DomainConfig)}


def test_split_overrides() -> None:
    assert recipes.split_overrides(["demo", "--run.seed=1", "--json", "--run", "x.y"]) == (
        ["--run.seed=1"],
        ["demo", "--json", "--run", "x.y"],
    )


def test_a_floor_is_measured_and_never_trained(write: typing.Callable[[str], str]) -> None:
    text = '[model]\nvocabulary = "abc"\n[[domains]]\nname = "d"\nmodule = "m"\n[[domains]]\nname = "f"\nmodule = "m"\n'
    own = "train = false\nfloor = true\nmax_new_tokens = 20\nstop = []\neval_tasks = 164\neval_samples = 1\n"
    recipe = recipes.load(write(text + own))
    sampling = domain_sampling(recipe, recipe.domains[1])
    assert sampling == DomainSampling((), 20, 164, 1, recipe.eval.temperature)
    assert domain_sampling(recipe, recipe.domains[0]) == domain_sampling(recipe, None)
    for keys, words in [
        ("floor = true\n", "floor = true needs train = false"),
        ("max_new_tokens = 31\n", "above sampling.max_new_tokens"),
        ("train = false\nmax_new_tokens = 32\n", "no room for a prompt"),
        ("eval_temperature = -1\n", "eval_temperature = -1, expected >= 0"),
        ("eval_temperature = inf\n", "expected a finite number"),
        ("train = false\nshare = 2\n", "share has no effect"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            recipes.load(write(text + keys))


def test_without_steps_a_recipe_needs_nothing_to_train(write: typing.Callable[[str], str]) -> None:
    text = '[model]\nvocabulary = "abc"\n[[domains]]\nname = "d"\nmodule = "m"\ntrain = false\n'
    with pytest.raises(ConfigError, match="every domain has train = false"):
        recipes.load(write(text))
    assert recipes.load(write(text), ["--run.max_steps=0"]).run.max_steps == 0


def test_derived_table_multiplies_the_batch_sizes() -> None:
    recipe = Recipe(pacing=Pacing(groups_per_step=8, samples_per_group=4, max_staleness=2))
    rows = {name: value for name, value, _ in derived_table(recipe)}
    assert capacity_groups(recipe) == 24
    assert rows["samples per step"] == "32"
    assert rows["groups ahead of the learner"] == "at most 24"


@given(st.sampled_from(sorted(RANGES)), st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6))
def test_any_number_is_refused_or_kept(path: str, value: float) -> None:
    """No value of a numeric key is silently changed, and a refusal names the key or the combination."""
    section, key = path.split(".")
    tree: dict[str, typing.Any] = {"model": {"vocabulary": "abc"}, "domains": [{"name": "d", "module": "m"}]}
    tree.setdefault(section, {})[key] = value
    try:
        built = recipes.from_json(json.dumps(tree))
    except ConfigError as error:
        assert key in str(error)
    else:
        assert getattr(getattr(built, section), key) == value
