"""`temper keys`: the key folder of a broker and the key files of its peers, for runs over TCP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from temper.common import keys

DEFAULT_FOLDER = Path.home() / ".config" / "temper" / "keys"


def main(argv: Sequence[str]) -> int:
    """Make, show, allow or revoke keys."""
    parser = argparse.ArgumentParser(
        prog="temper keys",
        description="Keys for daemons on several machines. The broker's folder stays beside the broker; a peer's key file is "
        "made there and carried to the peer's machine.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="new | allow | list | revoke | show")
    new = commands.add_parser("new", help="make the broker's keys, and a peer's key file when NAME is given")
    new.add_argument("name", nargs="?", metavar="NAME", help="the peer")
    new.add_argument(
        "--file", type=Path, metavar="FILE", help="where to write the peer's key (default FOLDER/NAME.key)"
    )
    listing = commands.add_parser("list", help="the peers that are let in, and their public keys")
    show = commands.add_parser("show", help="the broker's public key, then the same")
    allow = commands.add_parser("allow", help="let in a peer that made its key elsewhere")
    allow.add_argument("name", metavar="NAME")
    allow.add_argument("public", metavar="PUBLIC_KEY")
    revoke = commands.add_parser("revoke", help="shut a peer out, also from a running broker")
    revoke.add_argument("name", metavar="NAME")
    for command in (new, listing, show, allow, revoke):
        command.add_argument(
            "--keys", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER", help=f"(default {DEFAULT_FOLDER})"
        )
    arguments = parser.parse_args(argv)
    folder: Path = arguments.keys
    if arguments.command == "new":
        broker = keys.new_broker(folder)
        print(f"broker keys in {folder}, public key {broker.public}")
        if arguments.name:
            print(f"key file of {arguments.name}: {keys.new_peer(folder, arguments.name, arguments.file)}")
    elif arguments.command in ("show", "list"):
        if arguments.command == "show":
            print(f"broker {keys.load_broker(folder).public}")
        for name, public in keys.allowed(folder).items():
            print(f"{name} {public}")
    elif arguments.command == "allow":
        keys.allow(folder, arguments.name, arguments.public)
        print(f"{arguments.name} is let in")
    else:
        keys.revoke(folder, arguments.name)
        print(f"{arguments.name} is shut out")
    return 0
