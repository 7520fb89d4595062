"""Two real sandbox workers behind a real broker: what the death of one leaves, and where sessions live."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temper.common.schema import (
    Job,
    JobCancel,
    JobDone,
    Limits,
    SandboxJob,
    TestCase,
    Verdict,
    pack_frames,
    unpack_frames,
)
from temper.sandbox.state import default_base

from tests.protocol.broker_stage import Guest, Stage, stage

pytestmark = pytest.mark.system


class Farm:
    """A broker, its workers, and an actor that asks."""

    def __init__(self, scene: Stage, actor: Guest) -> None:
        self.scene = scene
        self.actor = actor
        self.workers: dict[str, asyncio.subprocess.Process] = {}
        self.numbers = iter(range(1000))

    async def start(self, *names: str, slots: int = 1) -> None:
        """Start workers and wait until the broker knows them."""
        for name in names:
            command = [sys.executable, "-P", "-m", "temper.sandbox", "--broker", self.scene.address, "--name", name]
            self.workers[name] = await asyncio.create_subprocess_exec(
                *command, "--slots", str(slots), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        for name in names:
            out = self.workers[name].stdout
            assert out is not None and (await out.readline()).startswith(b"READY"), name

    async def kill(self, name: str) -> None:
        """kill -9."""
        self.workers[name].kill()
        await self.workers[name].wait()

    async def ask(self, source: str, tests: list[TestCase], *, session: str | None = None, **options: object) -> str:
        """Send a job; its id."""
        name = f"j{next(self.numbers)}"
        files = {} if session else {"main.py": source.encode()}
        job = SandboxJob(name, "python", files, tests, session_id=session, **options)  # type: ignore[arg-type]
        await self.actor.peer.send(Job(name, 0, "code", session, job.close_session), pack_frames(job))
        return name

    async def answer(self) -> tuple[str, Verdict]:
        done, frames = await self.actor.next(JobDone)
        return done.job_id, unpack_frames(frames, Verdict)

    async def step(self, session: str, code: str, **options: object) -> Verdict:
        name = await self.ask("", [TestCase(code.encode())] if code else [], session=session, **options)
        found, verdict = await self.answer()
        assert found == name
        return verdict

    def folders(self, name: str) -> list[Path]:
        return list(default_base().glob(f"temper-{self.workers[name].pid}-*"))


@asynccontextmanager
async def farm(folder: Path) -> AsyncIterator[Farm]:
    async with stage(folder) as scene:
        made = Farm(scene, await scene.guest("actor", "actor-1", 1))
        try:
            yield made
        finally:
            for process in made.workers.values():
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                await process.wait()


def play(story: Callable[[Farm], Awaitable[None]]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="temper-") as folder:
            async with asyncio.timeout(110), farm(Path(folder)) as made:
                await story(made)

    asyncio.run(main())


def running(mark: str) -> list[int]:
    """nsjail processes that were started out of the folder `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{mark}/inside:".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def until(what: Callable[[], bool]) -> None:
    """Other processes come and go without an event."""
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def test_kill_9_of_a_worker_mid_job_runs_the_job_on_the_other_one_and_sweeps_orphans() -> None:
    async def story(farm: Farm) -> None:
        await farm.start("one", "two")
        folders = {worker: farm.folders(worker)[0] for worker in ("one", "two")}
        idle = {worker: len(running(folder.name)) for worker, folder in folders.items()}
        name = await farm.ask(
            "import time\ntime.sleep(3)\nprint('done')", [TestCase(expected=b"done")], limits=Limits(wall_s=30.0)
        )

        working: list[str] = []

        def look() -> bool:
            working[:] = [worker for worker, folder in folders.items() if len(running(folder.name)) > idle[worker]]
            return bool(working)

        await until(look)
        victim, folder = working[0], folders[working[0]]
        await farm.kill(victim)
        found, verdict = await farm.answer()
        assert (found, verdict.outcome) == (name, "ok"), verdict
        await until(lambda: not running(folder.name))
        await farm.start("three")
        assert not folder.exists(), "swept, by this one or by whoever started a worker on this host before"
        assert not list(Path("/sys/fs/cgroup").glob(f"**/{folder.name}"))
        marker = await farm.ask("print(1)", [TestCase(expected=b"1")])
        assert (await farm.answer())[0] == marker, "the killed job was answered once"

    play(story)


def test_sessions_live_on_one_worker_until_they_are_closed_ended_or_lost() -> None:
    async def story(farm: Farm) -> None:
        await farm.start("one", "two")
        for name in ("a", "b", "c", "d"):
            assert (await farm.step(name, f"x = {name!r}; open('note', 'w').write(x)")).outcome == "ok"
        for name in ("d", "c", "b", "a"):
            assert (await farm.step(name, "x", resume=True)).stdout == f"{name!r}\n".encode()
        assert (await farm.step("a", "", resume=True, close_session=True)).files == {"note": b"a"}
        await farm.actor.peer.send(JobCancel("b", session=True))
        for name in ("a", "b"):
            verdict = await farm.step(name, "x", resume=True)
            assert verdict.outcome == "infra" and "not there any more" in verdict.detail, verdict
        assert (await farm.step("c", "x", resume=True)).stdout == b"'c'\n", "the others are as they were"

        thief = await farm.scene.guest("actor", "thief", 1)
        job = SandboxJob("t0", "python", {}, [TestCase(b"x")], session_id="c")
        await thief.peer.send(Job("t0", 0, "code", "c"), pack_frames(job))
        assert "belongs to another peer" in str(await asyncio.wait_for(thief.peer.lost, 60))
        assert (await farm.step("c", "x", resume=True)).stdout == b"'c'\n"

        await farm.kill("one")
        await farm.kill("two")
        await farm.start("three")
        for name in ("c", "d"):
            verdict = await farm.step(name, "x", resume=True)
            assert verdict.outcome == "infra", "a session that is lost is no empty session"

    play(story)


def test_an_actor_that_dies_leaves_no_session_and_no_job() -> None:
    async def story(farm: Farm) -> None:
        await farm.start("one", slots=2)
        other = await farm.scene.guest("actor", "other", 1)
        job = SandboxJob("o0", "python", {}, [TestCase(b"x = 1")], session_id="theirs")
        await other.peer.send(Job("o0", 0, "code", "theirs"), pack_frames(job))
        assert (await other.next(JobDone))[0].outcome == "ok"
        loop = SandboxJob("o1", "python", {"main.py": b"while True: pass"}, [], Limits(wall_s=600.0, cpu_s=600.0))
        await other.peer.send(Job("o1", 0, "code"), pack_frames(loop))
        (folder,) = farm.folders("one")
        await until(lambda: len(running(folder.name)) >= 2)
        await other.peer.close("gone", 1)
        await until(lambda: not running(folder.name))

    play(story)
