"""The model bundle (config, tokenizer, template ...) that the learner sends and every peer needs, kept on disk.

Checked on arrival: plain file names, digests, a cap on the whole. A peer that asks before it is there gets it when it
comes. Called by the broker's daemon.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from temper.common.errors import EnvironmentFault, ProtocolError
from temper.common.schema import Bundle
from temper.common.wire import FRAME_LIMIT_BYTES

BUNDLE_LIMIT_BYTES = 60 * 1024 * 1024  # one message, below the window that a peer grants
INDEX = "bundle.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def digest(frames: Sequence[Any]) -> str:
    """blake2b-16 over frames, hex: `BundleFile.digest`."""
    sponge = hashlib.blake2b(digest_size=16)
    for frame in frames:
        sponge.update(frame)
    return sponge.hexdigest()


class BundleStore:
    """The bundle of one run directory; `waiting` are the peers that asked too early."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.body: Bundle | None = None
        self.frames: list[Any] = []
        self.waiting: dict[bytes, None] = {}
        if (folder / INDEX).exists():
            self._load()

    def put(self, body: Bundle, frames: Sequence[Any]) -> None:
        """Take a bundle. ProtocolError if it is not what it says; EnvironmentFault if it cannot be written."""
        size = sum(memoryview(frame).nbytes for frame in frames)
        if size > BUNDLE_LIMIT_BYTES:
            raise ProtocolError(f"bundle of {size} bytes, at most {BUNDLE_LIMIT_BYTES}")
        used = 0
        for file in body.files:
            if not PLAIN_NAME.fullmatch(file.name) or file.name == INDEX:
                raise ProtocolError(f"bundle file {file.name!r}: expected a plain file name")
            if file.frames < 0 or digest(frames[used : used + file.frames]) != file.digest:
                raise ProtocolError(f"bundle file {file.name!r} does not have the digest that its entry names")
            used += file.frames
        if used != len(frames):
            raise ProtocolError(f"bundle with {len(frames)} frames, its files name {used}")
        try:
            self._write(body, frames)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {self.folder}: {error.strerror}") from error
        self.body, self.frames = body, [bytes(frame) for frame in frames]

    def _write(self, body: Bundle, frames: Sequence[Any]) -> None:
        partial = self.folder.with_name(self.folder.name + ".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        used = 0
        for file in body.files:
            with (partial / file.name).open("wb") as out:
                for frame in frames[used : used + file.frames]:
                    out.write(frame)
                out.flush()
                os.fsync(out.fileno())
            used += file.frames
        (partial / INDEX).write_bytes(msgspec.json.encode(body))
        shutil.rmtree(self.folder, ignore_errors=True)
        partial.rename(self.folder)

    def _load(self) -> None:
        """Read the bundle of an earlier process; one that is damaged is forgotten, the learner sends it again."""
        try:
            body = msgspec.json.decode((self.folder / INDEX).read_bytes(), type=Bundle)
            frames: list[Any] = []
            for file in body.files:
                data = memoryview((self.folder / file.name).read_bytes())
                pieces = [data[at : at + FRAME_LIMIT_BYTES] for at in range(0, len(data), FRAME_LIMIT_BYTES)]
                pieces = pieces or [data] * file.frames  # an empty file travels as empty frames
                if len(pieces) != file.frames or digest(pieces) != file.digest:
                    return
                frames += pieces
        except (OSError, msgspec.DecodeError):
            return
        self.body, self.frames = body, frames
