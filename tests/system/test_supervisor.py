"""The supervisor with real processes: small scripts that behave, crash, hang or ignore signals in place of the daemons."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from temper.cli import view
from temper.cli.policy import INTERRUPTED_CODE, Ending, Policy
from temper.cli.processes import ProcessSpec
from temper.cli.supervisor import Supervisor

# A stand-in for a daemon: says READY (or not), then behaves as told by its arguments.
CHILD = '''
"""NAME BEHAVIOUR: a process for the supervisor's tests. "BEHAVIOUR after A,B": once those are READY."""
import os, signal, sys, threading
from temper.common.process import follow_parent
follow_parent()
name, behaviour = sys.argv[1:3]
stop = threading.Event()
def drained(*_):
    with open(os.environ["STOPS"], "a") as file:
        file.write(name + "\\n")
    stop.set()
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "deaf" else drained)
if behaviour == "refuses":
    for number in range(30):
        print("line", number)
    sys.exit("temper x: no such thing")
print(f"READY {name} pid={os.getpid()}", flush=True)
if " after " in behaviour:
    behaviour, others = behaviour.split(" after ")
    for other in others.split(","):
        log = os.path.join(os.path.dirname(os.environ["STOPS"]), "logs", other + ".log")
        while not os.path.exists(log) or b"READY" not in open(log, "rb").read():
            stop.wait(0.02)
if behaviour == "ends":
    sys.exit(0)
if behaviour == "crashes":
    print("temper x: out of luck", flush=True)
    sys.exit(1)
stop.wait()
'''


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "child_for_supervisor.py").write_text(CHILD)
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STOPS", str(tmp_path / "stops"))
    return tmp_path


class Lines:
    """A display that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.drawn: list[str] = []

    def draw(self, picture: view.Picture, now: float) -> None:
        self.drawn.append(view.line(picture, now))

    def say(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        pass


def supervisor(folder: Path, behaviours: dict[str, str], shown: Lines) -> Supervisor:
    specs = [
        ProcessSpec(name, name.split("-")[0], "child_for_supervisor", (name, behaviour))  # type: ignore[arg-type]
        for name, behaviour in behaviours.items()
    ]
    policy = Policy([(spec.name, spec.role) for spec in specs], drain_timeout_s=5.0)
    picture = view.Picture("test", 10, str(folder))
    return Supervisor(specs, policy, picture, shown, run_dir=folder, address=f"ipc://{folder}/s", threads=1)


def supervise(folder: Path, behaviours: dict[str, str]) -> tuple[Ending, Lines, Supervisor]:
    shown = Lines()

    async def run() -> tuple[Ending, Supervisor]:
        made = supervisor(folder, behaviours, shown)
        return await made.run(), made

    ending, made = asyncio.run(run())
    assert all(process.poll() is not None for process in made.processes.values())
    return ending, shown, made


ALL = {"broker": "lives", "learner": "lives", "sandbox-1": "lives", "eval-1": "lives", "actor-1": "lives"}


@pytest.mark.system
def test_learner_ends_and_the_others_drain_in_order(scripts: Path) -> None:
    others = ",".join(name for name in ALL if name != "learner")  # only who is READY notes that it was told to stop
    ending, _, _ = supervise(scripts, {**ALL, "learner": f"ends after {others}"})
    assert ending.exit_code == 0
    assert (scripts / "stops").read_text().split() == ["actor-1", "eval-1", "sandbox-1", "broker"]


@pytest.mark.system
def test_exit_before_ready_ends_the_run_with_the_last_lines(scripts: Path) -> None:
    ending, _, made = supervise(scripts, {**ALL, "actor-1": "refuses"})
    assert (ending.exit_code, ending.blamed) == (1, "actor-1")
    tail = made.tail("actor-1")
    assert len(tail) == 20
    assert tail[-1] == "temper x: no such thing"


@pytest.mark.system
def test_crashing_actor_is_restarted_then_given_up(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.cli.policy.BACKOFF_S", (0.1, 0.1, 0.1))
    ending, shown, _ = supervise(scripts, {**ALL, "actor-1": "crashes"})
    restarts = [line for line in shown.lines if "restart" in line]
    assert len([line for line in restarts if " of 3 in " in line]) == 3
    assert any("out of luck" in line for line in shown.lines)
    assert (ending.exit_code, ending.blamed) == (1, "actor-1")
    assert "given up after 3 restarts" in ending.reason


@pytest.mark.system
def test_deaf_process_is_killed_when_the_run_fails(scripts: Path) -> None:
    ending, _, made = supervise(scripts, {**ALL, "sandbox-1": "deaf", "learner": "crashes after sandbox-1"})
    assert ending.blamed == "learner"
    assert made.processes["sandbox-1"].poll() == -signal.SIGKILL


RUNNER = """
import asyncio, json, sys
from pathlib import Path
from temper.cli import view
from temper.cli.policy import Policy
from temper.cli.processes import ProcessSpec
from temper.cli.supervisor import PlainDisplay, Supervisor

folder = Path(sys.argv[1])
specs = [ProcessSpec(n, n.split("-")[0], "child_for_supervisor", (n, b)) for n, b in json.loads(sys.argv[2]).items()]

async def run():
    policy = Policy([(s.name, s.role) for s in specs], drain_timeout_s=5.0)
    picture = view.Picture("t", 1, "d")
    address = f"ipc://{folder}/s"
    made = Supervisor(specs, policy, picture, PlainDisplay(), run_dir=folder, address=address, threads=1)
    return (await made.run()).exit_code

sys.exit(asyncio.run(run()))
"""


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll what only the file system or the process table tells."""
    deadline = time.monotonic() + 90
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within 90 s")
        time.sleep(0.02)


def start_runner(folder: Path, behaviours: dict[str, str]) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A supervisor in a process of its own, its children READY; its stderr goes to the file `shown`."""
    with (folder / "shown").open("wb") as shown:
        command = [sys.executable, "-P", "-c", RUNNER, str(folder), json.dumps(behaviours)]
        runner = subprocess.Popen(command, stderr=shown)
    logs = [folder / "logs" / f"{name}.log" for name in behaviours]
    until(lambda: all(log.exists() and b"READY" in log.read_bytes() for log in logs), "children READY")
    return runner, psutil.Process(runner.pid).children()


@pytest.mark.system
def test_ctrl_c_drains_in_order(scripts: Path) -> None:
    runner, _ = start_runner(scripts, ALL)
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) == INTERRUPTED_CODE
    assert (scripts / "stops").read_text().split() == ["actor-1", "eval-1", "sandbox-1", "learner", "broker"]


@pytest.mark.system
def test_second_ctrl_c_kills(scripts: Path) -> None:
    runner, children = start_runner(scripts, {**ALL, "actor-1": "deaf"})
    runner.send_signal(signal.SIGINT)
    until(lambda: b"draining" in (scripts / "shown").read_bytes(), "draining")
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) == INTERRUPTED_CODE
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert len(gone) == len(ALL)


@pytest.mark.system
def test_nothing_survives_a_killed_supervisor(scripts: Path) -> None:
    runner, children = start_runner(scripts, ALL)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait(60)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert len(gone) == len(ALL)
