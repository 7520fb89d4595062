"""What `temper evaluate MODEL` may name, found before anything starts: a run directory, one of its checkpoints, a plain
Hugging Face folder, or a built-in model. A checkpoint becomes a plain folder first, so that all of them are loaded alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from temper.cli.preflight import BUILT_IN_MODELS
from temper.common.errors import ConfigError
from temper.common.reports import RECIPE_FILE

CHECKPOINTS = "checkpoints"
BUNDLE = "bundle"
DEFAULT_RECIPES = {"smollm2": "smollm2", "micro": "demo"}
PLAIN_RECIPE = "smollm2"


@dataclass(frozen=True, slots=True)
class Target:
    """A model to evaluate. `path`: what model.path becomes, empty for a checkpoint, which is exported first: `run_dir`,
    its `version` and RL `step`. `recipe` is the recipe unless another is named."""

    label: str
    recipe: str
    path: str = ""
    run_dir: Path | None = None
    version: int | None = None
    step: int | None = None


def resolve(model: str, step: int | None) -> Target:
    """The target of a MODEL argument and ``--step``; ConfigError says what was found and what is expected."""
    if model in BUILT_IN_MODELS or not Path(model).is_dir():
        if model not in BUILT_IN_MODELS:
            what = "is a file" if Path(model).exists() else "no such folder"
            raise ConfigError(f"{model}: {what}; expected {_expected()}")
        _no_step(model, step)
        return Target(model, DEFAULT_RECIPES[model], path=model)
    folder = Path(model).absolute()
    if folder.name == CHECKPOINTS and not (folder / RECIPE_FILE).exists():
        folder = folder.parent
    if (folder / "state.json").is_file() and (folder / "manifest.json").is_file():
        _no_step(model, step)
        return _checkpoint(folder)
    if (folder / CHECKPOINTS).is_dir() or (folder / RECIPE_FILE).is_file():
        return _run(folder, step)
    if (folder / "config.json").is_file():
        _no_step(model, step)
        return _plain(folder)
    raise ConfigError(
        f"{model}: neither {RECIPE_FILE} nor config.json nor a checkpoint's state.json in it; expected {_expected()}"
    )


def _expected() -> str:
    return (
        "a run directory, a checkpoint folder below one, a Hugging Face model folder, or one of: "
        f"{', '.join(BUILT_IN_MODELS)}"
    )


def _no_step(model: str, step: int | None) -> None:
    if step is not None:
        raise ConfigError(
            f"--step {step}: {model} is a single model; --step chooses among a run directory's checkpoints"
        )


def _recipe_of(run_dir: Path) -> str:
    path = run_dir / RECIPE_FILE
    return str(path) if path.is_file() else ""


def _bundle(run_dir: Path) -> None:
    if not (run_dir / BUNDLE / "config.json").is_file():
        raise ConfigError(
            f"{run_dir}: no {BUNDLE}/config.json there: expected the run directory that the broker used too, "
            "which keeps the model's config and tokenizer"
        )


def _checkpoint(folder: Path) -> Target:
    run_dir = folder.parent.parent
    _bundle(run_dir)
    version, done = _state(folder)
    return Target(f"{folder} (step {done})", _recipe_of(run_dir), run_dir=run_dir, version=version, step=done)


def _run(run_dir: Path, step: int | None) -> Target:
    root = run_dir / CHECKPOINTS
    folders = sorted(path for path in root.glob("version-*") if (path / "state.json").is_file())
    if not folders:
        raise ConfigError(f"{root}: no checkpoint there yet: the run has not reached one (run.checkpoint_every_steps)")
    steps = {_state(path)[1]: path for path in folders}
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {root} has checkpoints after steps {', '.join(map(str, sorted(steps)))}")
    return _checkpoint(folders[-1] if step is None else steps[step])


def _state(folder: Path) -> tuple[int, int]:
    """(version, RL steps done) of a checkpoint."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return int(state["version"]), int(state["trainer"]["steps_done"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: state.json is no checkpoint's ({type(error).__name__}: {error})") from error


def _plain(folder: Path) -> Target:
    for name, what in (("tokenizer.json", "a fast tokenizer"), ("*.safetensors", "weights as safetensors")):
        if not any(folder.glob(name)):
            raise ConfigError(f"{folder}: no {name} there: {what} and config.json make a model folder")
    return Target(str(folder), PLAIN_RECIPE, path=str(folder))
