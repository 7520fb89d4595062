"""What a host file may say about SGLang, which server takes a request, and why one ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temper.actor.engines.sglang_causes import cause_of
from temper.actor.engines.sglang_host import SglangHost, check, read_key
from temper.actor.engines.sglang_process import CPU_SHIMS
from temper.actor.engines.sglang_rows import Rows
from temper.actor.host import load_host
from temper.common.errors import ConfigError

FAR = ("http://10.0.0.7:30000",)
NEAR = ("http://127.0.0.1:30000", "http://localhost:30001", "http://[::1]:30002")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"count": 0}, "at least 1"),
        ({"servers": ("127.0.0.1:30000",)}, "is no address"),
        ({"router": "http://127.0.0.1:1"}, "router needs servers"),
        ({"servers": NEAR, "count": 2}, "both count and servers"),
        ({"dp_size": 2, "transfer": "copy"}, "replicas take weights from disk"),
        ({"servers": FAR, "transfer": "disk"}, "needs disk_dir"),
        ({"servers": FAR, "transfer": "shared"}, "on another machine"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(SglangHost(**table))


def test_how_weights_travel_unless_told() -> None:
    assert SglangHost(python="/x").how == SglangHost(servers=NEAR).how == "shared"
    assert SglangHost(servers=(*NEAR, *FAR)).how == "copy"
    assert SglangHost(python="/x", dp_size=2).how == "disk"
    assert SglangHost(servers=FAR, transfer="disk", disk_dir="/mnt").how == "disk"


def test_the_host_file_names_servers_and_their_key(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(
        f'[actor.sglang]\nservers = ["{NEAR[0]}"]\nrouter = "{NEAR[1]}"\nadmin_key_file = "{tmp_path / "k"}"\n'
    )
    host = load_host(file).sglang
    assert host.usable and host.servers == NEAR[:1] and host.router == NEAR[1]
    with pytest.raises(ConfigError, match="admin_key_file"):
        read_key(host.admin_key_file)
    (tmp_path / "k").write_text("secret\n")
    assert read_key(host.admin_key_file) == "secret" and read_key("") == ""


@dataclass
class Seat:
    open: bool = True
    rows: int = 0


def test_the_least_loaded_open_server_is_taken() -> None:
    seats = [Seat(rows=2), Seat(rows=1), Seat(open=False)]
    rows = Rows(seats, 3)
    assert rows.free() == 1
    seats[1].rows = 2
    assert rows.free() == 0
    seats[2].open = True
    assert rows.free() == 2
    seats[0].open = seats[1].open = False
    seats[2].rows = 3
    assert rows.free() is None


def test_who_waits_is_woken_in_order_and_a_cancelled_one_passes_its_turn_on() -> None:
    async def scenario() -> None:
        seats = [Seat(rows=1)]
        rows, woken = Rows(seats, 1), []

        async def waits(name: str) -> None:
            await rows.turn()
            woken.append(name)

        tasks = {name: asyncio.ensure_future(waits(name)) for name in "abc"}
        await asyncio.sleep(0)
        rows.leave(0)
        tasks["a"].cancel()  # it had its turn already
        await asyncio.wait([tasks["a"]])
        await asyncio.sleep(0)
        assert woken == ["b"] and seats[0].rows == 0
        rows.wake()
        await tasks["c"]
        assert woken == ["b", "c"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("exit_code", "tail", "words"),
    [
        (-9, "", "SIGKILL, perhaps by the kernel for want of memory"),
        (-15, "", "killed by SIGTERM"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "out of GPU memory: lower --mem-fraction-static"),
        (1, "OSError: [Errno 98] Address already in use", "its port was taken"),
        (1, "ModuleNotFoundError: No module named 'xgrammar'", "lacks a module: run `temper engine install`"),
        (2, "launch_server.py: error: unrecognized arguments: --no-such", "does not know a flag"),
        (1, "x\nValueError: bad\ny", "it raised an error (ValueError: bad)"),
        (
            -9,
            "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Trig",
            "one of its processes died (Subprocess sch",
        ),
        (-9, "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "its scheduler hung"),
        (-9, "server_args=ServerArgs(watchdog_timeout=300, soft_watchdog_timeout=None)", "killed by SIGKILL"),
        (3, "nothing", "exit code 3"),
        (None, "", "does not answer"),
    ],
)
def test_the_cause_in_words(exit_code: int | None, tail: str, words: str) -> None:
    assert words in cause_of(exit_code, tail)


STARTS = """
import multiprocessing, threading

def tell():
    print("fork" if "inherited" in globals() else "spawn", flush=True)

def start():
    process = multiprocessing.Process(target=tell)
    process.start()
    process.join()
    assert process.exitcode == 0

if __name__ == "__main__":
    inherited = True
    multiprocessing.set_start_method("spawn", force=True)  # as SGLang does
    start()
    over = threading.Event()
    threading.Thread(target=over.wait).start()
    start()
    over.set()
"""


def test_a_server_on_cpu_forks_its_processes_only_while_it_has_one_thread(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    done = subprocess.run(
        [sys.executable, tmp_path / "starts.py"],
        env=os.environ | {"PYTHONPATH": str(CPU_SHIMS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["fork", "spawn"]
