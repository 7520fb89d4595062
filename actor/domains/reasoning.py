"""Any `reasoning-gym` dataset as a domain: its tasks, our split, strict extraction, then its scorer.

Options: `dataset` (a reasoning-gym name), `levels` (a list of that dataset's configurations, one a level), `style`
(``few_shot``: solved examples as plain text; ``chat``: the same through the model's template; ``raw``: the question alone),
`shots` (examples), `eval_share`.

Seeds do not hold tasks out in reasoning-gym (neighbouring seeds share items), so the split is by the question's text. Its
default scorers pay any answer that contains the right one; here the answer is exactly the first line of the completion,
and only a full score counts as correct. At load the entries' own answers must score 1, or the domain is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from temper.common.domains import Completion, Grader, Message, Score, SingleTurn, Split, Task, derive_seed, split_of
from temper.common.errors import ConfigError

STYLES = ("few_shot", "chat", "raw")
ITEMS = 2**31 - 1
CHECKED_AT_LOAD = 20
DRAWS_WITHOUT_NEWS = 2000


class Reasoning(SingleTurn):
    """One dataset. Reward 1 for a right answer, else 0; partial credit of the scorer is only a component."""

    def __init__(
        self, name: str, levels: Sequence[Mapping[str, Any]], style: str, shots: int, eval_share: float
    ) -> None:
        import reasoning_gym

        if style not in STYLES:
            raise ConfigError(f"reasoning: style {style!r}, expected one of {', '.join(STYLES)}")
        self.name = name
        self.style = style
        self.eval_share = eval_share
        try:
            self.datasets = [reasoning_gym.create_dataset(name, size=ITEMS, seed=0, **config) for config in levels]
        except (ValueError, TypeError, AssertionError, KeyError) as error:
            raise ConfigError(f"reasoning: dataset {name!r} with {list(levels)}: {error}") from error
        self._held_out: list[dict[str, dict[str, Any]]] = [{} for _ in levels]
        self._draws = [itertools.count() for _ in levels]
        self._exhausted = [False for _ in levels]
        self.shots = self._draw_shots(shots)
        self._check()

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        """A question whose text is in `split`; eval tasks differ as long as the task space has enough."""
        if not 0 <= level < len(self.datasets):
            raise ConfigError(
                f"reasoning: level {level} of {self.name}, the recipe defines 0..{len(self.datasets) - 1}"
            )
        entry = self._nth_held_out(level, seed) if split == "eval" else self._draw_train(level, seed)
        return Task(key=self._key(entry), prompt=self._prompt(entry), private=(level, entry))

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        """Strictly extracted, then scored by reasoning-gym; correct means a score of at least 1."""
        level, entry = task.private
        answer = extract(completion.text)
        value = self._value(level, answer, entry) if answer else 0.0
        correct = value >= 1.0 and completion.finish_reason == "stop"
        return Score(float(correct), correct, {"scorer": value}, outcome="ok" if correct else "wrong")

    def demonstration(self, task: Task) -> str | None:
        """The entry's own answer as the prompt's style expects it."""
        answer = str(task.private[1]["answer"])
        return f" {answer}\n" if self.style == "few_shot" else answer

    def _value(self, level: int, answer: str, entry: Mapping[str, Any]) -> float:
        """The scorer's value. Some scorers raise on text that they cannot parse: that is a wrong answer, as long as the
        same scorer takes the entry's own answer; one that does not is broken, and its error goes on."""
        score = self.datasets[level].score_answer
        try:
            return float(score(answer, entry))
        except Exception:
            if float(score(extract(str(entry["answer"])), entry)) < 1.0:
                raise
            return 0.0

    def _key(self, entry: Mapping[str, Any]) -> str:
        return f"{self.name} {entry['question']}"

    def _draw_train(self, level: int, seed: int) -> dict[str, Any]:
        for attempt in range(10_000):
            entry = self.datasets[level][derive_seed(self.name, level, seed, attempt) % ITEMS]
            if split_of(self._key(entry), self.eval_share) == "train":
                return dict(entry)
        raise ConfigError(
            f"reasoning: {self.name} level {level} has no training question at eval_share {self.eval_share}"
        )

    def _draw_shots(self, count: int) -> list[dict[str, Any]]:
        """Training questions with different answers, as far as there are any: equal ones would suggest that answer."""
        drawn = [self._draw_train(0, derive_seed("shot", self.name, number)) for number in range(10 * count)]
        different = list({str(entry["answer"]): entry for entry in reversed(drawn)}.values())[::-1]
        return (different + drawn)[:count]

    def _nth_held_out(self, level: int, number: int) -> dict[str, Any]:
        found = self._held_out[level]
        quiet = 0
        while len(found) <= number and not self._exhausted[level]:
            entry = self.datasets[level][derive_seed(self.name, "eval", level, next(self._draws[level])) % ITEMS]
            key = self._key(entry)
            quiet += 1
            if key not in found and split_of(key, self.eval_share) == "eval":
                found[key] = dict(entry)
                quiet = 0
            self._exhausted[level] = quiet >= DRAWS_WITHOUT_NEWS
        if not found:
            raise ConfigError(
                f"reasoning: {self.name} level {level} has no held-out question at eval_share {self.eval_share}"
            )
        return list(found.values())[number % len(found)]

    def _prompt(self, entry: Mapping[str, Any]) -> str | list[Message]:
        if self.style == "raw":
            return str(entry["question"])
        if self.style == "few_shot":
            solved = "".join(f"Q: {shot['question']}\nA: {shot['answer']}\n\n" for shot in self.shots)
            return f"{solved}Q: {entry['question']}\nA:"
        turns: list[Message] = []
        for shot in self.shots:
            turns.append({"role": "user", "content": str(shot["question"])})
            turns.append({"role": "assistant", "content": str(shot["answer"])})
        return [*turns, {"role": "user", "content": str(entry["question"])}]

    def _check(self) -> None:
        for level, dataset in enumerate(self.datasets):
            for item in range(CHECKED_AT_LOAD):
                entry = dataset[item]
                value = float(dataset.score_answer(extract(str(entry["answer"])), entry))
                if value < 1.0:
                    raise ConfigError(
                        f"reasoning: {self.name} level {level} scores its own answer {entry['answer']!r} as {value}: "
                        "its scorer or our one-line extraction does not fit it; choose another dataset"
                    )


def extract(text: str) -> str:
    """The answer in a completion: its first line, white space around it removed. Nothing else is looked at."""
    return text.strip(" \t").split("\n", 1)[0].strip()


def make(options: Mapping[str, Any]) -> Reasoning:
    """The domain from the recipe's options."""
    if "dataset" not in options:
        raise ConfigError(
            "reasoning: options.dataset is missing; name a reasoning-gym dataset, for example 'letter_counting'"
        )
    return Reasoning(
        str(options["dataset"]),
        list(options.get("levels", [{}])),
        str(options.get("style", "few_shot")),
        int(options.get("shots", 3)),
        float(options.get("eval_share", 0.2)),
    )
