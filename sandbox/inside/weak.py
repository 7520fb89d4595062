"""Runs a program and its assert-style suite in one interpreter; says so with a nonce after the last assert.

The nonce waits in a descriptor until then. A program that wants to can read it: verdicts of this kind are marked weak.
"""

from __future__ import annotations

import builtins
import os
import sys
import traceback


def main() -> int:
    nonce_fd = 3
    names = {"__name__": "candidate", "__file__": "/tmp/main.py", "__builtins__": builtins}
    with open("/tmp/main.py", "rb") as file:
        exec(compile(file.read(), "/tmp/main.py", "exec", dont_inherit=True), names)
    with open("/tmp/suite.txt", "rb") as file:
        code = compile(file.read(), "suite", "exec", dont_inherit=True)
    try:
        exec(code, names)
    except AssertionError:
        traceback.print_exc()
        return 10
    sys.stdout.flush()
    os.write(1, b"\n" + os.read(nonce_fd, 64))
    return 0


sys.exit(main())
