"""``python -m temper.sandbox --broker ADDR``: start one sandbox worker.

Exit code 4, with one message, where nsjail cannot run programs.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from temper.common.errors import TemperError


def parser() -> argparse.ArgumentParser:
    """The command line of ``temper sandbox``."""
    made = argparse.ArgumentParser(prog="temper sandbox", description="Execute programs for a run inside nsjail.")
    made.add_argument("--broker", required=True, metavar="ADDR", help="ipc://DIR or tcp://HOST:PORT")
    made.add_argument("--slots", type=_slots, default=os.cpu_count() or 1, metavar="N", help="programs at once")
    made.add_argument("--name", default="", help="shown in logs and status")
    made.add_argument("--key", metavar="FILE", help="this peer's CURVE key (see `temper keys`)")
    made.add_argument("--host", metavar="FILE", type=Path, help="this host's own configuration, section [sandbox]")
    made.add_argument(
        "--connect-timeout", type=float, default=300.0, metavar="SECONDS", help="how long to wait for the broker (300)"
    )
    return made


def _slots(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1024:
        raise argparse.ArgumentTypeError(f"{number} slots, expected 1 to 1024")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon to its end; its exit code."""
    arguments = parser().parse_args(argv)
    from temper.common.daemon import run_daemon
    from temper.sandbox.check import check_host
    from temper.sandbox.daemon import SandboxDaemon
    from temper.sandbox.hostfile import load_host

    name = arguments.name or f"sandbox-{socket.gethostname()}-{os.getpid()}"
    try:
        host = load_host(arguments.host)
        report = check_host(host)
    except TemperError as error:
        print(f"temper sandbox: {error}", file=sys.stderr)
        return error.exit_code
    if not report.ok:
        print(f"temper {report.line()}", file=sys.stderr)
        return 4
    daemon = SandboxDaemon(name, arguments.broker, host, slots=arguments.slots, key_file=arguments.key)
    daemon.connect_timeout_s = arguments.connect_timeout
    return run_daemon(daemon)


if __name__ == "__main__":
    sys.exit(main())
