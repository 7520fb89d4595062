"""`temper evaluate` before anything starts: what MODEL may be, which recipe follows, and what is measured."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from temper.cli import evaluate
from temper.cli.measured import greedy_names, mean_of, measure, plain, table
from temper.cli.progress import Pace
from temper.cli.targets import resolve
from temper.common import recipe as recipes
from temper.common.config import DomainConfig
from temper.common.errors import ConfigError
from temper.common.recipe_derived import domain_sampling
from temper.common.reports import TaskResult


def checkpoint(run_dir: Path, version: int, step: int) -> Path:
    folder = run_dir / "checkpoints" / f"version-{version:010d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"version": version, "trainer": {"steps_done": step}}))
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    (made / "bundle").mkdir(parents=True)
    (made / "bundle" / "config.json").write_text("{}")
    (made / "recipe.json").write_text(recipes.to_json(recipes.load("demo")))
    checkpoint(made, 70, 20)
    checkpoint(made, 90, 40)
    return made


def test_a_run_means_its_last_checkpoint_or_the_one_of_a_step(run_dir: Path) -> None:
    last, first = resolve(str(run_dir), None), resolve(str(run_dir), 20)
    assert (last.version, last.step, last.recipe) == (90, 40, str(run_dir / "recipe.json"))
    assert (first.version, first.step) == (70, 20)
    assert resolve(str(run_dir / "checkpoints"), None) == last
    assert resolve(str(run_dir / "checkpoints" / "version-0000000070"), None) == first
    with pytest.raises(ConfigError, match="checkpoints after steps 20, 40"):
        resolve(str(run_dir), 30)


def test_built_in_models_and_plain_folders_have_their_recipes(tmp_path: Path) -> None:
    assert [(resolve(name, None).path, resolve(name, None).recipe) for name in ("smollm2", "micro")] == [
        ("smollm2", "smollm2"),
        ("micro", "demo"),
    ]
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert (resolve(str(tmp_path), None).path, resolve(str(tmp_path), None).recipe) == (str(tmp_path), "smollm2")


@pytest.mark.parametrize(
    ("files", "step", "words"),
    [
        (None, None, "no such folder; expected a run directory"),
        ([], None, "neither recipe.json nor config.json"),
        (["config.json"], None, "no tokenizer.json there"),
        (["config.json", "tokenizer.json"], None, "no *.safetensors there"),
        (["config.json", "tokenizer.json", "a.safetensors"], 3, "--step chooses among"),
        (["recipe.json"], None, "no checkpoint there yet"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, files: list[str] | None, step: int | None, words: str) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolve(str(folder), step)


def test_a_checkpoint_without_its_bundle_or_state_is_named(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "version-0000000090" / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"state\.json is no checkpoint's"):
        resolve(str(run_dir), None)
    (run_dir / "bundle" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no bundle/config\.json"):
        resolve(str(run_dir / "checkpoints" / "version-0000000070"), None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--domains", "nope"], "the recipe has no domain 'nope'; it has reverse, tinycode"),
        (["--domains", ","], "the recipe has no domain"),
        (["--samples", "2", "--k", "1,3"], "--k 3: reverse has 2 samples a task"),
        (["--recipe", "nope"], "no recipe is called 'nope'"),
        (["--recipe", "smollm2"], "needs model.vocabulary"),
        (["--run.max_stops=3"], "did you mean run.max_steps"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        evaluate.plan(*evaluate.parse(["micro", *arguments]))


def test_the_derived_recipe_trains_nothing_and_has_every_domain_twice() -> None:
    planned = evaluate.plan(*evaluate.parse(["smollm2", "--tasks", "7", "--samples", "3", "--eval.temperature=0.6"]))
    recipe = planned.recipe
    assert (recipe.run.max_steps, recipe.warm_start.max_steps) == (0, 0)
    assert recipe.daemons.evaluators >= 1
    assert planned.tasks == 2 * 7 * len(planned.greedy)
    own = {domain.name: domain_sampling(recipe, domain) for domain in recipe.domains}
    for name, twin in planned.greedy.items():
        assert (own[name].eval_temperature, own[name].eval_samples) == (0.6, 3)
        assert (own[twin].eval_temperature, own[twin].eval_samples) == (0.0, 1)
        assert (own[twin].stop, own[twin].max_new_tokens) == (own[name].stop, own[name].max_new_tokens)
    assert own["humaneval"].max_new_tokens == 64


def test_greedy_names_are_unique_and_short_enough_for_a_recipe() -> None:
    names = ["a", "a-greedy", "x" * 64, "x" * 63]
    found = greedy_names([DomainConfig(name, "m") for name in names])
    assert set(found) == set(names)
    every = [*names, *found.values()]
    assert len(set(every)) == len(every) and all(len(name) <= 64 for name in every)


def test_a_domain_s_measure_counts_what_was_not_judged_apart() -> None:
    sampled = [
        TaskResult(0, samples=2, correct=1, tokens=10, truncated=1),
        TaskResult(1, samples=1, correct=1, tokens=6, unscored=1),
        TaskResult(2, void="quarantined"),
    ]
    row = measure(sampled, [TaskResult(0, samples=1, correct=1)], expected=4, samples=2)
    assert row.mean_at_k is not None and row.mean_at_k.value == pytest.approx(0.75)
    passed = row.pass_at_k["2"]
    assert passed is not None and (passed.value, passed.tasks) == (1.0, 1)
    assert row.greedy is not None and row.greedy.interval == "wilson"
    assert (row.tasks, row.samples, row.void_tasks, row.unscored, row.missing) == (2, 3, 1, 1, 1 + 3)
    assert (row.mean_tokens, row.truncated, row.reasons) == (4.0, 0.25, ["quarantined"])
    nothing = measure([], [], expected=1, samples=2)
    assert nothing.mean_at_k is None and nothing.mean_tokens is None
    floor = measure(sampled, [], expected=3, samples=2, floor=True)
    assert mean_of({"a": row, "f": floor}) == pytest.approx(0.75)
    assert mean_of({"a": row, "b": nothing}) is None and mean_of({"f": floor}) is None
    assert json.loads(json.dumps(plain({"a": row})))["a"]["mean_at_k"]["interval"] == "bootstrap"
    shown = io.StringIO()
    Console(width=140, file=shown).print(table({"a": row, "f": floor}, (), "title"))
    text = shown.getvalue()
    assert "f (floor)" in text and "75.0 [" in text


def test_the_pace_counts_from_the_first_answer() -> None:
    pace = Pace(10)
    assert pace.text(0.0) == "starting" and pace.eta_s(0.0) is None
    pace.take(1, 100.0)
    assert pace.eta_s(101.0) is None
    pace.take(4, 106.0)
    assert pace.eta_s(106.0) == pytest.approx(12.0)
    pace.take(99, 110.0)
    assert (pace.done, pace.text(110.0)) == (10, "last answers")


def test_a_failed_evaluation_keeps_its_logs_and_a_killed_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = tmp_path / f"{evaluate.PREFIX}{2**22 + 1}-x"  # above the largest process id
    killed.mkdir()
    with evaluate.workplace() as place:
        assert not killed.exists()
        (place.run_dir / "logs" / "learner.log").write_text("why")
        (place.run_dir / "weights").write_text("much")
        place.failed = True
    assert place.kept is not None and (place.kept / "logs" / "learner.log").read_text() == "why"
    assert list(tmp_path.iterdir()) == [place.kept] and not (place.kept / "weights").exists()
    with evaluate.workplace() as place:
        assert place.run_dir.is_dir()
    assert place.kept is None and len(list(tmp_path.iterdir())) == 1
