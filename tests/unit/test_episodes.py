"""A lease from task to packed samples: evidence, seeds, multi-turn ids, and every way in which a domain can fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from temper.actor import episodes
from temper.actor.catalog import DomainRefused, check_allowed, check_domain, load_domain
from temper.actor.engines.base import Cancel, Counts, EngineCaps, GenerateRequest, Generation
from temper.actor.episodes import LeaseResult, run_lease
from temper.actor.packing import META_ROOM_BYTES, SAMPLE_BYTES, OversizedSample, pack_samples
from temper.actor.text import Text
from temper.common.arrays import unpack_arrays
from temper.common.config import DomainConfig, Model, Recipe, Sampling
from temper.common.config import Engine as EngineConfig
from temper.common.credit import LARGEST_BYTES
from temper.common.domains import Completion, Driver, Grader, Score, SingleTurn, Split, Task, derive_seed
from temper.common.errors import ConfigError, EngineError
from temper.common.schema import Lease, SandboxJob, Verdict, Version
from temper.common.wire import FRAME_LIMIT_BYTES, META_LIMIT_BYTES, pack_meta
from temper.learner.models import character_tokenizer

TEXT = Text(
    {
        "tokenizer.json": json.dumps(character_tokenizer(list("abcdefghij>!"))).encode(),
        "config.json": json.dumps({"eos_token_id": 0}).encode(),
    }
)
RECIPE = Recipe(model=Model(max_length_tokens=24), sampling=Sampling(max_new_tokens=6))
LEASE = Lease(5, 1, 77, "train", "toy", 0, 1234, [0, 1, 2, 3], 0, None, 30.0)


class Echo:
    """An engine that answers with the prompt's last token, once or more, and remembers what it was asked."""

    def __init__(self, answer: Callable[[GenerateRequest], Generation] | None = None) -> None:
        self.asked: list[GenerateRequest] = []
        self.caps = EngineCaps(True, True, True, True, 24, 8)
        self.version: Version | None = Version(3, 77, "d")
        self.counts = Counts()
        self.failure: BaseException | None = None
        self._answer = answer or self._echo

    async def generate(self, request: GenerateRequest, cancel: Cancel | None = None) -> Generation:
        self.asked.append(request)
        if cancel is not None and cancel.is_set:
            return Generation([], [], [], "abort")
        await asyncio.sleep(0)
        return self._answer(request)

    def _echo(self, request: GenerateRequest) -> Generation:
        ids = [request.ids[-1], 0]
        support = [[token, 9] for token in ids] if request.sampling.want_support else None
        return Generation(ids, [-0.5, -0.25], [(77, 3, 1), (77, 4, 1)], "stop", support)

    async def apply(self, update: Any) -> str:
        raise AssertionError("not used")

    async def close(self) -> None:
        raise AssertionError("not used")


class NoSandbox:
    async def run(self, job: SandboxJob) -> Verdict:
        return Verdict("infra", detail="no jail starts")


class Toy(SingleTurn):
    def __init__(self, score: Callable[[Task, Completion], Any] | None = None) -> None:
        self._score = score

    def tasks(self, split: Split, level: int, seed: int) -> Task:
        return Task(f"{split} {level} {seed}", "abc>", "b!")

    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        if self._score is not None:
            made = self._score(task, completion)
            return await made if asyncio.iscoroutine(made) else made
        return Score(1.0, True, {"length": len(completion.ids)}, [(1, 0.5)])

    def demonstration(self, task: Task) -> str | None:
        return str(task.private)


def run(domain: Any, lease: Lease = LEASE, *, engine: Any = None, recipe: Recipe = RECIPE, **extra: Any) -> LeaseResult:
    return asyncio.run(run_lease(lease, domain, engine or Echo(), TEXT, NoSandbox(), recipe, **extra))


