"""``python -m temper.broker RECIPE --run DIR [--bind ADDRESS] [--resume] [--section.key=value ...]``, or a relay:
``python -m temper.broker --relay PARENT --run DIR [--bind ADDRESS] [--key FILE] [--keys FOLDER]``."""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from temper.common.daemon import Daemon, run_daemon
from temper.common.errors import ConfigError, TemperError
from temper.common.keys import BrokerKeys, load_broker
from temper.common.process import keep_freed_memory, report
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
        description="Start the broker of a run alone, or a relay of one. Recipe values can be overridden: "
        "--pacing.max_staleness=4",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", help="a TOML file, or the name of a recipe that ships with Temper")
    parser.add_argument(
        "--relay",
        metavar="PARENT",
        help="no broker but a relay for a far site: the address of the run's broker, or of another relay",
    )
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="run directory: ledger, weights, bundle")
    parser.add_argument("--bind", metavar="ADDRESS", help="ipc://FOLDER or tcp://HOST:PORT; default: a folder in DIR")
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help="CURVE keys of `temper keys new`; needed for tcp")
    parser.add_argument("--key", metavar="FILE", help="relay: its own key file at the parent; needed for tcp")
    parser.add_argument("--name", default="", help="relay: shown in logs and status; default relay-HOST-PID")
    parser.add_argument(
        "--connect-timeout", type=float, default=300.0, metavar="SECONDS", help="relay: how long to wait for the parent"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run that DIR holds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    keep_freed_memory()
    options, overrides = arguments().parse_known_args(argv)
    try:
        run_dir = options.run.absolute()
        address = options.bind or default_address(run_dir)
        keys: BrokerKeys | None = load_broker(options.keys) if options.keys is not None else None
        if options.relay is not None:
            daemon = _relay(options, overrides, run_dir, address, keys)
        elif options.recipe is None:
            raise ConfigError("no recipe given: temper broker RECIPE --run DIR, or --relay PARENT for a relay")
        elif options.key or options.name:
            raise ConfigError("--key and --name are a relay's: a broker has its --keys FOLDER and is called broker")
        else:
            from temper.broker.daemon import Broker

            recipe = load(options.recipe, overrides)
            require_keys(parse_address(address), keys)
            daemon = Broker(recipe, run_dir, address, resume=options.resume, keys=keys)
    except TemperError as error:
        return report("broker", error)
    return run_daemon(daemon)


def _relay(
    options: argparse.Namespace, overrides: Sequence[str], run_dir: Path, address: str, keys: BrokerKeys | None
) -> Daemon:
    """A relay as the options say; its recipe is the run's."""
    from temper.broker.relay import Relay

    if options.recipe is not None or overrides:
        found = " ".join([options.recipe or "", *overrides]).strip()
        raise ConfigError(f"a relay gets its recipe from the run's broker: leave {found!r} out")
    if options.resume:
        raise ConfigError("a relay goes on with what DIR holds anyway: leave --resume out")
    require_keys(parse_address(address), keys)
    parent = parse_address(options.relay)
    if str(parent) == str(parse_address(address)):
        raise ConfigError(f"a relay cannot be its own parent ({parent}): choose another --bind")
    if parent.scheme == "tcp" and not options.key:
        raise ConfigError(f"{parent} needs a key file (--key FILE): make one beside the parent: temper keys new NAME")
    name = options.name or f"relay-{socket.gethostname()}-{os.getpid()}"
    return Relay(
        name,
        options.relay,
        run_dir,
        address,
        keys=keys,
        key_file=options.key,
        connect_timeout_s=options.connect_timeout,
    )


if __name__ == "__main__":
    sys.exit(main())
