"""`temper run RECIPE` (and `temper demo`): the whole system on this machine, supervised, with one live view and a summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from temper.cli import preflight, rundir, view
from temper.cli.policy import Ending
from temper.cli.processes import commands
from temper.cli.supervisor import Supervisor, display, supervise
from temper.common import recipe as recipes
from temper.common.config import Recipe
from temper.common.errors import ConfigError
from temper.common.log import clean
from temper.common.recipe_derived import derived_table
from temper.common.reports import (
    RECIPE_FILE,
    SUMMARY_FILE,
    DomainSummary,
    Summary,
    read_summary,
    write_atomically,
    write_summary,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run about to start: everything that can be refused has been checked."""

    recipe: Recipe
    run_dir: Path
    resume: bool
    host_file: str | None
    unavailable: dict[str, str] = field(default_factory=dict)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(flags, overrides)."""
    overrides, rest = recipes.split_overrides(argv)
    parser = argparse.ArgumentParser(
        prog="temper run",
        description="Run a recipe on this machine: start, supervise and show every daemon, end with a summary.",
        epilog=f"Recipes: {', '.join(recipes.names())}, or a .toml file. Keys are set as --section.key=value, "
        "such as --run.max_steps=50 or --domains.reverse.share=2.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a shipped recipe's name or a .toml file")
    parser.add_argument("--run", metavar="DIR", type=Path, help="run directory (default runs/NAME-DATE-TIME)")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="go on with the run in this directory")
    parser.add_argument("--host", metavar="FILE", help="this host's own configuration, handed to the daemons")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    return parser.parse_args(rest), overrides


def plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """Check everything and make the run directory; nothing is written before the checks have passed."""
    if arguments.resume is not None:
        if arguments.recipe or arguments.run:
            raise ConfigError("--resume DIR takes recipe and directory from DIR: leave RECIPE and --run out")
        source = str(rundir.require_recipe(arguments.resume))
    elif arguments.recipe is None:
        raise ConfigError(f"no recipe given: temper run RECIPE, such as {', '.join(recipes.names())}")
    else:
        source = arguments.recipe
    recipe = recipes.load(source, overrides)
    preflight.check_model(recipe)
    preflight.check_modules(recipe)
    preflight.check_objective(recipe)
    recipe, unavailable = preflight.without_sandbox(recipe)
    if arguments.resume is not None:
        run_dir = rundir.resumed(arguments.resume)
    else:
        run_dir = rundir.fresh(arguments.run, recipe.run.name)
    preflight.check_disk(run_dir)
    return Plan(recipe, run_dir, arguments.resume is not None, arguments.host, unavailable)


def execute(planned: Plan) -> Summary:
    """Start, supervise, and write the summary; returns it."""
    recipe, run_dir = planned.recipe, planned.run_dir
    with rundir.socket_folder() as sockets:
        address = f"ipc://{sockets}"
        with rundir.locked(run_dir, address):
            earlier = set_aside(run_dir)
            write_atomically(run_dir / RECIPE_FILE, recipes.to_json(recipe).encode())
            shown = display()
            started = time.monotonic()
            picture = view.Picture(recipe.run.name, recipe.run.max_steps, str(run_dir))
            specs = commands(recipe, run_dir, address, resume=planned.resume, host_file=planned.host_file)
            ending, supervisor = supervise(specs, recipe, picture, shown, run_dir=run_dir, address=address)
            explain(ending, supervisor, run_dir)
            summary = complete(planned, picture, ending, time.monotonic() - started, earlier)
            summary = msgspec.structs.replace(summary, peak_bytes=dict(supervisor.peak_bytes))
            write_summary(run_dir, summary)
            return summary


def set_aside(run_dir: Path) -> Summary | None:
    """An earlier summary of the directory (a resume) is moved away, so that it is not taken for this run's."""
    earlier = read_summary(run_dir)
    if earlier is not None:
        os.replace(run_dir / SUMMARY_FILE, run_dir / "summary.before.json")
    return earlier


def explain(ending: Ending, supervisor: Supervisor, run_dir: Path, command: str = "run") -> None:
    """On stderr: what ended a run that did not end by itself, with the last log lines of the process to blame."""
    if ending.exit_code == 0:
        return
    print(f"temper {command}: {ending.reason}", file=sys.stderr)
    if ending.blamed and supervisor.tail(ending.blamed):
        log = f"{ending.blamed}.log" if command != "run" else run_dir / "logs" / f"{ending.blamed}.log"
        print(f"last lines of {log}:", file=sys.stderr)
        for line in supervisor.tail(ending.blamed):
            print(f"  {line}", file=sys.stderr)
    if command == "run" and any((run_dir / name).exists() for name in ("checkpoints", "learner")):
        print(f"to go on: temper run --resume {run_dir}", file=sys.stderr)


