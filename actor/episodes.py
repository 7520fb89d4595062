"""One lease from task to scored samples: the same function in an actor, an evaluator and the in-process loop.

Guarantees: each index yields one `SampleOut` or counts as missing with a cause; ids that the engine sampled are never
re-encoded; a domain that raises, returns nonsense or never returns costs its own lease only (cause ``task``), a failing
engine or sandbox is cause ``infra``, a drained engine cause ``drain``; an infra outcome never becomes a sample. Touches
nothing but its arguments: the daemon wires it to the broker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from temper.actor.driver import EpisodeOver, SampleDriver
from temper.actor.engines.base import Cancel, Engine, SamplingParams
from temper.actor.grading_time import GradingTime
from temper.actor.text import Text
from temper.actor.tools import ToolLost, ToolSession
from temper.common.config import Recipe
from temper.common.domains import Completion, Domain, Grader, Score, Split, Task, derive_seed
from temper.common.errors import EngineError, TemperError
from temper.common.recipe_derived import domain_sampling
from temper.common.schema import FinishReason, Lease, Outcome, SampleMeta, SandboxJob, Verdict

MOST_REASON = 300  # characters of a sandbox's reason in a message
SCORE_TIMEOUT_S = 30.0  # a domain's own time for one score; waiting for sandbox verdicts is not counted
Cause = Literal["task", "infra", "drain"]
_OUTCOMES = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class SampleOut:
    """A finished sample: `tokens` i32[N] (prompt included), `logprobs` f32[N], `mask` u8[N]; 0 where not sampled.

    `support`: (ids i32[M], cu i64[N + 1]) of what truncation left at each token, or None. `experts`: i16[N, layers *
    experts per token] that each token was routed to, -1 where unknown, or None.
    """

    meta: SampleMeta
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint8]
    support: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]] | None = None
    experts: npt.NDArray[np.int16] | None = None


@dataclass(slots=True)
class LeaseResult:
    """`samples` in order of completion; `cause` None when no index is missing, else why the others are."""

    samples: list[SampleOut] = field(default_factory=list)
    cause: Cause | None = None
    error: str = ""


class Failed(Exception):
    """A sample that cannot be delivered."""

    def __init__(self, cause: Cause, error: str) -> None:
        super().__init__(error)
        self.cause: Cause = cause


@dataclass(frozen=True, slots=True)
class _Context:
    lease: Lease
    domain: Domain
    engine: Engine
    text: Text
    grader: Grader
    judging: GradingTime
    recipe: Recipe
    cancel: Cancel | None
    params: SamplingParams


async def run_lease(
    lease: Lease,
    domain: Domain,
    engine: Engine,
    text: Text,
    grader: Grader,
    recipe: Recipe,
    *,
    cancel: Cancel | None = None,
    on_sample: Callable[[SampleOut], None] | None = None,
    on_prolonged: Callable[[float], None] | None = None,
) -> LeaseResult:
    """Run the samples that `lease` names. `cancel` ends it early (cause drain), with the finished ones kept.

    `on_sample` hears of each sample as soon as it is scored. `lease.deadline_s` runs from this call; what jobs need beyond it
    is told to `on_prolonged`, in seconds from then.
    """
    params = sampling_params(lease, text, recipe)
    limit = asyncio.timeout(lease.deadline_s)
    judging = GradingTime(grader, recipe.sandbox, limit, SCORE_TIMEOUT_S, on_prolonged)
    context = _Context(lease, domain, engine, text, grader, judging, recipe, cancel, params)
    result = LeaseResult()
    try:
        work = [_demonstrate(context, i) for i in lease.indices] if lease.lane == "demo" else _samples(context)
    except Failed as error:
        return LeaseResult([], error.cause, str(error))
    tasks = [asyncio.create_task(one, name=lease_name(lease.lease_id)) for one in work]
    try:
        async with limit:
            for finished in asyncio.as_completed(tasks):
                _collect(result, await _outcome(finished), on_sample)
    except TimeoutError:
        waiting = sum(not task.done() for task in tasks)
        end = f"the lease's deadline of {lease.deadline_s:.0f} s and what its jobs may take beyond it"
        _fail(result, "infra", f"{waiting} samples unfinished at {end}")
    finally:
        for task in tasks:
            task.cancel()
    return result


def lease_name(lease_id: int) -> str:
    """The name of the asyncio tasks that work on a lease."""
    return f"lease-{lease_id}"


def sampling_params(lease: Lease, text: Text, recipe: Recipe) -> SamplingParams:
    """The domain's sampling in this lane, without seed. The eval lane has its own temperature and top-p and no other
    truncation."""
    s, eval_lane = recipe.sampling, lease.lane == "eval"
    own = domain_sampling(recipe, next((d for d in recipe.domains if d.name == lease.domain), None))
    params = SamplingParams(
        temperature=own.eval_temperature if eval_lane else s.temperature,
        top_p=recipe.eval.top_p if eval_lane else s.top_p,
        top_k=0 if eval_lane else s.top_k,
        min_p=0.0 if eval_lane else s.min_p,
        max_new_tokens=own.max_new_tokens,
        stop_token_ids=text.stop_ids(own.stop),
        lines=text.lines() if own.stop_unindented else None,
    )
    return replace(
        params,
        want_support=params.truncates and not eval_lane,
        want_experts=recipe.engine.routed_experts and not eval_lane,
    )


def sample_seed(lease: Lease, index: int, recipe: Recipe) -> int:
    """The seed of one sample: the same whoever runs the lease, and whenever."""
    if lease.lane == "eval":
        return derive_seed(recipe.run.seed, "eval", lease.domain, lease.task_seed, index)
    return derive_seed(recipe.run.seed, "sample", lease.lease_id, index)


def make_task(domain: Domain, lease: Lease, task_seed: int) -> Task:
    """The task of a seed. Failed("task") if the domain can't make it."""
    split: Split = "eval" if lease.lane == "eval" else "train"
    try:
        return domain.tasks(split, lease.level, task_seed)
    except Exception as error:
        raise Failed("task", f"{lease.domain}.tasks({split}, {lease.level}, {task_seed}): {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[:500] + place


# ---------------------------------------------------------------- collecting


async def _outcome(finished: Any) -> SampleOut | Failed:
    try:
        sample: SampleOut = await finished
        return sample
    except Failed as error:
        return error


def _collect(result: LeaseResult, outcome: SampleOut | Failed, on_sample: Callable[[SampleOut], None] | None) -> None:
    if isinstance(outcome, Failed):
        _fail(result, outcome.cause, str(outcome))
        return
    result.samples.append(outcome)
    if on_sample is not None:
        on_sample(outcome)


def _fail(result: LeaseResult, cause: Cause, error: str) -> None:
    """Keep the gravest cause: what the task did itself, before infrastructure, before a drain."""
    order = (None, "drain", "infra", "task")
    if order.index(cause) > order.index(result.cause):
        result.cause, result.error = cause, error


# ---------------------------------------------------------------- one sample


def _samples(context: _Context) -> list[Coroutine[Any, Any, SampleOut]]:
    lease = context.lease
    task = make_task(context.domain, lease, lease.task_seed)
    prompt = _prompt_ids(context, task)
    return [_sample(context, task, prompt, index) for index in lease.indices]


def _prompt_ids(context: _Context, task: Task) -> list[int]:
    try:
        ids = context.text.prompt_ids(task.prompt)
    except (TemperError, TypeError, ValueError) as error:
        raise Failed("task", f"prompt of {task.key[:100]!r}: {describe(error)}") from error
    room = context.recipe.model.max_length_tokens - len(ids)
    if not ids or room < 1:
        raise Failed(
            "task",
            f"prompt of {task.key[:100]!r} has {len(ids)} tokens, expected 1 to {context.recipe.model.max_length_tokens - 1}",
        )
    return ids


async def _sample(context: _Context, task: Task, prompt: list[int], index: int) -> SampleOut:
    seed = sample_seed(context.lease, index, context.recipe)
    # The box outlives the lease by a program's time, or the last step would meet a dead one.
    tools = ToolSession(context.grader, seed, context.lease.deadline_s + context.recipe.sandbox.wall_s)
    driver = SampleDriver(
        prompt, context.engine, context.text, context.params, seed, context.recipe, context.cancel, tools
    )
    try:
        completion = await _episode(context, task, driver)
        completion.files = await tools.close()
    except ToolLost as error:
        raise Failed("infra", str(error)) from error
    finally:
        tools.abandon()
    score = await score_completion(context.domain, context.lease.domain, task, completion, context.judging)
    return assemble(context, task, prompt, completion, score, index)


async def _episode(context: _Context, task: Task, driver: SampleDriver) -> Completion:
    """What the domain's episode made of the driver's sample."""
    try:
        episode = getattr(context.domain, "episode", None)
        await (driver.generate() if episode is None else episode(task, driver))
    except EpisodeOver:
        pass
    except EngineError as error:
        raise Failed("infra", f"engine: {error}") from error
    except ToolLost:
        raise
    except Exception as error:
        raise Failed("task", f"{context.lease.domain}.episode: {describe(error)}") from error
    if driver.aborted:
        raise Failed("drain", "the generation was aborted")
    completion = driver.completion()
    if not any(completion.loss_mask):
        raise Failed("task", f"{context.lease.domain}.episode sampled nothing for {task.key[:100]!r}")
    return completion


async def score_completion(domain: Domain, name: str, task: Task, completion: Completion, grader: Grader) -> Score:
    """The domain's score, checked. Failed("task") if it raises, returns nonsense or takes too long; Failed("infra") for
    an infra outcome, which is no score."""
    try:
        async with asyncio.timeout(SCORE_TIMEOUT_S) as limit:
            patient = _PatientGrader(grader, limit)
            score = await domain.score(task, completion, patient)
    except TimeoutError as error:
        raise Failed("task", f"{name}.score took over {SCORE_TIMEOUT_S:.0f} s for {task.key[:100]!r}") from error
    except Failed:
        raise
    except Exception as error:
        raise Failed("task", f"{name}.score: {describe(error)}") from error
    problem = score_problem(score, len(completion.ids))
    if problem:
        raise Failed("task", f"{name}.score of {task.key[:100]!r}: {problem}")
    if score.outcome == "infra":
        why = patient.why or "no reason given"
        raise Failed("infra", f"{name}: the sandbox could not judge {task.key[:100]!r}: {why[:MOST_REASON]}")
    return score


def score_problem(score: Any, tokens: int) -> str:
    """What is wrong with a score for a completion of `tokens` tokens; empty when nothing is."""
    if not isinstance(score, Score):
        return f"returned {type(score).__name__}, expected Score"
    numbers = [*score.components.values(), *(value for _, value in score.step_rewards)]
    if score.reward is not None:
        numbers.append(score.reward)
    if any(isinstance(n, bool) or not isinstance(n, (int, float)) or not math.isfinite(n) for n in numbers):
        return f"a value that is not a finite number: reward {score.reward}, components {dict(score.components)}"
    if any(not 0 <= at < tokens for at, _ in score.step_rewards):
        return f"a step reward outside the completion's {tokens} tokens"
    if score.correct not in (None, True, False) or score.outcome not in _OUTCOMES:
        return f"correct {score.correct!r}, outcome {score.outcome!r}: expected a bool or None, one of {', '.join(_OUTCOMES)}"
    return ""


class _PatientGrader:
    """Stops a domain's clock while it waits for verdicts. `why`: what the last one said that was none."""

    def __init__(self, grader: Grader, limit: asyncio.Timeout) -> None:
        self._grader, self._limit, self._open, self._left = grader, limit, 0, SCORE_TIMEOUT_S
        self.why = ""

    async def run(self, job: SandboxJob) -> Verdict:
        loop = asyncio.get_running_loop()
        if self._open == 0:
            self._left = (self._limit.when() or loop.time()) - loop.time()
            self._limit.reschedule(None)
        self._open += 1
        try:
            verdict = await self._grader.run(job)
            if verdict.outcome == "infra":
                self.why = verdict.detail
            return verdict
        finally:
            self._open -= 1
            if self._open == 0 and not self._limit.expired():
                self._limit.reschedule(loop.time() + self._left)


async def _demonstrate(context: _Context, index: int) -> SampleOut:
    lease = context.lease
    task = make_task(context.domain, lease, derive_seed(lease.task_seed, index))
    prompt = _prompt_ids(context, task)
    completion = demonstration(context.domain, lease.domain, task, context.text, context.params.stop_token_ids)
    limit = context.recipe.model.max_length_tokens
    if len(prompt) + len(completion.ids) > limit:
        raise Failed("task", f"demonstration of {task.key[:100]!r} is longer than model.max_length_tokens = {limit}")
    completion.version_runs = [[lease.lineage, lease.min_version, len(completion.ids)]]
    return assemble(context, task, prompt, completion, Score(None, None), index)


def demonstration(domain: Domain, name: str, task: Task, text: Text, stops: Sequence[int]) -> Completion:
    """The domain's own answer as a completion, ended as the model would end it. Failed("task") if it has none."""
    try:
        answer = domain.demonstration(task)
    except Exception as error:
        raise Failed("task", f"{name}.demonstration: {describe(error)}") from error
    if answer is None:
        raise Failed("task", f"{name} has no demonstration for {task.key[:100]!r}: set its warm_start_share = 0")
    ids = text.encode(answer)
    if not ids or ids[-1] not in stops:
        ids.append(text.eos_ids[0])
    size = len(ids)
    return Completion(ids, [0.0] * size, [1] * size, [], "stop", text.decode(ids))


def assemble(
    context: _Context, task: Task, prompt: list[int], completion: Completion, score: Score, index: int
) -> SampleOut:
    """Prompt and completion as one row; the prompt's tokens count to the first version run."""
    before = len(prompt)
    runs = [(lineage, ordinal, count) for lineage, ordinal, count in completion.version_runs]
    lineage, ordinal, count = runs[0]
    runs[0] = (lineage, ordinal, count + before)
    finish: FinishReason = "length" if completion.finish_reason == "length" else "stop"
    meta = SampleMeta(
        index=index,
        finish_reason=finish,
        reward=None if score.reward is None else float(score.reward),
        correct=None if score.correct is None else bool(score.correct),
        components={str(key): float(value) for key, value in score.components.items()},
        outcome=score.outcome,  # type: ignore[arg-type]  # checked by score_problem
        version_runs=runs,
        step_rewards=[(before + at, float(value)) for at, value in score.step_rewards],
        task_key=task.key[:1000],
    )
    support = None
    if completion.support is not None:
        sizes = [0] * before + [len(ids) for ids in completion.support]
        flat = [token for ids in completion.support for token in ids]
        support = (np.array(flat, np.int32), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    return SampleOut(
        meta,
        np.array(prompt + completion.ids, np.int32),
        np.array([0.0] * before + completion.logprobs, np.float32),
        np.array([0] * before + completion.loss_mask, np.uint8),
        support,
        completion.experts,
    )
