"""The Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time for the cards that matter.

The interpreter has to be chosen before Triton is imported, so each file of ``tests/interpreted`` runs in a process of its
own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).resolve().parents[1]
INTERPRETED = sorted(path for path in (TESTS / "interpreted").glob("*.py"))


def run(arguments: list[str], **environment: str) -> str:
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
    return child.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_in_the_interpreter(path: Path) -> None:
    run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)], TRITON_INTERPRET="1")


SHARED_MEMORY_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", SHARED_MEMORY_BYTES)
def test_compiled_ahead_of_time(target: str) -> None:
    """No local-memory traffic, shared memory within the card's, matrix units used where inputs have 16 bits."""
    lines = run([str(TESTS / "compiled" / "compile_kernels.py"), target], TRITON_INTERPRET="0")
    found = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    assert len(found) >= 10
    for case in found:
        assert case["spills"] == 0, case
        assert case["shared"] <= SHARED_MEMORY_BYTES[target], case
        assert case["matrix"] > 0 or not case.get("tensor_cores"), case
