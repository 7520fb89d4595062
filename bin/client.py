"""Asks a broker how the run is going: a peer of role "status" that sends StatusRequest and awaits StatusReport.

Used by `temper status` and by the live view of `temper run`. Never in the way of the run: requests are transient.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

from temper.cli.rundir import RUN_FILE
from temper.common.errors import ConfigError, PeerLost
from temper.common.keys import load_peer
from temper.common.peer import Peer, new_session
from temper.common.reports import RunStatus, decode
from temper.common.schema import Hello, StatusReport, StatusRequest

ADDRESS_FILE = "broker.addr"  # in the directory of a broker or relay, as long as it runs


class StatusClient:
    """One connection; `fetch` may be called again and again."""

    def __init__(self, address: str, key_file: str | None = None) -> None:
        self.address = address
        keys = load_peer(Path(key_file)) if key_file else None
        name = f"status-{os.getpid()}"
        self._peer = Peer(
            address, Hello("status", name, new_session(), host=socket.gethostname(), pid=os.getpid()), keys=keys
        )
        self._peer.on(StatusReport, self._report)
        self._answer: asyncio.Future[RunStatus] | None = None

    @property
    def lost(self) -> bool:
        """Whether the connection is over for good."""
        return self._peer.over

    async def open(self, timeout_s: float) -> None:
        """Connect; PeerLost when no broker answers within `timeout_s`."""
        await self._peer.open(timeout_s)

    async def fetch(self, timeout_s: float = 5.0) -> RunStatus:
        """The broker's picture now; PeerLost when it does not answer in time or is gone."""
        self._answer = asyncio.get_running_loop().create_future()
        self._peer.post(StatusRequest())
        awaited: set[asyncio.Future[Any]] = {self._answer, self._peer.lost}
        await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._answer.done():
            return self._answer.result()
        if self._peer.lost.done():
            raise PeerLost(f"the broker at {self.address} is gone: {self._peer.fault}")
        raise PeerLost(f"the broker at {self.address} did not answer a status request within {timeout_s:g} s")

    async def close(self, *, goodbye: bool = True) -> None:
        """Close; without a goodbye where the broker may be gone, so that nothing waits for it."""
        if not goodbye:
            self._peer.lose(PeerLost("closed"))
        await self._peer.close("status done", 0)

    def _report(self, body: StatusReport, frames: list[memoryview]) -> None:
        if self._answer is not None and not self._answer.done() and frames:
            self._answer.set_result(decode(bytes(frames[0]), RunStatus, f"the broker at {self.address}"))


def newest_run(folder: Path = Path("runs")) -> Path:
    """The run under `folder` that was started last and still goes on; ConfigError when there is none."""
    running = sorted(
        [*folder.glob(f"*/{RUN_FILE}"), *folder.glob(f"*/{ADDRESS_FILE}")], key=lambda path: path.stat().st_mtime
    )
    if not running:
        raise ConfigError("no run is going on under ./runs: say which with --run DIR or --broker ADDRESS")
    return running[-1].parent


def address_of(run_dir: Path) -> str:
    """The broker's address that a run directory names: run.json of `temper run`, or broker.addr of a broker or relay that
    was started by itself. ConfigError when no run is going on there."""
    alone = run_dir / ADDRESS_FILE
    if not (run_dir / RUN_FILE).exists() and alone.exists():
        return alone.read_text(encoding="utf-8").strip()
    try:
        facts = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
        address, pid = str(facts["address"]), int(facts["pid"])
    except FileNotFoundError as error:
        raise ConfigError(f"{run_dir}: no {RUN_FILE} there: no run of `temper run` is going on in it") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_dir / RUN_FILE}: cannot be read: {error}") from error
    if not Path(f"/proc/{pid}").exists():
        raise ConfigError(f"{run_dir}: its run is over: the process that supervised it (pid {pid}) is gone")
    return address
