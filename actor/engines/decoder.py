"""Continuous batching over the embedded model: synchronous, one thread, no clock, no asyncio.

Each `step` samples one token for every running row. The prompt of rows that ask for the same ids is prefilled once, all
but its last token, which every row then processes in its first step; so each sampled token comes from the same decode
pass, and a swap of the weights between two steps is a clean cut. Rows are kept dense so that a step costs what its live
rows cost. In `deterministic` mode the pass always has the full batch shape and cache length, prompts are prefilled one
by one and rows never move: a row's bits then depend on its own ids, seed and weights alone.

Where keys and values come from is `caches`' affair. Called by `embedded` (in its thread) and by tests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from temper.actor.engines.base import GenerateRequest, Generation, OnSwap
from temper.actor.engines.caches import Caches
from temper.actor.engines.copies import Copies
from temper.actor.engines.llama import Llama, Weights, empty_weights
from temper.actor.engines.rows import Row, Slots
from temper.actor.engines.sampler import Sampled, Truncation, sample, sample_truncated
from temper.actor.engines.shape import ModelShape
from temper.common.lora import Lora
from temper.common.schema import Version
from torch import Tensor

if TYPE_CHECKING:
    from temper.common.delta import StagedUpdate

HOLES = 8  # rows are moved together when more than one slot in this many is free

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The outcome of a request: a generation, or why there is none."""

    key: Any
    generation: Generation | None
    error: str = ""


