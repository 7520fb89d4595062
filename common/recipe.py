"""Loads a recipe: TOML file or shipped name, then ``--section.key=value``; strict types, no unknown and no inert key.

Every daemon and the command line load recipes here and nowhere else. What comes out has passed `recipe_checks`, so
its values are in range and agree with each other. Nothing is guessed: an unknown key, a wrong type or a key that has
no effect in its combination is a `ConfigError` that names the file, the key and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from temper.common.config import DomainConfig, Recipe
from temper.common.errors import ConfigError
from temper.common.recipe_checks import check, check_inert

Tree = dict[str, Any]
SECTIONS: dict[str, type] = {name: hint for name, hint in typing.get_type_hints(Recipe).items() if name != "domains"}


@dataclass(frozen=True, slots=True)
class Override:
    """One ``--section.key=value``: its dotted path and the text after ``=``."""

    path: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return "--" + ".".join(self.path)


def names() -> list[str]:
    """The recipes that ship with Temper."""
    folder = resources.files("temper.common.recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(path_or_name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The checked recipe of a file (``.toml``, or ``.json`` as `to_json` writes it) or of a shipped name.

    `overrides` are ``--section.key=value`` or ``--domains.NAME.key=value``. ConfigError for anything wrong.
    A key of the file is inert or not in the file's own combination, an override's in the final one: so an override
    may switch something off without removing the file's keys for it.
    """
    source, tree = _read(path_or_name)
    base = _build(tree, source)
    if not source.endswith(".json"):
        check_inert(base, _keys(tree), source)
    parsed = [_parse_override(text) for text in overrides]
    for override in parsed:
        _apply(tree, override)
    recipe = _build(tree, source) if parsed else base
    check_inert(recipe, {".".join(override.path) for override in parsed}, "the command line")
    check(recipe, source)
    return recipe


def to_json(recipe: Recipe) -> str:
    """Every key of the recipe as JSON, in order: what travels to the peers and lies in the run directory."""
    return json.dumps(dataclasses.asdict(recipe), ensure_ascii=False, indent=1)


