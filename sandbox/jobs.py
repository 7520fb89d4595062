"""What is done inside jails for a job: build it, run its tests, have them judged.

The expected answers, the suites and the checkers never enter the program's jail (a `weak` suite excepted): answers are
compared in this process, suites and checkers run in jails of their own, which the program's pool never lends. The build
and each test start in an emptied workspace.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from typing import Any

import msgspec
from temper.common.grading import suite_wall_s
from temper.common.schema import Checker, Limits, SandboxJob, TestCase, Verdict
from temper.sandbox import verdicts
from temper.sandbox.cell import Cell
from temper.sandbox.inside import protocol
from temper.sandbox.jail import INSIDE
from temper.sandbox.languages import BUILD_LIMITS, BUILT_LIMIT_BYTES, LANGUAGES, PROGRAM, Language
from temper.sandbox.run import Request
from temper.sandbox.streams import pack_bundle, sealed
from temper.sandbox.verdicts import Facts, Judgement

Lend = Callable[[], AbstractAsyncContextManager[Cell]]

SUITE_FILE = "suite.txt"
KEPT_BYTES = (
    32 * 1024 * 1024
)  # output of all tests of a job together that its verdict holds; later output is judged and dropped


class Visit:
    """The jail that a job's tests run in: one for all of them, or one each; a new one where the last one died."""

    def __init__(self, lend: Lend, one_each: bool) -> None:
        self._lend = lend
        self._one_each = one_each
        self._cell: Cell | None = None
        self._stack = AsyncExitStack()

    async def cell(self) -> Cell:
        """The jail for the next program."""
        if self._cell is not None and (self._one_each or not self._cell.alive):
            await self._stack.aclose()
            self._cell = None
        if self._cell is None:
            self._cell = await self._stack.enter_async_context(self._lend())
        return self._cell

    async def __aenter__(self) -> Visit:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._stack.__aexit__(*raised)


async def run_job(lend: Lend, job: SandboxJob, judges: Lend, on_test: Callable[[], None] = lambda: None) -> Verdict:
    """Build and test `job`; `lend` gives jails for the program, `judges` for suites and checkers. `on_test` hears of each
    test's end."""
    language = LANGUAGES[job.language]
    files = dict(job.files)
    async with Visit(lend, job.jail_per_test) as visit:
        if language.build:
            built = await build(await visit.cell(), language, files)
            if isinstance(built, Verdict):
                return built
            files[PROGRAM] = built
        runs: list[Facts] = []
        judged: list[Judgement] = []
        kept = 0
        with ExitStack() as stack:
            bundle = sealed("program", pack_bundle(language.arguments(job.limits), files, job.seed))
            stack.callback(os.close, bundle)
            for test in job.tests or [TestCase()]:
                facts, judgement = await run_test(await visit.cell(), job, test, bundle, judges)
                kept += len(facts.stdout) + len(facts.stderr)
                runs.append(facts if kept <= KEPT_BYTES else without_output(facts))
                judged.append(judgement)
                on_test()
    return verdicts.verdict_of(runs, judged, weak=any(test.suite and test.weak for test in job.tests))


def without_output(facts: Facts) -> Facts:
    """The same run, its output dropped and marked as truncated."""
    return dataclasses.replace(facts, stdout=b"", stderr=b"", stdout_cut=facts.stdout_cut or bool(facts.stdout))


async def run_test(cell: Cell, job: SandboxJob, test: TestCase, bundle: int, judges: Lend) -> tuple[Facts, Judgement]:
    """One test, in its way: a suite, the program's own interpreter, a checker or a comparison."""
    if test.suite and test.weak:
        return await run_weak(cell, job, test)
    if test.suite:
        return await run_suite(cell, job, test, judges)
    language = LANGUAGES[job.language]
    request = Request(language.kind, bundle, test.stdin, unbounded_address_space=language.reserves_memory)
    facts = await cell.run(request, job.limits)
    if job.checker is not None:
        return facts, await check(facts, test, job, job.checker, judges)
    return facts, verdicts.judge(facts, test, job.limits)


async def build(cell: Cell, language: Language, files: Mapping[str, bytes]) -> bytes | Verdict:
    """The built program, or the verdict that there is none."""
    script = f"{language.build} 1>&2 && cat {PROGRAM}"
    facts = await run_files(
        cell, protocol.COMMAND, ("/bin/sh", "-c", script), files, BUILD_LIMITS, stdout_limit=BUILT_LIMIT_BYTES
    )
    if facts.status == 0 and not facts.stdout_cut and not facts.killed:
        return facts.stdout
    return verdicts.not_built(facts, BUILD_LIMITS)


