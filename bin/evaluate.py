"""`temper evaluate MODEL`: held-out accuracy of a model, nothing trained: one table over a recipe's domains.

The daemons are those of a run, started and watched by the same supervisor: broker, evaluator and sandbox workers, and a
learner that publishes the model once and asks for one evaluation (a recipe with ``run.max_steps = 0``). Each domain is
evaluated sampled and greedily. Everything lies in a temporary folder; of one that failed, logs and recipe are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console
from temper.cli import preflight, rundir
from temper.cli.measured import INTERVALS, DomainMeasure, greedy_names, mean_of, measure, plain, table
from temper.cli.policy import INTERRUPTED_CODE, Ending
from temper.cli.processes import commands
from temper.cli.progress import display
from temper.cli.run import explain
from temper.cli.supervisor import supervise
from temper.cli.targets import BUNDLE, Target, resolve
from temper.cli.view import Picture, duration
from temper.common import recipe as recipes
from temper.common.config import Recipe, WarmStart
from temper.common.errors import ConfigError, RunFailed
from temper.common.log import clean
from temper.common.recipe_derived import domain_sampling
from temper.common.reports import EVALUATIONS_FILE, RECIPE_FILE, Evaluated, decode, write_atomically

PREFIX = "temper-evaluate-"
PIPE_COLUMNS = 160  # where there is no terminal to ask
DEADLINE_S = (
    24 * 3600.0
)  # a bound that no evaluation needs: leases and infrastructure have their own, much shorter ones


@dataclass(frozen=True, slots=True)
class Plan:
    """An evaluation about to start. `recipe` is the derived one; `greedy`: domain -> its greedy twin in it."""

    target: Target
    source: str
    recipe: Recipe
    greedy: Mapping[str, str]
    ks: tuple[int, ...]
    host_file: str | None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> int:
        """Tasks asked for, sampled and greedy."""
        return sum(domain_sampling(self.recipe, domain).eval_tasks for domain in self.recipe.domains)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(flags, overrides)."""
    overrides, rest = recipes.split_overrides(argv)
    parser = argparse.ArgumentParser(
        prog="temper evaluate",
        description="Evaluate a model on the held-out tasks of a recipe's domains, without training.",
        epilog="Recipe keys are set as --section.key=value, such as --eval.temperature=0.6.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a run directory, a checkpoint, a Hugging Face folder, smollm2 or micro"
    )
    parser.add_argument(
        "--recipe", metavar="R", help="domains and sampling (default: the run's own; smollm2 for a plain folder)"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="the run's checkpoint after N RL steps (default: the last)"
    )
    parser.add_argument("--samples", type=_count, metavar="K", help="samples of each task (default: the recipe's)")
    parser.add_argument("--tasks", type=_count, metavar="N", help="tasks of each domain (default: the recipe's)")
    parser.add_argument("--domains", metavar="A,B", help="only these domains of the recipe")
    parser.add_argument("--k", type=_counts, default=(), metavar="K[,K]", help="k of pass@k (default: the samples)")
    parser.add_argument("--host", metavar="FILE", help="this host's own configuration, handed to the daemons")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    return parser.parse_args(rest), overrides


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, expected 1 or more")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """Check everything; nothing is written before the checks have passed."""
    target = resolve(arguments.model, arguments.step)
    source = arguments.recipe or target.recipe
    if not source:
        raise ConfigError(f"{arguments.model} has no {RECIPE_FILE}: name the domains with --recipe R")
    recipe = recipes.load(source, overrides)
    if target.path:
        recipe = replace(recipe, model=replace(recipe.model, path=target.path))
        preflight.check_model(recipe)
    recipe = chosen(recipe, arguments.domains)
    recipe = replace(recipe, run=replace(recipe.run, max_steps=0))
    preflight.check_modules(recipe)
    recipe, unavailable = preflight.without_sandbox(recipe)
    recipe, greedy = derived(recipe, arguments.samples, arguments.tasks)
    for domain in recipe.domains:
        samples = domain_sampling(recipe, domain).eval_samples
        if domain.name in greedy and arguments.k and arguments.k[-1] > samples:
            raise ConfigError(f"--k {arguments.k[-1]}: {domain.name} has {samples} samples a task; raise --samples")
    recipes.from_json(recipes.to_json(recipe), source)  # what the daemons will check
    return Plan(target, source, recipe, greedy, arguments.k, arguments.host, unavailable)


def chosen(recipe: Recipe, names: str | None) -> Recipe:
    """Only the named domains; ConfigError for one that the recipe does not have."""
    if names is None:
        return recipe
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [domain.name for domain in recipe.domains]
    for name in wanted or [names]:
        if name not in known:
            raise ConfigError(f"--domains {names}: the recipe has no domain {name!r}; it has {', '.join(known)}")
    return replace(recipe, domains=tuple(domain for domain in recipe.domains if domain.name in wanted))


def derived(recipe: Recipe, samples: int | None, tasks: int | None) -> tuple[Recipe, dict[str, str]]:
    """(the recipe of the evaluation alone, {domain: its greedy twin}): nothing trained, every domain twice."""
    greedy = greedy_names(recipe.domains)
    domains = []
    for domain in recipe.domains:
        own = domain_sampling(recipe, domain)
        sampled = replace(domain, eval_samples=samples or own.eval_samples, eval_tasks=tasks or own.eval_tasks)
        twin = replace(sampled, name=greedy[domain.name], eval_samples=1, eval_temperature=0.0)
        domains += [sampled, twin]
    daemons = replace(recipe.daemons, evaluators=max(1, recipe.daemons.evaluators))
    made = replace(
        recipe,
        run=replace(recipe.run, max_steps=0),
        warm_start=WarmStart(),
        eval=replace(recipe.eval, timeout_s=DEADLINE_S),
        daemons=daemons,
        domains=tuple(domains),
    )
    return made, greedy


@dataclass(slots=True)
class Workplace:
    """The folder of an evaluation. With `failed` its logs and recipe are `kept` somewhere."""

    run_dir: Path
    failed: bool = False
    kept: Path | None = None


@contextlib.contextmanager
def workplace() -> Iterator[Workplace]:
    """A temporary folder, removed at the end; those of evaluations that were killed are removed too."""
    rundir.sweep(Path(tempfile.gettempdir()), PREFIX)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    place = Workplace(rundir.fresh(folder / "run", "evaluate"))
    try:
        preflight.check_disk(place.run_dir)
        yield place
    finally:
        if place.failed:
            place.kept = Path(tempfile.mkdtemp(prefix=f"{PREFIX}failed-"))
            for name in ("logs", RECIPE_FILE):
                if (place.run_dir / name).exists():
                    shutil.move(place.run_dir / name, place.kept / name)
        shutil.rmtree(folder, ignore_errors=True)


def exported(target: Target, folder: Path) -> str:
    """The model folder of a target: its own, or its checkpoint as a plain folder made now."""
    if target.run_dir is None:
        return target.path
    from temper.cli.export import export

    out = folder / "model"
    export(target.run_dir, out, target.run_dir / BUNDLE, target.version, None)
    return str(out)


def execute(planned: Plan, run_dir: Path) -> tuple[Evaluated | None, Ending]:
    """Start, supervise; what the learner recorded, and how it ended."""
    model = replace(planned.recipe.model, path=exported(planned.target, run_dir.parent))
    recipe = replace(planned.recipe, model=model)
    with rundir.socket_folder() as sockets:
        address = f"ipc://{sockets}"
        with rundir.locked(run_dir, address):
            write_atomically(run_dir / RECIPE_FILE, recipes.to_json(recipe).encode())
            shown = display(planned.tasks)
            every = commands(recipe, run_dir, address, resume=False, host_file=planned.host_file)
            specs = [spec for spec in every if spec.role != "actor"]
            picture = Picture("evaluate", 0, str(run_dir))
            ending, supervisor = supervise(specs, recipe, picture, shown, run_dir=run_dir, address=address)
            explain(ending, supervisor, run_dir, command="evaluate")
    path = run_dir / EVALUATIONS_FILE
    lines = path.read_bytes().splitlines() if path.exists() else []
    return (decode(lines[-1], Evaluated, str(path)) if lines else None), ending


def measures(planned: Plan, found: Evaluated) -> dict[str, DomainMeasure]:
    """Per domain of the recipe what was measured."""
    made = {}
    for domain in planned.recipe.domains:
        if domain.name in planned.greedy:
            own = domain_sampling(planned.recipe, domain)
            made[domain.name] = measure(
                found.domains.get(domain.name, []),
                found.domains.get(planned.greedy[domain.name], []),
                expected=own.eval_tasks,
                samples=own.eval_samples,
                ks=planned.ks,
                floor=domain.floor,
            )
    return made


def report(planned: Plan, made: Mapping[str, DomainMeasure], wall_s: float) -> dict[str, object]:
    """What ``--json`` prints."""
    return {
        "model": planned.target.label,
        "step": planned.target.step,
        "recipe": planned.source,
        "temperature": planned.recipe.eval.temperature,
        "mean": mean_of(made),
        "domains": plain(made),
        "unavailable": dict(planned.unavailable),
        "wall_s": round(wall_s, 1),
        "intervals": INTERVALS,
    }


def show(planned: Plan, made: Mapping[str, DomainMeasure], wall_s: float) -> None:
    """The table on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    title = f"{planned.target.label}: held-out tasks, T = {planned.recipe.eval.temperature:g} and greedy"
    console.print(table(made, planned.ks, title))
    mean = mean_of(made)
    lines = ["" if mean is None else f"mean of the domains' mean@k, floors left out: {mean:.1%}", INTERVALS]
    lines += [f"{name}: {'; '.join(row.reasons)}" for name, row in made.items() if row.reasons]
    lines += [f"{name}: not evaluated: {why}" for name, why in planned.unavailable.items()]
    lines.append(f"took {duration(wall_s)}")
    for line in filter(None, lines):
        console.print(clean(line), markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str]) -> int:
    """Evaluate; exit code 0 when there is a result for every domain."""
    arguments, overrides = parse(argv)
    planned = plan(arguments, overrides)
    print(f"evaluating {planned.target.label} with recipe {planned.source}: {planned.tasks} tasks", file=sys.stderr)
    begun = time.monotonic()
    with workplace() as place:
        found, ending = execute(planned, place.run_dir)
        place.failed = ending.exit_code not in (0, INTERRUPTED_CODE)
    if place.kept:
        print(f"its logs and recipe are kept in {place.kept}", file=sys.stderr)
    if ending.exit_code:
        return ending.exit_code
    made = measures(planned, found) if found is not None else {}
    if not any(row.mean_at_k for row in made.values()):
        why = "; ".join(f"{name}: {', '.join(row.reasons) or 'no answer'}" for name, row in made.items())
        raise RunFailed(f"no task was judged: {why or 'the evaluation never came'}")
    wall_s = time.monotonic() - begun
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report(planned, made, wall_s)), indent=1))
    else:
        show(planned, made, wall_s)
    return 0
