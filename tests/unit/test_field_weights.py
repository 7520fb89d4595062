"""What breaks in systems like this, section "Weights": the lines that no other test of the log is named after.

The others: an engine that refuses, a half-failed apply, a pruned chain (`test_weight_log`, `test_delta`, `test_weight_store`),
a prefix cache of old weights (`test_on_swap`), weights of another run (`test_weight_store`, `test_weights_other_run`).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from temper.common.config import Model, Optimizer
from temper.common.delta import DeltaError
from temper.learner import optimizer
from temper.learner.gather import serving
from temper.learner.models import micro

sys.path.insert(0, str(Path(__file__).parent))

import test_weight_log as kit


def test_a_version_whose_number_rose_without_a_transfer_is_not_taken_for_a_new_one() -> None:
    """The version number rises although nothing was transferred. -> a version is a digest."""

    async def scenario(network: Any) -> None:
        learner, actor = kit.Learner(network, 1), kit.Actor(network, "actor")
        await learner.publish()
        await actor.swap()
        first = actor.client.version
        learner.step()
        await learner.publish()
        await learner.publisher.flush(kit.DEADLINE_S)
        update = await actor.client.fetch(deadline_s=kit.DEADLINE_S)
        with pytest.raises(DeltaError, match="the engine reports"):  # it says "done" and still holds the old bits
            await actor.client.commit(update, first.digest)
        assert actor.client.version is None and actor.client.reseeds == {"engine": 1}
        await actor.swap()
        kit.check(actor, {1: learner})
        assert actor.client.version == learner.now.version != first
        await learner.stop()

    kit.run(scenario)


def test_fp32_masters_keep_what_bf16_ones_lose() -> None:
    """bf16 AdamW: w = 1.0, update 1e-4 a hundred times stays 1.0. -> fp32 masters give 0.99."""

    def trained(dtype: torch.dtype) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        adamw = optimizer.Optimizer({"w": weight}, Optimizer(max_gradient_norm=0.0))
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            assert adamw.update(1e-4).applied
        return weight

    master = trained(torch.float32)
    assert master.detach().tolist() == pytest.approx([0.99] * 4, abs=1e-5)
    assert trained(torch.bfloat16).detach().eq(1.0).all()
    ((_, served),) = serving({"w": master}, torch.bfloat16)
    assert served.eq(torch.tensor(0.99, dtype=torch.bfloat16)).all()
    model = micro(Model(vocabulary="abc", serving_dtype="bfloat16", compute_dtype="bfloat16"), 0).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_actor_that_joins_at_version_seven_samples_only_after_its_digest_matches_and_one_that_leaves_stalls_nobody() -> (
    None
):
    """An actor joins at v = 7. -> starts sampling only after its digest matches; another one leaving stalls nobody."""

    async def scenario(network: Any) -> None:
        learner, staying, leaving = (
            kit.Learner(network, 1),
            kit.Actor(network, "staying"),
            kit.Actor(network, "leaving"),
        )
        await learner.publish()
        for actor in (staying, leaving):
            await actor.swap()
        for _ in range(7):
            learner.step()
            await learner.publish(keep=True)
        await learner.publisher.flush(kit.DEADLINE_S)
        joining = kit.Actor(network, "joining")
        fetch = asyncio.create_task(leaving.client.fetch(deadline_s=kit.DEADLINE_S))
        await asyncio.sleep(0)
        network.ports.pop("leaving")  # killed in the middle of its fetch
        network.desk.closed("leaving")
        assert joining.client.version is None  # nothing may be sampled yet: `Versions.at_least` waits for this
        update = await joining.client.fetch(deadline_s=kit.DEADLINE_S)
        assert joining.client.version is None and update.version.ordinal == 7
        await joining.client.commit(update, joining.apply(update))
        await staying.swap()
        for actor in (joining, staying):
            kit.check(actor, {1: learner})
            assert actor.client.version == learner.now.version
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        await learner.stop()

    kit.run(scenario)
