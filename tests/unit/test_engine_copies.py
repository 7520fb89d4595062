"""Two copies of the weights: what is served is always one whole version, whatever is interrupted; the pause is an exchange."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.actor.engines import copies, embedded
from temper.actor.engines.copies import Copies
from temper.actor.engines.embedded import EmbeddedEngine
from temper.actor.engines.llama import Weights as Tensors
from temper.actor.weights import WeightClient
from temper.common.bits import TensorBits, Weights, seal
from temper.common.delta import DeltaError, StagedUpdate, encode, stage
from temper.common.errors import EngineError
from temper.common.schema import NewVersion

sys.path.insert(0, str(Path(__file__).parent))

import engine_kit as kit

NAMES = ("a", "b")
SIZE = 300
DEADLINE_S = 60.0


def tensors() -> Tensors:
    named = {name: torch.zeros(SIZE) for name in NAMES}
    nothing = torch.zeros(0)
    return Tensors(nothing, (), nothing, nothing, named)


def versions() -> list[Weights]:
    """Four versions: some values of "a" change each time, "b" at the third only."""
    found: list[Weights] = []
    for ordinal in range(4):
        rng = np.random.default_rng(7)
        bits = {name: rng.integers(0, 1 << 32, SIZE, np.uint32) for name in NAMES}
        bits["a"][: 10 * ordinal] += np.uint32(ordinal)
        bits["b"][5] += np.uint32(ordinal >= 3)
        made = {name: TensorBits("float32", (SIZE,), bits[name]) for name in NAMES}
        found.append(seal(ordinal, 1, made, found[-1] if found else None))
    return found


VERSIONS = versions()
ACTIONS = st.tuples(
    st.sampled_from(["whole", "delta", "again", "foreign"]), st.sampled_from(["", "write", "swap", "settle"])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 3)), max_size=12))
def test_what_is_served_is_one_whole_version_whatever_is_interrupted(script: list[Any]) -> None:
    """Each update may end after half of its writing, before the swap, or before the spare has been brought along."""
    made, held = Copies(tensors(), tensors()), -1

    def check() -> None:
        if held >= 0:
            assert made.served.digest == VERSIONS[held].version.digest
            for name in NAMES:
                assert (made.served.bits[name] == VERSIONS[held].tensors[name].bits).all()

    for (kind, ends), wanted in script:
        base = None if kind == "whole" or held < 0 else max(held - (kind == "again"), 0)
        base = (held + 2) % 4 if kind == "foreign" else base
        to = held if kind == "again" and held >= 0 else wanted
        of = None if base is None else VERSIONS[base]
        update = stage(list(encode(of, VERSIONS[to])), of)
        starts = None if base is None else (VERSIONS[base].version.digest, update.digest)
        if starts is not None and made.served.digest not in starts:
            with pytest.raises(EngineError, match="fetch a full copy"):
                made.prepare(update)
            continue
        with contextlib.ExitStack() as stack:
            if ends == "write":
                patched = stack.enter_context(pytest.MonkeyPatch.context())
                patched.setattr(copies, "write", _half)
                stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            made.prepare(update)
        check()
        if ends in ("write", "swap"):
            continue
        made.swap()
        held = to
        check()
        if ends != "settle":
            made.settle(update)
            assert made.spare.digest == made.served.digest
            for name in NAMES:
                assert (made.spare.bits[name] == VERSIONS[held].tensors[name].bits).all()
        check()


def _half(plan: Any) -> None:
    for target, where, values in plan[:1]:
        target[where] = values
    raise KeyboardInterrupt


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small models are written beside sampling."""
    monkeypatch.setattr(embedded, "INLINE_BYTES", 0)


def engine() -> EmbeddedEngine:
    config = kit.CONFIG.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    return EmbeddedEngine(config, dtype="float32", max_rows=2, max_length_tokens=kit.LENGTH)


