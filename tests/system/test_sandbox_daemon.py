"""A real sandbox worker process against a small broker: answers, cancels, drains, and what its death leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from temper.common.config import Recipe
from temper.common.pump import Delivery, Router
from temper.common.schema import (
    Goodbye,
    Hello,
    Job,
    JobCancel,
    JobDone,
    Limits,
    Metrics,
    SandboxJob,
    TestCase,
    Verdict,
    Welcome,
    pack_frames,
    unpack_frames,
)
from temper.sandbox.daemon import UNJAILED_ALLOWED
from temper.sandbox.state import default_base

pytestmark = pytest.mark.system


class Broker:
    """Just enough of a broker: hands out jobs, collects what comes back."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}"
        self.peer: asyncio.Queue[bytes] = asyncio.Queue()
        self.verdicts: asyncio.Queue[tuple[str, Verdict]] = asyncio.Queue()
        self.goodbyes: asyncio.Queue[Goodbye] = asyncio.Queue()
        self.counted: dict[str, float] = {}
        self.ticked = asyncio.Event()
        self.routers = [self._router("control"), self._router("bulk")]

    def _router(self, kind: str) -> Router:
        def welcome(peer: bytes, hello: Hello) -> Welcome:
            if kind == "control":
                self.peer.put_nowait(peer)
            return Welcome("run", msgspec.json.encode(Recipe()).decode(), 0, 1.0)

        return Router(self.address, kind, self._take, lambda peer, reason: None, welcome=welcome)

    def _take(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            body = delivery.body
            if isinstance(body, JobDone):
                self.verdicts.put_nowait(
                    (body.job_id, unpack_frames([memoryview(f) for f in delivery.frames], Verdict))
                )
            elif isinstance(body, Goodbye):
                self.goodbyes.put_nowait(body)
            elif isinstance(body, Metrics):
                for name, value in body.counters.items():
                    self.counted[name] = self.counted.get(name, 0.0) + value
                self.ticked.set()
            if delivery.sequence:
                self.routers[0].acknowledge(delivery.peer, delivery.sequence)

    def hand_out(self, peer: bytes, job_id: str, source: str, tests: list[TestCase], **limits: float) -> None:
        job = SandboxJob(job_id, "python", {"main.py": source.encode()}, tests, Limits(**limits))
        self.routers[0].send(peer, Job(job_id, 0, "code"), pack_frames(job))

    def close(self) -> None:
        for router in self.routers:
            router.close()


def start(address: str, *more: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "temper.sandbox", "--broker", address, "--name", "sandbox-t", *more]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def with_daemon(
    tmp_path: Path, story: Callable[[Broker, bytes, subprocess.Popen[str]], Awaitable[None]], *more: str
) -> str:
    """Run `story` beside a daemon; its stderr. Everything ends within 100 s or the test fails."""

    async def main() -> str:
        broker = Broker(tmp_path / "b")
        process = start(broker.address, *more)
        try:
            async with asyncio.timeout(100):
                peer = await broker.peer.get()
                await story(broker, peer, process)
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                return (await asyncio.to_thread(process.communicate))[1]
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            broker.close()

    return asyncio.run(main())


def test_jobs_are_answered_and_sigterm_drains(tmp_path: Path) -> None:
    async def story(broker: Broker, peer: bytes, process: subprocess.Popen[str]) -> None:
        expected = {}
        for i in range(8):
            answer = b"yes" if i % 2 else b"no"
            broker.hand_out(peer, f"j{i}", "print('yes')", [TestCase(expected=answer)])
            expected[f"j{i}"] = "ok" if i % 2 else "wrong"
        found = dict([await broker.verdicts.get() for _ in expected])
        assert {job_id: verdict.outcome for job_id, verdict in found.items()} == expected
        errors, last_s, first = 0, 0.25, "last"
        while first == "last":  # until it was still running when the other one had been answered
            last_s *= 2
            source = f"import time; time.sleep({last_s}); print(1)"
            broker.hand_out(peer, f"last {last_s}", source, [TestCase(expected=b"1")], wall_s=last_s + 5.0)
            broker.hand_out(peer, f"marker {last_s}", "1/0", [])
            errors += 1
            first = (await broker.verdicts.get())[0].split()[0]
            if first == "last":
                await broker.verdicts.get()
        process.send_signal(signal.SIGTERM)
        assert (await broker.verdicts.get())[1].outcome == "ok"
        assert (await broker.goodbyes.get()).exit_code == 0
        assert await asyncio.to_thread(process.wait) == 0
        assert broker.counted["sandbox/jobs/finished_count"] >= 8
        assert broker.counted["sandbox/outcomes/error"] == errors, "a failure is an outcome of its own, counted"

    with_daemon(tmp_path, story, "--slots", "2")


def test_a_cancelled_job_dies_and_a_broken_one_is_infra(tmp_path: Path) -> None:
    async def story(broker: Broker, peer: bytes, process: subprocess.Popen[str]) -> None:
        broker.hand_out(peer, "loop", "while True: pass", [], wall_s=600.0, cpu_s=600.0)
        broker.routers[0].send(peer, Job("broken", 0, "code"), [b"\xc1 not msgpack"])
        broker.routers[0].send(peer, JobCancel("loop"))
        broker.hand_out(peer, "next", "print(1)", [])
        found = dict([await broker.verdicts.get(), await broker.verdicts.get()])
        assert {job_id: verdict.outcome for job_id, verdict in found.items()} == {"broken": "infra", "next": "ok"}

    with_daemon(tmp_path, story, "--slots", "1")


def test_a_worker_that_can_jail_nothing_any_more_says_so_and_ends(tmp_path: Path) -> None:
    """Its folder removed by somebody who swept /run -> every job is infra with the reason, and a restart can mend it."""

    async def story(broker: Broker, peer: bytes, process: subprocess.Popen[str]) -> None:
        (folder,) = folders_of(process.pid)
        shutil.rmtree(folder)
        for number in range(UNJAILED_ALLOWED):
            assert process.poll() is None
            broker.hand_out(peer, f"j{number}", "print(1)", [])
            verdict = (await broker.verdicts.get())[1]
            assert verdict.outcome == "infra" and verdict.detail
        assert (await broker.goodbyes.get()).exit_code == 1
        assert await asyncio.to_thread(process.wait) == 1, "one that the supervisor restarts"

    assert f"no jail for {UNJAILED_ALLOWED} jobs in a row, the last: " in with_daemon(tmp_path, story, "--slots", "1")


def folders_of(pid: int) -> list[Path]:
    return list(default_base().glob(f"temper-{pid}-*"))


def family_of(folder: Path) -> set[int]:
    """Host pids of the jails that were started out of `folder`: nsjail processes and their descendants."""
    parents, roots = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if folder.name.encode() in (path / "cmdline").read_bytes():
                roots.add(int(path.name))
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_sigkill_leaves_no_process_and_the_next_start_sweeps(tmp_path: Path) -> None:
    async def main() -> None:
        broker = Broker(tmp_path / "b")
        process = start(broker.address)
        second = None
        try:
            async with asyncio.timeout(100):
                peer = await broker.peer.get()
                broker.hand_out(peer, "loop", "while True: pass", [], wall_s=600.0, cpu_s=600.0)
                broker.hand_out(peer, "marker", "print(1)", [])
                assert (await broker.verdicts.get())[0] == "marker"
                (folder,) = folders_of(process.pid)
                while len(family := family_of(folder)) < 3:  # nsjail, init, program
                    await asyncio.to_thread(os.sched_yield)
                process.kill()
                await asyncio.to_thread(process.wait)
                while any(Path("/proc", str(pid)).exists() for pid in family):  # the init sees its socket close
                    await asyncio.to_thread(os.sched_yield)
                second = start(broker.address)
                await broker.peer.get()
                assert folders_of(process.pid) == []
                assert not list(Path("/sys/fs/cgroup").glob(f"**/{folder.name}"))
                second.send_signal(signal.SIGTERM)
                await asyncio.to_thread(second.communicate)
                assert folders_of(second.pid) == []
        finally:
            for each in (process, second):
                if each is not None and each.poll() is None:
                    each.kill()
                    each.wait()
                if each is not None and each.stderr is not None:
                    each.stderr.close()
            broker.close()

    asyncio.run(main())


def test_without_nsjail_it_exits_4_with_one_message(tmp_path: Path) -> None:
    process = start(f"ipc://{tmp_path}/none", TEMPER_NSJAIL="/nowhere/nsjail")
    _, text = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "TEMPER_NSJAIL is /nowhere/nsjail" in text and "Traceback" not in text and len(text.splitlines()) == 1


def test_a_flaky_program_is_found_by_running_it_again(tmp_path: Path) -> None:
    host = tmp_path / "host.toml"
    host.write_text("[sandbox]\nrerun_share = 1.0\n")

    async def story(broker: Broker, peer: bytes, process: subprocess.Popen[str]) -> None:
        coin = "import os; raise SystemExit(os.urandom(1)[0] % 2)"
        for i in range(3):
            broker.hand_out(peer, f"steady{i}", "print(1)", [])
            broker.hand_out(peer, f"flaky{i}", coin, [TestCase()] * 24)
        for _ in range(6):
            await broker.verdicts.get()
        while broker.counted.get("sandbox/jobs/rerun_count", 0) < 6:
            await broker.ticked.wait()
            broker.ticked.clear()
        assert broker.counted["sandbox/jobs/flaky_count"] == 3

    text = with_daemon(tmp_path, story, "--slots", "2", "--host", str(host))
    assert text.count("is flaky") == 3 and "steady" not in "".join(x for x in text.splitlines() if "is flaky" in x)


def test_where_user_namespaces_are_forbidden_it_says_how_to_allow_them(tmp_path: Path) -> None:
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, "-P", "-m", "temper.sandbox"]
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this host does not let us play one that forbids user namespaces")
    done = subprocess.run(
        [*inside, "--broker", f"ipc://{tmp_path}/none"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 1, done
    assert "clone(flags=" in done.stderr and "sysctl user.max_user_namespaces" in done.stderr
