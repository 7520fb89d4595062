"""What users of comparable sandboxes reported, one test a report.

Reports whose tests are elsewhere: graders that set alarms off the main thread or hang in sympy: `test_graders`; a grader's
failure is counted: `tests/system/test_sandbox_daemon`; orphans of a killed worker are swept at the next start: there and in
`tests/system/test_sandbox_workers`; a deadline that leaves no time for grading, and timeouts that would bias training:
`tests/unit/test_reward_failures`, `test_learner_step` (outside the loss, counted), `test_tools` (the box outlives the lease).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from temper.common.schema import Limits, SandboxJob, TestCase, Verdict
from temper.sandbox import tree
from temper.sandbox.jail import POLICY, Host
from temper.sandbox.state import default_base
from temper.sandbox.worker import Worker


def job(source: str, mode: str = "fork", **limits: float) -> SandboxJob:
    return SandboxJob("job", "python", {"main.py": source.encode()}, [TestCase()], Limits(**limits), mode=mode)


def run(*jobs: SandboxJob) -> list[Verdict]:
    async def main() -> list[Verdict]:
        async with Worker(Host.here(), 2) as worker:
            return [await worker.execute(each) for each in jobs]

    return asyncio.run(main())


def test_kill_reaches_grandchildren_and_no_zombie_piles_up() -> None:
    """A kill that reaches only the direct child leaves grandchildren for hours."""
    source = """
