"""Publisher, desk, store and clients together, over a wire that loses, repeats and reorders: every committed version is
the learner's, bit for bit, whatever happens. The wire is in process; the transport has its own tests."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.actor.weights import WeightClient, WeightsUnavailable
from temper.broker.weight_desk import WeightDesk
from temper.broker.weights import WeightStore
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import DeltaError, StagedUpdate
from temper.common.errors import PeerLost
from temper.common.schema import Body, Chunk, NewVersion, Version
from temper.learner.publisher import Published, Publisher

RUN = "run-a"
DEADLINE_S = 60.0


class Port:
    """One peer's end: `on` and `send`, as a `Peer` has them. `fault` may change what passes, either way."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.handlers: dict[type, Callable[[Any, list[memoryview]], None]] = {}

    def on(self, body: type, handler: Callable[[Any, list[memoryview]], None]) -> None:
        self.handlers[body] = handler

    async def send(self, body: Body, frames: Any = (), version: int = 0) -> None:
        for b, f in self.network.through(self.name, body, list(frames)):
            self.network.desk.take(self.name, b, f, 0)
        await asyncio.sleep(0)

    def receive(self, body: Body, frames: list[Any]) -> None:
        handler = self.handlers.get(type(body))
        if handler is not None:
            handler(body, [memoryview(frame) for frame in frames])


class Network:
    """A broker's desk and the ports of its peers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports: dict[str, Port] = {}
        self.fault: str | None = None  # applied to the next chunk
        self.held: tuple[str, Body, list[Any]] | None = None
        self.announced: list[Version] = []
        self.task: asyncio.Task[None] | None = None
        self.start()

    def start(self) -> None:
        """A broker process starts (again): what it knows is what is on the disk."""
        self.store = WeightStore(self.directory, RUN, sync=False)
        self.desk = WeightDesk(
            self.store,
            send=self.send,
            backlog=lambda peer: (0, 0),
            acknowledge=lambda peer, sequence: None,
            announce=self.announce,
        )
        self.task = asyncio.create_task(self.desk.run())

    async def kill(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    def port(self, name: str) -> Port:
        self.ports[name] = Port(self, name)
        return self.ports[name]

    def announce(self, version: Version) -> None:
        self.announced.append(version)
        for port in list(self.ports.values()):
            port.receive(NewVersion(version), [])

    def send(self, peer: str, body: Body, frames: Any = ()) -> bool:
        if peer not in self.ports:
            return False
        for b, f in self.through(peer, body, list(frames)):
            asyncio.get_running_loop().call_soon(self.ports[peer].receive, b, f)
        return True

    def through(self, name: str, body: Body, frames: list[Any]) -> list[tuple[Body, list[Any]]]:
        if not isinstance(body, Chunk):
            return [(body, frames)]
        held, self.held = self.held, None
        late = [(held[1], held[2])] if held is not None and held[0] == name else []
        fault, self.fault = self.fault, None
        if fault == "drop":
            return late
        if fault == "repeat":
            return [(body, frames), (body, frames), *late]
        if fault == "hold":
            self.held = (name, body, frames)
            return late
        if fault == "damage":
            frames = [bytes(frames[0])[:-1] + bytes([frames[0][-1] ^ 1])]
        return [(body, frames), *late]


class Actor:
    """A client with an engine that holds its own copy, as the real ones do."""

    def __init__(self, network: Network, name: str) -> None:
        self.client = WeightClient(network.port(name), idle_s=0.05)
        self.engine: dict[str, np.ndarray] = {}
        self.update: StagedUpdate | None = None

    def apply(self, update: StagedUpdate) -> str:
        """The embedded engine's overwrite, and its digest computed from what it holds."""
        for patch in update.changed:
            if patch.indices is None:
                self.engine[patch.name] = patch.values.copy()
            else:
                self.engine[patch.name][patch.indices] = patch.values
        tensors = {p: TensorBits("float32", bits.shape, bits) for p, bits in self.engine.items()}
        return seal(0, 0, tensors).version.digest

    async def swap(self, want: int | None = None) -> None:
        update = await self.client.fetch(want, deadline_s=DEADLINE_S)
        await self.client.commit(update, self.apply(update))