def test_a_lease_yields_its_samples_with_their_evidence() -> None:
    engine = Echo()
    result = run(Toy(), engine=engine)
    assert result.cause is None
    assert sorted(sample.meta.index for sample in result.samples) == [0, 1, 2, 3]
    sample = result.samples[0]
    assert sample.tokens.tolist() == [1, 2, 3, 11, 11, 0] and sample.tokens.dtype == np.int32
    assert sample.logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.25] and sample.logprobs.dtype == np.float32
    assert sample.mask.tolist() == [0, 0, 0, 0, 1, 1] and sample.mask.dtype == np.uint8
    assert sample.meta.version_runs == [(77, 3, 5), (77, 4, 1)]
    assert sample.meta.step_rewards == [(5, 0.5)]
    assert (sample.meta.reward, sample.meta.correct, sample.meta.finish_reason) == (1.0, True, "stop")
    seeds = {request.sampling.seed for request in engine.asked}
    assert seeds == {derive_seed(0, "sample", 5, index) for index in range(4)}
    assert all(request.sampling.stop_token_ids == (0,) for request in engine.asked)


def test_lanes_have_their_own_sampling_and_seeds() -> None:
    engine = Echo()
    recipe = replace(RECIPE, sampling=Sampling(temperature=0.7, top_k=5, max_new_tokens=6))
    run(Toy(), engine=engine, recipe=recipe)
    assert engine.asked[0].sampling.temperature == 0.7 and engine.asked[0].sampling.want_support
    held_out = msgspec.structs.replace(LEASE, lane="eval", pinned_version=3)
    engine = Echo()
    result = run(Toy(), held_out, engine=engine, recipe=recipe)
    assert engine.asked[0].sampling.temperature == 1.0 and engine.asked[0].sampling.top_k == 0
    assert {r.sampling.seed for r in engine.asked} == {derive_seed(0, "eval", "toy", 1234, i) for i in range(4)}
    assert result.samples[0].meta.task_key == "eval 0 1234"


def test_demonstrations_are_tasks_of_their_own_ended_by_eos() -> None:
    seeds = []

    class Many(Toy):
        def tasks(self, split: Split, level: int, seed: int) -> Task:
            seeds.append(seed)
            return super().tasks(split, level, seed)

    lease = msgspec.structs.replace(LEASE, lane="demo")
    engine = Echo()
    result = run(Many(), lease, engine=engine)
    assert engine.asked == [] and sorted(seeds) == sorted(derive_seed(1234, i) for i in range(4))
    sample = result.samples[0]
    assert sample.tokens.tolist() == [1, 2, 3, 11, 2, 12, 0]
    assert sample.mask.tolist() == [0, 0, 0, 0, 1, 1, 1] and not sample.logprobs.any()
    assert sample.meta.reward is None and sample.meta.version_runs == [(77, 0, 7)]


class TwoTurns(Toy):
    """Turn, environment text, turn."""

    async def episode(self, task: Task, driver: Driver) -> None:
        self.first = await driver.generate()
        await driver.append("de")
        await driver.generate(3)


def test_a_second_turn_continues_the_engines_own_ids() -> None:
    engine = Echo()
    lease = msgspec.structs.replace(LEASE, indices=[2])
    result = run(TwoTurns(), lease, engine=engine)
    first, second = engine.asked
    assert list(second.ids) == [*first.ids, 11, 0, 4, 5]
    assert second.sampling.max_new_tokens == 3 and second.sampling.seed == first.sampling.seed
    sample = result.samples[0]
    assert sample.tokens.tolist() == [1, 2, 3, 11, 11, 0, 4, 5, 5, 0]
    assert sample.mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert sample.meta.version_runs == [(77, 3, 5), (77, 4, 3), (77, 3, 1), (77, 4, 1)]


def test_an_episode_that_outgrows_the_context_ends_with_length() -> None:
    class Endless(Toy):
        async def episode(self, task: Task, driver: Driver) -> None:
            while True:
                await driver.generate()
                await driver.append("abc")

    result = run(Endless())
    assert result.cause is None
    assert all(sample.meta.finish_reason == "length" and len(sample.tokens) <= 24 for sample in result.samples)


