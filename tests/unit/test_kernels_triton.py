"""The Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time for the cards that matter.

The interpreter has to be chosen before Triton is imported, so each file of ``tests/interpreted`` runs in a process of its
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).resolve().parents[1]
INTERPRETED = sorted(path for path in (TESTS / "interpreted").glob("*.py"))


def run(arguments: list[str], **environment: str) -> None:
    child = subprocess.run(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **environment},
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-8000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path) -> None:
    run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)], TRITON_INTERPRET="1")
