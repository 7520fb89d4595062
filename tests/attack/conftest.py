"""Shared by the attack tests: run programs through the real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from temper.common.schema import Limits, SandboxJob, TestCase, Verdict
from temper.sandbox.jail import Host
from temper.sandbox.languages import LANGUAGES
from temper.sandbox.worker import Worker


class Jails:
    """Jobs of one file, and their verdicts."""

    @staticmethod
    def job(source: str | bytes, tests: Sequence[TestCase] = (), language: str = "python", **limits: Any) -> SandboxJob:
        data = source.encode() if isinstance(source, str) else source
        return SandboxJob("attack", language, {LANGUAGES[language].entry: data}, list(tests), Limits(**limits))

    @staticmethod
    def run(*jobs: SandboxJob, slots: int = 2) -> list[Verdict]:
        """The verdicts of `jobs`, all through one worker."""

        async def main() -> list[Verdict]:
            async with Worker(Host.here(), slots) as worker:
                return list(await asyncio.gather(*(worker.execute(each) for each in jobs)))

        return asyncio.run(main())


@pytest.fixture
def jails() -> Jails:
    return Jails()
