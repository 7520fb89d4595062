"""The model bundle on the actor's side: config, tokenizer, template. Data only; digests, names and sizes are checked."""

from __future__ import annotations

import hashlib

from temper.common.errors import ProtocolError
from temper.common.model_files import NAMES
from temper.common.schema import Bundle

LIMIT_BYTES = 128 * 1024 * 1024


def unpack_bundle(bundle: Bundle, frames: list[memoryview]) -> dict[str, bytes]:
    """Files by name; ProtocolError if one has an unknown name, is too large or is not what its digest says."""
    if sum(frame.nbytes for frame in frames) > LIMIT_BYTES:
        raise ProtocolError(f"model bundle of more than {LIMIT_BYTES} bytes")
    if sum(max(file.frames, 0) for file in bundle.files) != len(frames):
        raise ProtocolError(f"model bundle with {len(frames)} frames, its table announces another number")
    files: dict[str, bytes] = {}
    start = 0
    for file in bundle.files:
        if file.name not in NAMES:
            raise ProtocolError(f"model bundle holds {file.name!r}, expected only {', '.join(NAMES)}")
        data = b"".join(frames[start : start + file.frames])
        start += file.frames
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if digest != file.digest:
            raise ProtocolError(f"{file.name} of the model bundle has digest {digest}, announced was {file.digest}")
        files[file.name] = data
    return files
