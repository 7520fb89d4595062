"""A Python that lives across the turns of an episode: runs one piece of code after the other in one namespace.

Code arrives on descriptor 4, length first; after each piece its end is told on descriptor 3 as ``0`` or ``1`` (an exception).
The value of a last expression is shown, as at a prompt.
"""

import ast
import os
import struct
import sys
import traceback


def exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(4, size - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def execute(source: str, names: dict) -> int:
    try:
        tree = ast.parse(source, "<step>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<step>", "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<step>", "eval", dont_inherit=True), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        return 1
    return 0


def main() -> None:
    sys.path[0] = "/tmp"
    names = {"__name__": "__main__"}
    while True:
        (size,) = struct.unpack("<Q", exactly(8))
        code = execute(exactly(size).decode(errors="replace"), names)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.write(3, str(code).encode())


main()
