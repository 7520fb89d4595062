"""Which jobs are refused unread, and why: a pure look at the job and at what this host has."""

from __future__ import annotations

from collections.abc import Iterable

from temper.common.schema import Limits, SandboxJob
from temper.sandbox.languages import LANGUAGES, PROGRAM

FILES_LIMIT = 256
FILES_LIMIT_BYTES = 32 * 1024 * 1024
TESTS_LIMIT = 1024
TESTS_LIMIT_BYTES = 256 * 1024 * 1024
NAME_LIMIT = 128
OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024


def refuse(job: SandboxJob) -> str:
    """Why `job` cannot be run at all, "" if it can."""
    if job.session_id is not None:
        return refuse_session(job)
    problem = refuse_program(job.language, job.files, job.limits)
    if not problem and job.checker is not None:
        problem = refuse_program(job.checker.language, job.checker.files, job.checker.limits)
        if not problem and LANGUAGES[job.checker.language].build:
            problem = f"a checker in {job.checker.language}, which must be built first"
        problem = problem and f"the checker: {problem}"
    if problem:
        return problem
    if len(job.tests) > TESTS_LIMIT:
        return f"{len(job.tests)} tests, at most {TESTS_LIMIT}"
    size = sum(len(test.stdin) + len(test.expected or b"") + len(test.suite) for test in job.tests)
    if size > TESTS_LIMIT_BYTES:
        return f"tests of {size} bytes together, at most {TESTS_LIMIT_BYTES}"
    if any(test.suite for test in job.tests) and job.language != "python":
        return f"suites of asserts call Python functions; this job's language is {job.language}"
    if job.checker is not None and any(test.suite for test in job.tests):
        return "a test has a suite of asserts and the job a checker: one of them"
    return ""


def refuse_session(job: SandboxJob) -> str:
    """A session needs no entry file: its steps are code."""
    if not 1 <= len(job.session_id or "") <= NAME_LIMIT:
        return f"the name of a session has {len(job.session_id or '')} characters, allowed 1 to {NAME_LIMIT}"
    if not 0.1 <= job.session_s <= 24 * 3600:
        return f"session_s = {job.session_s}, allowed 0.1 to 86400"
    if job.checker is not None or any(test.suite for test in job.tests):
        return "a session has no suites and no checker"
    return refuse_files(job.files) or refuse_limits(job.limits)


def refuse_program(language_name: str, files: dict[str, bytes], limits: Limits) -> str:
    """Why a program cannot be run here, "" if it can."""
    language = LANGUAGES.get(language_name)
    if language is None:
        return f"language {language_name!r} is unknown; known: {', '.join(sorted(LANGUAGES))}"
    if missing := language.missing():
        return f"language {language_name} needs {missing}, which is not on this host"
    if language.entry not in files:
        return f"a {language_name} job needs the file {language.entry}; it has {', '.join(sorted(files)[:8]) or 'none'}"
    if language.build and PROGRAM in files:
        return f"the file name {PROGRAM} is taken by what {language_name} builds"
    return refuse_files(files) or refuse_limits(limits)


def refuse_files(files: dict[str, bytes]) -> str:
    """A workspace has its bounds."""
    if len(files) > FILES_LIMIT:
        return f"{len(files)} files, at most {FILES_LIMIT}"
    size = sum(map(len, files.values()))
    if size > FILES_LIMIT_BYTES:
        return f"files of {size} bytes together, at most {FILES_LIMIT_BYTES}"
    return refuse_names(files)


def refuse_names(names: Iterable[str]) -> str:
    """File names must stay inside the workspace."""
    for name in names:
        parts = name.split("/")
        if not name or "\0" in name or len(name) > 255 or any(part in ("", ".", "..") for part in parts):
            return f"file name {name[:80]!r}: names are relative, without empty, . or .. parts"
    return ""


def refuse_limits(limits: Limits) -> str:
    """Limits must be within what the jails' outer bounds allow."""
    for what, value, least, most in (
        ("wall_s", limits.wall_s, 0.01, 3600.0),
        ("cpu_s", limits.cpu_s, 0.01, 3600.0),
        ("memory_bytes", limits.memory_bytes, 8 << 20, 1 << 40),
        ("pids", limits.pids, 1, 200),
        ("output_bytes", limits.output_bytes, 0, OUTPUT_LIMIT_BYTES),
    ):
        if not least <= value <= most:
            return f"limit {what} = {value}, allowed {least:g} to {most:g}"
    return ""
