"""What a sample costs in the real broker process: leases out, samples in, groups to the learner, steps done; what it keeps
while nothing is taken, and what it does when there is nothing to do. Used by ``broker``.

The clients (``_broker_clients``) are light and in processes of their own. `cpu_us` is the broker's processor time a sample, all
threads, leases and groups and acknowledgements included; with durability "full" an accepted sample is on disk before
it is acknowledged.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from temper.common.recipe_derived import TOKEN_BYTES

CLIENTS = Path(__file__).with_name("_broker_clients.py")
GROUPS_PER_STEP, SAMPLES_PER_GROUP, STALENESS, STEPS_PER_CHECKPOINT = 32, 16, 4, 8
PEERS_A_PROCESS = 256
RECIPE = f"""
[run]
name = "bench"
max_steps = 1000000
[model]
vocabulary = "abcdef"
[pacing]
samples_per_group = {SAMPLES_PER_GROUP}
max_staleness = {STALENESS}
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


def wait_for(path: Path, child: subprocess.Popen[bytes], deadline_s: float = 30.0) -> None:
    """Until the broker has bound its sockets."""
    end = time.monotonic() + deadline_s
    while not path.exists():
        if child.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the broker did not start ({child.poll()})")
        time.sleep(0.02)


@contextlib.contextmanager
def serving(
    durability: str, staleness: int = STALENESS, groups: int = GROUPS_PER_STEP, payload: int = 0
) -> Iterator[tuple[str, psutil.Process]]:
    """A real broker: the folder of its sockets, its process. Its recipe says that samples may have `payload` bytes."""
    tokens = max(payload // TOKEN_BYTES, 32)
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        recipe = Path(folder) / "bench.toml"
        recipe.write_text(RECIPE)
        address = f"{folder}/socket"
        broker = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "temper.broker", str(recipe), "--run", f"{folder}/run"),
                *("--bind", f"ipc://{address}", f"--run.durability={durability}"),
                f"--pacing.groups_per_step={groups}",
                f"--pacing.max_staleness={staleness}",
                f"--pacing.max_token_lag={max(staleness, 8)}",
                f"--model.max_length_tokens={tokens}",
                f"--optimizer.tokens_per_microbatch={max(tokens, 8192)}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(Path(address) / "bulk.sock", broker)
            yield address, psutil.Process(broker.pid)
        finally:
            broker.kill()
            broker.wait(30)


@contextlib.contextmanager
def clients(*commands: Sequence[Any]) -> Iterator[list[subprocess.Popen[str]]]:
    """Light clients, killed at the end."""
    children: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            line = [sys.executable, "-P", str(CLIENTS), *map(str, command)]
            children.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def begin(actors: Sequence[subprocess.Popen[str]]) -> None:
    """Let them work once all have joined: what a peer's joining costs is not what its samples cost."""
    for child in actors:
        assert child.stdout is not None
        if (said := child.stdout.readline().strip()) != "ready":
            raise RuntimeError(f"the actors said {said!r}")
    for child in actors:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()


def cpu_s(process: psutil.Process) -> float:
    """Processor time so far, all threads."""
    return float(sum(process.cpu_times()[:2]))


def measure(
    durability: str,
    samples: int,
    payload: int,
    peers: int = 4,
    together: int = 1,
    staleness: int = STALENESS,
    groups: int = GROUPS_PER_STEP,
    steps: int = STEPS_PER_CHECKPOINT,
) -> dict[str, Any]:
    """One row: `samples` of `payload` bytes from `peers` actors, `together` a message; a step takes `groups`, a checkpoint covers
    `steps`. `needed_mib`: what the broker must keep, at most."""
    leases = groups * (staleness + 1)
    with serving(durability, staleness, groups, payload) as (address, broker):
        apart = -(-peers // PEERS_A_PROCESS)
        actors = ("actors", address, peers // apart, -(-leases // peers), payload, together)
        with clients(("learner", address, samples, groups, steps), *[actors] * apart) as (learner, *others):
            begin(others)
            assert learner.stdout is not None
            said = learner.stdout.readline()
            if said.strip() != "begin":
                raise RuntimeError(f"the learner said {said!r}")
            before = cpu_s(broker)
            _, done, seconds = learner.stdout.readline().split()
            used = cpu_s(broker) - before
    count = int(done)
    return {
        "relay": f"broker, {durability}",
        "bytes": payload,
        "messages": count,
        "peers": peers,
        "together": together,
        "needed_mib": (leases + groups * steps) * SAMPLES_PER_GROUP * payload >> 20,
        "cpu_us": round(used / count * 1e6, 2),
        "rate": round(count / float(seconds)),
    }


def best(durability: str, samples: int, payload: int, repeat: int, **options: int) -> dict[str, Any]:
    """The best of `repeat`: lowest CPU, highest rate."""
    return merged([measure(durability, samples, payload, **options) for _ in range(repeat)])


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best of `rounds`."""
    payload = rounds[0]["bytes"]
    least, most = min(row["cpu_us"] for row in rounds), max(row["rate"] for row in rounds)
    return {**rounds[0], "cpu_us": least, "rate": most, "mib_per_s": round(most * payload / 2**20, 1)}


def acknowledged(durability: str, messages: int, payload: int, rate: float, peers: int = 4) -> dict[str, Any]:
    """How long a sample takes to be acknowledged while `rate` a second come, one a message; with durability "none" by a ROUTER
    that does nothing else. `cores` is what all processes of the row use together: near the machine's, they wait for each other."""
    slots = -(-GROUPS_PER_STEP * (STALENESS + 1) // peers)
    work = peers, slots, payload, rate, messages
    bare = durability == "none"
    with contextlib.ExitStack() as stack:
        if bare:
            address = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='bench'))}/socket"
            helper: Sequence[Any] = ("bare", address, slots)
        else:
            address, broker = stack.enter_context(serving(durability))
            goes_on = 100 * messages  # for longer than there will be groups
            helper = ("learner", address, goes_on, GROUPS_PER_STEP, STEPS_PER_CHECKPOINT)
        other, actors = stack.enter_context(clients(helper, ("timed", address, *work)))
        processes = [psutil.Process(child.pid) for child in (other, actors)] + ([] if bare else [broker])
        assert actors.stdout is not None
        if (said := actors.stdout.readline().strip()) != "begin":
            raise RuntimeError(f"the actors said {said!r}")
        before = list(map(cpu_s, processes))
        measured, p50, p99 = map(float, actors.stdout.readline().split())
        spent = [cpu_s(process) - since for process, since in zip(processes, before, strict=True)]
        used = spent[0] if bare else spent[-1]
    return {
        "relay": "a ROUTER that answers" if bare else f"broker, {durability}, acknowledged",
        "bytes": payload,
        "messages": messages,
        "peers": peers,
        "together": 1,
        "rate": round(measured),
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "cpu_us": round(used / messages * 1e6, 2),
        "cores": round(sum(spent) / messages * measured, 2),
    }


