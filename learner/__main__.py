"""``python -m temper.learner --broker ADDR``: start the run's learner."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line of ``temper learner``."""
    made = argparse.ArgumentParser(
        prog="temper learner", description="Train a run's model: groups of samples in, weights out."
    )
    made.add_argument("--broker", required=True, metavar="ADDR", help="ipc://DIR or tcp://HOST:PORT")
    made.add_argument(
        "--run", metavar="DIR", type=Path, help="checkpoints, TensorBoard, progress and summary (default: runs/NAME)"
    )
    made.add_argument(
        "--resume", metavar="DIR", type=Path, help="continue from the newest checkpoint of this run directory"
    )
    made.add_argument("--name", default="learner", help="shown in logs and status")
    made.add_argument("--key", metavar="FILE", help="this peer's CURVE key (see `temper keys`)")
    made.add_argument("--host", metavar="FILE", type=Path, help="this host's own configuration (accepted, not used)")
    made.add_argument(
        "--connect-timeout", type=float, default=300.0, metavar="SECONDS", help="how long to wait for the broker (300)"
    )
    return made


def cache_dir() -> Path:
    """Where converted models are kept: TEMPER_CACHE, or temper below XDG_CACHE_HOME or ~/.cache."""
    if found := os.environ.get("TEMPER_CACHE"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "temper"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon to its end; its exit code."""
    arguments = parser().parse_args(argv)
    from temper.common.daemon import run_daemon
    from temper.common.process import share_memory_between_threads

    share_memory_between_threads()
    from temper.learner.daemon import LearnerDaemon

    run_dir = arguments.run or arguments.resume
    daemon = LearnerDaemon(
        arguments.name,
        arguments.broker,
        run_dir=run_dir,
        resume=arguments.resume,
        cache_dir=cache_dir(),
        key_file=arguments.key,
    )
    daemon.connect_timeout_s = arguments.connect_timeout
    return run_daemon(daemon)


if __name__ == "__main__":
    sys.exit(main())
