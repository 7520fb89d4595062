"""Programs in a tiny grammar: ``p12>`` -> ``x+12``, completed to ``lambda x: x+12`` and judged by execution.

The prompt names an operation (p plus, t times, m minus) and a number; the completion is the body of a lambda. It runs in
a jail on five values; what it prints is compared outside the jail. A completion is untrusted text: whatever it is, it is
only ever source code of the program under test.

Options: `largest` (numbers 0..largest at level 0), `eval_share`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from temper.common.domains import Completion, Grader, Score, SingleTurn, Split, Task, derive_seed, split_of
from temper.common.errors import ConfigError
from temper.common.schema import SandboxJob, TestCase

OPERATIONS = {"p": "+", "t": "*", "m": "-"}
VALUES = (0, 1, 2, 7, -3)
STDIN = "".join(f"{value}\n" for value in VALUES).encode()
HARNESS = "import sys\nf = lambda x: {body}\nfor line in sys.stdin:\n    print(f(int(line)))\n"


class TinyCode(SingleTurn):
    """The reward is 1 when the program prints the right value for all five inputs, else 0."""

    def __init__(self, largest: int, eval_share: float) -> None:
        if not 9 <= largest <= 9999:
            raise ConfigError(f"tinycode: largest {largest} is outside 9..9999")
        self.largest = largest
        self.eval_share = eval_share

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        """An operation and a number, `prompt` like ``p12>``."""
        pool = split_pool(self.largest, self.eval_share)[split]
        if split == "eval":
            key = pool[seed % len(pool)]
        else:
            key = random.Random(derive_seed("tinycode", level, seed)).choice(pool)
        return Task(key=f"tinycode {key}", prompt=f"{key}>", private=f"x{OPERATIONS[key[0]]}{key[1:]}")

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        """Executed on a sandbox worker; an infrastructure failure is no reward at all."""
        if completion.finish_reason != "stop":
            return Score(reward=0.0, correct=False, outcome="wrong")
        verdict = await grader.run(program(completion.text, expected(str(task.private))))
        if verdict.outcome == "infra":
            return Score(reward=None, correct=None, outcome="infra")
        correct = verdict.outcome == "ok"
        return Score(reward=float(correct), correct=correct, outcome=verdict.outcome)

    def demonstration(self, task: Task) -> str | None:
        """The lambda's body."""
        return str(task.private)


def program(body: str, output: bytes) -> SandboxJob:
    """The job that runs ``lambda x: body`` on the five values."""
    return SandboxJob(
        job_id="",
        language="python",
        files={"main.py": HARNESS.format(body=body).encode()},
        tests=[TestCase(stdin=STDIN, expected=output)],
    )


def expected(body: str) -> bytes:
    """What the right program prints. `body` is ours (``x+12``), never a completion."""
    operation, number = body[1], int(body[2:])
    results = {"+": lambda x: x + number, "*": lambda x: x * number, "-": lambda x: x - number}
    return "".join(f"{results[operation](value)}\n" for value in VALUES).encode()


@lru_cache(maxsize=8)
def split_pool(largest: int, eval_share: float) -> dict[str, list[str]]:
    """All tasks by split, in an order fixed by content alone."""
    keys = [f"{operation}{number}" for operation in OPERATIONS for number in range(largest + 1)]
    keys.sort(key=lambda key: derive_seed("tinycode order", key))
    pools: dict[str, list[str]] = {"train": [], "eval": []}
    for key in keys:
        pools[split_of(f"tinycode {key}", eval_share)].append(key)
    if not pools["train"] or not pools["eval"]:
        raise ConfigError(f"tinycode: largest {largest} with eval_share {eval_share} leaves one split empty")
    return pools


def make(options: Mapping[str, Any]) -> TinyCode:
    """The domain from the recipe's options."""
    return TinyCode(int(options.get("largest", 149)), float(options.get("eval_share", 0.3)))
