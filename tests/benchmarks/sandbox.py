"""Executions a second of the three modes beside bare Python, nsjail and bubblewrap; then 10,000 mixed programs.

All contestants take turns in short rounds in one run, two programs at a time, so that what else the machine does hits them
alike. A comparison is the median over the rounds of the ratio within each; cpu time stands beside wall time. Bubblewrap gets the
same namespaces, rlimits, the same limits of a cgroup where the host has one, and a seccomp filter of the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import resource
import shutil
import statistics
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop
from temper.common.schema import Limits, SandboxJob, TestCase
from temper.sandbox import cgroups
from temper.sandbox.jail import POLICY, Host
from temper.sandbox.streams import sealed
from temper.sandbox.worker import Worker

PARALLEL = 2
Round = Callable[[int], Awaitable[None]]

MIXED: dict[str, tuple[bytes, list[TestCase], str]] = {
    "ok": (b"a, b = map(int, input().split()); print(a + b)", [TestCase(b"2 3", b"5"), TestCase(b"7 8", b"15")], "ok"),
    "wrong": (b"print(int(input()) + 1)", [TestCase(b"1", b"2"), TestCase(b"2", b"4")], "wrong"),
    "crash": (b"import ctypes; ctypes.string_at(0)", [TestCase(b"", b"x")], "signal"),
    "raise": (b"[][1]", [TestCase(b"", b"x")], "error"),
    "loop": (b"while True: pass", [TestCase(b"", b"x")], "timeout"),
    "flood": (b"while True: print('x' * 4096)", [TestCase(b"", b"x")], "output"),
    "memory": (b"x = bytearray(1 << 30)", [TestCase(b"", b"x")], "memory"),
    "fork": (
        b"import os\nfor _ in range(9):\n    try: os.fork()\n    except OSError: pass\nos._exit(7)",
        [TestCase(b"", b"x")],
        "error",
    ),
    "files": (b"for i in range(50): open(f'f{i}', 'w').write('x' * 99)\nprint(1)", [TestCase(b"", b"1")], "ok"),
    "forbidden": (b"import ctypes; ctypes.CDLL(None).chroot(b'/')", [TestCase(b"", b"x")], "policy"),
}
WEIGHTS = {
    "ok": 40,
    "wrong": 25,
    "crash": 6,
    "raise": 10,
    "loop": 3,
    "flood": 3,
    "memory": 4,
    "fork": 3,
    "files": 4,
    "forbidden": 2,
}
MIXED_LIMITS = Limits(wall_s=5.0, cpu_s=0.15, memory_bytes=128 << 20, pids=16, output_bytes=16 * 1024)


class Lanes:
    """Threads that start commands. With a hierarchy each is in a cgroup leaf of its own, so its commands are from birth."""

    def __init__(self, hierarchy: cgroups.Hierarchy | None = None) -> None:
        self._hierarchy = hierarchy
        self._numbers = itertools.count()
        self._own = threading.local()
        self._moved: list[tuple[int, Path]] = []
        self.pool = ThreadPoolExecutor(PARALLEL, initializer=self._enter)

    def _enter(self) -> None:
        self._own.leaf = None
        if self._hierarchy is not None and self._hierarchy.roots:
            self._own.leaf = leaf = self._hierarchy.leaf(f"lane-{next(self._numbers)}")
            for folder in set(leaf._folders.values()):
                self._moved.append((threading.get_native_id(), folder))
                (folder / "tasks").write_text(str(threading.get_native_id()))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Set the limits of a command, and read what it used: as a worker does for each program."""
        leaf, limits = self._own.leaf, Limits()
        if leaf is None:
            yield
            return
        leaf.arm(limits.memory_bytes, limits.pids + 1)
        yield
        leaf.cpu_s(), leaf.peak_bytes(), leaf.oom_kills()

    def close(self) -> None:
        """Move the threads back where they came from, end them, remove the leaves."""
        for thread, folder in self._moved:
            (folder.parent.parent / "tasks").write_text(str(thread))
        self.pool.shutdown()
        if self._hierarchy is not None:
            self._hierarchy.remove()


