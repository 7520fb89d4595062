"""The state of the decode batch, one slot a row: tensors for what a step reads, `Row` for what Python needs.

Slots 0 .. high-1 take part in a step. A slot whose row has finished idles at position 0 until it is filled again or
closed by `move`. Owned by `decoder`; holds no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from temper.actor.engines.base import GenerateRequest
from temper.actor.engines.lines import TokenLines
from temper.actor.engines.philox import uniforms
from temper.actor.engines.prefixes import Prefix
from torch import Tensor

DRAWS = 64  # uniforms drawn ahead, one column a step


@dataclass(slots=True)
class Row:
    """A request in the engine. `key` is the caller's handle; `slot` -1 while it waits.

    One that was stopped at a swap waits again, with what it has sampled at the end of its `prompt` and in `done`,
    `done_logprobs` and `done_runs` (see `Generation`).
    """

    key: Any
    request: GenerateRequest
    prompt: tuple[int, ...]
    slot: int = -1
    first_step: int = 0
    prefix: Prefix | None = None
    cancelled: bool = False
    support: list[list[int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    done_logprobs: list[float] = field(default_factory=list)
    done_runs: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def budget(self) -> int:
        """Tokens that it may still sample."""
        return self.request.sampling.max_new_tokens - len(self.done)


class Slots:
    """Tensors of all slots; B rows, T positions."""

    def __init__(self, rows: int, length: int) -> None:
        self.rows: list[Row | None] = [None] * rows
        self.length = length
        self.token = torch.zeros(rows, dtype=torch.int64)  # the token that the next step processes
        self.position = torch.zeros(rows, dtype=torch.int64)  # and its position
        self.shared = torch.zeros(rows, dtype=torch.int64)  # tokens of the prefix it shares with other rows
        self.live = torch.zeros(rows, dtype=torch.int64)
        self.limit = torch.full((rows,), length, dtype=torch.int64)  # tokens that the sequence may have
        self.temperature = torch.ones(rows, 1)
        self.top_k = torch.zeros(rows, dtype=torch.int64)
        self.top_p = torch.ones(rows)
        self.min_p = torch.zeros(rows)
        self.stops = torch.full((rows, 1), -1, dtype=torch.int64)
        self.draws = torch.zeros(rows, DRAWS)
        self.tokens = torch.zeros(rows, length, dtype=torch.int64)  # sampled tokens by absolute position
        self.logprobs = torch.zeros(rows, length)
        self.column = 0
        self.truncated = torch.zeros(rows, dtype=torch.bool)  # rows whose sampling truncates
        self.truncating = 0  # how many
        self.tempered = 0  # rows whose temperature is not 1
        self.lines: TokenLines | None = None  # the tokenizer's, once a row asked for it
        self.lined = torch.zeros(rows, dtype=torch.bool)  # rows that end at a line in column 0
        self.at_start = torch.zeros(rows, dtype=torch.bool)  # whether the next token begins a line

    def fill(self, rows: list[Row]) -> None:
        """Start `rows` in their slots: the last prompt token is the next to be processed."""
        slots = torch.tensor([row.slot for row in rows])
        sizes = [len(row.prompt) for row in rows]
        params = [row.request.sampling for row in rows]
        self.token[slots] = torch.tensor([row.prompt[-1] for row in rows])
        self.position[slots] = torch.tensor(sizes) - 1
        self.shared[slots] = torch.tensor([len(row.prefix.ids) if row.prefix else 0 for row in rows])
        self.live[slots] = 1
        limits = [min(size + row.budget, self.length) for size, row in zip(sizes, rows, strict=True)]
        self.limit[slots] = torch.tensor(limits)
        self.temperature[slots, 0] = torch.tensor([p.temperature or 1.0 for p in params])
        self.top_k[slots] = torch.tensor([p.top_k if p.temperature else 1 for p in params])
        self.top_p[slots] = torch.tensor([p.top_p for p in params])
        self.min_p[slots] = torch.tensor([p.min_p for p in params])
        widest = max(len(p.stop_token_ids) for p in params)
        if widest > self.stops.shape[1]:
            more = torch.full((len(self.rows), widest - self.stops.shape[1]), -1, dtype=torch.int64)
            self.stops = torch.cat([self.stops, more], 1)
        width = self.stops.shape[1]
        self.stops[slots] = torch.tensor([(list(p.stop_token_ids) + [-1] * width)[:width] for p in params])
        self.lines = next((p.lines for p in params if p.lines is not None), self.lines)
        self.lined[slots] = torch.tensor([p.lines is not None for p in params])
        self.at_start[slots] = torch.tensor([_at_start(row) for row in rows])
        self.truncated[slots] = torch.tensor([truncates(row) for row in rows])
        self._draw(slots, [p.seed for p in params], np.array(sizes), self.column)
        for row in rows:
            self.rows[row.slot] = row
            self.truncating += truncates(row)
            self.tempered += row.request.sampling.temperature != 1.0

    def advance_draws(self) -> None:
        """Go to the next column of uniforms, drawing the next ones for all live rows when they are used up."""
        self.column += 1
        if self.column < DRAWS:
            return
        self.column = 0
        rows = [row for row in self.rows if row is not None]
        if rows:
            slots = torch.tensor([row.slot for row in rows])
            self._draw(slots, [row.request.sampling.seed for row in rows], self.position[slots].numpy() + 1, 0)

    def unindented(self, tokens: Tensor) -> Tensor | None:
        """bool[N]: rows 0..N-1 whose new token, of i64[N], begins a line in column 0 where that ends them; None: no row."""
        if self.lines is None:
            return None
        count = len(tokens)
        begun, self.at_start[:count] = self.lines.begins(self.at_start[:count], tokens)
        return begun & self.lined[:count]

    def _draw(self, slots: Tensor, seeds: list[int], start: Any, column: int) -> None:
        self.draws[slots, column:] = torch.from_numpy(uniforms(seeds, start, DRAWS - column))

    def clear(self, row: Row) -> None:
        """Free the slot of `row`."""
        self.rows[row.slot] = None
        self.truncating -= truncates(row)
        self.tempered -= row.request.sampling.temperature != 1.0
        self.live[row.slot] = 0
        self.position[row.slot] = self.shared[row.slot] = 0
        self.token[row.slot] = 0
        self.temperature[row.slot] = 1.0
        self.lined[row.slot] = self.truncated[row.slot] = False

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows of slots `source` i64[M] take the free slots `target` i64[M]."""
        moved = (
            self.token,
            self.position,
            self.shared,
            self.live,
            self.limit,
            self.temperature,
            self.top_k,
            self.top_p,
        )
        flags = (self.lined, self.at_start, self.truncated)
        for tensor in (*moved, *flags, self.min_p, self.stops, self.draws, self.tokens, self.logprobs):
            tensor[target] = tensor[source]
        for tensor in (self.live, self.position, self.shared):
            tensor[source] = 0
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            row = self.rows[old]
            if row is None or self.rows[new] is not None:
                raise AssertionError(f"slot {old} -> {new}: source is empty or target taken")
            self.rows[old], self.rows[new], row.slot = None, row, new


def truncates(row: Row) -> bool:
    """Whether a row needs the truncated sampler (greedy is top-k 1)."""
    return row.request.sampling.truncates or not row.request.sampling.temperature


def _at_start(row: Row) -> bool:
    """Whether the next token of `row` begins a line; the first one does."""
    lines = row.request.sampling.lines
    said = [] if lines is None else [token for token in row.done if not lines.empty[token]]
    return lines is None or not said or bool(lines.ends[said[-1]])
