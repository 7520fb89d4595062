"""Serves the functions of a program under test to a suite in another jail, over its stdin and stdout.

Whatever the program does to this process, it can only send values: the asserts are elsewhere. Its own prints go to stderr.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys

from temper_plain import Channel, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def serve(channel: Channel, names: dict[str, Any]) -> None:
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        channel.send(answer(names, request))


def answer(names: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    arguments = decode(request["args"])
    keywords = decode(request["kwargs"])
    try:
        value = names[request["name"]] if request["name"] in names else getattr(builtins, request["name"])
        result = value(*arguments, **keywords) if request["call"] else value
        reply = {"value": encode(result)}
    except SystemExit:
        raise
    except BaseException as error:
        return {"error": [type(error).__name__, str(error)[:2000]]}
    with contextlib.suppress(TypeError):
        reply["args"] = encode(arguments)
    return reply


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    sys.argv = ["main.py"]
    names = {"__name__": "candidate", "__file__": "/tmp/main.py", "__builtins__": builtins}
    with open("/tmp/main.py", "rb") as file:
        exec(compile(file.read(), "/tmp/main.py", "exec", dont_inherit=True), names)
    serve(channel, names)


main()
