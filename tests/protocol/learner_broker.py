"""A broker for the learner alone: real sockets, groups made up from their id, versions stored as they come."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from temper.common import recipe as recipes
from temper.common.arrays import pack_arrays
from temper.common.config import Recipe
from temper.common.pump import Delivery, PeerId, Router
from temper.common.schema import (
    Chunk,
    Demand,
    Done,
    Drain,
    Evaluate,
    Group,
    Hello,
    Metrics,
    Phase,
    Publish,
    RunOver,
    SampleMeta,
    Samples,
    Stored,
    Welcome,
)

FIRST = {"train": 0, "demo": 1 << 60, "eval": 1 << 61}


def made_up(
    lane: str, group_id: int, version: int, vocabulary: int, samples: int = 4
) -> tuple[Group, list[memoryview]]:
    """A group whose content depends on its id alone; the first and third samples are right."""
    random = np.random.default_rng(group_id % 1000)
    prompt = random.integers(1, vocabulary, 3)
    rows = [
        np.concatenate([prompt, random.integers(0, vocabulary, int(random.integers(2, 5)))]) for _ in range(samples)
    ]
    cu = np.cumsum([0, *map(len, rows)])
    mask = np.concatenate([np.arange(len(row)) >= 3 for row in rows]).astype(np.uint8)
    arrays = {
        "tokens": np.concatenate(rows).astype(np.int32),
        "behaviour_logprob": np.where(mask, -2.0, 0.0).astype(np.float32),
        "loss_mask": mask,
        "cu_seqlens": cu.astype(np.int64),
    }
    metas = [
        SampleMeta(
            i, "stop", None if lane == "demo" else float(i % 2 == 0), i % 2 == 0, {}, "ok", [(1, version, len(row))]
        )
        for i, row in enumerate(rows)
    ]
    specs, frames = pack_arrays(arrays)
    pinned = version if lane == "eval" else None
    body = Group(group_id, lane, "toy", 0, group_id, 1, [Samples(group_id, 1, 1, metas, specs)], pinned)  # type: ignore[arg-type]
    return body, frames


class StandIn:
    """`bodies`: everything the learner said, in order; `stored`: published versions.

    `limit`: train groups handed out at most; `spoil(group, frames)` may damage a group; `evaluates`: tasks are answered.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, limit: int = 1 << 30, evaluates: bool = True) -> None:
        self.address = f"ipc://{folder}"
        self.recipe = recipe
        self.limit = limit
        self.evaluates = evaluates
        self.bodies: list[Any] = []
        self.stored: list[Any] = []
        self.trained_up_to = 0
        self.over = asyncio.Event()
        self.starved = asyncio.Event()
        self.spoil: Callable[[Group, list[memoryview]], tuple[Group, list[memoryview]]] = lambda group, frames: (
            group,
            frames,
        )
        self.next = dict(FIRST)
        self.learner: PeerId | None = None
        self._incoming: Publish | None = None
        self.control = Router(self.address, "control", self._on_control, self._on_closed, welcome=self._welcome)
        self.bulk = Router(self.address, "bulk", self._on_bulk, self._on_closed, welcome=self._welcome)

    def _welcome(self, peer: PeerId, hello: Hello) -> Welcome:
        self.learner = peer
        return Welcome("run-1", recipes.to_json(self.recipe), 0, 1.0)

    def _on_closed(self, peer: PeerId, reason: str) -> None:
        self.bodies.append(f"closed: {reason}")

    def of(self, kind: type) -> list[Any]:
        """The learner's messages of a kind."""
        return [body for body in self.bodies if isinstance(body, kind)]

    def _on_control(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            body = delivery.body
            if delivery.sequence:
                self.control.acknowledge(delivery.peer, delivery.sequence)
                self.bodies.append(body)
            if isinstance(body, Done):
                self.trained_up_to = body.version + 1
            if isinstance(body, Demand):
                for _ in range(body.groups):
                    self._hand_out(body.lane)
            elif isinstance(body, Evaluate) and self.evaluates:
                for _ in range(sum(count for _, _, count in body.tasks)):
                    self._hand_out("eval", body.version)
            elif isinstance(body, RunOver):
                self.over.set()
                self.control.send(delivery.peer, Drain(body.reason, 5.0))
            elif isinstance(body, Metrics):
                self.control.send(
                    delivery.peer,
                    Metrics("actor-1", {"actor/engine/sampled_tokens": 10.0}, {"broker/void/no contrast": 3.0}),
                )

    def _hand_out(self, lane: str, version: int | None = None) -> None:
        assert self.learner is not None
        if lane == "train" and self.next["train"] >= self.limit:
            self.starved.set()
            return
        vocabulary = len(self.recipe.model.vocabulary) + 1
        group, frames = made_up(lane, self.next[lane], self.trained_up_to if version is None else version, vocabulary)
        self.next[lane] += 1
        self.control.send(self.learner, *self.spoil(group, frames))

    def _on_bulk(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            body = delivery.body
            if delivery.sequence:
                self.bulk.acknowledge(delivery.peer, delivery.sequence)
            if isinstance(body, Publish):
                self._incoming = body
            elif isinstance(body, Chunk):
                if body.last:
                    assert self._incoming is not None
                    version = self._incoming.manifest.version
                    self.stored.append(version)
                    self.bulk.send(delivery.peer, Stored(version, version.ordinal))
            elif delivery.sequence:
                self.bodies.append(body)

    @property
    def phases(self) -> list[str]:
        """The phases that the learner announced."""
        return [body.phase for body in self.of(Phase)]

    async def start(self, run: Path, *extra: str) -> asyncio.subprocess.Process:
        """The learner as a process of its own."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "temper.learner", "--broker", self.address, "--run", str(run), *extra),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        """Let the sockets go."""
        self.control.close()
        self.bulk.close()