def command_round(command: list[str], document: bytes = b"", lanes: Lanes | None = None) -> Round:
    """Start `command` n times, two at a time, as cheaply as Python can. `document` is what FD in the command holds."""
    lanes = lanes or Lanes()

    def once(_: int) -> None:
        with lanes.limited():
            start_once()

    def start_once() -> None:
        fd = sealed("document", document)
        done = subprocess.run(
            [str(fd) if part == "FD" else part for part in command],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(fd,), check=False,
        )  # fmt: skip
        os.close(fd)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr.decode()[-300:]}")

    async def run(n: int) -> None:
        await asyncio.to_thread(lambda: list(lanes.pool.map(once, range(n))))

    return run


def job_round(worker: Worker, mode: str, source: bytes) -> Round:
    """Execute `source` n times in `mode`."""
    job = SandboxJob("bench", "python", {"main.py": source}, [], Limits(), mode=mode)  # type: ignore[arg-type]

    async def once() -> None:
        verdict = await worker.execute(job)
        if verdict.outcome != "ok":
            raise RuntimeError(f"{mode}: {verdict}")

    async def run(n: int) -> None:
        await asyncio.gather(*(once() for _ in range(n)))

    return run


def seccomp_program() -> bytes:
    """A filter of the policy's length, which is 200 instructions once compiled: 198 comparisons, then allow."""
    compare = b"".join(struct.pack("HBBI", 0x15, 0, 0, 10_000 + i) for i in range(198))
    return struct.pack("HBBI", 0x20, 0, 0, 0) + compare + struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)


def bubblewrap(host: Host) -> list[str]:
    """bwrap with the policy's namespaces, mounts and limits; [] where it is not installed."""
    bwrap, prlimit = shutil.which("bwrap"), shutil.which("prlimit")
    if bwrap is None or prlimit is None:
        return []
    prefix = str(host.interpreter.prefix)
    shared = [("/usr", "/usr"), (prefix, prefix)]
    links = [("usr/bin", "/bin"), ("usr/lib", "/lib"), ("usr/lib64", "/lib64")]
    devices = [f"/dev/{name}" for name in ("null", "zero", "urandom")]
    return [
        prlimit, "--core=0", "--nofile=256", "--fsize=67108864", "--stack=67108864",
        bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--hostname", "temper", "--clearenv",
        *(part for source, target in shared for part in ("--ro-bind", source, target)),
        *(part for source, target in links for part in ("--symlink", source, target)),
        *(part for device in devices for part in ("--dev-bind", device, device)),
        "--tmpfs", "/tmp", "--tmpfs", "/dev/shm", "--chdir", "/tmp", "--cap-drop", "ALL", "--new-session", "--die-with-parent",
        "--seccomp", "FD", str(host.interpreter.binary), "-S", "-s", "-P", "-c", "pass",
    ]  # fmt: skip


def jailed_python(host: Host, reachable: dict[Path, Path]) -> list[str]:
    """nsjail with our policy around one Python, without our init."""
    prefix = host.interpreter.prefix
    return [
        str(host.nsjail), "-Q", "-C", str(POLICY), *host.identity(), "-R", f"{reachable.get(prefix, prefix)}:{prefix}", "--",
        str(host.interpreter.binary), "-S", "-s", "-P", "-c", "pass",
    ]  # fmt: skip


@dataclass
class Speed:
    """One entry a round: executions a second on two lanes; cpu milliseconds of one execution there, everything included
    (none where no cgroup accounts for it); the median milliseconds of an execution that ran alone."""

    rate: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)


def ratio(ours: list[float], theirs: list[float]) -> float | None:
    """The median over the rounds of one against the other in the same round; None where there are none."""
    pairs = [one / other for one, other in zip(ours, theirs, strict=False)]
    return statistics.median(pairs) if pairs else None


