"""Checkpoints: a folder each, complete or absent.

A checkpoint is written into a temporary folder (tensors as safetensors, everything else as JSON), every file synced,
then a manifest with their digests, then renamed into place: a crash at any point leaves the older ones untouched and the
new one either whole or invisible. `load_newest` verifies digests, refuses a damaged one by name and takes the older.
Called by the learner's daemon; `write` may run in a worker thread while nothing else changes the state.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from temper.common.errors import EnvironmentFault
from temper.common.log import log

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = ("model", "optimizer", "reference", "critic", "rng")
READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors` by ``<part>.<name>`` (parts: model, optimizer, reference, critic, rng) and the JSON `state`: version, step,
    run id, trainer, curriculum, oversight, recipe."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]


class Damaged(EnvironmentFault):
    """A checkpoint folder that is not what its manifest says."""


def folder_name(version: int) -> str:
    """Name of the folder of a version's checkpoint; sorts by version."""
    return f"version-{version:010d}"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """blake2b-16 of a file, hex."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_json(path: Path, value: Any) -> None:
    with path.open("w") as file:
        json.dump(value, file, sort_keys=True, indent=1, allow_nan=True)
        file.flush()
        os.fsync(file.fileno())


def _fill(folder: Path, checkpoint: Checkpoint) -> None:
    """Write and sync every file of a checkpoint, the manifest last."""
    unknown = sorted({name.split(".", 1)[0] for name in checkpoint.tensors} - set(TENSORS))
    if unknown:
        raise ValueError(f"tensors of unknown parts {unknown} would be lost, expected {TENSORS}")
    for part in TENSORS:
        mine = {
            name.split(".", 1)[1]: tensor.detach().cpu().contiguous()
            for name, tensor in checkpoint.tensors.items()
            if name.split(".", 1)[0] == part
        }
        if mine:
            save_file(mine, folder / f"{part}.safetensors", metadata={"format": "pt"})
            _sync_file(folder / f"{part}.safetensors")
    _write_json(folder / STATE, {"format": FORMAT, "version": checkpoint.version, **checkpoint.state})
    files = {
        path.name: {"bytes": path.stat().st_size, "digest": file_digest(path)} for path in sorted(folder.iterdir())
    }
    _write_json(folder / MANIFEST, {"format": FORMAT, "version": checkpoint.version, "files": files})
    _sync_folder(folder)


def write(root: Path, checkpoint: Checkpoint, kept: int) -> tuple[Path, int]:
    """Write a checkpoint below `root` and keep the newest `kept`; (its folder, oldest version retained).

    EnvironmentFault when the disk refuses; the older checkpoints are untouched then.
    """
    final = root / folder_name(checkpoint.version)
    temporary = root / f".writing-{checkpoint.version}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".*-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()
        _fill(temporary, checkpoint)
        if final.exists():  # the same version again, after a resume: the new lineage's replaces it
            os.rename(final, root / f".replaced-{checkpoint.version}-{os.getpid()}")
        os.rename(temporary, final)
        _sync_folder(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise EnvironmentFault(
            f"cannot write the checkpoint of version {checkpoint.version} below {root}: {error}; "
            "free space there or give another --run folder (older checkpoints are untouched)"
        ) from error
    retained = versions(root)[-max(1, kept) :]
    _retire(root, retained)
    return final, retained[0]


def _retire(root: Path, retained: list[int]) -> None:
    for version in versions(root):
        if version not in retained:
            gone = root / f".retired-{version}-{os.getpid()}"
            os.rename(root / folder_name(version), gone)
            shutil.rmtree(gone, ignore_errors=True)
    for stale in root.glob(".replaced-*"):
        shutil.rmtree(stale, ignore_errors=True)


def versions(root: Path) -> list[int]:
    """Versions that have a folder below `root`, ascending."""
    found = (path.name.removeprefix("version-") for path in root.glob("version-*") if path.is_dir())
    return sorted(int(name) for name in found if name.isdigit())


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, every file checked against the manifest. `Damaged` says what is wrong."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != entry["bytes"] or file_digest(path) != entry["digest"]:
                raise Damaged(f"checkpoint {folder}: {name} is not what its manifest says (size or digest)")
        state = json.loads((folder / STATE).read_text())
        if manifest["format"] != FORMAT or state["format"] != FORMAT:
            raise Damaged(f"checkpoint {folder}: format {manifest['format']}, this release reads {FORMAT}")
        tensors = {
            f"{part}.{name}": tensor
            for part in TENSORS
            if f"{part}.safetensors" in manifest["files"]
            for name, tensor in load_file(folder / f"{part}.safetensors").items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise Damaged(f"checkpoint {folder} cannot be read: {type(error).__name__}: {error}") from error
    return Checkpoint(int(state["version"]), tensors, state)


def below(folder: Path) -> Path | None:
    """What `load_newest` takes for a run directory, a checkpoint folder or their parent; None for a run without any yet."""
    if (folder / "checkpoints").is_dir():
        return folder / "checkpoints"
    return folder if (folder / MANIFEST).exists() or versions(folder) or not folder.is_dir() else None


def load_newest(root: Path) -> Checkpoint:
    """The newest whole checkpoint below `root` (or `root` itself, if it is one); damaged ones are named and passed over.

    EnvironmentFault when there is none.
    """
    if (root / MANIFEST).exists():
        return load(root)
    troubles: list[str] = []
    for version in reversed(versions(root)):
        try:
            return load(root / folder_name(version))
        except Damaged as damaged:
            log(f"{damaged}; taking the one before it")
            troubles.append(str(damaged))
    why = "; ".join(troubles) if troubles else "there is none"
    raise EnvironmentFault(f"no usable checkpoint below {root}: {why}")
