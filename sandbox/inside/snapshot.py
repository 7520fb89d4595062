"""Writes the regular files below the workspace to stdout: name and content, each with its length before it.

Run by the init after every process of the session is dead. Links are not followed, what cannot be read is left out.
"""

import os
import stat
import struct
import sys

LIMIT_BYTES = int(sys.argv[1])


def walk(folder: str) -> None:
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                walk(path)
            elif stat.S_ISREG(mode) and name != "temper_snapshot.py":
                show(path)
        except OSError:
            continue


def show(path: str) -> None:
    global LIMIT_BYTES
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    size = os.fstat(fd).st_size
    name = os.fsencode(os.path.relpath(path, "/tmp"))
    needed = size + len(name) + 16
    if needed <= LIMIT_BYTES:
        LIMIT_BYTES -= needed
        with open(fd, "rb") as file:
            for part in (name, file.read(size)):
                sys.stdout.buffer.write(struct.pack("<Q", len(part)) + part)


walk("/tmp")
