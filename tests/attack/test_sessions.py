"""Sessions: state across turns, limits of each step, the workspace at the end, and nothing left whatever ends them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from temper.actor.tools import ToolLost, ToolSession
from temper.common.schema import Limits, SandboxJob, TestCase, Verdict
from temper.sandbox.cell import Cell
from temper.sandbox.jail import Host
from temper.sandbox.run import JailFailed
from temper.sandbox.worker import Worker

LIMITS = Limits(wall_s=4.0, cpu_s=0.5, memory_bytes=128 << 20, output_bytes=10_000)

Turn = Callable[..., Awaitable[Verdict]]


def story(tell: Callable[[Worker, Turn], Awaitable[None]], language: str = "python", **options: Any) -> None:
    """Run `tell(worker, turn)`; afterwards nothing of any session is left."""

    async def main() -> None:
        async with Worker(Host.here(), 2) as worker:

            async def turn(*steps: str, name: str = "s", close: bool = False, **more: Any) -> Verdict:
                tests = [TestCase(step.encode()) for step in steps]
                job = SandboxJob(
                    "job", language, more.pop("files", {}), tests, LIMITS, session_id=name, close_session=close
                )
                job = msgspec.structs.replace(job, **{**options, **more})
                return await worker.execute(job)

            await tell(worker, turn)
        assert len(worker.sessions) == 0

    asyncio.run(asyncio.wait_for(main(), 100))


def test_python_keeps_its_state() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        assert (await turn("x = 40")).outcome == "ok"
        assert (await turn("x + 2")).stdout == b"42\n"
        verdict = await turn("1 / 0")
        assert verdict.outcome == "error" and b"ZeroDivisionError" in verdict.stderr
        assert (await turn("x", "def f(): return x", "f() * 2")).tests[2].stdout == b"80\n"
        assert (await turn("this is no python")).outcome == "error"
        assert (await turn("import os; print(os.getcwd()); x")).stdout == b"/tmp\n40\n"

    story(tell)


def test_a_shell_keeps_its_state() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        await turn("cd /dev/shm; A=5; f() { echo $((A * 2)); }")
        assert (await turn("pwd; f")).stdout == b"/dev/shm\n10\n"
        verdict = await turn("ls /no/such/place")
        assert verdict.outcome == "error" and b"No such file" in verdict.stderr
        assert (await turn("echo still here; false; true")).outcome == "ok"
        assert (await turn("sleep 50; echo woke")).outcome == "timeout"
        assert (await turn("f")).stdout == b"10\n"

    story(tell, "bash", limits=Limits(wall_s=0.7, cpu_s=0.5))


def test_two_sessions_do_not_meet() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        await asyncio.gather(turn("x = 1; open('a', 'w').write('1')", name="a"), turn("x = 2", name="b"))
        assert (await turn("x", name="a")).stdout == b"1\n"
        assert (await turn("import os; (x, os.listdir('/tmp'))", name="b")).stdout == b"(2, [])\n"

    story(tell)


def test_an_overrun_is_interrupted_and_the_session_lives() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        await turn("x = 1")
        assert (await turn("while True: x += 1")).outcome == "timeout"
        assert (await turn("x > 1")).stdout == b"True\n"
        verdict = await turn("while True: print('flood' * 100)")
        assert verdict.outcome == "output" and verdict.truncated and len(verdict.stdout) == LIMITS.output_bytes
        assert (await turn("'alive'")).stdout == b"'alive'\n"

    story(tell)


def test_what_does_not_heed_the_interrupt_ends_the_session() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        assert (await turn(deaf)).outcome == "timeout"
        verdict = await turn("1")
        assert verdict.outcome == "error" and b"the session has ended" in verdict.stderr

    story(tell)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os; os._exit(3)", "error"),
        ("exit()", "ok"),
        ("import os; os.kill(os.getpid(), 9)", "signal"),
        ("import ctypes; ctypes.CDLL(None).chroot(b'/')", "policy"),
        ("x = [bytearray(1 << 20) for _ in range(999)]", "memory"),
        ("import os; os.write(3, b'0'); os._exit(3)", None),
        ("import os; os.close(4); os.close(3)", "ok"),
    ],
)
def test_a_step_that_ends_the_interpreter(code: str, outcome: str | None) -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        verdict = await turn(code)
        assert outcome is None or verdict.outcome in (outcome, "error"), verdict
        assert (await turn("print('again')")).outcome in ("error", "ok")

    story(tell)


def test_the_workspace_comes_back_without_links_and_within_its_bounds() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        await turn(
            "import os; os.mkdir('d'); open('d/b', 'wb').write(b'\\xff\\0'); os.symlink('/etc/passwd', 'link'); os.mkfifo('f')\n"
            "open('big', 'wb').truncate(60 << 20); os.mkdir('shut'); open('shut/x', 'w'); os.chmod('shut', 0); open('empty', 'w')",
            files={"given/a.txt": b"hello"},
        )
        verdict = await turn("open('given/a.txt').read()", close=True)
        assert verdict.stdout == b"'hello'\n"
        assert verdict.files == {"given/a.txt": b"hello", "d/b": b"\xff\0", "empty": b""}, verdict.files.keys()
        assert (await turn("import os; os.listdir('/tmp')")).stdout == b"[]\n", "a new session"

    story(tell)


def test_no_workspace_is_too_hostile_for_its_snapshot() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        verdict = await turn(
            "import os\nfor name in ('stat.py', 'struct.py', 'os.py', 'sys.py'): open(name, 'w').write('raise SystemExit(9)')",
            "os.symlink('.', 'loop'); os.symlink('loop2', 'loop2'); os.mkfifo('temper_snapshot.py'); os.mkdir('main.py')",
            "for name in (b'-rf', b'new\\nline', b'\\xff'): open(name, 'wb').write(name)",
            "open('big', 'wb').truncate(60 << 20); open('sparse', 'wb').truncate(1 << 20); open('last', 'w').write('z')",
            "for i in range(2500): os.mkdir('d'); os.chdir('d')",
            "os.chdir('/tmp')\ntry:\n    for i in range(9999): open(f'{i}', 'w').close()"
            "\nexcept OSError as error: print(error.errno)",
            "file = open('big', 'r+b')\ntry:\n    while True: n = file.write(bytes(1 << 20))"
            "\nexcept OSError as error: print(error.errno)",
            close=True,
        )
        assert [test.stdout for test in verdict.tests[-2:]] == [b"28\n", b"28\n"], verdict
        files = verdict.files
        assert (
            files["last"] == b"z"
            and files["-rf"] == b"-rf"
            and files["new\nline"] == b"new\nline"
            and files["\\xff"] == b"\xff"
        )
        assert files["sparse"] == bytes(1 << 20) and "big" not in files and files["stat.py"] == b"raise SystemExit(9)"
        assert not {"loop", "loop2", "temper_snapshot.py"} & files.keys() and len(files) > 1000

    story(tell, limits=Limits(wall_s=10.0, cpu_s=5.0, memory_bytes=256 << 20))


def test_a_session_imports_from_its_own_workspace() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        await turn("open('mine.py', 'w').write('x = 7')")
        assert (await turn("import mine; mine.x")).stdout == b"7\n"
        assert (await turn("import os; os.listdir('/tmp')", name="other")).stdout == b"[]\n"

    story(tell)


def test_an_episodes_tool_meets_real_jails() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        class Direct:
            async def run(self, job: SandboxJob) -> Verdict:
                return await worker.execute(msgspec.structs.replace(job, limits=LIMITS))

            def end_session(self, name: str) -> None:
                worker.sessions.end(name)

        one, two, died = (ToolSession(Direct(), seed, 30.0) for seed in (1, 2, 3))
        await one.step("import random; x = random.random(); open('note', 'w').write('one')", "python")
        await two.step("echo two > note", "bash")
        await died.step("x = 1", "python")
        assert (await one.step("1 / 0", "python")).outcome == "error"
        assert float((await one.step("x", "python")).stdout) > 0
        assert await one.close() == {"note": b"one"} and await two.close() == {"note": b"two\n"}
        died.abandon()
        with pytest.raises(ToolLost, match="not there any more"):
            await gone(Direct())

    async def gone(grader: Any) -> None:
        lost = ToolSession(grader, 1, 30.0)
        await lost.step("1", "python")
        grader.end_session(lost._name)
        await lost.step("1", "python")

    story(tell)


def test_what_goes_on_between_steps_has_a_steps_cpu_time() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        await turn("import os\nif not os.fork():\n    while True: pass")
        cell = next(iter(worker.sessions._entries.values())).cell
        await asyncio.wait_for(asyncio.shield(next(iter(worker.sessions._entries.values())).session._ended), 60)
        verdict = await turn("1", resume=True)
        assert verdict.outcome == "error" and b"between steps" in verdict.stderr, verdict
        assert cell.alive, "the jail is there until the session is closed"

    story(tell)


def test_a_later_step_does_not_open_an_empty_session() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        verdict = await turn("1", resume=True)
        assert verdict.outcome == "infra" and "not there any more" in verdict.detail, verdict
        assert len(worker.sessions) == 0
        await turn("x = 1")
        assert (await turn("x", resume=True)).stdout == b"1\n"

    story(tell)


def test_a_deadline_and_a_cancel_sweep_the_session() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        step = asyncio.ensure_future(turn("x = 1", session_s=0.3))
        while not worker.sessions._entries:  # noqa: ASYNC110  (seen before its deadline, which comes in a later turn)
            await asyncio.sleep(0)
        cell = next(iter(worker.sessions._entries.values())).cell
        await asyncio.wait_for(cell.ended(), 60)
        await step
        assert len(worker.sessions) == 0
        task = asyncio.ensure_future(turn("import time; time.sleep(30)", name="t"))
        await asyncio.wait([task], timeout=0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(worker.sessions) == 0

    story(tell)


def test_a_session_that_cannot_be_opened_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cell: Cell, message: bytes, fds: Any = ()) -> None:
        raise JailFailed("the init does not take messages")

    async def tell(worker: Worker, turn: Turn) -> None:
        await turn("1", close=True)
        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patched:
            patched.setattr(Cell, "send", refuse)
            assert (await turn("1", name="other")).outcome == "infra"
        assert len(os.listdir("/proc/self/fd")) == len(before)

    story(tell)


def test_a_session_asks_only_for_what_there_is() -> None:
    async def tell(worker: Worker, turn: Turn) -> None:
        verdict = await turn("1", session_s=0.0)
        assert verdict.outcome == "infra" and "session_s" in verdict.detail

    story(tell)
