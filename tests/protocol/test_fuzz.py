"""The fuzz targets of tests/benchmarks/fuzz.py, driven by plain random mutation: the short form of `bin/bench fuzz`."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

INPUTS = 3000


def load() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("temper_fuzz", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = load()


@pytest.mark.parametrize("name", sorted(fuzz.TARGETS))
def test_no_input_breaks_a_promise(name: str) -> None:
    target = fuzz.TARGETS[name]()
    chance = random.Random(name)
    kept = [b""]
    try:
        for _ in range(INPUTS):
            data = bytearray(chance.choice(kept) or chance.randbytes(chance.randrange(300)))
            for _ in range(chance.randrange(4)):
                at = chance.randrange(len(data) + 1)
                data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
            target(bytes(data[:600]))
            if chance.random() < 0.05:
                kept.append(bytes(data[:600]))
    finally:
        fuzz.close()
