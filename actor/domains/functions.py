"""One-line Python functions from a description, judged by execution: ``# f(x) returns x plus 3`` -> ``def f(x): return x+3``.

Train and eval use *different wordings and shapes* (disjoint templates), so that the held-out accuracy is generalisation.
The completion's first line becomes the body of a function that runs in a jail on eight values; its output is compared
outside. Options: `style` (``raw``: the comment and the beginning of the function; ``few_shot``: solved training ones before
it; ``chat``: asked for through the model's template), `shots` (of few_shot), `largest` (constants 2..largest).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from temper.common.domains import Completion, Grader, Message, Score, SingleTurn, Split, Task, derive_seed
from temper.common.errors import ConfigError
from temper.common.schema import SandboxJob, TestCase

VALUES = (0, 1, 2, 3, 7, 10, -1, -4)
STDIN = "".join(f"{value}\n" for value in VALUES).encode()
STYLES = ("raw", "few_shot", "chat")
HEAD = "# f(x) returns {wording}\ndef f(x): return"
HARNESS = "import sys\ndef f(x): return {body}\nfor line in sys.stdin:\n    print(f(int(line)))\n"


@dataclass(frozen=True, slots=True)
class Template:
    """A wording with {a}, the expression that answers it, and what it computes."""

    wording: str
    answer: str
    compute: Callable[[int, int], int]


TRAIN = (
    Template("x plus {a}", "x + {a}", lambda x, a: x + a),
    Template("x minus {a}", "x - {a}", lambda x, a: x - a),
    Template("x times {a}", "x * {a}", lambda x, a: x * a),
    Template("{a} minus x", "{a} - x", lambda x, a: a - x),
    Template("the sum of x and {a}", "x + {a}", lambda x, a: x + a),
    Template("x multiplied by {a}", "x * {a}", lambda x, a: x * a),
    Template("x squared plus {a}", "x * x + {a}", lambda x, a: x * x + a),
    Template("twice x plus {a}", "2 * x + {a}", lambda x, a: 2 * x + a),
    Template("the remainder of x divided by {a}", "x % {a}", lambda x, a: x % a),
    Template("the larger of x and {a}", "max(x, {a})", max),
)
EVAL = (
    Template("{a} plus x", "{a} + x", lambda x, a: a + x),
    Template("x increased by {a}", "x + {a}", lambda x, a: x + a),
    Template("{a} times x", "{a} * x", lambda x, a: a * x),
    Template("the product of x and {a}", "x * {a}", lambda x, a: x * a),
    Template("x reduced by {a}", "x - {a}", lambda x, a: x - a),
    Template("the difference of x and {a}", "x - {a}", lambda x, a: x - a),
    Template("x squared minus {a}", "x * x - {a}", lambda x, a: x * x - a),
    Template("twice x minus {a}", "2 * x - {a}", lambda x, a: 2 * x - a),
    Template("the smaller of x and {a}", "min(x, {a})", min),
    Template("x modulo {a}", "x % {a}", lambda x, a: x % a),
)
TEMPLATES: dict[Split, tuple[Template, ...]] = {"train": TRAIN, "eval": EVAL}


class Functions(SingleTurn):
    """The reward is 1 when the function prints the right value for all eight inputs, else 0."""

    def __init__(self, style: str, largest: int, shots: int | None = None) -> None:
        if style not in STYLES:
            raise ConfigError(f"functions: style {style!r}, expected one of {', '.join(STYLES)}")
        if shots is not None and (style != "few_shot" or not 1 <= shots <= len(TRAIN)):
            raise ConfigError(f"functions: shots {shots} with style {style}, expected 1..{len(TRAIN)} with few_shot")
        if not 3 <= largest <= 999:
            raise ConfigError(f"functions: largest {largest} is outside 3..999")
        self.style = style
        self.largest = largest
        self.solved = self._solved(shots or 3) if style == "few_shot" else ""

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        """A template of `split` with a constant."""
        pool = task_pool(split, self.largest)
        template, constant = (
            pool[seed % len(pool)] if split == "eval" else random.Random(derive_seed("functions", seed)).choice(pool)
        )
        wording = template.wording.format(a=constant)
        return Task(f"functions {wording}", self._prompt(wording), (template, constant))

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        """Executed on a sandbox worker; an infrastructure failure is no reward at all."""
        template, constant = task.private
        body = completion.text.strip(" \t").split("\n", 1)[0]
        if completion.finish_reason != "stop" or not body.strip():
            return Score(0.0, False, outcome="wrong")
        verdict = await grader.run(program(body, template, constant))
        if verdict.outcome == "infra":
            return Score(None, None, outcome="infra")
        correct = verdict.outcome == "ok"
        return Score(float(correct), correct, outcome=verdict.outcome)

    def demonstration(self, task: Task) -> str | None:
        """The template's expression on a line of its own."""
        template, constant = task.private
        return f" {template.answer.format(a=constant)}\n"

    def _prompt(self, wording: str) -> str | list[Message]:
        source = HEAD.format(wording=wording)
        if self.style != "chat":
            return self.solved + source
        return [
            {
                "role": "user",
                "content": f"Complete this Python function on one line. Write only what follows.\n{source}",
            }
        ]

    def _solved(self, shots: int) -> str:
        """Solved training functions of different wordings, one after the other."""
        pool = task_pool("train", self.largest)
        first = {template.wording: (template, constant) for template, constant in reversed(pool)}
        chosen = list(first.values())[::-1][:shots]
        return "".join(f"{HEAD.format(wording=t.wording.format(a=a))} {t.answer.format(a=a)}\n\n" for t, a in chosen)


def program(body: str, template: Template, constant: int) -> SandboxJob:
    """The job that runs ``def f(x): return body`` on the eight values."""
    output = "".join(f"{template.compute(value, constant)}\n" for value in VALUES).encode()
    source = HARNESS.format(body=body).encode()
    return SandboxJob("", "python", {"main.py": source}, [TestCase(STDIN, output)])


@lru_cache(maxsize=8)
def task_pool(split: Split, largest: int) -> list[tuple[Template, int]]:
    """All (template, constant) of a split, in an order fixed by content alone."""
    pool = [(template, constant) for template in TEMPLATES[split] for constant in range(2, largest + 1)]
    pool.sort(key=lambda item: derive_seed("functions order", item[0].wording, item[1]))
    return pool


def make(options: Mapping[str, Any]) -> Functions:
    """The domain from the recipe's options."""
    shots = int(options["shots"]) if "shots" in options else None
    return Functions(str(options.get("style", "raw")), int(options.get("largest", 20)), shots)
