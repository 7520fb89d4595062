"""What is done inside a jail for a job: build it, run its tests. And which jobs are refused unread.

The expected answers stay in this process. The build and each test start in an emptied workspace; what a test gets is the
job's files, the built program and the test's stdin.
"""

from __future__ import annotations

import os

from temper.common.schema import SandboxJob, TestCase, Verdict
from temper.sandbox import init as protocol
from temper.sandbox import verdicts
from temper.sandbox.cell import Cell
from temper.sandbox.languages import BUILD_LIMITS, BUILT_LIMIT_BYTES, LANGUAGES, PROGRAM, Language
from temper.sandbox.run import Request
from temper.sandbox.streams import pack_bundle, sealed

FILES_LIMIT = 256
FILES_LIMIT_BYTES = 32 * 1024 * 1024
OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024


async def run_job(cell: Cell, job: SandboxJob) -> Verdict:
    """Build and test `job` in `cell`."""
    language = LANGUAGES[job.language]
    files = dict(job.files)
    if language.build:
        built = await build(cell, language, files)
        if isinstance(built, Verdict):
            return built
        files[PROGRAM] = built
    tests = job.tests or [TestCase()]
    bundle = sealed("program", pack_bundle(language.arguments(job.limits), files))
    try:
        runs = [
            await cell.run(
                Request(language.kind, bundle, test.stdin, unbounded_address_space=language.reserves_memory), job.limits
            )
            for test in tests
        ]
    finally:
        os.close(bundle)
    return verdicts.combine(tests, runs, job.limits)


async def build(cell: Cell, language: Language, files: dict[str, bytes]) -> bytes | Verdict:
    """The built program, or the verdict that there is none."""
    script = f"{language.build} 1>&2 && cat {PROGRAM}"
    bundle = sealed("source", pack_bundle(("/bin/sh", "-c", script), files))
    try:
        request = Request(protocol.COMMAND, bundle, stdout_limit=BUILT_LIMIT_BYTES)
        facts = await cell.run(request, BUILD_LIMITS)
    finally:
        os.close(bundle)
    if facts.status == 0 and not facts.stdout_cut and not facts.killed:
        return facts.stdout
    return verdicts.not_built(facts, BUILD_LIMITS)


def refuse(job: SandboxJob) -> str:
    """Why a job cannot be run at all, "" if it can."""
    language = LANGUAGES.get(job.language)
    if language is None:
        return f"language {job.language!r} is unknown; known: {', '.join(sorted(LANGUAGES))}"
    if missing := language.missing():
        return f"language {job.language} needs {missing}, which is not on this host"
    if language.entry not in job.files:
        return (
            f"a {job.language} job needs the file {language.entry}; it has {', '.join(sorted(job.files)[:8]) or 'none'}"
        )
    if language.build and PROGRAM in job.files:
        return f"the file name {PROGRAM} is taken by what {job.language} builds"
    if len(job.files) > FILES_LIMIT:
        return f"{len(job.files)} files, at most {FILES_LIMIT}"
    size = sum(map(len, job.files.values()))
    if size > FILES_LIMIT_BYTES:
        return f"files of {size} bytes together, at most {FILES_LIMIT_BYTES}"
    for name in job.files:
        parts = name.split("/")
        if not name or "\0" in name or len(name) > 255 or any(part in ("", ".", "..") for part in parts):
            return f"file name {name[:80]!r}: names are relative, without empty, . or .. parts"
    limits = job.limits
    for what, value, least, most in (
        ("wall_s", limits.wall_s, 0.01, 3600.0),
        ("cpu_s", limits.cpu_s, 0.01, 3600.0),
        ("memory_bytes", limits.memory_bytes, 8 << 20, 1 << 40),
        ("pids", limits.pids, 1, 4096),
        ("output_bytes", limits.output_bytes, 0, OUTPUT_LIMIT_BYTES),
    ):
        if not least <= value <= most:
            return f"limit {what} = {value}, allowed {least:g} to {most:g}"
    return ""
