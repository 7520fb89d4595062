"""Shared by the attack tests: run programs through the real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from temper.common.schema import Limits, SandboxJob, TestCase, Verdict
from temper.sandbox.jail import Host
from temper.sandbox.languages import LANGUAGES
from temper.sandbox.worker import Worker

Mode = Literal["fresh", "pool", "fork"]


class Jails:
    """Jobs of one file, and their verdicts."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def job(
        self, source: str | bytes, tests: Sequence[TestCase] = (), language: str = "python", **limits: Any
    ) -> SandboxJob:
        data = source.encode() if isinstance(source, str) else source
        files = {LANGUAGES[language].entry: data}
        return SandboxJob("attack", language, files, list(tests), Limits(**limits), mode=self.mode)

    @staticmethod
    def run(*jobs: SandboxJob, slots: int = 2) -> list[Verdict]:
        """The verdicts of `jobs`, one after the other in the same jail where jails are kept, with one slot."""

        async def main() -> list[Verdict]:
            async with Worker(Host.here(), slots) as worker:
                return list(await asyncio.gather(*(worker.execute(each) for each in jobs)))

        return asyncio.run(main())


@pytest.fixture(params=["fresh", "pool", "fork"])
def jails(request: pytest.FixtureRequest) -> Jails:
    """Every test that takes this runs in each of the three modes."""
    return Jails(request.param)
