"""The interface of a domain: it makes tasks from seeds and scores completions.

Hundreds of domains live in one run. An actor loads the module that the recipe names (only modules on the host's own
allow-list), asks it for the task of a lease, runs its episode against an engine and has it scored. A domain is pure
apart from what it asks of its `Driver` and `Grader`; it may raise, hang or return NaN: the actor counts that, and
the broker quarantines the task.

Train and eval are split by *content*: `split_of(key)` hashes the canonical task, so that no seed can leak a held-out
task into training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from temper.common.schema import SandboxJob, Verdict

Split = Literal["train", "eval"]
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `key` is its canonical content (equal keys are equal tasks, whatever their seed).

    `prompt` is raw text, or a list of chat messages ({"role", "content"}) that goes through the model's template.
    `private` (answers, tests) never enters the jail of the program under test and never leaves the actor's graders.
    """

    key: str
    prompt: str | Sequence[Message]
    private: Any = None


@dataclass(slots=True)
class Completion:
    """What an episode produced for one sample index.

    `ids`: every token after the prompt, tool tokens included; `loss_mask[i]` is 1 where the engine sampled `ids[i]`.
    `logprobs[i]` is the behaviour log-probability (nats) of `ids[i]`, 0.0 where the mask is 0.
    `version_runs`: [lineage, ordinal, count] over `ids`. `text` is the decoding of `ids` without special tokens.
    `experts`: int16 array [prompt and ids, layers * experts per token] where the recipe asks for it, -1 where unknown.
    """

    ids: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    version_runs: list[list[int]]
    finish_reason: str
    text: str
    support: list[list[int]] | None = None
    experts: Any = None
    files: dict[str, bytes] = field(default_factory=dict)  # the workspace that the episode's tool session left


@dataclass(frozen=True, slots=True)
class Score:
    """A scored sample. `reward` None means "could not be scored": outside baseline and loss, never a silent 0.

    `correct` is the raw verdict before any shaping. `components` are logged one by one. `step_rewards` are
    (token index within the completion, value). `outcome` is one of `schema.Outcome`.
    """

    reward: float | None
    correct: bool | None
    components: Mapping[str, float] = field(default_factory=dict)
    step_rewards: Sequence[tuple[int, float]] = ()
    outcome: str = "ok"


class Grader(Protocol):
    """Runs what a domain's scoring needs outside the actor's loop."""

    async def run(self, job: SandboxJob) -> Verdict:
        """Execute a program on a sandbox worker. Identical jobs may share one execution (same program + same seed =
        same outcome)."""
        ...


class Driver(Protocol):
    """What an episode may do. One driver a sample."""

    async def generate(self, max_new_tokens: int | None = None) -> str:
        """Sample a turn after everything appended so far; returns its text (special tokens removed)."""
        ...

    async def append(self, text: str) -> None:
        """Append environment or tool text: mask 0, no log-probability."""
        ...

    async def tool(self, code: str, language: str = "python") -> Verdict:
        """Run one step in the sample's own sandbox session ("python" or "bash"). It is opened by the first step, keeps its
        state from step to step and ends with the episode; its files are then `Completion.files`. An error of the code is in
        the verdict."""
        ...


@runtime_checkable
class Domain(Protocol):
    """A domain module exposes `make(options: Mapping[str, Any]) -> Domain`; options come from the recipe."""

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        """The task of `seed`, deterministic, its key in `split`."""
        ...

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score: ...

    def demonstration(self, task: Task) -> str | None:
        """A right completion for supervised warm start, or None if the domain has none."""
        ...


class SingleTurn:
    """Base for domains whose episode is one generation. Override `episode` for several turns or tools."""

    async def episode(self, task: Task, driver: Driver) -> None:
        """One generation; the driver already holds the prompt."""
        await driver.generate()

    def demonstration(self, task: Task) -> str | None:
        """None: no demonstrations."""
        return None


def content_digest(key: str) -> int:
    """A 64-bit hash of a canonical task, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def split_of(key: str, eval_share: float = 0.2) -> Split:
    """Which split a canonical task belongs to: by content, never by seed."""
    return "eval" if content_digest(key) % 10_000 < eval_share * 10_000 else "train"


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts, the same on every machine: derive_seed(run_seed, "task", lease_id, index)."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
