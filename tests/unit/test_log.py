"""No text, whoever wrote it, forges a line or drives a terminal."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temper.common import log


@given(st.text())
def test_a_logged_text_is_one_printable_line(text: str) -> None:
    line = log.clean(text)
    assert line.isprintable() and len(line) <= 10 * log.LINE_LIMIT
    assert line == text or not text.isprintable() or len(text) > log.LINE_LIMIT


def test_escapes_newlines_and_direction_marks_are_spelled_out() -> None:
    assert log.clean("a\x1b[31m\nb\u202ec\udc80") == "a\\x1b[31m\\nb\\u202ec\\udc80"


def test_a_long_text_is_cut_with_its_length() -> None:
    assert log.clean("x" * 5000) == "x" * 4000 + "... (5000 characters)"


def test_a_line_has_time_name_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(log, "_name", "temper")
    log.name_process("actor-1\n")
    log.log("two\nlines")
    assert re.fullmatch(r"\d\d:\d\d:\d\d actor-1\\n two\\nlines\n", out.getvalue())


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.close()
    monkeypatch.setattr(sys, "stderr", out)
    log.log("nobody listens")
    assert out.closed
