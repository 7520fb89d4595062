"""The learner as a process, over real sockets, against a stand-in broker that makes groups up."""

import asyncio
import dataclasses
import json
import signal
import sys
from pathlib import Path

from temper.common.config import DomainConfig, Eval, Model, Optimizer, Pacing, Recipe, Run, Sampling, WarmStart
from temper.common.reports import ProgressReader, read_summary
from temper.common.schema import (
    Bundle,
    Covered,
    Demand,
    Done,
    Evaluate,
    LearnerReady,
    RunFailed,
    RunOver,
    Trouble,
    Void,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent))
from learner_broker import StandIn

RECIPE = Recipe(
    run=Run(name="toy", max_steps=4, checkpoint_every_steps=2, drain_timeout_s=10, stall_timeout_s=30),
    model=Model(vocabulary="abcdefgh", hidden_size=16, layers=1, heads=2, intermediate_size=16),
    pacing=Pacing(groups_per_step=2, samples_per_group=4, max_staleness=0),
    sampling=Sampling(max_new_tokens=4),
    optimizer=Optimizer(learning_rate=1e-2, warmup_steps=1),
    warm_start=WarmStart(max_steps=2, groups_per_step=1, samples_per_group=4),
    eval=Eval(tasks_per_domain=3, samples_per_task=4, every_steps=3, timeout_s=20),
    domains=(DomainConfig("toy", "temper.actor.domains.reverse"),),
)


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """(exit code, stderr) of a learner that ends by itself."""
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


def sockets(tmp_path: Path, name: str = "s") -> Path:
    """A folder for sockets."""
    (tmp_path / name).mkdir(mode=0o700)
    return tmp_path / name


