"""`temper exec FILE`: one program through the same jails as a run's programs, for people.

Exit code 0 when the verdict is ok, 10 when it is anything else, 2 for a wrong flag or tests file, 4 where nsjail cannot run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from temper.common.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from temper.common.schema import SandboxJob, TestCase, Verdict

HELP = "execute one program in a jail and show its verdict"
NOT_OK = 10
EXTENSIONS = {
    ".py": "python",
    ".c": "c",
    ".cc": "c++",
    ".cpp": "c++",
    ".sh": "bash",
    ".js": "javascript",
    ".mjs": "javascript",
}
TEST_KEYS = ("stdin", "expected", "name", "suite", "weak")


def parser() -> argparse.ArgumentParser:
    """The command line of ``temper exec``."""
    made = argparse.ArgumentParser(prog="temper exec", description=HELP.capitalize() + ".")
    made.add_argument("file", type=Path, metavar="FILE", help="the program; - reads it from stdin (with --language)")
    made.add_argument("--language", metavar="L", help="python, c, c++, bash, javascript; default: by FILE's extension")
    made.add_argument("--stdin", type=Path, metavar="F", help="the program's input")
    made.add_argument(
        "--tests", type=Path, metavar="T.json", help='[{"stdin", "expected"} or {"suite": "assert f(1) == 2"}, ...]'
    )
    made.add_argument("--mode", choices=("fresh", "pool", "fork"), default="fresh", help="how its jail is made")
    made.add_argument("--memory-mb", type=int, default=256, metavar="N", help="memory limit (default 256)")
    made.add_argument("--cpu-s", type=float, default=2.0, metavar="N", help="cpu time limit (default 2)")
    made.add_argument("--wall-s", type=float, default=None, metavar="N", help="wall time limit (default 2.5 times cpu)")
    made.add_argument("--output-kb", type=int, default=64, metavar="N", help="output limit (default 64)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="the job's seed, TEMPER_SEED in its environment")
    made.add_argument("--host", type=Path, metavar="FILE", help="this host's own configuration, section [sandbox]")
    made.add_argument("--json", action="store_true", help="print the whole verdict as JSON")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the program; the exit code says whether its verdict is ok."""
    arguments = parser().parse_args(argv)
    from temper.sandbox.admission import refuse
    from temper.sandbox.check import check_host
    from temper.sandbox.hostfile import load_host
    from temper.sandbox.worker import Worker

    job = job_of(arguments)
    if problem := refuse(job):
        raise ConfigError(problem)
    host = load_host(arguments.host)

    async def run() -> Verdict:
        async with Worker(host, slots=1) as worker:
            return await worker.execute(job)

    verdict = asyncio.run(run())
    if verdict.outcome == "infra":
        report = check_host(host)
        raise EnvironmentFault(verdict.detail if report.ok else report.line())
    print(json.dumps(as_json(verdict), indent=1) if arguments.json else as_text(verdict, job.tests))
    return 0 if verdict.outcome == "ok" else NOT_OK


def job_of(arguments: argparse.Namespace) -> SandboxJob:
    """The job that the command line describes. ConfigError names what is wrong."""
    from temper.common.schema import Limits, SandboxJob, TestCase
    from temper.sandbox.languages import LANGUAGES

    language = arguments.language or EXTENSIONS.get(arguments.file.suffix.lower(), "")
    if language not in LANGUAGES:
        raise ConfigError(f"--language {language or 'is needed'}: one of {', '.join(sorted(LANGUAGES))}")
    source = sys.stdin.buffer.read() if str(arguments.file) == "-" else read(arguments.file)
    tests = [TestCase(read(arguments.stdin) if arguments.stdin else b"")]
    if arguments.tests:
        if arguments.stdin:
            raise ConfigError("--stdin and --tests exclude each other: each test has its own stdin")
        tests = tests_of(arguments.tests)
    limits = Limits(
        wall_s=2.5 * arguments.cpu_s if arguments.wall_s is None else arguments.wall_s,
        cpu_s=arguments.cpu_s,
        memory_bytes=arguments.memory_mb << 20,
        output_bytes=arguments.output_kb << 10,
    )
    files = {LANGUAGES[language].entry: source}
    return SandboxJob("exec", language, files, tests, limits, arguments.seed, arguments.mode)


def read(path: Path) -> bytes:
    """A file's bytes; ConfigError if there are none to read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def tests_of(path: Path) -> list[TestCase]:
    """The tests in a JSON file."""
    from temper.common.schema import TestCase

    try:
        rows: Any = json.loads(read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: expected a list of objects with {', '.join(TEST_KEYS)}")
    tests = []
    for number, row in enumerate(rows):
        for key, value in row.items():
            if key not in TEST_KEYS:
                raise ConfigError(f"{path}, test {number}: unknown key {key!r}; known: {', '.join(TEST_KEYS)}")
            wanted = bool if key == "weak" else str
            if not (isinstance(value, wanted) or (key == "expected" and value is None)):
                raise ConfigError(f"{path}, test {number}: {key} is {value!r}, expected {wanted.__name__}")
        expected = row.get("expected")
        tests.append(
            TestCase(
                stdin=row.get("stdin", "").encode(),
                expected=None if expected is None else expected.encode(),
                name=row.get("name", ""),
                suite=row.get("suite", "").encode(),
                weak=row.get("weak", False),
            )
        )
    return tests


def text(data: bytes) -> str:
    """Bytes of a program as text that can neither fail nor drive a terminal."""
    shown = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in shown)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict with its bytes as text."""
    import msgspec

    data: dict[str, Any] = {name: getattr(verdict, name) for name in verdict.__struct_fields__}
    data["tests"] = [{name: getattr(test, name) for name in test.__struct_fields__} for test in verdict.tests]
    return msgspec.json.decode(msgspec.json.encode(_texts(data)))


def _texts(value: Any) -> Any:
    if isinstance(value, bytes):
        return text(value)
    if isinstance(value, dict):
        return {key: _texts(inner) for key, inner in value.items()}
    return [_texts(inner) for inner in value] if isinstance(value, list) else value


def as_text(verdict: Verdict, tests: Sequence[TestCase]) -> str:
    """A few lines for people."""
    peak = "?" if verdict.peak_bytes is None else f"{verdict.peak_bytes / 2**20:.0f}"
    how = verdict.detail or f"exit code {verdict.exit_code}"
    lines = [f"{verdict.outcome} ({how}); wall {verdict.wall_s:.3f} s, cpu {verdict.cpu_s:.3f} s, peak {peak} MiB"]
    if len(verdict.tests) > 1:
        for number, (test, result) in enumerate(zip(tests, verdict.tests, strict=True)):
            lines.append(f"  test {test.name or number}: {result.outcome}, {result.wall_s * 1000:.1f} ms")
    for name, data in (("stdout", verdict.stdout), ("stderr", verdict.stderr)):
        if data:
            cut = ", cut" if verdict.truncated else ""
            lines += [f"--- {name} ({len(data)} bytes{cut})", text(data).rstrip("\n")]
    return "\n".join(lines)
