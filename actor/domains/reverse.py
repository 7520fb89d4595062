"""Reverse a short string: ``abc>`` -> ``cba``. The smallest task with a right answer; the demo's rule domain.

Options: `letters` (the alphabet), `length` (letters per string at level 0; each level adds one), `eval_share`.
The held-out strings are enumerable: eval task i is the i-th of them in a fixed shuffled order, so that an evaluation
of n tasks covers n different strings.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from temper.common.domains import Completion, Grader, Score, SingleTurn, Split, Task, derive_seed, split_of
from temper.common.errors import ConfigError


class Reverse(SingleTurn):
    """Strings over `letters`; the reward is 1 for exactly the reversed string, else 0."""

    def __init__(self, letters: str, length: int, eval_share: float) -> None:
        if len(set(letters)) != len(letters) or len(letters) < 2:
            raise ConfigError(f"reverse: letters {letters!r} must be at least two different characters")
        if not 1 <= length <= 6:
            raise ConfigError(f"reverse: length {length} is outside 1..6")
        self.letters = letters
        self.length = length
        self.eval_share = eval_share

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        """A string of `length + level` letters whose key is in `split`."""
        if split == "eval":
            held_out = self._held_out(level)
            text = held_out[seed % len(held_out)]
        else:
            text = self._draw_train(level, seed)
        return Task(key=f"reverse {text}", prompt=f"{text}>", private=text[::-1])

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        """1.0 for the exact answer ended by the model itself, else 0.0."""
        correct = completion.finish_reason == "stop" and completion.text == task.private
        return Score(reward=float(correct), correct=correct, outcome="ok" if correct else "wrong")

    def demonstration(self, task: Task) -> str | None:
        """The reversed string."""
        return str(task.private)

    def _draw_train(self, level: int, seed: int) -> str:
        for attempt in itertools.count():
            source = random.Random(derive_seed("reverse", level, seed, attempt))
            text = "".join(source.choice(self.letters) for _ in range(self.length + level))
            if split_of(f"reverse {text}", self.eval_share) == "train":
                return text
        raise AssertionError("unreachable")

    def _held_out(self, level: int) -> list[str]:
        return held_out_strings(self.letters, self.length + level, self.eval_share)


@lru_cache(maxsize=8)
def held_out_strings(letters: str, length: int, eval_share: float, limit: int = 4096) -> list[str]:
    """Up to `limit` different held-out strings in an order fixed by content alone."""
    source = random.Random(derive_seed("reverse held out", letters, length))
    found: dict[str, None] = {}
    draws = min(len(letters) ** length, limit) * 40
    for _ in range(draws):
        text = "".join(source.choice(letters) for _ in range(length))
        if split_of(f"reverse {text}", eval_share) == "eval":
            found[text] = None
            if len(found) == limit:
                break
    if not found:
        raise ConfigError(f"reverse: no string of {length} letters is held out at eval_share {eval_share}")
    return list(found)


def make(options: Mapping[str, Any]) -> Reverse:
    """The domain from the recipe's options."""
    return Reverse(
        str(options.get("letters", "abcdefghijklmnopqrstuvwxyz")),
        int(options.get("length", 3)),
        float(options.get("eval_share", 0.2)),
    )