@contextmanager
def accounts() -> Iterator[Callable[[], float | None]]:
    """Cpu seconds of this process and everything below it, by a cgroup of its own. It neither depends on what else the
    machine does nor misses processes that nobody waited for."""
    hierarchy = cgroups.discover(f"bench-{os.getpid()}")
    if (
        "cpu" not in hierarchy.roots or hierarchy.version != 1
    ):  # in version 2 the jails' leaves could not be made below it
        hierarchy.remove()
        yield lambda: None
        return
    root = hierarchy.roots["cpu"]
    (root / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield lambda: int((root / "cpuacct.usage").read_text()) / 1e9
    finally:
        (root.parent / "cgroup.procs").write_text(str(os.getpid()))
        hierarchy.remove()


async def speeds(
    contestants: dict[str, tuple[Round, int]], rounds: int, cpu_s: Callable[[], float | None]
) -> dict[str, Speed]:
    """Everybody in turn, round by round, every other round in reverse: what drifts hits all alike."""
    found = {name: Speed() for name in contestants}
    for run, n in contestants.values():
        await run(min(n, 4))  # warm up
    for number in range(rounds):
        turns = list(contestants.items())[:: -1 if number % 2 else 1]
        for name, (run, n) in turns:
            before, started = cpu_s(), time.perf_counter()
            await run(n)
            found[name].rate.append(n / (time.perf_counter() - started))
            after = cpu_s()
            if before is not None and after is not None:
                found[name].cpu_ms.append(1000 * (after - before) / n)
        for name, (run, n) in turns:
            alone = []
            for _ in range(max(5, n // 8)):
                started = time.perf_counter()
                await run(1)
                alone.append((time.perf_counter() - started) * 1000)
            found[name].alone_ms.append(statistics.median(alone))
    return found


async def mixed(host: Host, total: int) -> dict[str, Any]:
    """`total` programs of all kinds at full load; what came out wrong, what was left, how the worker grew."""
    kinds = random.Random(0).choices(list(WEIGHTS), list(WEIGHTS.values()), k=total)
    wrong: Counter[str] = Counter()
    rss: dict[int, int] = {}
    done = 0
    mounts = Path("/proc/self/mountinfo").read_text()
    started = time.perf_counter()
    async with Worker(host, PARALLEL) as worker:
        queue = iter(enumerate(kinds))

        async def lane() -> None:
            nonlocal done
            for number, kind in queue:
                source, tests, expected = MIXED[kind]
                job = SandboxJob(f"j{number}", "python", {"main.py": source}, tests, MIXED_LIMITS, number, "fork")
                verdict = await worker.execute(job)
                if verdict.outcome != expected:
                    wrong[f"{kind}: {verdict.outcome} instead of {expected}"] += 1
                done += 1
                if done in (total // 10, total):
                    rss[done] = psutil.Process().memory_info().rss

        await asyncio.gather(*(lane() for _ in range(2 * PARALLEL)))
        folder, group = worker._state.folder, worker._state.name
    left = [f"process {p.pid}" for p in psutil.process_iter(["cmdline"]) if group in " ".join(p.info["cmdline"] or ())]
    left += [str(path) for name, paths in cgroups.stale_groups("").items() if name == group for path in paths]
    left += [str(folder)] if folder.exists() else []
    left += ["mounts"] if Path("/proc/self/mountinfo").read_text() != mounts else []
    growth = (rss[total] - rss[total // 10]) / 2**20
    wall = time.perf_counter() - started
    return {
        "programs": total,
        "wall_s": round(wall, 1),
        "wrong": dict(wrong),
        "left": left,
        "growth_mib": round(growth, 1),
    }


async def measure(rounds: int, programs: int, cpu_s: Callable[[], float | None]) -> dict[str, Any]:
    host = Host.here()
    async with Worker(host, PARALLEL) as worker, AsyncExitStack() as stack:
        assert worker._spawner is not None
        spawner = worker._spawner
        python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else str(host.interpreter.binary)
        contestants = {
            "bare python3 -c pass": (command_round([python, "-c", "pass"]), 40),
            "bare python3 -I -S -c pass": (command_round([python, "-I", "-S", "-c", "pass"]), 40),
            "nsjail python -c pass": (in_thread_of(spawner, jailed_python(host, spawner.reachable)), 40),
            "fresh": (job_round(worker, "fresh", b"pass"), 40),
            "pool": (job_round(worker, "pool", b"pass"), 40),
            "fork": (job_round(worker, "fork", b"pass"), 300),
        }
        wrapped = bubblewrap(host)
        if wrapped:
            lanes = Lanes(cgroups.discover(f"bench-lanes-{os.getpid()}") if worker.hierarchy.roots else None)
            stack.callback(lanes.close)
            contestants["bubblewrap python -c pass"] = (command_round(wrapped, seccomp_program(), lanes), 40)
        if "numpy" in host.libraries:
            numpy = str(host.libraries["numpy"].parent)
            bare = [str(host.interpreter.binary), "-c", f"import sys; sys.path.append({numpy!r}); import numpy"]
            contestants["bare python3, import numpy"] = (command_round(bare), 10)
            contestants["fork, import numpy"] = (job_round(worker, "fork", b"import numpy"), 200)
        found = await speeds(contestants, rounds, cpu_s)
    load = await mixed(host, programs)
    rows: list[dict[str, Any]] = [
        {
            "contestant": name,
            "executions_s": round(statistics.median(speed.rate), 1),
            "executions_s_best_round": round(max(speed.rate), 1),
            "ms_each_on_2_lanes": round(1000 * PARALLEL / statistics.median(speed.rate), 2),
            "alone_p50_ms": round(statistics.median(speed.alone_ms), 2),
            "alone_p50_ms_best_round": round(min(speed.alone_ms), 2),
            "cpu_ms_each": round(statistics.median(speed.cpu_ms), 2) if speed.cpu_ms else None,
            "rounds": rounds,
        }
        for name, speed in found.items()
    ]
    rows.append({"contestant": "mixed programs", **load})
    return {"rows": rows, "goals": goals(found, load)}


def in_thread_of(spawner: Any, command: list[str]) -> Round:
    """As `command_round`, from the spawner's thread, which alone may see the interpreter's folder."""

    async def run(n: int) -> None:
        def all_of_them() -> None:
            running: list[subprocess.Popen[bytes]] = []
            for _ in range(n):
                if len(running) == PARALLEL:
                    running.pop(0).wait()
                running.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                )
            for process in running:
                process.wait()

        await spawner.call(all_of_them)

    return run


def goals(found: dict[str, Speed], load: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals with what was found. A contestant that this host lacks leaves its goal without a value, unmet."""
    goals: list[dict[str, Any]] = []

    def goal(name: str, text: str, value: float | None, met: bool) -> None:
        goals.append({"name": name, "goal": text, "value": None if value is None else round(value, 2), "met": met})

    def faster(name: str, fast: str, slow: str, least: float) -> None:
        value = ratio(found[fast].rate, found[slow].rate) if {fast, slow} <= found.keys() else None
        goal(name, f">= {least:g}", value, value is not None and value >= least)

    def no_dearer(name: str, ours: str, theirs: str, most: float, by_cpu: bool = False) -> None:
        value = None
        if {ours, theirs} <= found.keys():
            one, other = found[ours], found[theirs]
            value = ratio(one.cpu_ms, other.cpu_ms) if by_cpu else ratio(one.alone_ms, other.alone_ms)
        goal(name, f"<= {most:g}", value, value is not None and value <= most)

    faster("fork against a bare python3 -c pass, executions/s", "fork", "bare python3 -c pass", 4.0)
    faster("fork against a fresh nsjail python, executions/s", "fork", "nsjail python -c pass", 8.0)
    faster(
        "fork against a bare python3 where numpy is imported", "fork, import numpy", "bare python3, import numpy", 25.0
    )
    p50_ms = statistics.median(found["fork"].alone_ms)  # the program is `pass`: all of it is the sandbox's
    goal("fork, p50 above the program itself", "<= 3 ms", p50_ms, p50_ms <= 3.0)
    no_dearer("pool against a bare python3 -c pass, p50 alone", "pool", "bare python3 -c pass", 1.0)
    no_dearer("fresh against bubblewrap, cpu cost", "fresh", "bubblewrap python -c pass", 1.3, by_cpu=True)
    goal("wrong verdicts in mixed programs", "0", sum(load["wrong"].values()), not load["wrong"])
    goal("left over after mixed programs", "0", len(load["left"]), not load["left"])
    goal("growth of the worker between a tenth and the end, MiB", "< 20", load["growth_mib"], load["growth_mib"] < 20)
    return goals


def main(argv: list[str]) -> dict[str, Any]:
    """Rows and goals."""
    parser = argparse.ArgumentParser(prog="bin/bench sandbox")
    parser.add_argument("--rounds", type=int, default=13, help="rounds of each contestant")
    parser.add_argument("--programs", type=int, default=10_000, help="mixed programs")
    arguments = parser.parse_args(argv)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with accounts() as cpu_s, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(arguments.rounds, arguments.programs, cpu_s))
