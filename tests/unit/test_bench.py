"""The benchmark runner: what it writes, and that missed goals are shown as missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temper.cli import bench
from temper.common.errors import ConfigError

SCRIPT = """
def main(argv):
    return {
        "rows": [{"case": "small", "rate": 12.5, "argument": argv[0]}],
        "goals": [
            {"name": "fast", "goal": ">= 10", "value": 12.5, "met": True},
            {"name": "faster", "goal": ">= 100", "value": 12.5, "met": False},
        ],
    }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "speed.py").write_text(SCRIPT)
    (tmp_path / "_shared.py").write_text("")
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    return tmp_path


def test_result_names_commit_machine_rows_and_goals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "results" / "speed.json"
    assert bench.main(["speed", "--json", str(out), "--steps=3"]) == 0
    written = json.loads(out.read_text())
    assert set(written) == {"bench", "commit", "machine", "rows", "goals"}
    assert written["bench"] == "speed"
    assert written["rows"][0]["argument"] == "--steps=3"
    assert {"processor", "cores", "memory_gib", "system", "python"} == set(written["machine"])
    shown = capsys.readouterr().out
    assert "met    fast" in shown
    assert "MISSED faster: 12.5 (goal >= 100)" in shown


def test_names_and_an_unknown_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    assert capsys.readouterr().out.split() == ["speed"]
    with pytest.raises(ConfigError, match=r"no benchmark speeed.*there are: speed"):
        bench.main(["speeed"])
