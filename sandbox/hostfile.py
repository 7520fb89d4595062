"""The host's own say about its jails: a TOML file, section ``[sandbox]``. Nothing of it ever comes from the broker.

[sandbox]
python = "/opt/python3.12/bin/python3"   # interpreter inside the jails; default: the one that runs Temper
preload = ["math", "numpy"]              # imported before the first program where jails are kept warm
libraries = ["numpy"]                    # Python libraries of this host that programs may import (the default)
rerun_share = 0.01                       # share of jobs that are run twice, to find flaky verdicts (the default)
[sandbox.binds]                          # read-only, host path = path in the jail
"/srv/data" = "/data"
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from temper.common.errors import ConfigError
from temper.sandbox.jail import PRELOAD, RERUN_SHARE, Host, Interpreter, find_nsjail
from temper.sandbox.libraries import JUDGE_LIBRARIES, PROGRAM_LIBRARIES, find_libraries

KEYS: dict[str, type | tuple[type, ...]] = {
    "python": str,
    "binds": dict,
    "preload": list,
    "libraries": list,
    "rerun_share": (int, float),
}


def load_host(file: Path | None = None) -> Host:
    """The host that `file` describes (None: the defaults). ConfigError names a wrong key; EnvironmentFault a missing tool."""
    section = _section(file) if file else {}
    for key, value in section.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            raise ConfigError(f"{file}: unknown key sandbox.{key}; {hint}")
        if not isinstance(value, KEYS[key]):
            kind = KEYS[key]
            name = kind.__name__ if isinstance(kind, type) else "a number"
            raise ConfigError(f"{file}: sandbox.{key} is {value!r}, expected {name}")
    binds = section.get("binds", {})
    for source, target in binds.items():
        if (
            not (isinstance(target, str) and source.startswith("/") and target.startswith("/"))
            or ":" in source + target
        ):
            raise ConfigError(f"{file}: bind {source!r} = {target!r}: both are absolute paths without a colon")
        if not Path(source).exists():
            raise ConfigError(f"{file}: bind source {source} does not exist on this host")
    preload = section.get("preload", list(PRELOAD))
    if not all(isinstance(name, str) and name.replace(".", "").replace("_", "").isalnum() for name in preload):
        raise ConfigError(f"{file}: sandbox.preload is {preload!r}, expected module names")
    python = section.get("python")
    libraries = section.get("libraries", list(PROGRAM_LIBRARIES))
    if not all(isinstance(name, str) and name.isidentifier() for name in libraries):
        raise ConfigError(f"{file}: sandbox.libraries is {libraries!r}, expected top-level module names")
    found = find_libraries(libraries, python)
    if "libraries" in section and (missing := [name for name in libraries if name not in found]):
        raise ConfigError(
            f"{file}: sandbox.libraries: {', '.join(missing)} cannot be imported by {python or 'this Python'}"
        )
    rerun_share = section.get("rerun_share", RERUN_SHARE)
    if not 0 <= rerun_share <= 1:
        raise ConfigError(f"{file}: sandbox.rerun_share is {rerun_share}, expected a share of 0 to 1")
    return Host(
        find_nsjail(),
        Interpreter.of(python),
        dict(binds),
        tuple(preload),
        found,
        find_libraries(JUDGE_LIBRARIES, python),
        float(rerun_share),
    )


def _section(file: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"host file {file}: {error}") from error
    section = data.get("sandbox", {})
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: sandbox is {section!r}, expected a table [sandbox]")
    return section
