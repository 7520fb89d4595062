"""`temper export RUN OUT`: a run's trained model as a plain Hugging Face folder that transformers loads.

Takes the newest checkpoint (or ``--version``), verified by its digests, and the run's own config, tokenizer and template.
Low-rank adapters are merged into the weights. The folder appears complete or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from temper.common import recipe as recipes
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.reports import RECIPE_FILE

BUNDLE_FOLDER = "bundle"
BUNDLE_INDEX = "bundle.json"
PREFIX = "model."
TOKENIZER_CONFIG = "tokenizer_config.json"


def describing_files(folder: Path) -> dict[str, bytes]:
    """config.json, tokenizer.json and what else describes the model, from the run's bundle."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: no config.json there: the broker keeps it in its run directory; name that folder with --bundle"
        )
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != BUNDLE_INDEX}


def export(run_dir: Path, out: Path, bundle: Path, version: int | None, dtype_name: str | None) -> int:
    """Write the folder; returns the version it holds."""
    import torch
    from safetensors.torch import save_file
    from temper.learner import checkpoint
    from temper.learner.adapters import merged
    from temper.learner.mixtures import published

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already: choose a new folder")
    files = describing_files(bundle)
    root = run_dir / "checkpoints"
    kept = checkpoint.versions(root)
    if not kept:
        raise ConfigError(f"{root}: no checkpoint there yet")
    if version is not None and version not in kept:
        raise ConfigError(f"{root}: no checkpoint of version {version}; there are {', '.join(map(str, kept))}")
    found = checkpoint.load_newest(root) if version is None else checkpoint.load(root / checkpoint.folder_name(version))
    if dtype_name is None:
        recipe_file = run_dir / RECIPE_FILE  # missing beside a learner that runs without `temper run`
        dtype_name = recipes.load(str(recipe_file)).model.serving_dtype if recipe_file.exists() else "float32"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype_name]
    model = {name.removeprefix(PREFIX): tensor for name, tensor in found.tensors.items() if name.startswith(PREFIX)}
    plain = merged(model, float(found.state["trainer"].get("lora_scale", 0.0)))
    config = json.loads(files["config.json"])
    plain = published(plain, config.get("model_type", ""))
    weights = {name: tensor.to(dtype, copy=True).contiguous() for name, tensor in plain.items()}
    files["config.json"] = json.dumps({**config, "dtype": dtype_name}, indent=1).encode()
    files.setdefault(TOKENIZER_CONFIG, json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as made:
            folder = Path(made) / "model"
            folder.mkdir()
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "model.safetensors").chmod(0o644)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            if out.exists():
                out.rmdir()
            os.replace(folder, out)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {out}: {error.strerror or error}") from error
    return found.version


def main(argv: Sequence[str]) -> int:
    """Export a run's model."""
    parser = argparse.ArgumentParser(
        prog="temper export",
        description="A run's trained model as a folder that transformers loads.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory with the checkpoints")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--bundle", metavar="DIR", type=Path, help="config and tokenizer (default: RUN/bundle)")
    parser.add_argument("--version", metavar="N", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: the recipe's serving_dtype"
    )
    arguments = parser.parse_args(argv)
    version = export(
        arguments.run,
        arguments.out,
        arguments.bundle or arguments.run / BUNDLE_FOLDER,
        arguments.version,
        arguments.dtype,
    )
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"version {version} in {arguments.out} ({size / 1e6:.1f} MB)")
    return 0
