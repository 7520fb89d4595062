"""``python -m temper.actor --broker ADDR``: one actor, or with ``--lane eval`` one evaluator."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Run the daemon; its exit code."""
    parser = argparse.ArgumentParser(prog="temper actor", description="Run episodes for a broker until it drains us.")
    parser.add_argument("--broker", required=True, metavar="ADDR", help="ipc://DIR or tcp://HOST:PORT")
    parser.add_argument(
        "--lane", choices=("train", "eval"), default="train", help="eval: held-out tasks on pinned weights"
    )
    parser.add_argument("--name", default="", help="shown in logs and status; default actor-PID or eval-PID")
    parser.add_argument(
        "--host", metavar="FILE", help="this host's own configuration (TOML): allowed domain modules, slots"
    )
    parser.add_argument("--key", metavar="FILE", help="CURVE key file of this peer, needed for tcp")
    parser.add_argument(
        "--connect-timeout", type=float, default=300.0, metavar="SECONDS", help="how long to wait for the broker (300)"
    )
    options = parser.parse_args(argv)
    from temper.common.process import report, share_memory_between_threads

    share_memory_between_threads()
    from temper.actor.daemon import ActorDaemon
    from temper.actor.host import load_host
    from temper.common.daemon import run_daemon
    from temper.common.errors import TemperError

    role = "eval" if options.lane == "eval" else "actor"
    try:
        host = load_host(Path(options.host) if options.host else None)
        daemon = ActorDaemon(
            "eval" if options.lane == "eval" else "actor",
            options.name or f"{role}-{os.getpid()}",
            options.broker,
            key_file=options.key,
            host=host,
        )
        daemon.connect_timeout_s = options.connect_timeout
    except TemperError as error:
        return report(role, error)
    return run_daemon(daemon)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
