"""`temper status`: what the daemons of a run are doing, live or once, for people or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from temper.cli.client import StatusClient, address_of
from temper.cli.view import duration
from temper.common.errors import ConfigError
from temper.common.log import clean
from temper.common.reports import RunStatus, encode

REFRESH_S = 1.0
LETTERS = 5


def render(status: RunStatus) -> RenderableType:
    """The whole picture: one line about the run, one row a peer."""
    head = Text(
        f"run {status.name or status.run_id}  {status.phase or 'starting'}  step {status.steps_done}/{status.max_steps}  "
        f"version {status.version}  up {duration(status.uptime_s)}\n"
        f"queued {status.queued_groups} groups ({status.queued_bytes / 1e6:.1f} MB), with the learner {status.leased_groups}, "
        f"in flight {status.leases_in_flight}; sandbox jobs {status.jobs_running} running, {status.jobs_queued} waiting"
    )
    table = Table()
    for column in ("peer", "role", "state", "version", "holds", "progress", "waits for"):
        table.add_column(column)
    for peer in status.peers:
        silent = f" (silent {peer.silent_s:.0f} s)" if peer.silent_s > 3 else ""
        progress = f"{clean(peer.progress)} ({peer.progress_age_s:.0f} s ago)" if peer.progress else "-"
        version = "-" if peer.version is None else f"{peer.version} {clean(peer.digest)[:8]}"
        cells = (
            clean(f"{peer.name} {peer.host}:{peer.pid}"),
            peer.role,
            peer.state + silent,
            version,
            str(peer.in_flight),
            progress,
            clean(peer.waiting_for) or "-",
        )
        table.add_row(*(Text(cell) for cell in cells))
    counts = [
        ("groups", status.groups),
        ("samples", status.samples),
        ("sandbox", status.jobs),
    ]
    fates = [
        f"{name}: " + ", ".join(f"{count:,} {fate}" for fate, count in found.items()) for name, found in counts if found
    ]
    paused = [f"domain {name} is paused: {clean(why)}" for name, why in status.paused_domains.items()]
    letters = [f"given up: {clean(letter)}" for letter in status.letters[-LETTERS:]]
    return Group(head, table, Text("\n".join([*fates, *paused, *letters])))


async def _show(address: str, key_file: str | None, timeout_s: float, *, once: bool, as_json: bool) -> None:
    client = StatusClient(address, key_file)
    console = Console()
    answered = False
    try:
        await client.open(timeout_s)
        answered = True
        if once:
            status = await client.fetch()
            if as_json:
                print(encode(status).decode(), flush=True)
            else:
                console.print(render(status))
            return
        if as_json or not console.is_terminal:
            while True:
                print(encode(await client.fetch()).decode(), flush=True)
                await asyncio.sleep(REFRESH_S)
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                live.update(render(await client.fetch()), refresh=True)
                await asyncio.sleep(REFRESH_S)
    finally:
        await client.close(goodbye=answered)


def newest_run(folder: Path = Path("runs")) -> Path:
    """The run under `folder` that was started last and still goes on; ConfigError when there is none."""
    running = sorted(folder.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not running:
        raise ConfigError("no run is going on under ./runs: say which with --run DIR or --broker ADDRESS")
    return running[-1].parent


def main(argv: Sequence[str]) -> int:
    """Show the status."""
    parser = argparse.ArgumentParser(
        prog="temper status", description="What the daemons of a run are doing.", allow_abbrev=False
    )
    parser.add_argument("--broker", metavar="ADDRESS", help="the broker: ipc://FOLDER or tcp://HOST:PORT")
    parser.add_argument(
        "--run", metavar="DIR", type=Path, help="a run directory (default: the newest one under ./runs)"
    )
    parser.add_argument("--key", metavar="FILE", help="this peer's key file, for tcp://")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one line each")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=10.0, help="how long to wait for the broker (10)"
    )
    arguments = parser.parse_args(argv)
    if arguments.broker and arguments.run:
        raise ConfigError("give --broker or --run, not both")
    address = arguments.broker or address_of(arguments.run or newest_run())
    try:
        asyncio.run(_show(address, arguments.key, arguments.timeout, once=arguments.once, as_json=arguments.json))
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0
