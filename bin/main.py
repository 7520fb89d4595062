"""The command line: one table of commands, each imported only when it is called.

`temper --help` must stay under half a second, so nothing here imports torch, zmq or a daemon. Expected errors
(`TemperError`, a full disk) end as one line on stderr with their exit code; a traceback means a bug.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from temper.common.errors import EnvironmentFault, TemperError


@dataclass(frozen=True, slots=True)
class Command:
    """`module` has ``main(argv) -> int``; `prefix` is put before the user's arguments."""

    name: str
    module: str
    help: str
    prefix: tuple[str, ...] = ()


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "temper.cli.run",
        "run the demo recipe: a micro model learns two tasks in a minute or two",
        ("demo",),
    ),
    Command("run", "temper.cli.run", "run a recipe on this machine: starts and supervises every daemon"),
    Command(
        "evaluate", "temper.cli.evaluate", "a model on held-out tasks, nothing trained: a run, a checkpoint or a folder"
    ),
    Command("status", "temper.cli.status", "what the daemons of a run are doing, live or once"),
    Command("check", "temper.cli.check", "check this host, or a recipe, without starting anything"),
    Command(
        "inspect", "temper.cli.inspect", "what a run directory holds: steps, accuracies, fates of groups and samples"
    ),
    Command("plot", "temper.cli.plot", "draw a run's curve to a PNG or SVG file"),
    Command("export", "temper.cli.export", "the trained model of a run as a folder that transformers loads"),
    Command("weights", "temper.cli.weights", "show, verify or export the versions of a run's weight log"),
    Command("engine", "temper.cli.engine", "install SGLang into its own environment; show what is installed"),
    Command("keys", "temper.cli.keys", "make, list and revoke the keys for daemons on several machines"),
    Command(
        "broker",
        "temper.broker.__main__",
        "start the broker alone (it alone takes the recipe), or a relay for a far site",
    ),
    Command("learner", "temper.learner.__main__", "start the learner alone"),
    Command("actor", "temper.actor.__main__", "start an actor alone"),
    Command("sandbox", "temper.sandbox.__main__", "start a sandbox worker alone"),
    Command("exec", "temper.cli.exec", "execute one program in a jail and show its verdict"),
    Command("eval", "temper.actor.__main__", "start an evaluator alone", ("--lane", "eval")),
    Command("docs", "temper.cli.docs", "print or refresh the pages' tables, made from the code"),
    Command("version", "temper.cli.version", "the versions of Temper and of what it stands on"),
)


def usage() -> str:
    """The text of ``temper --help``."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: temper COMMAND [...]",
            "",
            "Asynchronous actor-learner system that post-trains language models with reinforcement learning.",
            "",
            *lines,
            "",
            "`temper COMMAND --help` explains one. Recipe keys are set as --section.key=value.",
            "Exit codes: 0 clean, 1 bug, 2 configuration, 3 peer lost, 4 environment. TEMPER_DEBUG=1 shows tracebacks.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name = "version" if arguments[0] in ("-V", "--version") else arguments[0]
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        near = get_close_matches(name, [command.name for command in COMMANDS], n=1)
        hint = f"did you mean {near[0]}?" if near else "`temper --help` lists them"
        print(f"temper: unknown command {name}: {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(command.module)
    return guarded(f"temper {command.name}", lambda: module.main([*command.prefix, *arguments[1:]]))


def printable(text: str) -> str:
    """`text` without what could drive a terminal: errors quote what files, programs and peers said."""
    from temper.common.log import clean

    return "\n".join(clean(line) for line in text.splitlines())


def guarded(label: str, call: Callable[[], int]) -> int:
    """Call `call`, turning expected errors into one line on stderr and an exit code."""
    try:
        return int(call())
    except TemperError as error:
        if os.environ.get("TEMPER_DEBUG") == "1":
            traceback.print_exc()
        print(f"{label}: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{label}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(f"{label}: disk full{where}: free some space and start again", file=sys.stderr)
        return EnvironmentFault.exit_code


if __name__ == "__main__":
    sys.exit(main())