def complete(planned: Plan, picture: view.Picture, ending: Ending, wall_s: float, earlier: Summary | None) -> Summary:
    """The learner's summary, or what is known without it, with what only the supervisor knows."""
    found = read_summary(planned.run_dir)
    status = picture.status
    before, after = picture.evals.get("before"), picture.evals.get("after")
    if found is None:
        domains = {
            domain.name: DomainSummary(
                status="trained" if domain.train else "floor" if domain.floor else "evaluated",
                accuracy_before=before.accuracy.get(domain.name) if before else None,
                accuracy_after=after.accuracy.get(domain.name) if after else None,
                reason="" if after else f"the run ended early: {ending.reason}",
            )
            for domain in planned.recipe.domains
        }
        found = Summary(steps=picture.step, tokens_trained=picture.tokens_trained, domains=domains)
    domains = dict(found.domains)
    for name, why in planned.unavailable.items():
        domains[name] = DomainSummary(status="unavailable", reason=why)
    for name, row in (earlier.domains if earlier else {}).items():
        if row.status == "unavailable":
            domains.setdefault(name, row)
    return msgspec.structs.replace(
        found,
        name=planned.recipe.run.name,
        run_dir=str(planned.run_dir),
        exit_code=ending.exit_code,
        exit_reason=found.exit_reason if ending.exit_code == 0 and found.exit_reason else ending.reason,
        domains=domains,
        wall_s=round(wall_s, 1),
        tokens_sampled=found.tokens_sampled or (status.sampled_tokens if status else 0),
        samples=found.samples or (dict(status.samples) if status else {}),
    )


def derived_lines(recipe: Recipe) -> list[str]:
    """What a recipe implies, one line each."""
    return [f"  {name + ':':<42} {value:<28} ({how})" for name, value, how in derived_table(recipe)]


def show_plan(planned: Plan) -> None:
    """What the recipe implies and what is left out, on stderr, before anything starts."""
    print(f"recipe {planned.recipe.run.name}, run directory {planned.run_dir}", file=sys.stderr)
    print("\n".join(derived_lines(planned.recipe)), file=sys.stderr)
    for name, why in planned.unavailable.items():
        print(f"domain {name} is left out: {why}", file=sys.stderr)


def show_summary(summary: Summary) -> None:
    """The summary as a table on stdout."""
    console = Console()
    table = Table(title=Text(f"{summary.name}: {clean(summary.exit_reason)}"), title_justify="left")
    for column in ("domain", "status", "accuracy before", "accuracy after", "held-out tasks"):
        table.add_column(column)
    for name, row in summary.domains.items():
        accuracies = ["-" if value is None else f"{value:.1%}" for value in (row.accuracy_before, row.accuracy_after)]
        table.add_row(name, row.status, *accuracies, str(row.tasks or "-"))
    console.print(table)
    rows = [
        ("steps", f"{summary.steps:,}" + (f" + {summary.warm_start_steps:,} warm" if summary.warm_start_steps else "")),
        ("wall time", view.duration(summary.wall_s)),
        ("tokens", f"{summary.tokens_sampled:,} sampled, {summary.tokens_trained:,} trained"),
        ("samples", ", ".join(f"{count:,} {fate}" for fate, count in summary.samples.items()) or "-"),
        ("samples/s", view.rate(summary.samples_per_s)),
        ("peak memory", ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in summary.peak_bytes.items()) or "-"),
        ("run directory", summary.run_dir),
    ]
    if summary.tensorboard:
        rows.append(("TensorBoard", f"tensorboard --logdir {summary.tensorboard}"))
    for name, value in rows:
        console.print(f"{name:<14} {value}", markup=False, highlight=False, soft_wrap=True)
    for name, row in summary.domains.items():
        if row.reason:
            console.print(f"{name}: {clean(row.reason)}", markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str]) -> int:
    """Run; the exit code is the run's."""
    arguments, overrides = parse(argv)
    planned = plan(arguments, overrides)
    show_plan(planned)
    summary = execute(planned)
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(summary), indent=1))
    else:
        show_summary(summary)
    return summary.exit_code
