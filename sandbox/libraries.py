"""Python libraries that jails may import: found without importing them, bound one by one.

A whole site-packages is never shown to a program: it holds data sets with their answers. What is found is a map from a
path on the host to the path in the jail, for the package and for the folder of shared objects beside it (``numpy.libs``).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from temper.common.errors import EnvironmentFault

LIBRARIES_IN_JAIL = "/opt/libraries"
PROGRAM_LIBRARIES = ("numpy",)
METADATA_OF = {"antlr4": "antlr4_python3_runtime"}  # whose folder of metadata is not named like the module
JUDGE_LIBRARIES = ("math_verify", "sympy", "mpmath", "latex2sympy2_extended", "antlr4", "numpy")

_FIND = """
import importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    if spec: found[name] = (list(spec.submodule_search_locations or []) or [spec.origin])[0]
print(json.dumps(found))
"""


def find_libraries(names: Sequence[str], python: str | None = None) -> dict[str, Path]:
    """Where those of `names` are that this process's Python (or the Python `python`) can import."""
    if python is None:
        found: dict[str, str | None] = {}
        for name in names:
            spec = importlib.util.find_spec(name)
            if spec is not None:
                folders = list(spec.submodule_search_locations or [])
                found[name] = folders[0] if folders else spec.origin
    else:
        command = [python, "-P", "-c", _FIND, *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode != 0:
            raise EnvironmentFault(f"the sandbox's interpreter {python} does not start: {done.stderr.strip()[-200:]}")
        found = json.loads(done.stdout)
    return {name: Path(where).resolve() for name, where in found.items() if where}


def binds_of(libraries: dict[str, Path]) -> dict[str, str]:
    """Host path -> path in the jail: the package, its shared objects, its metadata (some ask for their own version)."""
    binds = {}
    for name, where in libraries.items():
        metadata = where.parent.glob(f"{METADATA_OF.get(name, name)}-*.dist-info")
        for path in (where, where.with_name(where.name + ".libs"), *metadata):
            if path.exists():
                binds[str(path)] = f"{LIBRARIES_IN_JAIL}/{path.name}"
    return binds
