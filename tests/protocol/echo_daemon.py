"""A daemon for the tests: answers every Lease with a Touch, and behaves badly in the way that it is told.

python -P echo_daemon.py MODE [ADDRESS [KEY_FILE]]
"""

from __future__ import annotations

import asyncio
import errno
import sys
import time

from temper.common.daemon import Daemon, run_daemon
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.log import log
from temper.common.peer import Peer
from temper.common.peer_daemon import PeerDaemon
from temper.common.schema import Lease, Touch


class Echo(PeerDaemon):
    """Answers leases."""

    seen = 0

    def subscribe(self, peer: Peer) -> None:
        peer.on(Lease, self.on_lease)

    def on_lease(self, lease: Lease, frames: list[memoryview]) -> None:
        self.seen += 1
        self.progress(f"{self.seen} leases")
        self.peer.post(Touch(lease.lease_id, lease.attempt), [bytes(frame) for frame in frames])

    async def drain(self, reason: str) -> None:
        log(f"drained after {self.seen} leases")


class Behaviour(Daemon):
    """One way to end for each mode."""

    def __init__(self, mode: str) -> None:
        super().__init__("actor", "actor-9", drain_timeout_s=1.0 if mode == "slow" else 30.0)
        self.mode = mode
        self.ticks = 0
        self.third_tick = asyncio.Event()

    def idle(self) -> bool:
        return self.mode == "resting"

    def tick(self) -> None:
        super().tick()
        self.ticks += 1
        if self.ticks == 3:
            self.third_tick.set()

    async def setup(self) -> None:
        if self.mode == "config":
            raise ConfigError("model.pth is unknown, did you mean model.path?")
        if self.mode == "environment":
            raise EnvironmentFault("nsjail is impossible here\n\x1b[31mreally")

    async def main(self) -> None:
        if self.mode == "bug":
            raise ZeroDivisionError("a bug in main")
        if self.mode == "full":
            raise OSError(errno.ENOSPC, "No space left on device", "/run/x")
        if self.mode == "forgotten":
            asyncio.get_running_loop().create_task(self._raise()).add_done_callback(lambda task: None)
        if self.mode == "callback":
            asyncio.get_running_loop().call_soon([].pop)
        if self.mode == "background":
            self.spawn(self._raise(), "background")
        if self.mode == "waiting":
            await self.wait_for("learner: model bundle", asyncio.Event().wait(), 0.3)
        if self.mode == "done":
            return
        if self.mode == "resting":
            self.stall_timeout_s = 0.0
            self.progress("step 3")
            await self.third_tick.wait()
            return
        if self.mode == "stalled":
            self.stall_timeout_s = 0.5
            self.progress("step 3")
        if self.mode == "blocked":
            block(5)
        if self.mode == "stuck":
            block(60)
        if self.mode == "thread":
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
            await asyncio.sleep(0)
            return
        if self.mode == "deaf":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    log("not listening")
        await asyncio.Event().wait()

    async def _raise(self) -> None:
        raise ValueError("forgotten task")

    async def drain(self, reason: str) -> None:
        log(f"draining because of {reason}")
        if self.mode in ("slow", "slower"):
            print("DRAINING", flush=True)
            await asyncio.Event().wait()


def block(seconds: float) -> None:
    """Keep the event loop."""
    time.sleep(seconds)


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "echo":
        key = rest[1] if len(rest) > 1 else None
        sys.exit(run_daemon(Echo("actor", "actor-1", rest[0], key_file=key, slots=4, connect_timeout_s=20)))
    sys.exit(run_daemon(Behaviour(mode)))
