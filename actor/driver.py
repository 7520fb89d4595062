"""`SampleDriver`: what an episode may do to its sample: sample a turn, append foreign text, use a tool.

Keeps the sequence as ids all along: a later turn continues the very ids of the earlier ones, so training sees what was
sampled. One driver a sample, made by `episodes`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from temper.actor.engines.base import Cancel, Engine, GenerateRequest, SamplingParams, longer_record
from temper.actor.text import Text
from temper.actor.tools import ToolSession
from temper.common.config import Recipe
from temper.common.domains import Completion
from temper.common.schema import Verdict


class EpisodeOver(Exception):
    """Raised into an episode that goes on after its sample has ended (no room left, or aborted)."""


class SampleDriver:
    """Implements `domains.Driver`. `max_new_tokens` of the recipe bounds each turn, `max_length_tokens` the whole."""

    def __init__(
        self,
        prompt: list[int],
        engine: Engine,
        text: Text,
        params: SamplingParams,
        seed: int,
        recipe: Recipe,
        cancel: Cancel | None,
        tools: ToolSession,
    ) -> None:
        self._ids = list(prompt)
        self._start = len(prompt)
        self._engine, self._text, self._params, self._cancel = engine, text, replace(params, seed=seed), cancel
        self._tools = tools
        self._limit = min(recipe.model.max_length_tokens, engine.caps.max_length_tokens)
        self._logprobs: list[float] = []
        self._mask: list[int] = []
        self._runs: list[list[int]] = []
        self._unversioned = 0  # foreign tokens before the first sampled one
        self._support: list[list[int]] = []
        self._experts: npt.NDArray[np.int16] | None = None
        self._finish = ""
        self.aborted = False

    async def generate(self, max_new_tokens: int | None = None) -> str:
        """See `domains.Driver.generate`. EpisodeOver when there is no room for another token."""
        room = self._limit - len(self._ids)
        if room < 1 or self.aborted:
            self._finish = "length"
            raise EpisodeOver
        budget = min(room, max_new_tokens or self._params.max_new_tokens, self._params.max_new_tokens)
        params = replace(self._params, max_new_tokens=budget)
        made = await self._engine.generate(self._request(params), self._cancel)
        self._ids += made.ids
        self._logprobs += made.logprobs
        self._mask += [1] * len(made.ids)
        for lineage, ordinal, count in made.version_runs:
            self._count(lineage, ordinal, count)
        if self._params.want_support:
            self._support += made.support or [[] for _ in made.ids]
        if made.experts is not None:
            self._experts = longer_record(self._experts, made.experts)
        self._finish = made.finish_reason
        if made.finish_reason == "abort":
            self.aborted = True
            raise EpisodeOver
        return self._text.decode(made.ids)

    async def append(self, text: str) -> None:
        """See `domains.Driver.append`. EpisodeOver when it does not fit with at least one token after it."""
        ids = self._text.encode(text)
        if len(self._ids) + len(ids) >= self._limit:
            self._finish = "length"
            raise EpisodeOver
        self._ids += ids
        self._logprobs += [0.0] * len(ids)
        self._mask += [0] * len(ids)
        if self._params.want_support:
            self._support += [[] for _ in ids]
        if self._runs:
            self._runs[-1][2] += len(ids)
        else:
            self._unversioned += len(ids)

    async def tool(self, code: str, language: str = "python") -> Verdict:
        """See `domains.Driver.tool`."""
        return await self._tools.step(code, language)

    def completion(self) -> Completion:
        """Everything after the prompt."""
        ids = self._ids[self._start :]
        support = self._support if self._params.want_support else None
        return Completion(
            ids, self._logprobs, self._mask, self._runs, self._finish, self._text.decode(ids), support, self._routed()
        )

    def _routed(self) -> npt.NDArray[np.int16] | None:
        """The experts of every token; -1 where it was never fed back: the last one, and what was appended after it."""
        if self._experts is None:
            return None
        rows, width = self._experts.shape
        return np.concatenate([self._experts, np.full((len(self._ids) - rows, width), -1, np.int16)])

    def _count(self, lineage: int, ordinal: int, count: int) -> None:
        if self._runs and self._runs[-1][:2] == [lineage, ordinal]:
            self._runs[-1][2] += count
        else:
            self._runs.append([lineage, ordinal, count + self._unversioned])
            self._unversioned = 0

    def _request(self, params: SamplingParams) -> GenerateRequest:
        return GenerateRequest(tuple(self._ids), params)
