"""The wheel: everything is in it, nothing else is, and it runs away from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)  # what is built and installed first counts with the test that needs it
FOLDERS = ("actor", "learner", "broker", "sandbox", "kernels", "common", "bin")


def run(command: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TEMPER"))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    work = tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, work / "src" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "src" / name)
    pip = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = run([*pip, "--wheel-dir", work / "dist", work / "src"], work)
    assert built.returncode == 0, built.stderr
    return next((work / "dist").glob("temper_rl-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment elsewhere: this environment's dependencies, and Temper from the wheel alone."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    assert run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent).returncode == 0
    # Paths added by a .pth file bring packages, but not the .pth files that lie there: not the editable install of Temper.
    sites = [path for path in sys.path if path.endswith("site-packages")]
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(sites) + "\n")
    pip = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    done = run([*pip, "--ignore-installed", str(wheel)], folder.parent)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.system
def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = set()
    for folder in FOLDERS:
        package = "cli" if folder == "bin" else folder
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".cfg") or (path.suffix == ".sh" and folder != "bin"):
                expected.add(f"temper/{package}/{path.relative_to(ROOT / folder)}")
    assert expected <= names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"temper"}


@pytest.mark.system
def test_wheel_runs_elsewhere(installed: Path, tmp_path: Path) -> None:
    temper = installed / "bin" / "temper"
    helped = run([temper, "--help"], tmp_path)
    assert helped.returncode == 0
    assert "temper COMMAND" in helped.stdout
    code = (
        "import importlib, pkgutil, temper, sys\n"
        "for package in ('actor', 'learner', 'broker', 'sandbox', 'kernels', 'common', 'cli'):\n"
        "    module = importlib.import_module('temper.' + package)\n"
        f"    assert module.__file__.startswith({str(installed)!r}), module.__file__\n"
    )
    imported = run([installed / "bin" / "python", "-P", "-c", code], tmp_path)
    assert imported.returncode == 0, imported.stderr
    checked = run([temper, "check", "recipe", "demo"], tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "samples per step" in checked.stdout


@pytest.mark.system
def test_wheel_alone_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    """A short form of it: every daemon, both domains, nsjail."""
    short = ["--run.max_steps=2", "--warm_start.max_steps=5", "--eval.tasks_per_domain=4", "--eval.samples_per_task=1"]
    done = run([installed / "bin" / "temper", "demo", "--json", *short], tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 2
    assert all(row["status"] == "trained" for row in summary["domains"].values())
    assert [path.parent.parent for path in tmp_path.rglob("summary.json")] == [tmp_path / "runs"]
