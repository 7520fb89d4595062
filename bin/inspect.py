"""`temper inspect RUN`: what a run directory holds: recipe, steps, evaluations, and what became of groups and samples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from temper.cli.view import duration
from temper.common import recipe as recipes
from temper.common.errors import ConfigError
from temper.common.log import clean
from temper.common.reports import RECIPE_FILE, Progress, ProgressReader, Summary, read_summary


def shown(accuracy: float | None) -> str:
    """A share as a percentage."""
    return "-" if accuracy is None else f"{accuracy:.1%}"


def steps_lines(lines: Sequence[Progress]) -> list[str]:
    """What progress.jsonl tells."""
    steps = [line for line in lines if line.kind == "step"]
    found = []
    if steps:
        last = steps[-1]
        span = last.time_s - steps[0].time_s
        trained = sum(line.samples for line in steps[1:])
        pace = f", {trained / span:,.0f} samples/s" if span > 0 else ""
        found.append(f"steps       {last.step} in {duration(last.time_s)}{pace}, version {last.version}")
        found.append(f"lag         mean {sum(line.lag_mean for line in steps) / len(steps):.2f} versions")
    for line in lines:
        if line.kind == "eval":
            accuracies = ", ".join(f"{domain} {shown(value)}" for domain, value in line.accuracy.items())
            found.append(f"evaluation  {line.when} (version {line.version}): {accuracies or clean(line.reason)}")
    return found


def summary_lines(summary: Summary) -> list[str]:
    """What summary.json tells."""
    ended = f"{clean(summary.exit_reason)} (exit code {summary.exit_code})"
    found = [f"summary     {ended} after {duration(summary.wall_s)}"]
    for name, counts in (("groups", summary.groups), ("samples", summary.samples)):
        if counts:
            found.append(f"{name:<11} " + ", ".join(f"{count:,} {clean(fate)}" for fate, count in counts.items()))
    for name, row in summary.domains.items():
        reason = f" ({clean(row.reason)})" if row.reason else ""
        accuracies = f"{shown(row.accuracy_before)} -> {shown(row.accuracy_after)}"
        found.append(f"domain      {clean(name)}: {row.status}, {accuracies}{reason}")
    return found


def main(argv: Sequence[str]) -> int:
    """Print what is there."""
    parser = argparse.ArgumentParser(
        prog="temper inspect", description="What a run directory holds.", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    run_dir: Path = parser.parse_args(argv).run
    recipe_file = run_dir / RECIPE_FILE
    if not recipe_file.is_file():
        raise ConfigError(f"{run_dir}: no {RECIPE_FILE} there: expected a run directory")
    recipe = recipes.load(str(recipe_file))
    print(f"recipe      {recipe.run.name}, seed {recipe.run.seed}, max_steps {recipe.run.max_steps}")
    print("\n".join(steps_lines(ProgressReader(run_dir).read())) or "steps       none yet")
    summary = read_summary(run_dir)
    if summary is None:
        print("summary     none: the run goes on, or was killed")
    else:
        print("\n".join(summary_lines(summary)))
    return 0
