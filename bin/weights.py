"""`temper weights show|verify|export`: what a run's weight log holds, whether it is intact, and one version as safetensors.

Reads only; safe beside a running broker. PATH is a run directory, its `weights` directory, or one file of the log.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from temper.common import coding, delta
from temper.common.delta import DeltaError, StagedUpdate
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.schema import Version
from temper.common.weight_format import unpack

if TYPE_CHECKING:
    from temper.broker.weight_files import LogFile

HELP = "show, verify or export the versions of a run's weight log"

FORMS = {coding.RAW: "raw", coding.PLANES: "planes", coding.DENSE: "dense", coding.SPARSE: "sparse"}


def files_of(path: Path, *, verify: bool) -> tuple[list[LogFile], list[tuple[Path, str]]]:
    """(complete files, damaged ones with the reason) at `path`; ConfigError if no log is there."""
    from temper.broker.weight_files import SUFFIXES, Damaged, read, scan

    if path.is_file():
        try:
            return [read(path, verify=verify)], []
        except Damaged as error:
            return [], [(path, str(error))]
    directory = path / "weights" if (path / "weights").is_dir() else path
    if not directory.is_dir():
        raise ConfigError(f"{path}: not there; expected a run directory, its weights directory or one file of it")
    found, damaged = scan(directory, verify=verify)
    if not found and not damaged:
        raise ConfigError(f"{directory}: no {' or '.join('*' + suffix for suffix in SUFFIXES)} file there")
    return found, damaged


def name(version: Version) -> str:
    """`12 of 3f9a0b11 (d41d8cd98f00...)`."""
    return f"{version.ordinal} of {version.lineage:08x} ({version.digest[:12]}...)"


def line(log_file: LogFile) -> str:
    """One entry as a line."""
    manifest = log_file.footer.manifest
    ratio = manifest.full_size / manifest.size if manifest.size else 0.0
    if manifest.base is None:
        return f"snapshot  {name(manifest.version)}  {manifest.size:,} bytes, {ratio:.2f}x smaller than the bits"
    return (
        f"delta     {name(manifest.version)} from {manifest.base.ordinal}  {manifest.size:,} bytes, {ratio:,.1f}x smaller"
        f" than a copy, {manifest.density:.3%} of the values"
    )


def forms(log_file: LogFile) -> list[str]:
    """The pieces of an entry by form: how many, values, bytes."""
    pieces: Counter[int] = Counter()
    values: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    overhead = 0
    for chunk in log_file.chunks():
        meta, coded = unpack(chunk)
        overhead += len(chunk)
        for record, piece in zip(meta.records, coded, strict=True):
            pieces[record.kind] += 1
            values[record.kind] += record.count
            sizes[record.kind] += piece.nbytes
            overhead -= piece.nbytes
    lines = [
        f"  {FORMS.get(kind, str(kind)):<7} {pieces[kind]:,} pieces of {values[kind]:,} values, {sizes[kind]:,} bytes"
        for kind in sorted(pieces)
    ]
    return [*lines, f"  heads   {overhead:,} bytes"]


def rebuild(files: Sequence[LogFile]) -> StagedUpdate:
    """Stage a snapshot and its chain; DeltaError if its root digest is not the one claimed."""
    return delta.stage([chunk for log_file in files for chunk in log_file.chunks()], None)


def show(path: Path, *, pieces: bool) -> int:
    """Print every entry."""
    found, damaged = files_of(path, verify=False)
    if found:
        print(f"run       {found[0].footer.run_id}")
    for log_file in found:
        print(line(log_file))
        if pieces:
            print("\n".join(forms(log_file)))
    for file, reason in damaged:
        print(f"damaged   {file.name}: {reason}")
    return 0


def verify(path: Path) -> int:
    """Check chunk digests, then rebuild every version that a snapshot leads to and check its root digest."""
    from temper.broker.weight_log import WeightLog

    found, damaged = files_of(path, verify=True)
    wrong = [f"{file.name}: {reason}" for file, reason in damaged]
    log, orphans = WeightLog.of(found)
    for ordinal, place in log.places.items():
        way = log.way(None, ordinal)
        if way is None:
            print(f"version   {name(place.version)}: files intact, no snapshot leads to it here")
            continue
        try:
            rebuild(way)
            print(f"version   {name(place.version)}: right, from {len(way)} files")
        except DeltaError as error:
            wrong.append(f"version {name(place.version)}: {error}")
    if orphans:
        print(f"orphans   {len(orphans)} files of lineages that were left behind, intact")
    if wrong:
        raise EnvironmentFault(f"{path} is damaged: {'; '.join(wrong)}")
    return 0


def export(path: Path, target: Path, ordinal: int | None) -> int:
    """Write one version as a safetensors file, all or nothing."""
    import torch
    from safetensors.torch import save_file
    from temper.broker.weight_log import WeightLog

    log, _ = WeightLog.of(files_of(path, verify=True)[0])
    way = log.way(None, ordinal)
    if not way:
        there = ", ".join(str(n) for n in log.places if log.way(None, n)) or "none"
        raise ConfigError(
            f"{path}: no version {'at all' if ordinal is None else ordinal} can be rebuilt; there are: {there}"
        )
    update = rebuild(way)
    tensors = {
        patch.name: torch.from_numpy(patch.values).view(getattr(torch, patch.dtype)).reshape(patch.shape)
        for patch in update.changed
    }
    version = update.version
    metadata = {
        "format": "pt",
        "ordinal": str(version.ordinal),
        "lineage": f"{version.lineage:08x}",
        "digest": version.digest,
    }
    part = target.with_name(target.name + ".part")
    try:
        save_file(tensors, part, metadata)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    print(f"version {name(version)}: {len(tensors)} tensors written to {target}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(prog="temper weights", description=HELP, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    where = "a run directory, its weights directory or one file of it"
    shown = actions.add_parser("show", help="list the entries: version, bytes, ratio, density", allow_abbrev=False)
    shown.add_argument("path", metavar="PATH", type=Path, help=where)
    shown.add_argument("--pieces", action="store_true", help="the forms that each entry's tensors are coded in, too")
    checked = actions.add_parser("verify", help="check every digest by rebuilding every version", allow_abbrev=False)
    checked.add_argument("path", metavar="PATH", type=Path, help=where)
    exported = actions.add_parser("export", help="write one version as a safetensors file", allow_abbrev=False)
    exported.add_argument("path", metavar="PATH", type=Path, help=where)
    exported.add_argument("target", metavar="FILE", type=Path, help="the safetensors file to write")
    exported.add_argument("--version", type=int, metavar="N", help="the ordinal; the newest if not given")
    given = parser.parse_args(argv)
    if given.action == "show":
        return show(given.path, pieces=given.pieces)
    if given.action == "verify":
        return verify(given.path)
    return export(given.path, given.target, given.version)
