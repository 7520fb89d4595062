"""The real model on real tasks through real daemons, in its shortest form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from temper.common import reports

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SHORT = (
    "--run.max_steps=3",
    "--pacing.groups_per_step=8",
    "--pacing.samples_per_group=4",
    "--eval.tasks_per_domain=2",
    "--domains.humaneval.eval_tasks=2",
)


def test_the_shipped_model_trains_on_every_domain(tmp_path: Path, audit: Any) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "temper.cli.main", "run", "smollm2", "--run", str(run_dir), *SHORT],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted((run_dir / "logs").glob("*.log")))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    summary = reports.read_summary(run_dir)
    assert summary is not None
    assert summary.steps == 3
    trained = {"addition", "letter_counting", "gcd", "syllogism", "arithmetic", "functions"}
    assert {name: row.status for name, row in summary.domains.items()} == {
        **dict.fromkeys(trained, "trained"),
        "humaneval": "floor",
    }
    assert all(row.accuracy_after is not None for row in summary.domains.values()), summary.domains
    means = [row.accuracy_after for name, row in summary.domains.items() if name in trained]
    assert summary.accuracy_after == pytest.approx(sum(means) / len(means)), "the floor is in the mean"
    assert (summary.domains["humaneval"].eval_samples, summary.domains["humaneval"].samples) == (2, 0)
    assert audit(run_dir)["trained"] == 3 * 8
    lines = reports_of(run_dir)
    assert all(line.loss is not None for line in lines if line.kind == "step")
    assert [line.floors for line in lines if line.kind == "eval"] == [["humaneval"]] * 2


def reports_of(run_dir: Path) -> list[reports.Progress]:
    """The learner's progress lines."""
    path = run_dir / reports.PROGRESS_FILE
    return [reports.decode(line, reports.Progress, str(path)) for line in path.read_bytes().splitlines()]
