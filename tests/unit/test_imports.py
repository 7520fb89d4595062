"""The dependency rules of the packages, by reading the source; and what a light command may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "actor": "actor",
    "learner": "learner",
    "broker": "broker",
    "sandbox": "sandbox",
    "kernels": "kernels",
    "common": "common",
    "bin": "cli",
}
DAEMONS = {"actor", "learner", "broker", "sandbox"}
HEAVY = ("torch", "transformers", "triton")

# package -> what it may import of temper at module level, and what only lazily (inside functions)
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "common": ({"common"}, set()),
    "kernels": ({"kernels"}, set()),
    "broker": ({"broker", "common"}, set()),
    "sandbox": ({"sandbox", "common"}, set()),
    "actor": ({"actor", "common"}, {"kernels"}),
    "learner": ({"learner", "common"}, {"kernels"}),
    "cli": ({"cli", "common"}, DAEMONS | {"kernels"}),
}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(module, whether it is imported at module level, line) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            inner |= {id(node) for node in ast.walk(block)}
    for node in ast.walk(tree):
        top = id(node) not in inner
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, top, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            if module == "temper":
                yield from ((f"temper.{alias.name}", top, node.lineno) for alias in node.names)
            else:
                yield module, top, node.lineno


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    package = FOLDERS[path.relative_to(ROOT).parts[0]]
    always, lazily = ALLOWED[package]
    for module, top, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line}: import of {module}"
        first = module.split(".")[0]
        assert first not in FOLDERS and first != "cli", f"{where}: a bare name of ours; write temper.{first}"
        if first == "temper":
            target = module.split(".")[1]
            assert target in always | lazily, f"{where}: {package} may import only {sorted(always | lazily)}"
            # A daemon that needs torch anyway may import kernels at the top: lazy means "not with the package's __init__".
            assert target in always or target == "kernels" or not top, f"{where}: only inside a function"
        if package in ("common", "broker", "sandbox"):
            assert first not in HEAVY, f"{where}: {package} imports no {first}"
        if package == "kernels":
            allowed = {"torch", "triton", "temper", "math", "numpy"} | set(sys.stdlib_module_names)
            assert first in allowed, f"{where}: kernels import only torch and triton"
        if package == "cli":
            assert first not in HEAVY or not top, f"{where}: only inside a function"


FORKS = {"os.fork", "os.forkpty", "pty.fork", "multiprocessing", "concurrent.futures.ProcessPoolExecutor"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_forks_a_process_that_has_threads(path: Path) -> None:
    """A fork copies locks that other threads hold, and the child waits for them for ever. Processes are started anew;
    only the single-threaded programs inside a jail fork, and SGLang's shim, which looks (`test_sglang_host.py`)."""
    if path.is_relative_to(ROOT / "sandbox" / "inside") or path == ROOT / "actor/engines/sglang_cpu/sitecustomize.py":
        return
    used = {module for module, _, _ in imports(path)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
    used = {name for name in used if not name.startswith("multiprocessing.reduction")}  # pickles, and forks nothing
    assert not {name for name in used if name in FORKS or name.startswith("multiprocessing.")}


def test_light_modules_load_nothing_heavy() -> None:
    """The command line, the recipe loader and the transport start without torch; help starts without ZeroMQ too."""
    check = (
        "import sys, {modules}; loaded = [name for name in {heavy!r} if name in sys.modules]; assert not loaded, loaded"
    )
    for modules, heavy in [
        ("temper.cli.main", ("torch", "zmq", "rich", "msgspec", "numpy", "transformers")),
        ("temper.common.recipe", ("torch", "zmq", "rich", "numpy", "transformers")),
        ("temper.cli.run, temper.cli.status, temper.cli.keys, temper.cli.check", ("torch", "transformers")),
        ("temper.common.daemon, temper.common.delta", ("torch", "transformers")),
    ]:
        code = check.format(modules=modules, heavy=heavy)
        subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_every_package_of_the_tree_is_declared() -> None:
    """A folder with Python files that pyproject.toml does not name would be missing from the wheel."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    declared = set(settings["packages"])
    found = set()
    for path in sources():
        parts = path.relative_to(ROOT).parent.parts
        found.add(".".join(["temper", FOLDERS[parts[0]], *parts[1:]]))
    assert found == declared
    assert {name: folder for folder, name in FOLDERS.items()} == {
        name.removeprefix("temper."): folder for name, folder in settings["package-dir"].items()
    }