async def run_files(
    cell: Cell,
    kind: int,
    arguments: tuple[str, ...],
    files: Mapping[str, bytes],
    limits: Limits,
    seed: int = 0,
    *,
    stdin: bytes | int = b"",
    **options: object,
) -> Facts:
    """Run `arguments` once among `files`; `options` are the Request's."""
    bundle = sealed("program", pack_bundle(arguments, files, seed))
    try:
        return await cell.run(msgspec.structs.replace(Request(kind, bundle, stdin), **options), limits)
    finally:
        os.close(bundle)


def inside(name: str) -> bytes:
    """The text of a program of ours that runs in jails."""
    return (INSIDE / f"{name}.py").read_bytes()


async def check(facts: Facts, test: TestCase, job: SandboxJob, checker: Checker, judges: Lend) -> Judgement:
    """Have a test's output judged by the job's checker, in another jail."""
    if verdicts.classify(facts, job.limits)[0] != "ok":
        return verdicts.judge_checked(facts, None, job.limits, checker.limits)
    language = LANGUAGES[checker.language]
    files = {**checker.files, "input": test.stdin, "output": facts.stdout, "expected": test.expected or b""}
    async with judges() as judge:
        result = await run_files(
            judge, language.kind, language.arguments(checker.limits), files, checker.limits, job.seed,
            flags=protocol.LOUD, unbounded_address_space=language.reserves_memory,
        )  # fmt: skip
    return verdicts.judge_checked(facts, result, job.limits, checker.limits)


def suite_limits(limits: Limits) -> Limits:
    """The suite waits for the program, so it must be the last to run out of time."""
    return msgspec.structs.replace(
        limits, wall_s=suite_wall_s(limits.wall_s), cpu_s=limits.cpu_s + 2, memory_bytes=1 << 28
    )


async def run_suite(cell: Cell, job: SandboxJob, test: TestCase, judges: Lend) -> tuple[Facts, Judgement]:
    """The program in `cell` serves calls; the suite in another jail makes them. Two pipes connect the two."""
    limits = suite_limits(job.limits)
    plain = inside("plain")
    program = {**job.files, "temper_candidate.py": inside("candidate"), "temper_plain.py": plain}
    suite = {SUITE_FILE: test.suite, "temper_suite.py": inside("suite"), "temper_plain.py": plain}
    async with judges() as judge:
        with ExitStack() as stack:
            served_ends, asking_ends = stack.enter_context(ExitStack()), stack.enter_context(ExitStack())
            calls, calls_in = pipe(served_ends, asking_ends)
            replies, replies_in = pipe(asking_ends, served_ends)
            bundles = []
            for name, files in (("temper_candidate.py", program), ("temper_suite.py", suite)):
                bundles.append(sealed(name, pack_bundle((name,), files, job.seed)))
                stack.callback(os.close, bundles[-1])
            # Each run closes our copies once it has sent them, or nobody would ever see an end of file.
            served = Request(protocol.PYTHON, bundles[0], calls, stdout=replies_in, on_sent=served_ends.close)
            asking = Request(protocol.PYTHON, bundles[1], replies, stdout=calls_in, on_sent=asking_ends.close)
            facts, asked = await _both([cell.run(served, job.limits), judge.run(asking, limits)])
    return facts, verdicts.judge_suite(facts, asked, job.limits, limits)


def pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """A pipe whose ends these stacks close."""
    source, sink = os.pipe2(os.O_CLOEXEC)
    reader.callback(os.close, source)
    writer.callback(os.close, sink)
    return source, sink


async def _both(runs: Sequence[Coroutine[Any, Any, Facts]]) -> list[Facts]:
    running = [asyncio.ensure_future(run) for run in runs]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


async def run_weak(cell: Cell, job: SandboxJob, test: TestCase) -> tuple[Facts, Judgement]:
    """Program and suite in one interpreter, decided by a nonce after the last assert."""
    nonce = secrets.token_hex(16).encode()
    files = {**job.files, SUITE_FILE: test.suite, "temper_weak.py": inside("weak")}
    fd = sealed("nonce", nonce)
    try:
        facts = await run_files(
            cell, protocol.PYTHON, ("temper_weak.py",), files, job.limits, job.seed, stdin=test.stdin, extra=(fd,)
        )
    finally:
        os.close(fd)
    return facts, verdicts.judge_weak(facts, nonce, job.limits)
