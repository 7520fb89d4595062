"""Where SGLang's own environment lies on this host. Its pins differ from Temper's, so the two never share one.

``temper engine install`` makes it; an actor whose host file names no interpreter uses it. Pure lookups, no installing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
from temper.actor.engines.sglang_host import SglangHost

VERSION = "0.5.23"  # the version that is tested
MARK = "temper-engine.json"
Flavour = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Installed:
    """A complete installation."""

    version: str
    flavour: Flavour


def home() -> Path:
    """The folder of the environment (about 3 GB on CPU): TEMPER_ENGINE_HOME, else in the user's cache folder."""
    named = os.environ.get("TEMPER_ENGINE_HOME")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "temper" / f"sglang-{VERSION}"


def installed(folder: Path | None = None) -> Installed | None:
    """What is installed there; None if nothing is, or an installation was not finished."""
    folder = folder or home()
    try:
        mark = msgspec.json.decode((folder / MARK).read_bytes(), type=Installed)
    except (OSError, msgspec.DecodeError):
        return None
    return mark if python_of(folder).exists() else None


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def completed(host: SglangHost) -> SglangHost:
    """`host`, its interpreter filled in from the installed environment where it names none."""
    if host.usable:
        return host
    found = installed()
    if found is None:
        return host
    return replace(host, python=str(python_of(home())), cpu=host.cpu or found.flavour == "cpu")