import os, signal, sys, time
for _ in range(6):
    if not os.fork():
        os.setsid()
        if not os.fork():
            for n in (1, 2, 13, 15): signal.signal(n, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
while 'stay' in sys.argv or True: time.sleep(0.01)
"""

    async def main() -> None:
        async with Worker(Host.here(), 1) as worker:
            for _ in range(3):
                verdict = await worker.execute(job(source, wall_s=0.3))
                assert verdict.outcome == "timeout"
                (cell,) = (cell for pool in worker._pools.values() for cell in pool._idle)
                await cell.ready()
                assert tree.descendants(cell.init_pid) == [], "nothing is left, not even a zombie"

    asyncio.run(main())


def test_nsjails_own_time_limit_is_off_and_every_rlimit_has_its_type() -> None:
    """The time limit defaults to 600 s; rlimits without `_type: VALUE` are ignored."""
    policy = re.sub(r"#.*", "", POLICY.read_text())
    assert re.search(r"^time_limit: 0$", policy, re.M) or "time_limit: 0" in policy
    for name in re.findall(r"^rlimit_(\w+): \d+", policy, re.M):
        assert f"rlimit_{name}_type: VALUE" in policy, name


def test_the_rlimits_hold_inside() -> None:
    source = """
import resource as r
names = ('STACK', 'MEMLOCK', 'MSGQUEUE', 'CORE', 'FSIZE', 'NOFILE', 'NPROC', 'RTPRIO')
print({n: r.getrlimit(getattr(r, 'RLIMIT_' + n))[1] for n in names if hasattr(r, 'RLIMIT_' + n)})
"""
    (verdict,) = run(job(source, pids=20))
    found = eval(verdict.stdout)
    assert found["STACK"] == 64 << 20 and found["MEMLOCK"] == 64 << 10 and found["CORE"] in (0, 1)
    assert found["FSIZE"] == 64 << 20 and found["NOFILE"] == 256 and found["NPROC"] == 21
    assert found.get("MSGQUEUE", 0) == 0 and found.get("RTPRIO", 0) == 0


def test_the_workers_memory_does_not_leak_into_a_programs_peak() -> None:
    """wait4's ru_maxrss begins with the parent's resident size."""
    ballast = bytearray(400 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    for mode in ("fresh", "pool", "fork"):
        (verdict,) = run(job("print(1)", mode))
        assert verdict.peak_bytes is not None and verdict.peak_bytes < 64 << 20, (mode, verdict)
    (verdict,) = run(job("x = bytearray(100 << 20); x[::4096] = b'x' * 25600"))
    assert 100 << 20 <= (verdict.peak_bytes or 0) < 160 << 20, verdict


BELOW = """
import asyncio, ctypes, dataclasses, sys
from pathlib import Path
from temper.common.schema import SandboxJob
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker
data = Path(sys.argv[1], 'data')
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0 and libc.mount(b'none', b'/', None, 0x44000, None) == 0
for name in ('disk', 'other disk'):
    (data / name).mkdir(parents=True)
    assert libc.mount(b'none', bytes(data / name), b'tmpfs', 0, b'mode=777') == 0
    (data / name / 'file').write_text('there')
    (data / name / 'file').chmod(0o666)
source = "import errno\\nfor name in ('disk', 'other disk'):\\n    try: open(f'/data/{name}/file', 'w')\\n" \\
    "    except OSError as error: print(errno.errorcode[error.errno], open(f'/data/{name}/file').read())"
async def main():
    host = dataclasses.replace(Host.here(), binds={str(data): '/data'})
    async with Worker(host, 1) as worker:
        print(await worker.execute(SandboxJob('j', 'python', {'main.py': source.encode()}, [])))
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs mounts of its own")
def test_a_mount_below_a_read_only_bind_is_read_only_too() -> None:
    """Read-only binds are not recursive: a disk mounted below one used to stay writable."""
    with tempfile.TemporaryDirectory(prefix="temper-below-") as folder:
        Path(folder).chmod(0o755)
        command = [sys.executable, "-P", "-c", BELOW, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and r"b'EROFS there\nEROFS there\n'" in done.stdout, done


def test_rollouts_cancelled_at_any_moment_bring_the_running_jails_to_zero() -> None:
    """A rollout that was cancelled while its program ran used to leave the program running."""
    loop = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"

    async def main() -> None:
        async with Worker(Host.here(), 2) as worker:
            for mode in ("fresh", "pool", "fork"):
                for moment in range(4):
                    worker.began.clear()
                    rollouts = [
                        asyncio.ensure_future(worker.execute(job(loop, mode, wall_s=60, cpu_s=60))) for _ in range(4)
                    ]
                    if moment == 1:
                        await asyncio.sleep(0)
                    if moment >= 2:
                        await worker.began.wait()
                    if moment == 3:
                        await next(iter(worker.running)).began.wait()
                    for _ in range(3):  # some are cancelled while they are being cancelled
                        for rollout in rollouts:
                            rollout.cancel()
                        await asyncio.sleep(0)
                    await asyncio.gather(*rollouts, return_exceptions=True)
                    assert not worker.running
            for cell in (cell for pool in worker._pools.values() for cell in pool._idle):
                await cell.ready()
                assert tree.descendants(cell.init_pid) == []
            mark = worker._state.name.encode()
        assert family(mark) == set()

    asyncio.run(main())


WORKERS = """
import asyncio, os, sys
from temper.common.schema import Limits, SandboxJob
from temper.sandbox.jail import Host
from temper.sandbox.worker import Worker
async def main():
    async with Worker(Host.here(), 2) as worker:
        print('open', os.getpid(), flush=True)
        loop = SandboxJob('j', 'python', {'main.py': b'while True: pass'}, [], Limits(wall_s=60, cpu_s=60))
        await asyncio.gather(worker.execute(loop), worker.execute(loop))
for line in sys.stdin:  # a worker for each, by a fork: what is imported once costs nothing again
    if not (pid := os.fork()):
        try:
            os.setsid()
            asyncio.run(main())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    print('ended', flush=True)
"""


def family(mark: bytes) -> set[int]:
    """Processes with `mark` in their command line, and everything below them."""
    parents, roots = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if mark in (path / "cmdline").read_bytes():
                roots.add(int(path.name))
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_killed_while_jails_start_orphans_none(number: signal.Signals) -> None:
    """SIGKILL during start-up used to orphan a live jail in 7 of 160 cases."""
    command, pipe = [sys.executable, "-P", "-c", WORKERS], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as workers:
        assert workers.stdin is not None and workers.stdout is not None
        for delay_ms in (0, 3, 6, 9, 12, 15, 20, 25, 35, 50):
            workers.stdin.write(b"\n")
            workers.stdin.flush()
            word, pid = workers.stdout.readline().split()
            assert word == b"open"
            time.sleep(delay_ms / 1000)  # the moment of the kill is what is tried
            os.kill(int(pid), number)
            assert workers.stdout.readline() == b"ended\n"
            mark = b"/temper-%s-" % pid
            deadline = time.monotonic() + 60
            while left := family(mark):
                assert time.monotonic() < deadline, f"killed after {delay_ms} ms, left {left}"
                os.sched_yield()
            assert number == signal.SIGKILL or not list(default_base().glob(f"temper-{int(pid)}-*"))


def test_a_hanging_judge_blocks_nobody() -> None:
    """A slow synchronous judge used to block the loop: here a hundred verdicts overtake it."""

    async def main() -> None:
        async with Worker(Host.here(), 3) as worker:
            slow = asyncio.ensure_future(worker.execute(job("import time; time.sleep(600)", wall_s=600.0)))
            done = [await worker.execute(job("print(1)")) for _ in range(100)]
            assert {verdict.outcome for verdict in done} == {"ok"} and not slow.done()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            assert not worker.running

    asyncio.run(main())
