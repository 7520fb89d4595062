"""`temper version`: Temper and what it stands on, from package metadata alone (nothing heavy is imported)."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from importlib import metadata

PACKAGES = ("torch", "triton", "transformers", "pyzmq", "msgpack", "msgspec", "uvloop", "numpy", "tensorboard")


def versions() -> dict[str, str]:
    """Installed versions by distribution name; "missing" where there is none."""
    found = {"temper-rl": "missing", "python": platform.python_version()}
    for name in ("temper-rl", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def main(argv: Sequence[str]) -> int:
    """Print the versions."""
    parser = argparse.ArgumentParser(
        prog="temper version", description="The versions of Temper and of what it stands on."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    found = versions()
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<14} {version}" for name, version in found.items()))
    return 0
