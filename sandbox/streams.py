"""What goes into and comes out of a program: sealed inputs, bounded outputs."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import struct
from collections.abc import Callable, Mapping, Sequence

READ_BYTES = 64 * 1024
_FIONREAD = 0x541B
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed(name: str, data: bytes) -> int:
    """A memfd holding `data` that nobody can change any more; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
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
    """A bounded reader of one pipe."""

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
        """Take what is there; True at end of file."""
        try:
            chunk = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self.fd)
            return True
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        if len(chunk) > room and not self.cut:
            self.cut = True
            self._on_flood()
        return False

    def drain(self) -> None:
        """After every writer is dead: take the rest."""
        while True:
            before = len(self.data)
            if self.read():
                return
            if len(self.data) == before and (self.cut or self._empty()):
                return

    def _empty(self) -> bool:
        waiting = array.array("i", [0])
        fcntl.ioctl(self.fd, _FIONREAD, waiting)
        return waiting[0] == 0

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
