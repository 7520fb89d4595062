"""Runs an assert-style suite against a program in another jail.

Every name that the suite uses and nobody else defines is a function of the program. Exit codes: 0 every assert held, 10 one
did not, 11 the program raised, 12 the program is gone, 13 the suite itself is broken.
"""

from __future__ import annotations

import builtins
import os
import sys
import traceback

from temper_plain import CannotCross, Channel, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HELD, FAILED, RAISED, GONE, BROKEN = 0, 10, 11, 12, 13


class CandidateError(Exception):
    """The program raised something that is no built-in exception."""


class Gone(BaseException):
    """The program ended before the suite did."""


class Remote:
    """A function of the program."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.__name__ = self.__qualname__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            request = {"name": self.__name__, "call": True, "args": encode(list(arguments)), "kwargs": encode(keywords)}
            self.channel.send(request)
            reply = self.channel.receive()
        except (EOFError, OSError, ValueError) as error:
            raise Gone(str(error)) from None
        if "error" in reply:
            raise exception(*reply["error"])
        for old, new in zip(arguments, decode(reply.get("args", [])), strict=False):
            update(old, new)
        return decode(reply["value"])


def exception(name: str, text: str) -> Exception:
    kind: Any = getattr(builtins, str(name), None)
    known = (
        isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (UnicodeError, ExceptionGroup))
    )
    error: Any = kind(text) if known else CandidateError(f"{name}: {text}")
    error.from_candidate = True
    return error


def update(old: Any, new: Any) -> None:
    """Make what the program did to an argument visible here."""
    if type(old) is not type(new) or old == new:
        return
    if type(old) in (list, bytearray):
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)


class Names(dict):
    """The suite's globals."""

    channel: Channel

    def __missing__(self, name: str) -> Remote:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        return Remote(self.channel, name)


def main() -> int:
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    names = Names(__name__="suite", __builtins__=builtins)
    names.channel = channel
    try:
        with open("/tmp/suite.txt", "rb") as file:
            code = compile(file.read(), "suite", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        traceback.print_exc()
        return BROKEN
    try:
        exec(code, names)
    except Gone as error:
        print(f"the program is gone: {error}", file=sys.stderr)
        return GONE
    except SystemExit:
        print("the suite called exit", file=sys.stderr)
        return BROKEN
    except BaseException as error:
        traceback.print_exc()
        if getattr(error, "from_candidate", False):
            return RAISED
        return BROKEN if isinstance(error, (ImportError, NameError, CannotCross)) else FAILED
    return HELD


sys.exit(main())
