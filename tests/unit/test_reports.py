"""Reports on disk: complete lines only, atomic summaries, tolerant of fields that a later version appends."""

from __future__ import annotations

from pathlib import Path

import pytest
from temper.common import reports
from temper.common.errors import ProtocolError


def test_progress_reader_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    reader = reports.ProgressReader(tmp_path)
    assert reader.read() == []
    first = reports.Progress("step", 1.0, step=1, reward={"a": 0.5})
    line = reports.encode(first)
    path = tmp_path / reports.PROGRESS_FILE
    path.write_bytes(line + b"\n" + line[:7])
    assert reader.read() == [first]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(line[7:] + b"\n")
    assert reader.read() == [first]


def test_a_line_that_a_crash_cut_short_is_skipped_and_counted(tmp_path: Path) -> None:
    line = reports.encode(reports.Progress("step", 1.0, step=1))
    (tmp_path / reports.PROGRESS_FILE).write_bytes(line[:9] + line + b"\n" + line + b"\n")
    reader = reports.ProgressReader(tmp_path)
    assert [found.step for found in reader.read()] == [1]
    assert reader.skipped == 1


def test_summary_round_trip_and_failed_write_keeps_the_old_one(tmp_path: Path) -> None:
    assert reports.read_summary(tmp_path) is None
    summary = reports.Summary(name="x", steps=3, domains={"a": reports.DomainSummary(accuracy_after=0.5)})
    reports.write_summary(tmp_path, summary)
    assert reports.read_summary(tmp_path) == summary
    (tmp_path / f".{reports.SUMMARY_FILE}.part").mkdir()
    with pytest.raises(OSError):
        reports.write_summary(tmp_path, reports.Summary(name="y"))
    assert reports.read_summary(tmp_path) == summary


def test_unknown_fields_are_ignored_and_nonsense_is_named() -> None:
    status = reports.decode(b'{"phase": "train", "later": 1}', reports.RunStatus, "broker")
    assert status.phase == "train"
    with pytest.raises(ProtocolError, match="broker: not a RunStatus"):
        reports.decode(b'{"phase": 3}', reports.RunStatus, "broker")
    with pytest.raises(ProtocolError, match="broker"):
        reports.decode(b"\xff", reports.RunStatus, "broker")