def stopped(seconds: float, payload: int, peers: int = 4) -> dict[str, Any]:
    """Actors, in four processes, push against a learner that takes nothing: the most memory that the broker had."""
    slots = GROUPS_PER_STEP * (STALENESS + 1) * 4 // peers
    with (
        serving("full", payload=payload) as (address, broker),
        clients(("stopped", address), *[("actors", address, peers // 4, slots, payload, 1)] * 4) as (_, *others),
    ):
        begin(others)
        end, peak = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            peak = max(peak, broker.memory_info().rss)
            time.sleep(0.2)
        pushed = sum(file.stat().st_size for file in Path(address).parent.glob("run/ledger/segments/*.seg"))
    name = "broker, full, stopped learner"
    return {
        "relay": name,
        "bytes": payload,
        "peers": peers,
        "seconds": seconds,
        "mib_taken": pushed >> 20,
        "rss_mib": peak >> 20,
    }


def spent(pid: int) -> tuple[int, int]:
    """(ns of processor time, how often it waited for something) of a process so far, all threads."""
    ns = waits = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        ns += int((task / "schedstat").read_text().split()[0])
        waits += int((task / "status").read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return ns, waits


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """No processor halts: one process of idle priority turns on each, which gives way to everything else at once."""
    turn = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    turning = [subprocess.Popen([sys.executable, "-S", "-c", turn]) for _ in range(psutil.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in turning:
            one.kill()
            one.wait(30)


def idle(seconds: float) -> dict[str, Any]:
    """What a broker takes with four actors that have nothing to do."""
    with serving("full") as (address, broker), clients(("actors", address, 4, 1, 1024, 1)) as others:
        begin(others)
        return {"relay": "broker, idle", "peers": 4, **at_rest(broker.pid, seconds)}


def sleeper(seconds: float, wakeups_per_s: float) -> dict[str, Any]:
    """What a process takes that does nothing but wake up."""
    nothing = f"import time\nwhile True: time.sleep({1 / wakeups_per_s})"
    child = subprocess.Popen([sys.executable, "-S", "-c", nothing])
    try:
        return {"relay": "a process that only wakes up", **at_rest(child.pid, seconds)}
    finally:
        child.kill()
        child.wait(30)


def at_rest(pid: int, seconds: float) -> dict[str, Any]:
    """The share of a core that a process takes, in all and in its busiest second; how often it is woken. A second far above
    the others without more wake-ups is the machine's, not the process's: a virtual machine that is stopped counts the time for
    whoever ran. `machine_idle_percent` says how much of the time the processors were halted: on a virtual machine the wake-up
    of a halted one is charged to whom it wakes, and takes many times what the process does then."""
    time.sleep(2.0)
    seen = [(time.monotonic(), *spent(pid))]
    halted = psutil.cpu_times().idle
    while seen[-1][0] < seen[0][0] + seconds:
        time.sleep(1.0)
        seen.append((time.monotonic(), *spent(pid)))
    halted = psutil.cpu_times().idle - halted
    shares = [(ns - before) / (at - since) / 1e7 for (since, before, _), (at, ns, _) in itertools.pairwise(seen)]
    (begun, before, waits), (ended, after, more) = seen[0], seen[-1]
    return {
        "seconds": round(ended - begun, 1),
        "core_percent": round((after - before) / (ended - begun) / 1e7, 2),
        "busiest_second_percent": round(max(shares), 2),
        "median_second_percent": round(sorted(shares)[len(shares) // 2], 2),
        "wakeups_per_s": round((more - waits) / (ended - begun), 1),
        "machine_idle_percent": round(100 * halted / (ended - begun) / (psutil.cpu_count() or 1), 1),
    }
