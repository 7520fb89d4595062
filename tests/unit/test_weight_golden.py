"""Files of format 1 that lie in the tree are read as they always were: a release must not orphan logs and relays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from temper.broker.weight_files import scan
from temper.broker.weight_log import WeightLog
from temper.common import coding, delta
from temper.common.weight_format import unpack

GOLDEN = Path(__file__).parent / "golden" / "weights"


def test_the_golden_log_is_read_bit_for_bit() -> None:
    files, damaged = scan(GOLDEN)
    assert not damaged and [f.footer.manifest.base is None for f in files] == [True, False]
    log, orphans = WeightLog.of(files)
    assert not orphans and log.lineage == 0x60D1
    way = log.way(None)
    assert way == files
    update = delta.stage([chunk for log_file in files for chunk in log_file.chunks()], None)
    assert update.digest == "ea7bc9cc8064aa7e340f75096ce57a9d"
    special = next(patch for patch in update.changed if patch.name == "fp32.special").values
    expected = [0x7F800001, 0xFFC12345, 0x80000000, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x80000001]
    assert special[:8].tolist() == expected and special[10] == 0x7FFFFFFF


def test_the_golden_log_holds_every_form_and_mode() -> None:
    kinds, modes, most_classes = set(), set(), 0
    for log_file in scan(GOLDEN)[0]:
        for chunk in log_file.chunks():
            for record in unpack(chunk)[0].records:
                kinds.add(record.kind)
                if record.kind == coding.SPARSE:
                    bound, lowest, *rest = record.parameters
                    most_classes = max(most_classes, bound - lowest)
                    modes |= modes_of(rest)
    assert kinds == {coding.RAW, coding.PLANES, coding.DENSE, coding.SPARSE}
    assert modes == {0, 1, 2} and most_classes > 3


def modes_of(parameters: list[int]) -> set[int]:
    """The modes in which a sparse piece says its steps."""
    modes, at = set(), 0
    while at < len(parameters):
        n, at = parameters[at], at + 1
        if n:
            mode, at = parameters[at + 1], at + 2
            modes.add(mode)
            at += 3 if mode == 1 else 2 + parameters[at] if mode == 2 else 0
    return modes


def test_a_sparse_piece_is_written_as_it_always_was() -> None:
    base = np.arange(1000, dtype=np.uint16)
    new = base.copy()
    new[[3, 500, 501, 999]] += np.array([1, 2, 65535, 40], np.uint16)
    coded = coding.encode(base, new, "bfloat16")
    assert coded is not None
    assert (coded.parameters, b"".join(coded.streams).hex()) == ((0, 0, 4, 7, 1, 2, 0, 4), "316a020338200e6004")
