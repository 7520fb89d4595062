"""`temper plot RUN --out FILE`: a run's curve (reward by domain, evaluations, lag) from its progress lines, as PNG or SVG.

Needs matplotlib, which only the development extra installs.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from temper.common.errors import ConfigError
from temper.common.reports import Progress, ProgressReader, read_summary

SMOOTH_STEPS = 10
COLOURS = ("#1f6f8b", "#d1495b", "#5b8c5a", "#8d6a9f", "#c98b2b", "#4a4a4a")


def smooth(values: Sequence[float], width: int = SMOOTH_STEPS) -> list[float]:
    """Trailing means over `width` values."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def series(lines: Sequence[Progress]) -> dict[str, tuple[list[int], list[float]]]:
    """domain -> (steps, share of correct samples of that step; the reward where a domain has no correctness)."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        if line.kind == "step":
            for domain, value in {**line.reward, **line.accuracy}.items():
                if value is not None:
                    steps, values = found.setdefault(domain, ([], []))
                    steps.append(line.step)
                    values.append(value)
    return found


def draw(run_dir: Path, lines: Sequence[Progress], out: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "temper"}
    )  # small, and the same for the same run
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained")
    evals = [line for line in lines if line.kind == "eval"]
    last = max((line.step for line in lines), default=0)
    for (domain, (steps, values)), colour in zip(sorted(series(lines).items()), COLOURS * 100, strict=False):
        top.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
        top.plot(
            steps, smooth(values), color=colour, label=f"{domain}, training samples (mean of {SMOOTH_STEPS} steps)"
        )
        places = {"before": 0, "after": last}
        marks = [(places.get(line.when, line.step), line.accuracy.get(domain)) for line in evals]
        known = [(step, value) for step, value in marks if value is not None]
        if known:
            top.plot(*zip(*known, strict=True), "o", color=colour, markersize=8, label=f"{domain}, held-out")
    top.set_ylim(0, 1.02)
    top.set_ylabel("share correct (T = 1)")
    top.legend(loc="lower right", fontsize=8)
    summary = read_summary(run_dir)
    name = summary.name if summary else run_dir.name
    wall = f", {summary.wall_s:.0f} s" if summary else ""
    top.set_title(f"{name}: {last} steps{wall}", loc="left")
    steps_lines = [line for line in lines if line.kind == "step"]
    bottom.plot(
        [line.step for line in steps_lines], [line.lag_mean for line in steps_lines], color="#4a4a4a", label="mean"
    )
    bottom.plot(
        [line.step for line in steps_lines], [line.lag_max for line in steps_lines], color="#bbbbbb", label="max"
    )
    bottom.set_ylabel("lag (versions)")
    bottom.set_xlabel("RL step")
    bottom.legend(loc="upper right", fontsize=8)
    for axis in (top, bottom):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if out.suffix == ".svg" else None
    figure.savefig(out, dpi=120, metadata=metadata)
    plt.close(figure)


def main(argv: Sequence[str]) -> int:
    """Draw a run."""
    parser = argparse.ArgumentParser(prog="temper plot", description="Draw a run's curve.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--out", metavar="FILE", type=Path, help="a .png or .svg file (default RUN/curve.png)")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out or arguments.run / "curve.png"
    if out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {out}: expected a name that ends in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("temper plot needs matplotlib: pip install matplotlib")
    lines = ProgressReader(arguments.run).read()
    if not any(line.kind == "step" for line in lines):
        raise ConfigError(f"{arguments.run}: no RL step in its progress.jsonl: nothing to draw")
    draw(arguments.run, lines, out)
    print(out)
    return 0