class Learner:
    """Versions whose tensors change a little, in one lineage."""

    def __init__(self, network: Network, lineage: int, start: Weights | None = None, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed + lineage)
        self.lineage = lineage
        self.published: list[Published] = []
        self.publisher = Publisher(network.port("learner"), lineage, stored_timeout_s=0.05)
        self.publisher.on_published = self.published.append
        self.task = asyncio.create_task(self.publisher.run())
        tensors = start.tensors if start else {
            name: TensorBits("float32", (size,), self.rng.integers(0, 1 << 32, size, np.uint32))
            for name, size in (("a", 3000), ("b", 50), ("c", 900))
        }  # fmt: skip
        self.now = seal(start.version.ordinal if start else 0, lineage, tensors)
        self.history = {self.now.version.ordinal: self.now}

    async def publish(self, keep: bool = False) -> None:
        await self.publisher.publish(self.now.version.ordinal, self.now.tensors, keep=keep)

    def step(self) -> None:
        tensors = dict(self.now.tensors)
        for name in ("a", "c"):
            bits = tensors[name].bits.copy()
            where = self.rng.integers(0, bits.size, bits.size // 40)
            bits[where] += np.uint32(1)
            tensors[name] = TensorBits("float32", bits.shape, bits)
        self.now = seal(self.now.version.ordinal + 1, self.lineage, tensors, self.now)
        self.history[self.now.version.ordinal] = self.now

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def run(scenario: Callable[[Network], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with asyncio.timeout(60), broker(Path(directory)) as network:
                await scenario(network)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def broker(directory: Path) -> AsyncIterator[Network]:
    network = Network(directory)
    try:
        yield network
    finally:
        await network.kill()


def check(actor: Actor, learners: dict[int, Learner]) -> None:
    """The actor's copy and its engine's are the learner's, bit for bit, for the version it says it has."""
    version = actor.client.version
    if version is None:
        return
    truth = learners[version.lineage].history[version.ordinal]
    assert truth.version == version
    held = actor.client._weights
    assert held is not None
    for name, tensor in truth.tensors.items():
        assert (held.tensors[name].bits == tensor.bits).all()
        assert (actor.engine[name] == tensor.bits).all()


def test_an_actor_follows_delta_by_delta() -> None:
    async def scenario(network: Network) -> None:
        learner, actor = Learner(network, 1), Actor(network, "actor")
        await learner.publish()
        await actor.swap()
        for _ in range(5):
            learner.step()
            await learner.publish()
            await learner.publisher.flush(DEADLINE_S)
            await actor.swap()
            check(actor, {1: learner})
            assert actor.client.version == learner.now.version and not actor.client.behind
        assert [p.snapshot for p in learner.published] == [True, False, False, False, False, False]
        assert 0.0 < learner.published[-1].density < 0.03
        assert learner.published[-1].nbytes < learner.published[-1].full_nbytes / 20
        assert network.announced == [w.version for w in learner.history.values()]
        assert not actor.client.reseeds
        await learner.stop()

    run(scenario)


def test_an_actor_that_joins_late_and_one_that_skips_end_at_the_same_bits() -> None:
    async def scenario(network: Network) -> None:
        learner, early = Learner(network, 1), Actor(network, "early")
        await learner.publish()
        await early.swap()
        for _ in range(7):
            learner.step()
            await learner.publish()
            await learner.publisher.flush(DEADLINE_S)
        late = Actor(network, "late")
        await asyncio.gather(early.swap(), late.swap())
        for actor in (early, late):
            check(actor, {1: learner})
            assert actor.client.version == learner.now.version
        await learner.stop()

    run(scenario)


def test_a_slow_broker_never_blocks_the_learner_and_the_newest_wins_but_pinned_versions_are_stored() -> None:
    async def scenario(network: Network) -> None:
        learner = Learner(network, 1)
        await learner.publish(keep=True)
        for ordinal in range(1, 30):
            learner.step()
            await learner.publish(keep=ordinal == 10)
        await learner.publisher.flush(DEADLINE_S)
        ordinals = [p.version.ordinal for p in learner.published]
        assert ordinals == sorted(ordinals) and {0, 10, 29} <= set(ordinals) and len(ordinals) < 10
        evaluator = Actor(network, "eval")
        await evaluator.swap(10)
        check(evaluator, {1: learner})
        assert evaluator.client.version == learner.history[10].version
        await learner.stop()

    run(scenario)


def test_a_pinned_fetch_waits_for_its_version_and_gives_up_on_a_retired_one() -> None:
    async def scenario(network: Network) -> None:
        learner, evaluator = Learner(network, 1), Actor(network, "eval")
        await learner.publish()
        await learner.publisher.flush(DEADLINE_S)
        waiting = asyncio.create_task(evaluator.swap(2))
        for _ in range(3):
            learner.step()
            await learner.publish(keep=True)
            await learner.publisher.flush(DEADLINE_S)
        await waiting
        assert evaluator.client.version == learner.history[2].version
        with pytest.raises(WeightsUnavailable, match="retired"):
            await evaluator.swap(-1)
        with pytest.raises(WeightsUnavailable, match=r"did not come within .* the log ends at 3"):
            await evaluator.client.fetch(99, deadline_s=0.05)
        await learner.stop()

    run(scenario)


def test_an_engine_that_answers_with_another_digest_gets_a_full_copy() -> None:
    """Field failure: an engine answers (False, message) to a delta; the sender moves on; drift for ever."""

    async def scenario(network: Network) -> None:
        learner, actor = Learner(network, 1), Actor(network, "actor")
        await learner.publish()
        await actor.swap()
        learner.step()
        await learner.publish()
        update = await actor.client.fetch(deadline_s=DEADLINE_S)
        with pytest.raises(DeltaError, match="the engine reports"):
            await actor.client.commit(update, "0" * 32)
        assert actor.client.version is None and actor.client.reseeds == {"engine": 1}
        update = await actor.client.fetch(deadline_s=DEADLINE_S)
        assert update.base_digest is None
        await actor.client.commit(update, actor.apply(update))
        check(actor, {1: learner})
        await learner.stop()

    run(scenario)


def test_a_host_copy_that_was_damaged_is_found_and_replaced() -> None:
    async def scenario(network: Network) -> None:
        learner, actor = Learner(network, 1), Actor(network, "actor")
        await learner.publish()
        await actor.swap()
        held = actor.client._weights
        assert held is not None
        held.tensors["a"].bits[5] ^= 1
        learner.step()
        await learner.publish()
        await learner.publisher.flush(DEADLINE_S)
        await actor.swap()
        assert actor.client.reseeds == {"digest": 1}
        check(actor, {1: learner})
        await learner.stop()

    run(scenario)


def test_publishing_to_a_broker_that_never_answers_ends_with_the_reason() -> None:
    async def scenario(network: Network) -> None:
        learner = Learner(network, 1)
        await network.kill()
        await learner.publish()
        with pytest.raises(PeerLost, match="did not store version 0"):
            await learner.task
        with pytest.raises(PeerLost, match="can no longer be published"):
            await learner.publish()
        with pytest.raises(PeerLost, match="can no longer be published"):
            await learner.publisher.flush(DEADLINE_S)

    run(scenario)


def test_sixty_four_actors_join_at_once() -> None:
    async def scenario(network: Network) -> None:
        learner = Learner(network, 1)
        await learner.publish()
        for _ in range(3):
            learner.step()
            await learner.publish()
            await learner.publisher.flush(DEADLINE_S)
        actors = [Actor(network, f"actor-{i}") for i in range(64)]
        await asyncio.gather(*(actor.swap() for actor in actors))
        for actor in actors:
            check(actor, {1: learner})
            assert actor.client.version == learner.now.version
        await learner.stop()

    run(scenario)


@pytest.mark.parametrize("inline_bytes", [0, 4 << 20], ids=["written beside sampling", "written between steps"])
def test_greedy_output_is_the_learners_own_after_each_of_twenty_swaps(
    inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model trained for twenty steps; its versions go through publisher, log, client and the embedded engine."""
    import torch
    from temper.actor.engines.base import GenerateRequest, SamplingParams
    from temper.actor.engines.embedded import EmbeddedEngine
    from temper.common.config import Model
    from temper.learner.models import micro
    from temper.learner.policy import bit_view

    monkeypatch.setattr("temper.actor.engines.embedded.INLINE_BYTES", inline_bytes)
    loaded = micro(Model(vocabulary="abcdefgh", layers=1, hidden_size=32, heads=2, intermediate_size=32), 0)
    model, optimizer = loaded.model, torch.optim.AdamW(loaded.model.parameters(), lr=1e-2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)  # decided enough that its greedy output says something
    generator = torch.Generator().manual_seed(0)
    prompt = [1, 5, 3, 7]

    async def scenario(network: Network) -> None:
        publisher = Publisher(network.port("learner"), 1)
        task = asyncio.create_task(publisher.run())
        client = WeightClient(network.port("actor"))
        engine = EmbeddedEngine(model.config.to_dict(), dtype="float32", max_rows=2, max_length_tokens=32)
        outputs = set()
        for ordinal in range(21):
            tensors = {n: TensorBits.of(bit_view(p).copy(), "float32") for n, p in model.named_parameters()}
            await publisher.publish(ordinal, tensors, keep=True)
            await publisher.flush(DEADLINE_S)
            update = await client.fetch(deadline_s=DEADLINE_S)
            await client.commit(update, await engine.apply(update), engine.host_copy)
            assert client.version is not None and client.version.ordinal == ordinal
            got = await engine.generate(GenerateRequest(prompt, SamplingParams(temperature=0.0, max_new_tokens=12)))
            with torch.no_grad():
                ids = torch.tensor([prompt])
                for _ in range(12):
                    ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            assert got.ids == ids[0, len(prompt) :].tolist()
            outputs.add(tuple(got.ids))
            rows = torch.randint(1, 9, (4, 12), generator=generator)
            optimizer.zero_grad()
            model(rows, labels=rows).loss.backward()
            optimizer.step()
        assert len(outputs) > 5  # the swaps were seen
        await engine.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario)


OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("settle"), st.just(False)),
    st.tuples(st.sampled_from(["swap", "stage and die", "join", "leave", "half apply"]), st.integers(0, 3)),
    st.tuples(st.just("fault"), st.sampled_from(["drop", "repeat", "hold", "damage"])),
    st.tuples(st.sampled_from(["learner resumes", "broker restarts"]), st.integers(0, 3)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(OPERATIONS, max_size=25))
def test_every_live_actors_bits_are_the_learners_whatever_happens(operations: list[tuple[str, Any]]) -> None:
    async def scenario(network: Network) -> None:
        learner = Learner(network, 1)
        learners = {1: learner}
        actors = {0: Actor(network, "actor-0")}
        await learner.publish()
        for operation, detail in operations:
            if operation == "step":
                learner.step()
                await learner.publish(keep=detail)
            elif operation == "settle":
                await learner.publisher.flush(DEADLINE_S)
            elif operation == "fault":
                network.fault = detail
            elif operation == "learner resumes":
                await learner.stop()
                ordinals = sorted(learner.history)
                start = learner.history[ordinals[max(0, len(ordinals) - 1 - detail)]]
                learner = Learner(network, learner.lineage + 1, start)
                learners[learner.lineage] = learner
                await learner.publish(keep=True)
            elif operation == "broker restarts":
                await network.kill()
                network.start()
            elif operation == "join":
                if detail not in actors:
                    actors[detail] = Actor(network, f"actor-{detail}")
            elif operation == "leave" and detail in actors:
                del actors[detail], network.ports[f"actor-{detail}"]
                network.desk.closed(f"actor-{detail}")
            elif detail in actors:
                await act(operation, actors[detail])
            for actor in actors.values():
                check(actor, learners)
        network.fault = network.held = None
        await learner.publisher.flush(DEADLINE_S)
        for actor in actors.values():
            await actor.swap()
            check(actor, learners)
            assert actor.client.version == learner.now.version
        await learner.stop()

    run(scenario)


async def act(operation: str, actor: Actor) -> None:
    if operation == "swap":
        await actor.swap()
    elif operation == "stage and die":
        await actor.client.fetch(deadline_s=DEADLINE_S)  # staged, and never committed
    elif operation == "half apply":
        update = await actor.client.fetch(deadline_s=DEADLINE_S)
        for patch in update.changed[:1]:  # the engine fails after the first tensor, and the same update is tried again
            if patch.indices is not None:
                actor.engine[patch.name][patch.indices] = patch.values
        await actor.client.commit(update, actor.apply(update))
