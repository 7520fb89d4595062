"""One file of the weight log: the chunks of an entry, then a footer that says what they are.

    TMPRLOG1 | chunk | chunk ... | MessagePack Footer | u32 length of it | blake2b-16 of it | TMPREND1

A file is written under another name and renamed once it is on the disk, so a file without a right footer, or whose
chunks do not have their digests, is left over from a crash: it is never served, and removed at the next start.
Every file names the run it belongs to. Used by ``weights`` alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from temper.common.errors import EnvironmentFault
from temper.common.schema import Manifest

START = b"TMPRLOG1"
END = b"TMPREND1"
_TAIL = struct.Struct("<I16s8s")
PART = ".part"
SUFFIXES = (".snapshot", ".delta")


class Footer(msgspec.Struct, array_like=True, frozen=True):
    """What the chunks of a file are. `sequence` orders the files of a store by when they were begun."""

    run_id: str
    sequence: int
    manifest: Manifest
    sizes: list[int]
    digests: list[str]


@dataclass(frozen=True, slots=True)
class LogFile:
    """A complete file."""

    path: Path
    footer: Footer

    def chunks(self) -> list[memoryview]:
        """Its chunks, mapped, uncopied; valid for as long as they are referenced, also after the file is removed."""
        with open(self.path, "rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        at, chunks = len(START), []
        for size in self.footer.sizes:
            chunks.append(view[at : at + size])
            at += size
        return chunks


class Damaged(Exception):
    """A file that is not a complete entry; the text says what is wrong."""


def chunk_digest(frame: Any) -> str:
    """blake2b-16 of a chunk, hex: what `Chunk.digest` holds."""
    return hashlib.blake2b(frame, digest_size=16).hexdigest()


class Writer:
    """An entry on its way to the disk. `commit` or `discard` it."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path = path
        self.sizes: list[int] = []
        self.digests: list[str] = []
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
        self._sync = sync
        self._fd = self._guard(os.open, self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._write(START)

    def add(self, frame: Any, digest: str) -> None:
        """Append a chunk. EnvironmentFault when the disk is full or gone."""
        self._write(frame)
        self.sizes.append(memoryview(frame).nbytes)
        self.digests.append(digest)

    def commit(self, run_id: str, sequence: int, manifest: Manifest) -> LogFile:
        """Make it durable and visible under its own name."""
        footer = Footer(run_id, sequence, manifest, self.sizes, self.digests)
        packed = msgspec.msgpack.encode(footer)
        digest = hashlib.blake2b(packed, digest_size=16).digest()
        self._write(packed + _TAIL.pack(len(packed), digest, END))
        if self._sync:
            self._guard(os.fsync, self._fd)
        os.close(self._fd)
        self._guard(os.replace, self._part, self.path)
        if self._sync:
            sync_directory(self.path.parent)
        return LogFile(self.path, footer)

    def discard(self) -> None:
        """Give the entry up and remove what was written."""
        with contextlib.suppress(OSError):
            os.close(self._fd)
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _write(self, data: Any) -> None:
        view = memoryview(data).cast("B") if len(data) else b""
        while len(view):
            view = view[self._guard(os.write, self._fd, view) :]

    def _guard(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            if hasattr(self, "_fd"):
                self.discard()
            full = " (free space, or move the run directory)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise EnvironmentFault(f"cannot write weights to {self.path}: {error.strerror}{full}") from error


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(path: Path, *, verify: bool = True) -> LogFile:
    """The file at `path`, its footer and sizes checked, its chunks' digests too with `verify`. Damaged if not."""
    size = path.stat().st_size
    if size < len(START) + _TAIL.size:
        raise Damaged(f"{size} bytes")
    with open(path, "rb") as file:
        if file.read(len(START)) != START:
            raise Damaged("it does not start like a weight file")
        file.seek(size - _TAIL.size)
        length, digest, end = _TAIL.unpack(file.read(_TAIL.size))
        if end != END or length > size - len(START) - _TAIL.size:
            raise Damaged("it has no end: torn")
        file.seek(size - _TAIL.size - length)
        packed = file.read(length)
    if hashlib.blake2b(packed, digest_size=16).digest() != digest:
        raise Damaged("its footer is damaged")
    try:
        footer = msgspec.msgpack.decode(packed, type=Footer)
    except msgspec.DecodeError as error:
        raise Damaged(f"its footer is of another format: {error}") from error
    if sum(footer.sizes) != size - len(START) - _TAIL.size - length or len(footer.sizes) != len(footer.digests):
        raise Damaged("its chunks do not have the sizes announced")
    log_file = LogFile(path, footer)
    if verify:
        for i, chunk in enumerate(log_file.chunks()):
            if chunk_digest(chunk) != footer.digests[i]:
                raise Damaged(f"chunk {i} is damaged")
    return log_file


def scan(directory: Path, *, verify: bool = True) -> tuple[list[LogFile], list[tuple[Path, str]]]:
    """(complete files, damaged ones with the reason) of a log's directory, by name; nothing is changed."""
    found: list[LogFile] = []
    damaged: list[tuple[Path, str]] = []
    for path in sorted(directory.iterdir()):
        if path.suffix not in SUFFIXES:
            continue
        try:
            found.append(read(path, verify=verify))
        except Damaged as error:
            damaged.append((path, str(error)))
        except OSError as error:
            raise EnvironmentFault(f"cannot read {path}: {error.strerror}") from error
    return found, damaged
