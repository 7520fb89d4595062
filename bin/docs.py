"""`temper docs`: the pages' tables of recipe keys, objectives, metrics and status, made from the code: they agree with it.

``temper docs`` prints them, ``temper docs --write */README.md`` puts them between their markers
(``<!-- table: keys -->`` ... ``<!-- end -->``), ``temper docs --check */README.md`` fails when a page is not current.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import re
import tokenize
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from temper.common import config, metrics, reports
from temper.common.errors import ConfigError
from temper.common.recipe import SECTIONS
from temper.common.reports import write_atomically

_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def comments(source: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the comment on the lines of the field's definition."""
    by_line: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            by_line[token.start[0]] = token.string.lstrip("# ").strip()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
                found[node.name, field.target.id] = " ".join(by_line[n] for n in lines if n in by_line)
    return found


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " / ".join(map(str, typing.get_args(hint)))
    names: dict[Any, str] = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true / false",
        tuple[str, ...]: "list of texts",
    }
    return next((words for kind, words in names.items() if hint in (kind, kind | None)), "table")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is not dataclasses.MISSING else "(required)"
    if field.default is None or field.default in ("", ()):
        return ""
    return str(field.default).lower() if isinstance(field.default, bool) else f"{field.default}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def key_table() -> str:
    """Every key of a recipe: name, type, default, meaning."""
    told = comments(Path(config.__file__).read_text(encoding="utf-8"))
    lines = [_row("key", "type", "default", "meaning"), "|---|---|---|---|"]
    for section, kind in [*SECTIONS.items(), ("domains.NAME", config.DomainConfig)]:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            meaning = told[kind.__name__, field.name]
            lines.append(_row(f"`{section}.{field.name}`", _type(hints[field.name]), _default(field), meaning))
    return "\n".join(lines)


def metric_table() -> str:
    """Every metric: TensorBoard tag, unit, kind, definition."""
    lines = [_row("metric", "unit", "kind", "definition"), "|---|---|---|---|"]
    for metric in sorted(metrics.REGISTRY.values(), key=lambda metric: metric.name):
        lines.append(_row(f"`{metric.name}`", metric.unit, metric.kind, metric.definition))
    return "\n".join(lines)


def objective_table() -> str:
    """Every named objective: what it is made of, where it comes from and who else agrees with it in tests."""
    from temper.learner.objectives import TABLE

    head = ("name", "advantage", "loss", "correction", "aggregation", "source", "confirmed by")
    lines = [_row(*head), "|" + "---|" * len(head)]
    for row in TABLE.values():
        loss = row.loss if row.level == "token" else f"{row.loss}, ratio of the sequence"
        lines.append(
            _row(f"`{row.name}`", row.advantage, loss, row.correction, row.aggregation, row.source, row.confirmed)
        )
    return "\n".join(lines)


def status_table() -> str:
    """Every key of `temper status --json`: path, type, meaning. A list's items are `[]`."""
    told = comments(Path(reports.__file__).read_text(encoding="utf-8"))
    lines = [_row("key", "type", "meaning"), "|---|---|---|"]

    def add(kind: type, prefix: str) -> None:
        for name, hint in typing.get_type_hints(kind).items():
            inner = [h for h in (hint, *typing.get_args(hint)) if isinstance(h, type) and issubclass(h, msgspec.Struct)]
            lines.append(_row(f"`{prefix}{name}`", _json_type(hint), told[kind.__name__, name]))
            if inner:
                add(inner[0], f"{prefix}{name}{'[]' if typing.get_origin(hint) is list else ''}.")

    add(reports.RunStatus, "")
    return "\n".join(lines)


def _json_type(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if type(None) in arguments:
        return f"{_json_type(arguments[0])} or null"
    if typing.get_origin(hint) in (list, dict):
        inner = _json_type(arguments[-1])
        first, *rest = inner.split(" ")
        many = " ".join([f"{first}s", *rest])
        return f"{'list' if typing.get_origin(hint) is list else 'object'} of {many}"
    return {int: "integer", float: "number", str: "text", bool: "true / false"}.get(hint, "object")


TABLES: dict[str, Callable[[], str]] = {
    "keys": key_table,
    "objectives": objective_table,
    "metrics": metric_table,
    "status": status_table,
}


def refreshed(text: str) -> str:
    """`text` with current tables between the markers; ConfigError for a marker that names no table."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ConfigError(f"no table is called {match[2]}; there are: {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    return _MARK.sub(fill, text)


def main(argv: Sequence[str]) -> int:
    """Print, write or check."""
    parser = argparse.ArgumentParser(
        prog="temper docs", description="Tables of recipe keys, objectives and metrics, from the code."
    )
    parser.add_argument("--write", metavar="FILE", type=Path, nargs="+", default=[], help="refresh the tables there")
    parser.add_argument(
        "--check", metavar="FILE", type=Path, nargs="+", default=[], help="fail if tables are not current"
    )
    arguments = parser.parse_args(argv)
    for page in arguments.write:
        write_atomically(page, refreshed(page.read_text(encoding="utf-8")).encode())
    for page in arguments.check:
        text = page.read_text(encoding="utf-8")
        if refreshed(text) != text:
            raise ConfigError(f"{page}: its tables are not current: temper docs --write {page}")
    if not arguments.write and not arguments.check:
        print("\n\n".join(table() for table in TABLES.values()))
    return 0