def raising(task: Task, completion: Completion) -> Score:
    raise ValueError("odd task")


async def hanging() -> Score:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("score", "named"),
    [
        (raising, r"score: ValueError: odd task \(test_episodes.py:\d+\)"),
        (lambda task, completion: Score(float("nan"), None), "not a finite number"),
        (lambda task, completion: Score(1.0, True, {"x": float("inf")}), "not a finite number"),
        (lambda task, completion: Score("1", True), "not a finite number"),  # type: ignore[arg-type]
        (lambda task, completion: Score(1.0, True, {}, [(9, 1.0)]), "step reward outside"),
        (lambda task, completion: Score(1.0, True, outcome="fine"), "outcome 'fine'"),
        (lambda task, completion: 1.0, "returned float"),
        (lambda task, completion: hanging(), "took over 0 s"),
    ],
)
def test_a_domain_that_misbehaves_is_a_task_failure(
    score: Callable[..., Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "SCORE_TIMEOUT_S", 0.05)
    result = run(Toy(score))
    assert result.samples == [] and result.cause == "task"
    assert re.search(named, result.error), result.error


def test_finished_siblings_of_a_failed_sample_are_kept() -> None:
    calls = []

    def third_fails(task: Task, completion: Completion) -> Score:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("once")
        return Score(0.0, False)

    heard: list[int] = []
    result = run(Toy(third_fails), on_sample=lambda sample: heard.append(sample.meta.index))
    assert len(result.samples) == 3 and result.cause == "task" and "once" in result.error
    assert sorted(heard) == sorted(sample.meta.index for sample in result.samples)


class Judged(Toy):
    async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
        return Score(None, None, outcome=(await grader.run(SandboxJob("", "python", {}, []))).outcome)


def test_infrastructure_is_never_a_reward() -> None:
    result = run(Judged())
    assert result.samples == [] and result.cause == "infra"
    assert "could not judge 'train 0 " in result.error and result.error.endswith(": no jail starts")

    def dead(request: GenerateRequest) -> Generation:
        raise EngineError("gone")

    result = run(Toy(), engine=Echo(dead))
    assert result.samples == [] and result.cause == "infra" and "gone" in result.error


def test_a_sample_that_cannot_be_scored_travels_without_reward() -> None:
    result = run(Toy(lambda task, completion: Score(None, None, outcome="timeout")))
    assert result.cause is None and result.samples[0].meta.reward is None
    assert result.samples[0].meta.outcome == "timeout"


def test_a_drain_keeps_what_is_finished() -> None:
    cancel = Cancel()
    cancel.set()
    result = run(Toy(), cancel=cancel)
    assert result.samples == [] and result.cause == "drain"


def test_the_leases_deadline_returns_the_rest_as_infrastructure() -> None:
    def one_hangs(task: Task, completion: Completion) -> Any:
        waiting.append(1)
        return hanging() if len(waiting) == 2 else Score(0.0, False)

    for deadline_s in (0.05, 0.5, 5.0):  # the other three must be done by then, however slow this machine is
        waiting: list[int] = []
        result = run(Toy(one_hangs), msgspec.structs.replace(LEASE, deadline_s=deadline_s))
        if len(result.samples) == 3:
            break
    assert len(result.samples) == 3 and result.cause == "infra" and "1 samples unfinished" in result.error


def test_waiting_for_a_verdict_does_not_count_as_the_domains_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        async def run(self, job: SandboxJob) -> Verdict:
            await asyncio.sleep(3 * episodes.SCORE_TIMEOUT_S)
            return Verdict("ok")

    class Graded(Toy):
        async def score(self, task: Task, completion: Completion, grader: Grader) -> Score:
            job = SandboxJob("", "python", {}, [])
            verdicts = await asyncio.gather(grader.run(job), grader.run(job))
            return Score(float(verdicts[0].outcome == "ok"), True)

    for own_s in (0.05, 0.5, 5.0):  # enough for what the domain itself does, however slow this machine is
        monkeypatch.setattr(episodes, "SCORE_TIMEOUT_S", own_s)
        result = asyncio.run(run_lease(LEASE, Graded(), Echo(), TEXT, Slow(), RECIPE))
        if result.cause is None:
            break
    assert result.cause is None and len(result.samples) == 4, result


@pytest.mark.parametrize(
    ("prompt", "named"), [("", "0 tokens"), ("a" * 24, "24 tokens"), ([{"role": "x"}], "template")]
)
def test_an_impossible_prompt_is_a_task_failure(prompt: Any, named: str) -> None:
    class Bad(Toy):
        def tasks(self, split: Split, level: int, seed: int) -> Task:
            return Task("bad", prompt)

    result = run(Bad())
    assert result.cause == "task" and named in result.error


# ---------------------------------------------------------------- packing


def test_packed_samples_come_back_as_they_were() -> None:
    recipe = replace(RECIPE, sampling=Sampling(top_k=5, max_new_tokens=6))
    result = run(Toy(), recipe=recipe)
    [(body, frames)] = pack_samples(LEASE, result.samples)
    arrays = unpack_arrays(body.arrays, frames)
    cu = arrays["cu_seqlens"].tolist()
    assert (body.lease_id, body.attempt, body.lineage) == (5, 1, 77) and len(cu) == 5
    for sample, start, end in zip(result.samples, cu, cu[1:], strict=False):
        assert arrays["tokens"][start:end].tolist() == sample.tokens.tolist()
        assert arrays["behaviour_logprob"][start:end].tolist() == sample.logprobs.tolist()
        assert arrays["loss_mask"][start:end].tolist() == sample.mask.tolist()
        offsets = arrays["support_cu"][start : end + 1]
        ids = [arrays["support_ids"][a:b].tolist() for a, b in itertools.pairwise(offsets)]
        assert ids == [[], [], [], [], [11, 9], [0, 9]]
    assert len(arrays["support_cu"]) == cu[-1] + 1


def test_routed_experts_travel_with_their_tokens() -> None:
    """Two layers of two experts: a row for each token that was fed back, -1 for the last one."""

    def answer(request: GenerateRequest) -> Generation:
        assert request.sampling.want_experts
        rows = len(request.ids) + 2 - 1
        experts = np.arange(rows * 4, dtype=np.int16).reshape(rows, 4)
        return Generation([11, 9], [-0.5, -0.25], [(77, 3, 2)], "stop", None, experts)

    recipe = replace(RECIPE, engine=EngineConfig(routed_experts=True))
    result = run(Toy(), recipe=recipe, engine=Echo(answer))
    [(body, frames)] = pack_samples(LEASE, result.samples)
    arrays = unpack_arrays(body.arrays, frames)
    assert arrays["routed_experts"].shape == (len(arrays["tokens"]), 4)
    first = arrays["routed_experts"][: int(arrays["cu_seqlens"][1])]
    assert (first[-1] == -1).all() and first[:-1].flatten().tolist() == list(range(first[:-1].size))


def test_a_second_turn_leaves_the_experts_of_the_first() -> None:
    turns: list[int] = []

    def answer(request: GenerateRequest) -> Generation:
        turns.append(len(request.ids) + 1)
        return Generation(
            [11, 0], [-0.5, -0.25], [(77, 3, 2)], "stop", None, np.full((turns[-1], 4), len(turns), np.int16)
        )

    recipe = replace(RECIPE, engine=EngineConfig(routed_experts=True))
    lease = msgspec.structs.replace(LEASE, indices=[2])
    (sample,) = run(TwoTurns(), lease, recipe=recipe, engine=Echo(answer)).samples
    first, second = turns
    assert sample.experts is not None
    assert sample.experts[:, 0].tolist() == [1] * first + [2] * (second - first) + [-1]


def test_many_samples_are_split_below_the_metas_limit() -> None:
    names = {f"component-{number}": 0.5 for number in range(150)}
    lease = msgspec.structs.replace(LEASE, indices=list(range(64)))
    result = run(Toy(lambda task, completion: Score(1.0, True, names)), lease)
    messages = pack_samples(lease, result.samples)
    assert len(messages) > 1
    assert [meta.index for body, _ in messages for meta in body.samples] == [s.meta.index for s in result.samples]
    assert all(len(pack_meta(body)) <= META_LIMIT_BYTES for body, _ in messages)
    huge = {f"component-{number}": 0.5 for number in range(5000)}
    result = run(Toy(lambda task, completion: Score(1.0, True, huge)))
    with pytest.raises(OversizedSample, match=str(META_ROOM_BYTES)):
        pack_samples(LEASE, result.samples)


@pytest.mark.parametrize(
    ("ids", "experts", "fits"),
    [
        (FRAME_LIMIT_BYTES, 0, True),
        (FRAME_LIMIT_BYTES, SAMPLE_BYTES - FRAME_LIMIT_BYTES - 1024, True),
        (FRAME_LIMIT_BYTES + 4, 0, False),
        (FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES, False),
    ],
)
def test_a_sample_is_as_large_as_the_broker_takes_or_refused_with_its_size(ids: int, experts: int, fits: bool) -> None:
    (sample,) = run(Toy(), msgspec.structs.replace(LEASE, indices=[0])).samples
    offsets = np.linspace(0, ids // 4, len(sample.tokens) + 1).astype(np.int64)
    routed = np.zeros(experts // 2, np.int16) if experts else None
    sample = replace(sample, support=(np.zeros(ids // 4, np.int32), offsets), experts=routed)
    if fits:
        ((body, frames),) = pack_samples(LEASE, [sample])
        assert len(pack_meta(body)) + sum(frame.nbytes for frame in frames) <= LARGEST_BYTES
    else:
        with pytest.raises(
            OversizedSample, match=f"at most {SAMPLE_BYTES} and {FRAME_LIMIT_BYTES}: sample fewer tokens"
        ):
            pack_samples(LEASE, [sample])


# ---------------------------------------------------------------- the catalog


def check(domain: Any) -> None:
    asyncio.run(check_domain(DomainConfig("toy", "m"), domain, TEXT, NoSandbox(), (0,)))


def test_a_domain_whose_own_answer_fails_is_refused() -> None:
    check(Toy())
    seen: list[Completion] = []

    def right(task: Task, completion: Completion) -> Score:
        seen.append(completion)
        return Score(1.0, True)

    check(Toy(right))
    assert seen[0].ids == [2, 12, 0] and seen[0].text == "b!" and seen[0].finish_reason == "stop"
    with pytest.raises(DomainRefused, match=r"'b!'.*reward 0\.0"):
        check(Toy(lambda task, completion: Score(0.0, False)))
    with pytest.raises(DomainRefused, match="odd task"):
        check(Toy(raising))
    with pytest.raises(episodes.Failed):
        check(Judged())


def test_domains_are_loaded_only_from_allowed_modules() -> None:
    recipe = Recipe(domains=(DomainConfig("toy", "os"),))
    with pytest.raises(ConfigError, match="module os is not allowed on this host"):
        check_allowed(recipe, {"temper.actor.domains.reverse"})
    check_allowed(recipe, {"os"})
    with pytest.raises(DomainRefused, match="no_such_module"):
        load_domain(DomainConfig("toy", "no_such_module"))
    with pytest.raises(DomainRefused, match="has no attribute 'make'"):
        load_domain(DomainConfig("toy", "json"))
    made = load_domain(DomainConfig("r", "temper.actor.domains.reverse"))
    assert isinstance(made.tasks("train", 0, 1), Task)
