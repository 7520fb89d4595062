"""Mounts below what a jail binds: a read-only bind is read-only for its own mount only, what is mounted below stays writable."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def writable_below(sources: Iterable[Path], table: str) -> dict[Path, list[Path]]:
    """Mount points strictly below each of `sources` that are not read-only, by source; `table` is a mountinfo."""
    points = [point for point, options in map(_entry, table.splitlines()) if "ro" not in options]
    found = {}
    for source in sources:
        below = sorted({point for point in points if point != source and point.is_relative_to(source)})
        if below:
            found[source] = below
    return found


def _entry(line: str) -> tuple[Path, list[str]]:
    _, _, _, _, point, options, *_ = line.split(" ")
    return Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)), options.split(
        ","
    )  # a blank is \040


def here() -> str:
    """The mountinfo of this process."""
    return Path("/proc/self/mountinfo").read_text()
