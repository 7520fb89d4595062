"""`bin/bench NAME --json FILE`: runs tests/benchmarks/NAME.py and writes its rows and goals with the machine and commit.

A benchmark is a script with ``main(argv: list[str]) -> {"rows": [...], "goals": [{"name", "goal", "value", "met"}]}``. Goals missed
are shown as missed and do not fail the run: a benchmark reports. Works in a checkout only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from temper.common.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "benchmarks"


def names() -> list[str]:
    """The benchmarks of this checkout."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def load(name: str) -> ModuleType:
    """The benchmark's module, from its file; ConfigError when there is none."""
    path = FOLDER / f"{name}.py"
    if name not in names():
        raise ConfigError(f"no benchmark {name} in {FOLDER}; there are: {', '.join(names()) or 'none'}")
    spec = importlib.util.spec_from_file_location(f"temper_benchmark_{name}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    processor = platform.processor()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The checkout's commit, with ``+dirty`` when the tree differs from it; "unknown" outside git."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout.strip()
    return head.stdout.strip() + ("+dirty" if dirty else "")


def report(result: dict[str, Any]) -> str:
    """Rows and goals as lines for a reader."""
    lines = [", ".join(f"{key} {value}" for key, value in row.items()) for row in result["rows"]]
    for goal in result["goals"]:
        lines.append(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['value']} (goal {goal['goal']})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; exit code 0 when it ran through."""
    parser = argparse.ArgumentParser(
        prog="bin/bench", description="Run a benchmark of tests/benchmarks.", allow_abbrev=False
    )
    parser.add_argument("name", nargs="?", help="the benchmark; without it they are listed")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result there")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.name is None:
        print("\n".join(names()))
        return 0
    measured = load(arguments.name).main(rest)
    result = {
        "bench": arguments.name,
        "commit": commit(),
        "machine": machine(),
        "rows": measured["rows"],
        "goals": measured.get("goals", []),
    }
    print(report(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        partial = arguments.json.with_name(arguments.json.name + ".part")
        partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        partial.replace(arguments.json)
    return 0


if __name__ == "__main__":
    from temper.cli.main import guarded

    sys.exit(guarded("bin/bench", main))
