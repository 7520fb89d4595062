"""The pages' tables are made from the code and are current; every recipe key and metric is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from temper.cli import docs, main
from temper.common import metrics
from temper.common.errors import ConfigError
from temper.common.recipe import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/README.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def test_pages_are_current() -> None:
    tables = re.findall(r"<!-- table: (\w+) -->", "".join(TEXTS.values()))
    assert sorted(tables) == sorted(docs.TABLES)
    for page, text in TEXTS.items():
        assert docs.refreshed(text) == text, f"run: temper docs --write {page}"


def test_links_between_pages_lead_somewhere() -> None:
    """Files that exist, headings too; every page can be reached from the first."""
    reached = set()
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            name, _, heading = target.partition("#")
            found = (page.parent / name).resolve() if name else page
            assert found.exists(), f"{page}: {target}"
            if heading:
                slugs = {
                    line.lstrip("# ").lower().replace(" ", "-") for line in TEXTS[found].splitlines() if line[:1] == "#"
                }
                assert heading in slugs, f"{page}: {target}"
            reached |= {found} if page == PAGES[0] else set()
    assert set(PAGES[1:]) <= reached


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


def test_pages_name_only_commands_that_exist() -> None:
    known = {command.name for command in main.COMMANDS} | {"COMMAND"}
    for block in re.findall(r"^temper (\w+)", "\n".join(TEXTS.values()), re.MULTILINE):
        assert block in known