def test_a_generation_goes_on_while_the_next_weights_are_written(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends under the old version although the new one's writing had begun before it was asked for."""

    async def scenario() -> None:
        _, new, first, second = kit.two_versions()
        made = engine()
        await made.apply(kit.update_to(first))
        began, gate, write = threading.Event(), threading.Event(), copies.write

        def held(plan: Any) -> None:
            began.set()
            assert gate.wait(DEADLINE_S)
            write(plan)

        monkeypatch.setattr(copies, "write", held)
        swap = asyncio.create_task(made.apply(kit.update_to(second, first)))
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        early = await made.generate(kit.ask([9, 8, 7], seed=1))
        assert early.version_runs == [(77, 0, 8)] and not swap.done()
        gate.set()
        assert await swap == second.version.digest
        late = await made.generate(kit.ask([9, 8, 7], seed=2))
        assert late.version_runs == [(77, 1, 8)]
        with torch.inference_mode():
            assert late.logprobs == pytest.approx(kit.forced(new, [9, 8, 7], late.ids), abs=1e-5)
        await made.close()

    asyncio.run(scenario())


def test_an_apply_that_nobody_waits_for_any_more_harms_none(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        _, _, first, second = kit.two_versions()
        made = engine()
        await made.apply(kit.update_to(first))
        began, gate, write = threading.Event(), threading.Event(), copies.write

        def held(plan: Any) -> None:
            began.set()
            assert gate.wait(DEADLINE_S)
            write(plan)

        monkeypatch.setattr(copies, "write", held)
        swap = asyncio.create_task(made.apply(kit.update_to(second, first)))
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        swap.cancel()
        await asyncio.gather(swap, return_exceptions=True)
        again = asyncio.create_task(made.apply(kit.update_to(first)))
        await asyncio.sleep(0)
        gate.set()
        assert await again == first.version.digest
        for name, tensor in first.tensors.items():
            assert (made.resident(name) == tensor.bits).all() and (made.host_copy(name) == tensor.bits).all()
        await made.close()

    asyncio.run(scenario())


class Nobody:
    """A peer that only takes handlers."""

    def __init__(self) -> None:
        self.handlers: dict[type, Any] = {}

    def on(self, body: type, handler: Any) -> None:
        self.handlers[body] = handler

    async def send(self, body: Any, frames: Any = (), version: int = 0) -> None:
        raise AssertionError("nothing is fetched here")


@pytest.mark.parametrize("inline", [True, False])
def test_the_spare_is_the_host_copy_and_there_is_no_third(inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not inline:
        monkeypatch.setattr(embedded, "INLINE_BYTES", 0)

    async def scenario() -> None:
        _, _, first, second = kit.two_versions()
        made, peer = engine(), Nobody()
        client = WeightClient(peer)
        peer.handlers[NewVersion](NewVersion(second.version), [])
        third = seal(2, 77, dict(second.tensors), second)
        for base, new in ((None, first), (first, second), (second, third), (None, second)):
            update: StagedUpdate = stage(list(encode(base, new)), client.weights if base else None)
            await client.commit(update, await made.apply(update), made.host_copy)
            held = client.weights
            assert held is not None and held.version == new.version and held.tensors.keys() == new.tensors.keys()
            for name, tensor in held.tensors.items():
                assert tensor.bits is made.host_copy(name) and tensor.bits is not made.resident(name)
                assert (tensor.bits == new.tensors[name].bits).all()
                assert (made.resident(name) == tensor.bits).all()
        await made.close()

    asyncio.run(scenario())


def test_a_host_copy_that_was_given_up_while_an_update_was_applied_is_not_moved() -> None:
    """The scrub asked for a full copy meanwhile: what the engine gives is not completed to a version."""

    async def scenario() -> None:
        client = WeightClient(Nobody())
        update = stage(encode(None, VERSIONS[0]), None)
        await client.commit(update, update.digest)
        step = stage(encode(VERSIONS[0], VERSIONS[1]), client.weights)
        client.reseed("scrub")
        bits = {name: tensor.bits for name, tensor in VERSIONS[1].tensors.items()}
        with pytest.raises(DeltaError, match="starts from"):
            await client.commit(step, step.digest, bits.get)
        assert client.version is None

    asyncio.run(scenario())
