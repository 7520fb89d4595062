"""``temper engine``: install SGLang into an environment of its own, and say what is installed.

    temper engine install --cpu | --cuda     make the environment (3 GB, some minutes); again: goes on or does nothing
    temper engine show                       which version, for what, where

The version and its dependencies are pinned: they are what Temper's tests run against.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from temper.common.errors import EnvironmentFault

if TYPE_CHECKING:
    from temper.actor.engines.sglang_home import Flavour

PACKAGES = [
    "torch==2.13.0", "triton==3.9.0", "transformers==5.19.0", "tokenizers==0.23.2", "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.18.0", "numba==0.65.1", "openai==2.8.0", "openai-harmony==0.0.4", "sentencepiece==0.2.1",
    "soundfile==0.13.1", "llguidance>=1.7.6,<2", "uvicorn>=0.51", "prometheus-client", "pyzmq", "IPython", "aiohttp",
    "build", "dill", "distro", "easydict", "einops", "fastapi", "gguf", "interegular", "jsonschema", "msgspec",
    "ninja", "orjson", "packaging", "partial_json_parser", "pillow", "psutil", "pybase64", "pydantic",
    "python-dateutil<3", "python-multipart", "requests", "scipy", "setproctitle", "tiktoken", "uvloop", "watchfiles",
    "xxhash", "zstandard",
]  # fmt: skip
ALONE = ("torchvision==0.28.0", "xgrammar==0.2.7")  # with SGLang, without what they ask for
NEEDED_BYTES = 4 * 1024**3
TAIL_LINES = 15


def main(argv: Sequence[str]) -> int:
    """The command's exit code."""
    parser = argparse.ArgumentParser(prog="temper engine", description="SGLang's own environment on this host.")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="make the environment, or finish it")
    flavour = install.add_mutually_exclusive_group(required=True)
    flavour.add_argument("--cpu", action="store_const", const="cpu", dest="flavour", help="run without a GPU")
    flavour.add_argument("--cuda", action="store_const", const="cuda", dest="flavour", help="for NVIDIA GPUs")
    commands.add_parser("show", help="what is installed, and where")
    options = parser.parse_args(argv)
    from temper.actor.engines.sglang_home import VERSION, home, installed

    found = installed()
    if options.command == "show":
        print(
            f"SGLang {found.version} ({found.flavour}) in {home()}" if found else f"not installed (looked in {home()})"
        )
        return 0
    if found is not None and (found.version, found.flavour) == (VERSION, options.flavour):
        print(f"SGLang {VERSION} ({found.flavour}) is installed in {home()}")
        return 0
    make(home(), options.flavour, VERSION)
    print(f"SGLang {VERSION} ({options.flavour}) is installed in {home()}; engine.kind = sglang uses it from now on")
    return 0


def make(folder: Path, flavour: Flavour, version: str) -> None:
    """Install into `folder`. EnvironmentFault with pip's last lines when it can't be done; what is there is kept."""
    import msgspec
    from temper.actor.engines.sglang_home import MARK, Installed, python_of

    (folder / MARK).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise EnvironmentFault(f"{folder}: {free >> 20} MiB are free, about {NEEDED_BYTES >> 20} are needed")
    python = python_of(folder)
    log = folder / "install.log"
    if not python.exists():
        run("making its environment", [sys.executable, "-m", "venv", str(folder)], log)
    pip = [str(python), "-P", "-m", "pip", "install", "--disable-pip-version-check"]
    cuda = flavour == "cuda"
    run("installing its dependencies", [*pip, *PACKAGES], log)
    kernels = (
        [] if cuda else ["--no-deps"]
    )  # its compiled kernels need CUDA: on CPU Temper's stand-ins take their place
    run("installing SGLang", [*pip, *kernels, f"sglang=={version}"], log)
    if not cuda:
        run("installing what it imports", [*pip, "--no-deps", *ALONE], log)
    (folder / MARK).write_bytes(msgspec.json.encode(Installed(version, flavour)))


def run(what: str, command: list[str], log: Path) -> None:
    """Run a step, its output in `log`. EnvironmentFault with the last lines if it fails."""
    print(f"temper engine: {what} ...", file=sys.stderr, flush=True)
    with log.open("ab") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False, cwd=log.parent)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise EnvironmentFault(
            f"{what} failed (exit code {done.returncode}); all of it is in {log}, the last lines:\n{tail}"
        )
