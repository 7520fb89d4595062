"""``python -m temper.broker RECIPE --run DIR [--bind ADDRESS] [--resume] [--section.key=value ...]``."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from temper.common.daemon import run_daemon
from temper.common.errors import ConfigError, TemperError
from temper.common.keys import BrokerKeys, load_broker
from temper.common.process import report
from temper.common.recipe import load
from temper.common.sockets import parse_address, require_keys


def default_address(run_dir: Path) -> str:
    """ipc in the run directory, or under the temporary directory where that path would be too long. The same for every
    start, so that peers find a restarted broker."""
    address = f"ipc://{run_dir / 'socket'}"
    try:
        parse_address(address)
    except ConfigError:
        tag = hashlib.blake2b(os.fsencode(run_dir), digest_size=8).hexdigest()
        return f"ipc://{tempfile.gettempdir()}/temper-{os.geteuid()}-{tag}"
    return address


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="temper broker",
        description="Start the broker of a run alone. Recipe values can be overridden: --pacing.max_staleness=4",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="a TOML file, or the name of a recipe that ships with Temper")
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="run directory: ledger, weights, bundle")
    parser.add_argument("--bind", metavar="ADDRESS", help="ipc://FOLDER or tcp://HOST:PORT; default: a folder in DIR")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="CURVE keys of `temper keys new`; needed for tcp")
    parser.add_argument("--resume", action="store_true", help="go on with the run that DIR holds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    options, overrides = arguments().parse_known_args(argv)
    try:
        recipe = load(options.recipe, overrides)
        run_dir = options.run.absolute()
        address = options.bind or default_address(run_dir)
        keys: BrokerKeys | None = load_broker(options.keys) if options.keys is not None else None
        require_keys(parse_address(address), keys)
    except TemperError as error:
        return report("broker", error)
    from temper.broker.daemon import Broker

    return run_daemon(Broker(recipe, run_dir, address, resume=options.resume, keys=keys))


if __name__ == "__main__":
    sys.exit(main())
