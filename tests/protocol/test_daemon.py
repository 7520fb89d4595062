"""The life of a daemon, seen from outside: READY line, signals, exit codes, causes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest


def ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == f"READY actor-9 pid={child.pid}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_exit_is_clean(kit: Any, number: signal.Signals) -> None:
    child = kit.start("idle")
    ready(child)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert f"draining because of {number.name}" in err and err.endswith(f"actor-9 stopped: {number.name}\n")


def test_a_second_signal_exits_at_once(kit: Any) -> None:
    child = kit.start("slower")
    ready(child)
    child.send_signal(signal.SIGTERM)
    assert child.stdout is not None and child.stdout.readline() == "DRAINING\n"
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert "second signal (SIGTERM): exiting at once" in err


def test_a_drain_that_takes_too_long_is_cut_off(kit: Any) -> None:
    child = kit.start("slow")
    ready(child)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "draining took longer than 1 s" in err


@pytest.mark.parametrize(
    ("mode", "code", "last"),
    [
        ("config", 2, "temper actor: model.pth is unknown, did you mean model.path?"),
        ("environment", 4, r"temper actor: nsjail is impossible here\n\x1b[31mreally"),
        ("full", 4, "temper actor: the disk is full (/run/x): free space or choose another run directory"),
        ("waiting", 3, "temper actor: waited 0 s for learner: model bundle: nothing came"),
        ("stalled", 1, "the last was: step 3"),
    ],
)
def test_an_expected_failure_is_one_line_and_its_exit_code(kit: Any, mode: str, code: int, last: str) -> None:
    child = kit.start(mode)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code
    assert last in err.splitlines()[-1] and "Traceback" not in err


def test_a_daemon_with_nothing_to_do_is_not_taken_for_a_stalled_one(kit: Any) -> None:
    child = kit.start("resting")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("bug", "ZeroDivisionError: a bug in main"),
        ("background", "ValueError: forgotten task"),
        ("forgotten", "ValueError: forgotten task"),
        ("callback", "IndexError: pop from empty list"),
    ],
)
def test_a_bug_anywhere_ends_the_daemon_with_its_traceback(kit: Any, mode: str, error: str) -> None:
    child = kit.start(mode)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "Traceback" in err and err.splitlines()[-1] == f"temper actor: a bug: {error}"


def test_returning_from_main_is_a_clean_end(kit: Any) -> None:
    child = kit.start("done")
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err.splitlines()[-1][9:]) == (0, "actor-9 stopped: done")


def test_a_loop_that_stands_still_is_reported_with_the_place(kit: Any) -> None:
    child = kit.start("blocked")
    ready(child)
    assert child.stderr is not None
    line = next(line for line in child.stderr if "stood still" in line)
    assert "echo_daemon.py" in line and line.rstrip().endswith("block")


def test_a_thread_that_never_returns_is_not_joined(kit: Any) -> None:
    child = kit.start("thread")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "threads do not end" in err


def test_a_task_that_will_not_be_cancelled_does_not_keep_the_process(kit: Any) -> None:
    child = kit.start("deaf")
    ready(child)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "main did not end within 5 s of being cancelled" in err


def orphan(mode: str) -> tuple[str, str]:
    """Start a daemon below a parent that dies at once; what both wrote until both were gone."""
    script = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True,\n"
        "                         env={**os.environ, 'TEMPER_PARENT_PID': str(os.getpid())})\n"
        "print(child.stdout.readline(), end='', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    daemon = [sys.executable, "-P", os.path.join(os.path.dirname(__file__), "echo_daemon.py"), mode]
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", script, *daemon], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = parent.communicate(timeout=60)  # returns when the daemon, too, has closed stderr
    assert parent.returncode == -signal.SIGKILL
    return out, err


def test_no_daemon_outlives_its_parent(kit: Any) -> None:
    out, err = orphan("idle")
    assert out.startswith("READY actor-9")
    assert "draining because of the process that started this one is gone" in err


def test_a_daemon_that_cannot_drain_does_not_outlive_its_parent_for_long(kit: Any) -> None:
    out, err = orphan("stuck")
    assert out.startswith("READY actor-9")
    assert "the process that started this one has been gone for 10 s; exiting at once" in err


def test_a_daemon_whose_parent_is_gone_already_does_not_start(kit: Any) -> None:
    child = kit.start("idle", environment={"TEMPER_PARENT_PID": "1234567"})
    _, err = child.communicate(timeout=60)
    assert child.returncode == 4
    assert err == "temper actor: the process that started this one (pid 1234567) is gone\n"


def test_a_broker_that_is_not_there_is_named_and_waited_for_no_longer_than_allowed(kit: Any) -> None:
    import asyncio

    from temper.common.errors import PeerLost

    async def alone() -> None:
        peer = kit.peer()
        with pytest.raises(PeerLost, match=f"no broker answered at {kit.address} within 1 s"):
            await peer.open(1)
        await peer.close("no broker", 3)

    asyncio.run(alone())


def test_a_silent_broker_ends_its_daemons_with_exit_code_3(kit: Any) -> None:
    import asyncio

    async def silent() -> None:
        broker = kit.Broker(kit.address)
        peer = kit.peer(silence_s=2.5)
        await peer.open(60)
        broker.close()
        async with asyncio.timeout(60):
            cause = await peer.lost
        assert cause == f"the broker at {kit.address} was silent for 2 s"
        assert getattr(peer.fault, "exit_code", None) == 3
        await peer.close("lost", 3)

    asyncio.run(silent())
