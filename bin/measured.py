"""What an evaluation measured, domain by domain: estimates with intervals from the learner's task results. Pure.

A domain is evaluated twice in one run: sampled at the recipe's temperature, and greedily under a name of its own
(`greedy_names`). Tasks that were given up and samples without a verdict are counted apart, never as wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from temper.common.config import DomainConfig
from temper.common.estimators import Estimate, mean_at_k, pass_at
from temper.common.reports import TaskResult

INTERVALS = (
    "[95 % interval]: Wilson for one verdict a task (and where all tasks agree), else bootstrap over tasks. tokens: mean "
    "length; cut: share that ended at the length limit; errors: tasks given up and samples without a verdict, never wrong ones"
)


class DomainMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """One domain. Estimates are null where no task was judged."""

    samples_per_task: int  # k of mean@k
    tasks: int  # judged with sampling
    samples: int  # judged
    mean_at_k: Estimate | None
    pass_at_k: dict[str, Estimate | None]  # k -> estimate
    greedy: Estimate | None
    mean_tokens: float | None  # generated, over all samples
    truncated: float | None  # share of the samples that ended at the length limit
    void_tasks: int  # given up, sampled or greedy
    unscored: int  # samples without a verdict
    missing: int  # tasks that were not answered at all
    reasons: list[str]
    floor: bool = False


def greedy_names(domains: Iterable[DomainConfig]) -> dict[str, str]:
    """domain -> the name under which it is evaluated greedily, unique and short enough for a recipe."""
    taken = {domain.name for domain in domains}
    found: dict[str, str] = {}
    for name in sorted(taken):
        number, candidate = 1, f"{name[:50]}-greedy"
        while candidate in taken:
            number, candidate = number + 1, f"{name[:50]}-greedy-{number + 1}"
        taken.add(candidate)
        found[name] = candidate
    return found


def measure(
    sampled: Sequence[TaskResult],
    greedy: Sequence[TaskResult],
    *,
    expected: int,
    samples: int,
    ks: Sequence[int] = (),
    floor: bool = False,
) -> DomainMeasure:
    """The estimates of one domain from its sampled and its greedy tasks, of which `expected` were asked for each.

    `samples`: how often each task was sampled; `ks`: the k of pass@k, without any that number."""
    tasks = [(row.samples, row.correct) for row in sampled]
    total = sum(row.samples + row.unscored for row in sampled)
    rows = [*sampled, *greedy]
    return DomainMeasure(
        samples_per_task=samples,
        tasks=sum(row.samples > 0 for row in sampled),
        samples=sum(row.samples for row in sampled),
        mean_at_k=mean_at_k(tasks),
        pass_at_k={str(k): pass_at(tasks, k) for k in ks or (samples,)},
        greedy=mean_at_k([(row.samples, row.correct) for row in greedy]),
        mean_tokens=sum(row.tokens for row in sampled) / total if total else None,
        truncated=sum(row.truncated for row in sampled) / total if total else None,
        void_tasks=sum(bool(row.void) for row in rows),
        unscored=sum(row.unscored for row in rows),
        missing=max(0, expected - len(sampled)) + max(0, expected - len(greedy)),
        reasons=sorted({row.void for row in rows if row.void}),
        floor=floor,
    )


def mean_of(domains: Mapping[str, DomainMeasure]) -> float | None:
    """Mean over domains of mean@k, floors left out; null when one is missing."""
    values = [row.mean_at_k for row in domains.values() if not row.floor]
    if not values or any(value is None for value in values):
        return None
    return sum(value.value for value in values if value is not None) / len(values)


def plain(domains: Mapping[str, DomainMeasure]) -> dict[str, Any]:
    """As JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(dict(domains))
    return found


def shown(estimate: Estimate | None) -> str:
    """``41.2 [35.0 47.1]``, in percent."""
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f} {100 * estimate.high:.1f}]"


def table(domains: Mapping[str, DomainMeasure], ks: Sequence[int], title: str) -> Table:
    """The results for people; without `ks` pass@k has the domain's own k."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("domain", no_wrap=True)
    passes = [f"pass@{k}" for k in ks] or ["pass@k"]
    for column in ("k", *(f"{each} %" for each in ("mean@k", *passes, "greedy")), "tasks", "tokens", "cut", "errors"):
        made.add_column(column, justify="right", no_wrap=True)
    for name, row in domains.items():
        errors = row.void_tasks + row.unscored + row.missing
        made.add_row(
            f"{name} (floor)" if row.floor else name,
            str(row.samples_per_task),
            shown(row.mean_at_k),
            *(shown(row.pass_at_k.get(str(k))) for k in ks or (row.samples_per_task,)),
            shown(row.greedy),
            str(row.tasks),
            "-" if row.mean_tokens is None else f"{row.mean_tokens:.1f}",
            "-" if row.truncated is None else f"{row.truncated:.0%}",
            str(errors) if errors else "-",
        )
    return made
