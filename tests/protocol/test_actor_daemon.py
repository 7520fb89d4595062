"""The actor as a process against a scripted broker: weights first, leases by version, verdicts, drains, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from temper.common import recipe as recipes
from temper.common.arrays import unpack_arrays
from temper.common.bits import TensorBits, Weights, seal
from temper.common.config import DomainConfig, Engine, Model, Pacing, Recipe, Run, Sampling
from temper.common.delta import encode
from temper.common.domains import derive_seed
from temper.common.schema import (
    Bundle,
    BundleFile,
    Chain,
    Chunk,
    Drain,
    Fetch,
    Goodbye,
    Job,
    JobDone,
    Lease,
    Manifest,
    NeedBundle,
    NewVersion,
    Refused,
    Return,
    SampleRefused,
    Samples,
    SandboxJob,
    Touch,
    Verdict,
    Welcome,
    pack_frames,
    unpack_frames,
)
from temper.learner import models

pytestmark = pytest.mark.timeout(120)

RECIPE = Recipe(
    run=Run(name="test", seed=3, connect_timeout_s=30, drain_timeout_s=5),
    model=Model(vocabulary="abcdef0123456789xptm+-*>", hidden_size=16, intermediate_size=16, max_length_tokens=16),
    pacing=Pacing(weights_timeout_s=60),
    sampling=Sampling(max_new_tokens=5),
    engine=Engine(kind="embedded", max_rows=8),
    domains=(
        DomainConfig("reverse", "temper.actor.domains.reverse", options={"letters": "abcdef", "length": 2}),
        DomainConfig("code", "temper.actor.domains.tinycode", needs_sandbox=True),
    ),
)
LINEAGE = 7


class Site:
    """A scripted broker, learner and sandbox: serves bundle and weights; leases and verdicts are the test's."""

    def __init__(self, broker: Any, process: asyncio.subprocess.Process) -> None:
        self.broker, self.process = broker, process
        loaded = models.load(RECIPE.model, RECIPE.run.seed, Path("/nonexistent"))
        self.files = loaded.bundle_files
        self.parameters = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
        self.versions: dict[int, Weights] = {}
        self.verdict: Callable[[SandboxJob], Verdict] | None = lambda job: Verdict("ok", 0)
        self._served = 0
        self._answering = asyncio.ensure_future(self._answer())

    @property
    def actor(self) -> bytes:
        """The control socket's id of the only peer."""
        return bytes(self.broker.control_id)

    async def _answer(self) -> None:
        while True:
            await self.broker.until(lambda: len(self.broker.got) > self._served)
            delivery = self.broker.got[self._served]
            self._served += 1
            match delivery.body:
                case NeedBundle():
                    table = [_file(name, data) for name, data in self.files.items()]
                    self.broker.bulk.send(delivery.peer, Bundle(table), [memoryview(d) for d in self.files.values()])
                case Fetch() as fetch:
                    self._serve(delivery.peer, fetch)
                case Job() as job if self.verdict is not None:
                    verdict = self.verdict(unpack_frames(list(delivery.frames), SandboxJob))
                    self.broker.control.send(delivery.peer, JobDone(job.job_id, verdict.outcome), pack_frames(verdict))

    def _serve(self, peer: bytes, fetch: Fetch) -> None:
        want = max(self.versions) if fetch.want is None and self.versions else fetch.want
        if want is None or want not in self.versions:
            self.broker.bulk.send(peer, Chain([], "not stored yet", None, fetch.request))
            return
        new = self.versions[want]
        have = fetch.have.ordinal if fetch.have else None
        base = self.versions.get(have) if have is not None and have < want else None
        chunks = [bytes(chunk) for chunk in encode(base, new)]
        size = sum(map(len, chunks))
        entry = Manifest(new.version, base.version if base else None, len(chunks), size, new.nbytes, 1.0)
        self.broker.bulk.send(peer, Chain([entry], "", new.version, fetch.request))
        for index, chunk in enumerate(chunks):
            body = Chunk(want, base is None, index, _digest(chunk), index == len(chunks) - 1)
            self.broker.bulk.send(peer, body, [memoryview(chunk)])

    def publish(self, ordinal: int) -> None:
        """A new version, every parameter a little different."""
        torch.manual_seed(ordinal)
        tensors = {n: TensorBits.of((p + 0.1 * torch.randn_like(p)).numpy()) for n, p in self.parameters.items()}
        self.versions[ordinal] = seal(ordinal, LINEAGE, tensors)
        self.broker.control.send(self.actor, NewVersion(self.versions[ordinal].version))

    def lease(self, lease_id: int, **changes: Any) -> Lease:
        """Send a lease."""
        fields: dict[str, Any] = {
            "lease_id": lease_id,
            "attempt": 1,
            "lineage": LINEAGE,
            "lane": "train",
            "domain": "reverse",
            "level": 0,
            "task_seed": derive_seed(lease_id),
            "indices": [0, 1, 2, 3],
            "min_version": 0,
            "pinned_version": None,
            "deadline_s": 60.0,
        }
        made = Lease(**(fields | changes))
        self.broker.control.send(self.actor, made)
        return made

    def all(self, kind: Any) -> list[Any]:
        """Bodies of a kind received so far."""
        return list(self.broker.bodies(kind))

    async def samples(self, lease_id: int) -> dict[int, tuple[Any, Any]]:
        """All four samples of a lease: index -> (meta, tokens)."""

        def found() -> dict[int, tuple[Any, Any]]:
            result: dict[int, tuple[Any, Any]] = {}
            for delivery in self.broker.got:
                if isinstance(delivery.body, Samples) and delivery.body.lease_id == lease_id:
                    arrays = unpack_arrays(delivery.body.arrays, list(delivery.frames))
                    cu = arrays["cu_seqlens"]
                    for number, meta in enumerate(delivery.body.samples):
                        result[meta.index] = (meta, arrays["tokens"][cu[number] : cu[number + 1]].tolist())
            return result

        await self.broker.until(lambda: len(found()) == 4)
        return found()

    async def log(self) -> str:
        """Everything the actor wrote to stderr, once it has ended."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def end(self) -> int:
        """The exit code, after a drain."""
        self.broker.control.send(self.actor, Drain("finished", 5.0))
        return await self.process.wait()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _file(name: str, data: bytes) -> BundleFile:
    return BundleFile(name, _digest(data), 1)


@contextlib.asynccontextmanager
async def site(kit: Any, *arguments: str, recipe: Recipe = RECIPE) -> AsyncIterator[Site]:
    broker = kit.Broker(kit.address)

    def answer(hello: Any) -> Welcome | Refused:
        broker.hello = hello
        return Welcome("run-1", recipes.to_json(recipe), LINEAGE, 1.0)

    broker.answer = answer
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "temper.actor", "--broker", kit.address, "--name", "actor-1", *arguments),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        await broker.until(lambda: broker.beats or process.returncode is not None)
        broker.control_id = broker.beats[0].peer if broker.beats else b""
        made = Site(broker, process)
        try:
            yield made
        finally:
            made._answering.cancel()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        broker.close()


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_leases_wait_for_their_version_and_yield_samples(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            assert actor.broker.hello.role == "actor"
            assert "temper.actor.domains.reverse" in actor.broker.hello.domains
            actor.lease(1, min_version=0)
            actor.lease(2, min_version=1)
            actor.publish(0)
            first = await actor.samples(1)
            assert sorted(first) == [0, 1, 2, 3]
            meta, tokens = first[0]
            assert sum(count for _, _, count in meta.version_runs) == len(tokens)
            assert {ordinal for m, _ in first.values() for _, ordinal, _ in m.version_runs} == {0}
            assert [touch.lease_id for touch in actor.all(Touch)] == [1]
            actor.publish(1)
            second = await actor.samples(2)
            assert {ordinal for m, _ in second.values() for _, ordinal, _ in m.version_runs} == {1}
            newest = actor.versions[1].version
            await actor.broker.until(lambda: any(beat.body.version == newest for beat in actor.broker.beats))
            assert await actor.end() == 0
            assert actor.all(Return) == [] and actor.all(Goodbye)[0].exit_code == 0

    play(scenario)


def test_a_lease_that_goes_out_again_yields_the_same_samples(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.publish(0)
            actor.lease(5, task_seed=99)
            actor.lease(6, task_seed=99)
            want = await actor.samples(5)
            other = await actor.samples(6)
            actor.broker.got.clear()
            actor._served = 0
            actor.lease(5, task_seed=99, attempt=2)
            again = await actor.samples(5)
            assert {i: tokens for i, (_, tokens) in again.items()} == {i: tokens for i, (_, tokens) in want.items()}
            assert {i: tokens for i, (_, tokens) in other.items()} != {i: tokens for i, (_, tokens) in want.items()}
            assert await actor.end() == 0

    play(scenario)


def test_an_evaluator_samples_exactly_the_pinned_version(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit, "--lane", "eval") as actor:
            assert actor.broker.hello.role == "eval"
            for ordinal in (0, 1, 2):
                actor.publish(ordinal)
            for lease_id, pinned in ((10, 1), (11, 1), (12, 2)):
                actor.lease(lease_id, lane="eval", pinned_version=pinned)
                found = await actor.samples(lease_id)
                assert {ordinal for m, _ in found.values() for _, ordinal, _ in m.version_runs} == {pinned}
            assert await actor.end() == 0

    play(scenario)


def test_verdicts_become_rewards_and_infrastructure_does_not(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.publish(0)
            lease = actor.lease(20, domain="code")
            found = await actor.samples(20)
            stopped = [meta for meta, _ in found.values() if meta.finish_reason == "stop"]
            assert all(meta.reward == 1.0 for meta in stopped)
            jobs = len(actor.all(Job))
            actor.verdict = lambda job: Verdict("infra")
            for number in range(20):  # until one of its samples needs a verdict that is not remembered
                actor.lease(21 + number, domain="code", task_seed=lease.task_seed + number)
            await actor.broker.until(lambda: actor.all(Return))
            assert {back.cause for back in actor.all(Return)} == {"infra"}
            assert len(actor.all(Job)) > jobs
            assert await actor.end() == 0

    play(scenario)


def test_a_drain_returns_what_waits_and_what_is_graded(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.publish(0)
            actor.lease(30, domain="code")
            await actor.samples(30)
            actor.verdict = None  # the sandbox falls silent
            for number in range(20):
                actor.lease(31 + number, domain="code", task_seed=number)
            actor.lease(60, min_version=9)
            before = len(actor.all(Job))
            await actor.broker.until(lambda: len(actor.all(Job)) > before)
            assert await actor.end() == 0
            returned = {back.lease_id: back.cause for back in actor.all(Return)}
            assert returned[60] == "drain" and set(returned.values()) == {"drain"}
            complete = {30}
            for lease_id in range(31, 51):
                indices = {m.index for body in actor.all(Samples) if body.lease_id == lease_id for m in body.samples}
                if len(indices) == 4:
                    complete.add(lease_id)
            assert complete | set(returned) == {30, 60, *range(31, 51)} and not complete & set(returned)

    play(scenario)


def test_a_lease_that_meets_a_drain_goes_back_and_is_not_begun(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.verdict = None  # the sandbox is silent: the drain lasts as long as verdicts are given to come
            actor.publish(0)
            actor.lease(70, domain="code")
            await actor.broker.until(lambda: actor.all(Job))
            actor.broker.control.send(actor.actor, Drain("finished", 5.0))
            await actor.broker.until(lambda: actor.broker.beats[-1].body.state == "DRAINING")
            jobs = len(actor.all(Job))
            for lease_id in range(71, 81):
                actor.lease(lease_id, domain="code")
            assert await actor.process.wait() == 0
            returns = [(back.lease_id, back.cause) for back in actor.all(Return)]
            assert sorted(returns) == [(lease_id, "drain") for lease_id in range(70, 81)]
            assert {body.lease_id for body in actor.all(Job)[jobs:]} <= {70}
            assert "Traceback" not in await actor.log()

    play(scenario)


def test_a_refused_attempt_is_dropped_without_a_return(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.lease(40, min_version=5)
            actor.broker.control.send(actor.actor, SampleRefused(40, 1, "expired"))
            actor.lease(41)
            actor.publish(0)
            await actor.samples(41)
            actor.publish(5)
            actor.lease(42, min_version=5)
            await actor.samples(42)
            assert not [body for body in actor.all(Samples) if body.lease_id == 40]
            assert await actor.end() == 0
            assert actor.all(Return) == []
            assert "lease-40 attempt 1 is abandoned: expired" in await actor.log()

    play(scenario)


def test_wrong_leases_go_back_with_their_reason(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.publish(0)
            actor.lease(50, domain="unknown")
            actor.lease(51, lane="demo", lineage=LINEAGE)
            demonstrations = await actor.samples(51)
            assert all(meta.reward is None for meta, _ in demonstrations.values())
            assert np.unique([tuple(tokens) for _, tokens in demonstrations.values()], axis=0).shape[0] > 1
            await actor.broker.until(lambda: actor.all(Return))
            (back,) = actor.all(Return)
            assert (back.lease_id, back.cause) == (50, "task") and "not in this run's recipe" in back.error
            assert await actor.end() == 0

    play(scenario)


def test_a_broken_bundle_ends_the_actor_with_its_reason(kit: Any) -> None:
    async def scenario() -> None:
        async with site(kit) as actor:
            actor.files = {**actor.files, "tokenizer.json": b"{}"}
            assert await actor.process.wait() == 2
            assert "temper actor: tokenizer.json of the bundle can't be loaded" in await actor.log()

    play(scenario)