class Decoder:
    """The batch. Must be used by one thread, under ``torch.inference_mode``."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        *,
        max_rows: int,
        length: int,
        on_swap: OnSwap = "in_flight",
        kv_on_swap: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        lora: Lora | None = None,
    ) -> None:
        self.shape, self.length, self.max_rows = shape, length, max_rows
        self.on_swap, self.kv_on_swap, self.deterministic = on_swap, kv_on_swap, deterministic
        self.admitting = True  # false: waiting rows stay where they are (a swap waits for the running ones to end)
        self.copies = Copies(empty_weights(shape, dtype, lora), empty_weights(shape, dtype, lora))
        self.model = Llama(shape, self.weights, length)
        self.slots = Slots(max_rows, length)
        self.caches = Caches(self.model, self.slots, max_rows, deterministic=deterministic)
        self.pending: deque[Row] = deque()
        self.running: dict[Any, Row] = {}
        self.high = 0
        self.steps = 0
        self.sampled_tokens = 0
        self.version: Version | None = None
        self._versions: list[tuple[int, Version]] = []

    @property
    def weights(self) -> Weights:
        """What is served."""
        return self.copies.served.weights

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.pending or self.running)

    def submit(self, key: Any, request: GenerateRequest) -> None:
        """Queue a request; it starts at a coming step, in order."""
        self.pending.append(Row(key, request, tuple(request.ids)))

    def cancel(self, key: Any) -> None:
        """End a request with what it has; unknown keys (finished ones) are ignored."""
        row = self.running.get(key)
        if row is not None:
            row.cancelled = True
        else:
            for waiting in self.pending:
                if waiting.key is key:
                    waiting.cancelled = True

    def commit(self, update: StagedUpdate) -> str:
        """Serve `update`, all at once: what is written beside sampling for a large model is written here."""
        self.copies.prepare(update)
        digest = self.swap(update)
        self.copies.settle(update)
        return digest

    def swap(self, update: StagedUpdate) -> str:
        """Serve the copy that `update` was prepared in; running rows go on under the new weights, or with `on_swap` abort
        wait again with what they have and are prefilled under them."""
        self.model.weights = self.copies.swap()
        if self.on_swap == "abort":
            self._stop_all()
        self.version = update.version
        self._versions.append((self.steps, update.version))
        self.caches.expire()
        if self.on_swap == "in_flight" and self.kv_on_swap == "recompute":
            self.caches.recompute(self.running.values())
        self._forget_versions()
        return update.digest

    def step(self) -> list[Finished]:
        """Admit what fits, sample one token for every running row, return what has ended."""
        ended = self._end_cancelled()
        if self.version is not None and self.admitting:
            self._admit()
        if not self.running:
            return ended
        slots = self.slots
        count = self.max_rows if self.deterministic else self.high
        position = slots.position[:count]
        logits = self.caches.decode(self.running.values(), count)
        sampled = self._sample(logits.div_(slots.temperature[:count]) if slots.tempered else logits, count)
        at = (position + 1).unsqueeze(1)
        slots.tokens[:count].scatter_(1, at, sampled.tokens.unsqueeze(1))
        slots.logprobs[:count].scatter_(1, at, sampled.logprobs.unsqueeze(1))
        slots.token[:count] = sampled.tokens
        position += slots.live[:count]
        stopped = (sampled.tokens.unsqueeze(1) == slots.stops[:count]).any(1)
        unindented = slots.unindented(sampled.tokens)
        if unindented is not None:
            stopped |= unindented
        broken = ~torch.isfinite(sampled.logprobs)
        done = (stopped | broken | (position + 1 >= slots.limit[:count])) & slots.live[:count].bool()
        self.steps += 1
        self.sampled_tokens += len(self.running)
        slots.advance_draws()
        if bool(done.any()):
            for slot in done.nonzero().squeeze(1).tolist():
                row = slots.rows[slot]
                if row is None:
                    raise AssertionError(f"slot {slot} is live without a row")
                ended.append(self._finish(row, "stop" if stopped[slot] else "length", bool(broken[slot])))
        return ended

    def abort_all(self) -> list[Finished]:
        """End everything with what it has."""
        for row in (*self.pending, *self.running.values()):
            row.cancelled = True
        return self._end_cancelled()

    # ------------------------------------------------------------ sampling and ending

    def _sample(self, scaled: Tensor, count: int) -> Sampled:
        """A row's token depends on its own sampling alone: whole distributions are inverted in the order of ids, also beside
        truncated ones, which are sorted."""
        slots = self.slots
        uniform = slots.draws[:count, slots.column].unsqueeze(1)
        if not slots.truncating:
            return sample(scaled, uniform)
        at = slots.truncated[:count].nonzero()[:, 0]
        some = len(at) < count
        limits = Truncation(slots.top_k[at], slots.top_p[at], slots.min_p[at])
        cut = sample_truncated(scaled[at] if some else scaled, uniform[at], limits)
        if cut.ids is not None and cut.keep is not None:
            kept, start = cut.ids[cut.keep].tolist(), 0
            for slot, size in zip(at.tolist(), cut.keep.sum(1).tolist(), strict=True):
                row = slots.rows[slot]
                if row is not None and row.request.sampling.want_support:
                    row.support.append(kept[start : start + size])
                start += size
        if not some:
            return cut
        whole = sample(scaled, uniform)
        whole.tokens[at], whole.logprobs[at] = cut.tokens, cut.logprobs
        return whole

    def _collect(self, row: Row) -> None:
        """Move what `row` has sampled in its slot to what it has done."""
        first, last = len(row.prompt), int(self.slots.position[row.slot]) + 1
        row.done += self.slots.tokens[row.slot, first:last].tolist()
        row.done_logprobs += self.slots.logprobs[row.slot, first:last].tolist()
        for lineage, ordinal, count in self._runs(row, last - first):
            before = row.done_runs[-1] if row.done_runs else None
            if before is not None and before[:2] == (lineage, ordinal):  # the same version was committed again
                row.done_runs[-1] = (lineage, ordinal, before[2] + count)
            else:
                row.done_runs.append((lineage, ordinal, count))

    def _stop_all(self) -> None:
        """Let every running row wait again, in order, its tokens a part of its prompt."""
        rows = list(self.running.values())
        for row in rows:
            sampled = len(row.done)
            self._collect(row)
            self.slots.clear(row)
            self.caches.release(row, broken=False)
            row.prompt += tuple(row.done[sampled:])
            row.slot, row.prefix = -1, None
        self.running.clear()
        self.pending.extendleft(reversed(rows))
        self.high = 0

    def _finish(self, row: Row, reason: Finish, broken: bool = False) -> Finished:
        self._collect(row)
        self.slots.clear(row)
        del self.running[row.key]
        self.caches.release(row, broken=broken)
        while self.high and self.slots.rows[self.high - 1] is None:
            self.high -= 1
        if broken:
            return Finished(row.key, None, f"the model's logits are not finite at weights {self.version}")
        return _finished(row, reason)

    def _end_cancelled(self) -> list[Finished]:
        ended = [self._finish(row, "abort") for row in list(self.running.values()) if row.cancelled]
        if any(row.cancelled for row in self.pending):
            ended += [_finished(row, "abort") for row in self.pending if row.cancelled]
            self.pending = deque(row for row in self.pending if not row.cancelled)
        return ended

    def _runs(self, row: Row, count: int) -> list[tuple[int, int, int]]:
        """Token i of a row was sampled in step first_step + i."""
        runs: list[tuple[int, int, int]] = []
        starts = [*(step for step, _ in self._versions[1:]), row.first_step + count]
        for (begin, version), end in zip(self._versions, starts, strict=True):
            size = min(end, row.first_step + count) - max(begin, row.first_step)
            if size > 0:
                runs.append((version.lineage, version.ordinal, size))
        return runs

    def _forget_versions(self) -> None:
        oldest = min((row.first_step for row in self.running.values()), default=self.steps)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            del self._versions[0]

    # ------------------------------------------------------------ admission

    def _admit(self) -> None:
        rows: list[Row] = []
        slot = 0
        while self.pending and len(self.running) < self.max_rows:
            while self.slots.rows[slot] is not None:
                slot += 1
            row = self.pending.popleft()
            row.slot, row.first_step = slot, self.steps
            self.slots.rows[slot] = row
            self.running[row.key] = row
            self.high = max(self.high, slot + 1)
            rows.append(row)
        if rows:
            self.caches.fill(rows)
            self.slots.fill(rows)
        if not self.deterministic and (self.high - len(self.running)) * HOLES > self.high:
            self._compact()

    def _compact(self) -> None:
        keep = len(self.running)
        target = [slot for slot in range(keep) if self.slots.rows[slot] is None]
        source = [slot for slot in range(keep, self.high) if self.slots.rows[slot] is not None]
        if target:
            sources, targets = torch.tensor(source), torch.tensor(target)
            self.caches.move(sources, targets)
            self.slots.move(sources, targets)
        self.high = keep


def _finished(row: Row, reason: Finish) -> Finished:
    """What a row has, as its outcome."""
    support = row.support if row.request.sampling.want_support else None
    return Finished(row.key, Generation(row.done, row.done_logprobs, row.done_runs, reason, support))
