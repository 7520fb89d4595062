"""Curves of a run and of a benchmark's result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temper.cli import plot
from temper.common.errors import ConfigError
from temper.common.reports import Progress


def test_the_mean_run_averages_what_runs_have() -> None:
    runs = [
        [Progress("eval", 0.0, when="before", accuracy={"a": 0.2}), Progress("step", 1.0, 1, accuracy={"a": 0.0})],
        [Progress("step", 9.0, 1, accuracy={"a": 1.0, "b": 0.5}), Progress("step", 9.5, 2, accuracy={"b": None})],
    ]
    found = {(line.kind, line.step, line.when): line.accuracy for line in plot.merged(runs)}
    assert found == {
        ("eval", 0, "before"): {"a": 0.2},
        ("step", 1, ""): {"a": 0.5, "b": 0.5},
        ("step", 2, ""): {},
    }


def test_a_result_file_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the development extra")
    lines = [{"kind": "step", "time_s": 1.0, "step": step, "accuracy": {"a": step / 9}} for step in range(9)]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": [{"what": "curve", "lines": lines}, {"what": "speed"}]}))
    assert plot.main([str(path), "--out", str(tmp_path / "curve.svg")]) == 0
    assert "result, mean of 1 seeds" in (tmp_path / "curve.svg").read_text()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rows": [{"what": "curve"}]}', '{"rows": [{"what": "curve", "lines": [1]}]}']
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json: expected a run directory or a result file"):
        plot.result_runs(path)
