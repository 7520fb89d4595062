"""Writes the regular files below the workspace to stdout: name and content, each with its length before it.

Run by the init after every process of the session is dead, from outside the workspace, which may be full and hostile. Links
are not followed; what cannot be read, is named too long or does not fit any more is left out.
"""

import os
import stat
import struct
import sys

WORKSPACE = b"/tmp"
NAME_BYTES = 255  # of a whole name below the workspace: so no tree is too deep
LIMIT_BYTES = int(sys.argv[1])


def walk(folder: bytes) -> None:
    for name in sorted(os.listdir(folder)):
        path = folder + b"/" + name
        if len(path) - len(WORKSPACE) - 1 > NAME_BYTES:
            continue
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                walk(path)
            elif stat.S_ISREG(mode):
                show(path)
        except OSError:
            continue


def show(path: bytes) -> None:
    global LIMIT_BYTES
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        name = path[len(WORKSPACE) + 1 :]
        needed = size + len(name) + 16
        if needed <= LIMIT_BYTES:
            LIMIT_BYTES -= needed
            for part in (name, file.read(size)):
                sys.stdout.buffer.write(struct.pack("<Q", len(part)) + part)


walk(WORKSPACE)
