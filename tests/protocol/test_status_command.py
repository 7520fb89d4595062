"""`temper status` on a terminal: it refreshes on a screen of its own, fits it, and Ctrl-C gives the terminal back."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_stage import play, stage
from temper.common import metrics, schema

STATUS = [sys.executable, "-P", "-m", "temper.cli.main", "status"]


class Terminal:
    """A pseudo terminal of `columns` x `rows` with a process on it."""

    def __init__(self, columns: int, rows: int) -> None:
        self.main, self.side = pty.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.set_blocking(self.main, False)
        self.before = termios.tcgetattr(self.side)
        self.text = ""
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.main, self._read)

    def _read(self) -> None:
        try:
            self.text += os.read(self.main, 65536).decode(errors="replace")
        except OSError:
            asyncio.get_running_loop().remove_reader(self.main)
        self._changed.set()

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        return await asyncio.create_subprocess_exec(
            *STATUS, *arguments, stdin=self.side, stdout=self.side, stderr=self.side, env=environment
        )

    async def until(self, text: str, times: int = 1) -> None:
        async with asyncio.timeout(60):
            while self.text.count(text) < times:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.main)
        os.close(self.main)
        os.close(self.side)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (160, 50)])
def test_the_live_view_has_a_screen_of_its_own_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, columns: int, rows: int
) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.guest("learner", "learner")
            terminal = Terminal(columns, rows)
            process = await terminal.start("--broker", s.address)
            await terminal.until("heard", 2)  # two pictures
            assert terminal.text.count("\x1b[?1049h") == 1
            assert "\x1b[2J" not in terminal.text.split("heard")[1]  # not cleared in between: no flicker
            assert ("host:pid" in terminal.text) == (columns >= 120)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 60.0) == 0
            await terminal.until("\x1b[?1049l")
            left = terminal.text.split("\x1b[?1049l")[1]
            assert "\x1b[?25h" in terminal.text.split("\x1b[?1049h")[1]  # the cursor is back
            assert "learner" in left and "Traceback" not in left  # the last picture stays
            assert termios.tcgetattr(terminal.side) == terminal.before
            terminal.close()

    play(scene)


def test_once_json_has_every_key_and_dead_letters_have_their_reason(tmp_path: Path) -> None:
    async def run(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(*STATUS, *arguments, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == 0
        return out.decode()

    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.learner()
            actor = await s.guest("actor", "actor-1", 1)
            for _ in range(2):  # task_attempts
                lease, _ = await actor.next(schema.Lease)
                await actor.peer.send(schema.Return(lease.lease_id, lease.attempt, "task", "ValueError: bad task"))
            await actor.peer.flush(60)
            told = json.loads(await run("--run", str(s.run_dir), "--once", "--json"))
            (learner,) = [peer for peer in told["peers"] if peer["role"] == "learner"]
            assert learner["via"] == [] and learner["credit_messages"] > 0 and learner["version"] is None
            assert told["chain"] and told["waits"][0]["who"] == "the learner"
            assert told["leases"]["train"]["quarantined"] == 1
            (letter,) = json.loads(await run("--broker", s.address, "--dead-letters", "--json"))
            assert (letter["reason"], letter["error"]) == ("quarantined", "ValueError: bad task")
            line = await run("--broker", s.address, "--dead-letters")
            assert line.startswith(f"lease {lease.lease_id} (train, a, seed ") and "bad task" in line

    play(scene)


def test_numbers_that_are_none_hurt_neither_the_broker_nor_its_status(tmp_path: Path) -> None:
    nan = float("nan")

    async def scene() -> None:
        async with stage(tmp_path) as s:
            await s.learner()
            actor = await s.guest("actor", "actor-1", 1)
            for number, values in enumerate((nan, float("inf"))):
                broken = await s.guest("actor", f"broken-{number}", 1)
                counted = {metrics.ACTOR_TOKENS: values, metrics.ACTOR_RESEED_REASONS.replace("*", "gap"): values}
                broken.peer.post(schema.Metrics("broken", counted, {metrics.ACTOR_PAUSE: values}))
                assert "expected a finite number" in await asyncio.wait_for(broken.peer.lost, 60.0)
            actor.peer.post(schema.Heartbeat("READY", "x", nan))
            actor.peer.post(schema.Metrics("actor-1", {metrics.ACTOR_TOKENS: 5.0}, {metrics.ACTOR_PAUSE: 0.25}))
            await actor.peer.send(schema.Touch(99, 1))
            await actor.peer.flush(60)
            status = await s.status()
            assert status.sampled_tokens == 5 and status.lag is None
            assert status.weights is not None and status.weights.pause_s == 0.25
            assert status.weights.reseeds == {}

    play(scene)
