"""The bundle message names every file with its digest and pieces, and refuses what cannot be one message."""

import hashlib

import pytest
from temper.common.errors import ConfigError
from temper.common.wire import FRAME_LIMIT_BYTES
from temper.learner.bundle import bundle_of


def test_files_are_named_digested_and_divided():
    large = bytes(FRAME_LIMIT_BYTES + 3)
    body, frames = bundle_of("toy", {"tokenizer.json": large, "config.json": b"{}", "empty": b""})
    assert [(file.name, file.frames) for file in body.files] == [
        ("config.json", 1),
        ("empty", 1),
        ("tokenizer.json", 2),
    ]
    assert body.files[2].digest == hashlib.blake2b(large, digest_size=16).hexdigest()
    assert [len(frame) for frame in frames] == [2, 0, FRAME_LIMIT_BYTES, 3]


def test_weights_among_the_files_are_refused():
    with pytest.raises(ConfigError, match="is a weights file among them"):
        bundle_of("toy", {f"part{i}": b"x" for i in range(65)})
