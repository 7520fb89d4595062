"""What a sample costs in the real broker process: leases out, samples in, groups to the learner, steps done.

    bin/bench broker_run [--json FILE] [--samples N] [--payload BYTES]

A real ``temper.broker`` serves one stand-in actor, which answers every lease at once with samples of `--payload` bytes, one
message each, and one stand-in learner, which takes groups as they come and reports steps. `cpu_us` is the broker's processor
time a sample, all threads, leases and groups and acknowledgements included; with durability "full" an accepted sample
is on disk before it is acknowledged.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

CLIENTS = Path(__file__).with_name("_broker_clients.py")
GROUPS_PER_STEP, SAMPLES_PER_GROUP, STALENESS = 32, 16, 4
RECIPE = f"""
[run]
name = "bench"
max_steps = 1000000
[model]
vocabulary = "abcdef"
[pacing]
groups_per_step = {GROUPS_PER_STEP}
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


def measure(
    durability: str, samples: int, payload: int, *, peers: int = 4, processes: int = 1, rate: float = 0.0
) -> dict[str, Any]:
    """One row."""
    children: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        recipe = Path(folder) / "bench.toml"
        recipe.write_text(RECIPE)
        address = f"{folder}/socket"
        broker = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "temper.broker", str(recipe), "--run", f"{folder}/run"),
                *("--bind", f"ipc://{address}", f"--run.durability={durability}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(Path(address) / "bulk.sock", broker)
            facts = psutil.Process(broker.pid)

            def client(*arguments: Any) -> subprocess.Popen[str]:
                command = [sys.executable, "-P", str(CLIENTS), *map(str, arguments)]
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                children.append(child)
                return child

            learner = client("learner", address, samples)
            for _ in range(processes):
                client("actors", address, peers // processes, max(640 // peers, 1), payload, rate / processes)
            assert learner.stdout is not None
            said = learner.stdout.readline()
            if said.strip() != "begin":
                raise RuntimeError(f"the learner said {said!r}")
            before = sum(facts.cpu_times()[:2])
            _, done, seconds = learner.stdout.readline().split()
            cpu_s = sum(facts.cpu_times()[:2]) - before
        finally:
            for child in children:
                child.kill()
                child.wait()
            broker.terminate()
            broker.wait(30)
    count = int(done)
    return {
        "relay": f"broker, {durability}",
        "bytes": payload,
        "peers": peers,
        "samples": count,
        "cpu_us": round(cpu_s / count * 1e6, 2),
        "rate": round(count / float(seconds)),
    }


def main(argv: Sequence[str]) -> dict[str, Any]:
    """A row for each durability."""
    parser = argparse.ArgumentParser(prog="bin/bench broker_run", description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--payload", type=int, default=1024)
    arguments = parser.parse_args(argv)
    rows = [measure(durability, arguments.samples, arguments.payload) for durability in ("memory", "full")]
    goals = [
        {
            "name": f"broker CPU for a sample of {row['bytes']} bytes, {row['relay']}, us",
            "goal": f"<= {most}",
            "value": row["cpu_us"],
            "met": row["cpu_us"] <= most,
        }
        for row, most in zip(rows, (8, 16), strict=True)
    ]
    return {"rows": rows, "goals": goals}