def from_json(text: str | bytes, source: str = "recipe.json") -> Recipe:
    """The inverse of `to_json`, checked; ConfigError when it is not a recipe of this version."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from error
    recipe = _build(tree, source)
    check(recipe, source)
    return recipe


def split_overrides(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """(overrides, everything else): an override is ``--a.b=value`` with a dot before the ``=``."""
    overrides: list[str] = []
    rest: list[str] = []
    for argument in arguments:
        head = argument.split("=", 1)[0]
        (overrides if argument.startswith("--") and "." in head else rest).append(argument)
    return overrides, rest


# ---------------------------------------------------------------- reading


def _read(path_or_name: str) -> tuple[str, Tree]:
    """(what to call the source in messages, its tree)."""
    path = Path(path_or_name)
    is_path = path.suffix in (".toml", ".json") or "/" in path_or_name
    if is_path and path.is_dir():
        raise ConfigError(f"{path}: is a folder, expected a recipe file (.toml) or one of: {', '.join(names())}")
    if is_path:
        try:
            data = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the recipe: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
        source = str(path)
    else:
        if path_or_name not in names():
            raise ConfigError(
                f"no recipe is called {path_or_name!r}{_nearest(path_or_name, names())}; "
                f"shipped: {', '.join(names()) or 'none'}; or give the path of a .toml file"
            )
        data = resources.files("temper.common.recipes").joinpath(path_or_name + ".toml").read_text(encoding="utf-8")
        source = path_or_name + ".toml"
    try:
        return source, json.loads(data) if source.endswith(".json") else tomllib.loads(data)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def _keys(tree: Mapping[str, Any]) -> set[str]:
    """Dotted keys that a checked tree sets, domains under their names."""
    found: set[str] = set()
    for section, table in tree.items():
        if section != "domains":
            found.update(f"{section}.{key}" for key in table)
            continue
        for domain in table:
            found.update(f"domains.{domain['name']}.{key}" for key in domain)
    return found


# ---------------------------------------------------------------- building


def _nearest(name: str, valid: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.4)
    return f": did you mean {found[0]}?" if found else ""


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _unknown(key: str, section: str, valid: Iterable[str], source: str) -> ConfigError:
    valid = list(valid)
    same = [f"{name}.{key}" for name, kind in SECTIONS.items() if key in _hints(kind)]
    near = [f"{section}.{name}" for name in difflib.get_close_matches(key, valid, n=1, cutoff=0.5)]
    best = same or near
    hint = f"did you mean {best[0]}?" if best else f"{section} has {', '.join(valid)}"
    return ConfigError(f"{source}: unknown key {section}.{key}: {hint}")


def _build(tree: Any, source: str) -> Recipe:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: {_type_name(tree)} at the top, expected tables")
    sections: dict[str, Any] = {}
    for name, table in tree.items():
        if name == "domains":
            sections[name] = _build_domains(table, source)
        elif name in SECTIONS:
            sections[name] = _build_table(SECTIONS[name], table, name, source)
        else:
            raise ConfigError(f"{source}: unknown section {name}{_nearest(name, [*SECTIONS, 'domains'])}")
    return Recipe(**sections)


def _build_table(kind: type, table: Any, section: str, source: str) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {section} is {_type_name(table)}, expected a table of keys")
    hints = _hints(kind)
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise _unknown(key, section, hints, source)
        values[key] = _convert(value, hints[key], f"{section}.{key}", source)
    return kind(**values)


def _build_domains(tables: Any, source: str) -> tuple[DomainConfig, ...]:
    if not isinstance(tables, list):
        raise ConfigError(f"{source}: domains is {_type_name(tables)}, expected [[domains]] tables")
    built = []
    for index, table in enumerate(tables):
        label = f"domains[{index}]"
        if isinstance(table, dict):
            label = f"domains.{table['name']}" if isinstance(table.get("name"), str) else label
            for key in ("name", "module"):
                if key not in table:
                    raise ConfigError(f"{source}: {label} has no {key}: every [[domains]] table needs name and module")
        built.append(_build_table(DomainConfig, table, label, source))
    return tuple(built)


def _type_name(value: Any) -> str:
    return {dict: "a table", list: "a list", str: "text", bool: "a boolean", int: "an integer", float: "a number"}.get(
        type(value), type(value).__name__
    )


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    simple: dict[Any, str] = {
        int: "an integer",
        float: "a number",
        str: "text",
        bool: "true or false",
        tuple[str, ...]: "a list of texts",
    }
    for kind, words in simple.items():
        if hint in (kind, kind | None):
            return words
    return "a table"


def _convert(value: Any, hint: Any, path: str, source: str) -> Any:
    try:
        return msgspec.convert(value, type=hint)
    except msgspec.ValidationError as error:
        shown = json.dumps(value, ensure_ascii=False, default=str)
        near = ""
        if typing.get_origin(hint) is typing.Literal and isinstance(value, str):
            near = _nearest(value, typing.get_args(hint))
        raise ConfigError(
            f"{source}: {path} = {shown} is {_type_name(value)}, expected {_expected(hint)}{near}"
        ) from error


# ---------------------------------------------------------------- overrides


def _parse_override(text: str) -> Override:
    head, equals, value = text.removeprefix("--").partition("=")
    path = tuple(head.split("."))
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"{text}: expected --section.key=value, such as --run.max_steps=50")
    return Override(path, value)


def _value(override: Override, hint: Any) -> Any:
    """The override's text as a value for `hint`: texts and choices need no quotes, the rest is written as in TOML."""
    wants_text = hint is str or typing.get_origin(hint) is typing.Literal
    try:
        parsed = tomllib.loads(f"value = {override.text}")
        value = parsed["value"] if len(parsed) == 1 else override.text
    except tomllib.TOMLDecodeError:
        return None if hint == float | None and override.text == "none" else override.text
    return override.text if wants_text and not isinstance(value, str) else value


def _apply(tree: Tree, override: Override) -> None:
    """Set the override's key in `tree`; ConfigError when there is no such key or domain."""
    section, *rest = override.path
    kind: type
    where = "the command line"
    if section == "domains":
        name, *keys = rest
        found = {domain["name"]: domain for domain in tree.get("domains", [])}
        if name not in found:
            raise ConfigError(f"{override}: the recipe has no domain {name}{_nearest(name, found)}")
        table, kind, label = found[name], DomainConfig, f"domains.{name}"
        if len(keys) == 2 and keys[0] == "options":
            table["options"] = {**table.get("options", {}), keys[1]: _value(override, Any)}
            return
    else:
        if section not in SECTIONS:
            raise ConfigError(f"{override}: unknown section {section}{_nearest(section, [*SECTIONS, 'domains'])}")
        table, kind, label, keys = tree.setdefault(section, {}), SECTIONS[section], section, rest
    if len(keys) != 1:
        raise ConfigError(f"{override}: expected --{label}.KEY=value")
    hints = _hints(kind)
    if keys[0] not in hints or (section == "domains" and keys[0] == "name"):
        raise _unknown(keys[0], label, [hint for hint in hints if hint != "name" or section != "domains"], where)
    value = _value(override, hints[keys[0]])
    _convert(value, hints[keys[0]], ".".join(override.path), where)
    table[keys[0]] = value
