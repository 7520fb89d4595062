"""`temper plot RUN --out FILE`: a run's curve (accuracy by domain, evaluations, lag) from its progress lines, as PNG or SVG.

RUN may also be a result file of `bin/bench`, whose curves (one a seed, without lag) are drawn together.

Needs matplotlib, which only the development extra installs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
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


def merged(runs: Sequence[Sequence[Progress]]) -> list[Progress]:
    """The mean run: accuracies of the same step, or of the same evaluation, averaged over the runs that have them."""
    found: dict[tuple[str, int, str], tuple[Progress, dict[str, list[float]]]] = {}
    for line in (line for lines in runs for line in lines):
        _, values = found.setdefault((line.kind, line.step, line.when), (line, {}))
        for domain, value in line.accuracy.items():
            if value is not None:
                values.setdefault(domain, []).append(value)
    return [
        Progress(
            first.kind, 0.0, step=first.step, when=first.when, accuracy={d: sum(v) / len(v) for d, v in values.items()}
        )
        for first, values in found.values()
    ]


def result_runs(path: Path) -> list[list[Progress]]:
    """The curves in a result file of `bin/bench`; ConfigError when it is none, or has none."""
    try:
        rows = json.loads(path.read_text())["rows"]
        return [msgspec.convert(row["lines"], list[Progress]) for row in rows if row["what"] == "curve"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected a run directory or a result file of bin/bench: {error}") from error


def draw(title: str, lines: Sequence[Progress], out: Path, *, lag: bool = True) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "temper"}
    )  # small, and the same for the same run
    import matplotlib.pyplot as plt

    rows, ratios = (2, (3, 1)) if lag else (1, (1,))
    figure, axes = plt.subplots(
        rows, 1, figsize=(8, 5), sharex=True, height_ratios=ratios, layout="constrained", squeeze=False
    )
    top = axes[0][0]
    evals = [line for line in lines if line.kind == "eval"]
    last = max((line.step for line in lines), default=0)
    for (domain, (steps, values)), colour in zip(sorted(series(lines).items()), COLOURS * 100, strict=False):
        top.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
        top.plot(steps, smooth(values), color=colour, label=domain)
        places = {"before": 0, "after": last}
        marks = [(places.get(line.when, line.step), line.accuracy.get(domain)) for line in evals]
        known = [(step, value) for step, value in marks if value is not None]
        if known:
            top.plot(*zip(*known, strict=True), "o", color=colour, markersize=8)
    top.set_ylim(0, 1.02)
    top.set_ylabel("share correct (T = 1)")
    key = f"lines: training samples, mean of {SMOOTH_STEPS} steps\ndots: held-out tasks"
    top.legend(
        loc="lower right" if lag else "upper left", fontsize=8, ncols=1 if lag else 2, title=key, title_fontsize=8
    )
    top.set_title(title, loc="left")
    if lag:
        steps_lines = [line for line in lines if line.kind == "step"]
        numbers = [line.step for line in steps_lines]
        axes[1][0].plot(numbers, [line.lag_mean for line in steps_lines], color="#4a4a4a", label="mean")
        axes[1][0].plot(numbers, [line.lag_max for line in steps_lines], color="#bbbbbb", label="max")
        axes[1][0].set_ylabel("lag (versions)")
        axes[1][0].legend(loc="upper right", fontsize=8)
    axes[-1][0].set_xlabel("RL step")
    for (axis,) in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if out.suffix == ".svg" else None
    figure.savefig(out, dpi=120, metadata=metadata)
    plt.close(figure)


def main(argv: Sequence[str]) -> int:
    """Draw a run."""
    parser = argparse.ArgumentParser(prog="temper plot", description="Draw a run's curve.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory, or a result file of bin/bench")
    parser.add_argument("--out", metavar="FILE", type=Path, help="a .png or .svg file (default RUN/curve.png)")
    arguments = parser.parse_args(argv)
    result = arguments.run.is_file()
    out: Path = arguments.out or (arguments.run.with_suffix(".png") if result else arguments.run / "curve.png")
    if out.suffix not in (".png", ".svg"):
        raise ConfigError(f"--out {out}: expected a name that ends in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("temper plot needs matplotlib: pip install matplotlib")
    if result:
        runs = result_runs(arguments.run)
        lines = merged(runs)
        title = f"{arguments.run.stem}, mean of {len(runs)} seeds"
    else:
        lines = ProgressReader(arguments.run).read()
        summary = read_summary(arguments.run)
        title = summary.name if summary else arguments.run.name
        title += f": {max((line.step for line in lines), default=0)} steps"
        title += f", {summary.wall_s:.0f} s" if summary else ""
    if not any(line.kind == "step" for line in lines):
        raise ConfigError(f"{arguments.run}: no RL step in it: nothing to draw")
    draw(title, lines, out, lag=not result)
    print(out)
    return 0
