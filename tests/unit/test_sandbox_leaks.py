"""What fails half-way leaves no descriptor and no folder."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from temper.common.errors import EnvironmentFault
from temper.sandbox import worker as workers
from temper.sandbox.jail import Host, Interpreter
from temper.sandbox.state import State
from temper.sandbox.streams import streams
from temper.sandbox.worker import Worker


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_stream_that_cannot_be_made_leaves_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pipe2 = [], os.pipe2

    def scarce(flags: int) -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(1)
        return pipe2(flags)

    async def main() -> None:
        before = descriptors()
        monkeypatch.setattr(os, "pipe2", scarce)
        with pytest.raises(OSError, match="too many"):
            streams(asyncio.get_running_loop(), (1, 1), lambda: None)
        assert descriptors() == before

    asyncio.run(main())


def test_a_worker_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise EnvironmentFault("no interpreter")

    async def main() -> None:
        worker = Worker(Host(Path("/bin/true"), Interpreter.of()))
        before = descriptors()
        with pytest.raises(EnvironmentFault):
            await worker.__aenter__()
        assert len(descriptors()) == len(before) - 1, "the lock"

    monkeypatch.setattr(workers, "State", lambda: State(tmp_path / "base"))
    monkeypatch.setattr(workers, "Spawner", broken)
    asyncio.run(main())
    assert list((tmp_path / "base").iterdir()) == []
