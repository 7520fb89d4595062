"""The model bundle as a message: every file that engines need beside the weights, content-addressed and size-capped."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from temper.common.errors import ConfigError
from temper.common.schema import Bundle, BundleFile
from temper.common.wire import FRAME_LIMIT, FRAME_LIMIT_BYTES


def bundle_of(name: str, files: Mapping[str, bytes]) -> tuple[Bundle, list[memoryview]]:
    """The message and its frames, files in the order of their names. ConfigError when they do not fit into one."""
    frames: list[memoryview] = []
    entries = []
    for file, content in sorted(files.items()):
        view = memoryview(content)
        parts = [view[i : i + FRAME_LIMIT_BYTES] for i in range(0, max(len(view), 1), FRAME_LIMIT_BYTES)]
        entries.append(BundleFile(file, hashlib.blake2b(content, digest_size=16).hexdigest(), len(parts)))
        frames += parts
    if len(frames) > FRAME_LIMIT:
        raise ConfigError(
            f"the model's files beside its weights take {sum(map(len, files.values())) >> 20} MiB in {len(frames)} "
            f"pieces, at most {FRAME_LIMIT} of {FRAME_LIMIT_BYTES >> 20} MiB: is a weights file among them?"
        )
    return Bundle(entries, name), frames
