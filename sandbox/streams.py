"""What goes into and comes out of a program: sealed inputs, bounded outputs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from collections.abc import Callable, Mapping, Sequence

READ_BYTES = 64 * 1024
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed(name: str, data: bytes) -> int:
    """A memfd holding `data` that nobody can change any more; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        while at < len(data):  # not write: a program finds the offset where it is
            at += os.pwrite(fd, memoryview(data)[at:], at)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def pack_bundle(arguments: Sequence[str], files: Mapping[str, bytes], seed: int = 0) -> bytes:
    """The init's bundle format."""
    items = [str(seed).encode(), str(len(arguments)).encode(), *(os.fsencode(a) for a in arguments)]
    for name, content in files.items():
        items += [os.fsencode(name), content]
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def streams(loop: asyncio.AbstractEventLoop, limits: Sequence[int], on_flood: Callable[[], None]) -> list[Stream]:
    """One for each limit, or an OSError and none."""
    made: list[Stream] = []
    try:
        for limit in limits:
            made.append(Stream(loop, limit, on_flood))
    except BaseException:
        for stream in made:
            stream.close()
        raise
    return made


class Stream:
    """A bounded reader of one pipe. While `far`, our copy of the writing end, is open, no end of file is seen: to be told of it
    costs more than a program's end, which is reported anyway."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int, on_flood: Callable[[], None]) -> None:
        self.fd, self.far = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.data = bytearray()
        self.cut = False
        self._limit = limit
        self._on_flood = on_flood
        self._loop = loop
        loop.add_reader(self.fd, self.read)

    def read(self) -> bool:
        """Take what is there; whether there was any."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:  # end of file, where nobody else has our end `far`
            self._loop.remove_reader(self.fd)
            return False
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        if len(chunk) > room and not self.cut:
            self.cut = True
            self._on_flood()
        return True

    def drain(self) -> None:
        """Take the rest of what was written so far, up to the limit."""
        while not self.cut and self.read():
            pass

    def take(self) -> tuple[bytes, bool]:
        """What came so far, and whether some was cut; then start anew."""
        taken = bytes(self.data), self.cut
        self.data.clear()
        self.cut = False
        return taken

    def close_far(self) -> None:
        """Close our copy of the writing end, so that end of file is seen. Idempotent."""
        far, self.far = self.far, -1
        if far >= 0:
            os.close(far)

    def close(self) -> None:
        self.close_far()
        self._loop.remove_reader(self.fd)
        os.close(self.fd)
