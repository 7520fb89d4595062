"""The README's tables are made from the code and are current; every recipe key and metric is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from temper.cli import docs, main
from temper.common import metrics
from temper.common.errors import ConfigError
from temper.common.recipe import SECTIONS

README = Path(__file__).resolve().parents[2] / "README.md"


def test_readme_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- table:") == len(docs.TABLES)
    assert docs.refreshed(text) == text, "run: temper docs --write README.md"


def test_every_key_and_metric_has_its_row_and_meaning() -> None:
    rows = [row.split(" | ") for row in docs.key_table().splitlines()[2:]]
    assert {row[0].strip("| `").split(".")[0] for row in rows} == {*SECTIONS, "domains"}
    assert all(row[-1].strip("| ") for row in rows), [row for row in rows if not row[-1].strip("| ")]
    assert all(row.split(" | ")[-1].strip("| ") for row in docs.status_table().splitlines()[2:])
    assert len(docs.metric_table().splitlines()) == 2 + len(metrics.REGISTRY)


def test_unknown_table_is_refused_and_text_outside_is_kept() -> None:
    with pytest.raises(ConfigError, match="no table is called colours"):
        docs.refreshed("<!-- table: colours -->\n<!-- end -->")
    kept = docs.refreshed("before\n<!-- table: keys -->\nold\n<!-- end -->\nafter")
    assert kept.startswith("before\n")
    assert kept.endswith("\nafter")
    assert "\nold\n" not in kept


def test_readme_names_only_commands_that_exist() -> None:
    known = {command.name for command in main.COMMANDS} | {"COMMAND"}
    for block in re.findall(r"^temper (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE):
        assert block in known