def test_a_run_from_warm_start_to_summary(tmp_path):
    async def run() -> StandIn:
        broker = StandIn(sockets(tmp_path), RECIPE)
        try:
            code, stderr = await ended(await broker.start(tmp_path / "run"))
        finally:
            broker.close()
        assert code == 0, stderr
        return broker

    broker = asyncio.run(run())
    (bundle,) = broker.of(Bundle)
    assert [file.name for file in bundle.files] == ["config.json", "tokenizer.json"]
    (ready,) = broker.of(LearnerReady)
    assert (ready.resumed_from, ready.steps_done, ready.version) == (None, 0, 0)
    assert broker.phases == ["warm", "train", "eval"]
    done = broker.of(Done)
    assert [(body.version, body.counted, len(body.trained)) for body in done] == [
        (0, False, 1),
        (1, False, 1),
        (2, True, 2),
        (3, True, 2),
        (4, True, 2),
        (5, True, 2),
    ]
    assert [body.trained for body in done[2:]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sum(body.groups for body in broker.of(Demand) if body.lane == "train") == 8
    assert [(body.version, body.tasks) for body in broker.of(Evaluate)] == [
        (2, [("toy", 0, 3)]),
        (5, [("toy", 0, 3)]),
        (6, [("toy", 0, 3)]),
    ]
    stored = [version.ordinal for version in broker.stored]
    assert stored == sorted(stored) and {0, 2, 5, 6} <= set(stored)  # those that an evaluation asks for are there
    covered = broker.of(Covered)
    assert [(body.version, body.oldest) for body in covered] == [(4, 4), (6, 4)]
    assert all(body.examined <= body.version for body in covered)
    assert broker.of(RunOver) == [RunOver("finished", 0)]

    summary = read_summary(tmp_path / "run")
    assert (summary.steps, summary.warm_start_steps, summary.exit_code) == (4, 2, 0)
    assert summary.accuracy_before == summary.accuracy_after == 0.5
    toy = summary.domains["toy"]
    assert (toy.tasks, toy.samples, toy.solved_after, toy.reason) == (3, 32, 1.0, "")
    assert toy.interval_after[0] < 0.5 < toy.interval_after[1]
    assert summary.samples["trained"] == 32 and summary.groups["trained"] == 8 and 0 < summary.lag_mean <= 1
    kinds = [line.kind for line in ProgressReader(tmp_path / "run").read()]
    assert kinds.count("warm") == 2 and kinds.count("step") == 4 and kinds.count("eval") == 3
    board = EventAccumulator(summary.tensorboard)
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {
        "learner/reward/toy",
        "learner/lag/mean_versions",
        "learner/eval/toy",
        "learner/eval_pass/toy",
        "learner/policy/entropy_nats",
        "learner/engine/logprob_gap_nats",
        "learner/groups/trained",
        "learner/groups/zero_variance",
        "learner/collapse/mixed_share",
        "learner/collapse/pass_share",
        "learner/accuracy/toy",
    } <= tags
    assert [event.step for event in board.Scalars("learner/optimizer/gradient_norm")] == [1, 2, 3, 4]


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    recipe = dataclasses.replace(
        RECIPE,
        run=dataclasses.replace(RECIPE.run, max_steps=6, checkpoint_every_steps=0),
        eval=Eval(tasks_per_domain=0),
    )

    async def whole() -> str:
        broker = StandIn(sockets(tmp_path, "a"), recipe)
        try:
            code, stderr = await ended(await broker.start(tmp_path / "whole"))
        finally:
            broker.close()
        assert code == 0, stderr
        return broker.stored[-1].digest

    async def halves() -> str:
        broker = StandIn(sockets(tmp_path, "b"), recipe, limit=6)  # three steps, then nothing more comes
        try:
            process = await broker.start(tmp_path / "halves")
            async with asyncio.timeout(60):
                await broker.starved.wait()  # asked for the fourth batch: the third step has begun and will be finished
            process.send_signal(signal.SIGTERM)
            code, stderr = await ended(process)
            assert code == 0, stderr
            assert broker.phases[-1] == "train" and broker.of(RunOver) == []
            assert [body.version for body in broker.of(Covered)] == [5]
            first = read_summary(tmp_path / "halves")
            assert first.exit_reason == "interrupted after 3 steps" and first.steps == 3
            broker.limit = 1 << 30
            done = [(body.version, body.trained) for body in broker.of(Done)]
            broker.bodies.clear()
            code, stderr = await ended(await broker.start(tmp_path / "halves", "--resume", str(tmp_path / "halves")))
        finally:
            broker.close()
        assert code == 0, stderr
        (ready,) = broker.of(LearnerReady)
        assert (ready.resumed_from, ready.steps_done, ready.version) == (5, 3, 5)
        assert ready.trained == done and len(done) == 5
        assert broker.phases == ["train", "eval"]
        return broker.stored[-1].digest

    assert asyncio.run(whole()) == asyncio.run(halves())
    one, other = (
        [line for line in ProgressReader(tmp_path / name).read() if line.kind == "step"] for name in ("whole", "halves")
    )
    assert [(line.step, line.loss, line.entropy) for line in one] == [
        (line.step, line.loss, line.entropy) for line in other
    ]
    summary = read_summary(tmp_path / "halves")
    assert summary.steps == 6 and summary.samples["trained"] == 48


def test_what_the_broker_gives_up_ends_the_run_with_its_reason(tmp_path):
    async def run() -> tuple[int, str]:
        broker = StandIn(sockets(tmp_path), RECIPE, limit=2)
        try:
            process = await broker.start(tmp_path / "run")
            async with asyncio.timeout(60):
                await broker.starved.wait()
            broker.control.send(broker.learner, RunFailed("40 groups in a row were void", 2))
            return await ended(process)
        finally:
            broker.close()

    code, stderr = asyncio.run(run())
    assert code == 2 and stderr.splitlines()[-1] == "temper learner: 40 groups in a row were void"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_code"] == 2 and "40 groups in a row" in summary["exit_reason"]
    assert "not evaluated (40 groups" in summary["domains"]["toy"]["reason"]


def test_a_malformed_group_is_replaced_and_silence_ends_the_run(tmp_path):
    recipe = dataclasses.replace(
        RECIPE,
        run=dataclasses.replace(RECIPE.run, stall_timeout_s=3),
        warm_start=WarmStart(),
        eval=Eval(tasks_per_domain=0),
    )

    async def run() -> tuple[int, str, StandIn]:
        broker = StandIn(sockets(tmp_path), recipe, limit=4)
        broker.spoil = lambda group, frames: (group, [memoryview(b""), *frames[1:]] if group.group_id == 1 else frames)
        try:
            process = await broker.start(tmp_path / "run")
            async with asyncio.timeout(60):
                await broker.starved.wait()
            broker.control.send(broker.learner, Trouble("actor-1 left: silent for 10 s"))
            return *await ended(process), broker
        finally:
            broker.close()

    code, stderr, broker = asyncio.run(run())
    assert code == 3
    last = stderr.splitlines()[-1]
    assert last.startswith("temper learner: waited 3 s for actors: groups (lane train, 1 of 2 there)")
    assert last.endswith("; the last trouble there: actor-1 left: silent for 10 s")
    assert broker.of(Void) == [Void({"1": "malformed"})]
    assert [body.trained for body in broker.of(Done)] == [[0, 2]]


def test_an_evaluation_that_never_comes_leaves_the_accuracy_null_with_the_reason(tmp_path):
    recipe = dataclasses.replace(RECIPE, eval=dataclasses.replace(RECIPE.eval, every_steps=0, timeout_s=2))

    async def run() -> tuple[int, str]:
        broker = StandIn(sockets(tmp_path), recipe, evaluates=False)
        try:
            return await ended(await broker.start(tmp_path / "run"))
        finally:
            broker.close()

    code, stderr = asyncio.run(run())
    assert code == 0, stderr
    summary = read_summary(tmp_path / "run")
    assert summary.accuracy_after is None
    assert "accuracy after: 0 of 3 tasks were answered in time" in summary.domains["toy"].reason
