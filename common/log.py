"""One line a fact, on stderr: ``HH:MM:SS actor-1 message``.

Every daemon logs through `log`. Text may come from a model, a program or a peer, so whatever is not printable is
escaped: no line can forge another one or drive a terminal. A closed stderr is not an error.
"""

from __future__ import annotations

import codecs
import contextlib
import sys
import time

LINE_LIMIT = 4000

_name = "temper"
_escape = codecs.getencoder("unicode_escape")  # found now: later a process may not reach its library any more


def name_process(name: str) -> None:
    """Set the name that every later line of this process carries."""
    global _name
    _name = clean(name)


def clean(text: str, limit: int = LINE_LIMIT) -> str:
    """`text` as one printable line of at most `limit` characters; control characters become ``\\x1b`` and the like."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c, "surrogatepass")[0].decode() for c in text)


def log(message: str) -> None:
    """Write one line. Never raises."""
    emit(f"{time.strftime('%H:%M:%S')} {_name} {clean(message)}\n")


def emit(text: str) -> None:
    """Write raw, already clean text to stderr."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
