"""`temper status`: what the daemons of a run are doing, live or once, for people or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from temper.cli.client import StatusClient, address_of, newest_run
from temper.cli.status_view import View, letter
from temper.cli.view import duration
from temper.common.errors import ConfigError, PeerLost
from temper.common.reports import RunStatus, encode

REFRESH_S = 1.0


async def _show(client: StatusClient, arguments: argparse.Namespace) -> None:
    console = Console()
    answered = False
    try:
        await client.open(arguments.timeout)
        answered = True
        if arguments.dead_letters:
            _letters((await client.fetch()), as_json=arguments.json)
        elif arguments.once:
            _print(await client.fetch(), console, as_json=arguments.json)
        elif arguments.json or not console.is_terminal:
            while True:
                print(encode(await client.fetch()).decode(), flush=True)
                await asyncio.sleep(REFRESH_S)
        else:
            await _live(client, console)
    finally:
        await client.close(goodbye=answered)


def _print(status: RunStatus, console: Console, *, as_json: bool) -> None:
    if as_json:
        print(encode(status).decode(), flush=True)
    else:
        console.print(View(status))


def _letters(status: RunStatus, *, as_json: bool) -> None:
    """Every dead letter that is kept, oldest first."""
    if as_json:
        print(msgspec.json.encode(status.dead_letters).decode(), flush=True)
        return
    for found in status.dead_letters:
        print(letter(found))
    if not status.dead_letters:
        print("no dead letters", file=sys.stderr)


async def _live(client: StatusClient, console: Console) -> None:
    """Once a second, on a screen of its own; the last picture stays when that is left. A broker that is restarted is
    waited for; one that is gone for good ends the view with its cause."""
    status: RunStatus | None = None
    silent_s = 0.0
    loop = asyncio.get_running_loop()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                begun = loop.time()
                try:
                    status = await client.fetch(timeout_s=2.0)
                    silent_s = 0.0
                except PeerLost:
                    if client.lost:
                        raise
                    silent_s += loop.time() - begun
                if status is not None:
                    note = f"the broker has not answered for {duration(silent_s)}" if silent_s else ""
                    live.update(View(status, console.size.height, note), refresh=True)
                await asyncio.sleep(max(REFRESH_S - (loop.time() - begun), 0.0))
    finally:
        if status is not None:
            console.print(View(status))


def main(argv: Sequence[str]) -> int:
    """Show the status."""
    parser = argparse.ArgumentParser(
        prog="temper status", description="What the daemons of a run are doing.", allow_abbrev=False
    )
    parser.add_argument("--broker", metavar="ADDRESS", help="the broker, or a relay: ipc://FOLDER or tcp://HOST:PORT")
    parser.add_argument(
        "--run", metavar="DIR", type=Path, help="a run directory (default: the newest one under ./runs)"
    )
    parser.add_argument("--key", metavar="FILE", help="this peer's key file, for tcp://")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one line each; broker/README.md lists its keys"
    )
    parser.add_argument("--dead-letters", action="store_true", help="print what was given up, and why, and end")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=10.0, help="how long to wait for the broker (10)"
    )
    arguments = parser.parse_args(argv)
    if arguments.broker and arguments.run:
        raise ConfigError("give --broker or --run, not both")
    address = arguments.broker or address_of(arguments.run or newest_run())

    async def show() -> None:
        await _show(StatusClient(address, arguments.key), arguments)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0
