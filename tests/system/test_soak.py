"""The short form of `bin/bench soak`: kill -9 of broker, actors and worker while they work; nothing is lost or doubled."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def soak_module() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("temper_soak", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.system
def test_a_dozen_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    row = asyncio.run(soak_module().soak(tmp_path, kills=12, seed=3))
    assert row["faults"] == []
    assert row["kills"] == 12
    assert row["kills_broker"] >= 1
    assert row["groups_trained"] >= 24  # three steps after the last kill
