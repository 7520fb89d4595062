"""This host's own configuration: what may execute here. It never comes from the recipe or the broker.

[actor]
domains = ["temper.actor.domains.reverse", "my_package.my_domain"]   # default: the built-in domains
slots = 16                                                           # default: the recipe's leases_in_flight
"""

from __future__ import annotations

import hashlib
import importlib.util
import pkgutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from temper.common.errors import ConfigError

BUILT_IN = "temper.actor.domains"


@dataclass(frozen=True, slots=True)
class ActorHost:
    """`domains`: modules that may be loaded; None means the built-in ones. `slots`: leases at once, 0 = the recipe's."""

    domains: tuple[str, ...] | None = None
    slots: int = 0


def load_host(path: Path | None) -> ActorHost:
    """The [actor] table of a host file; the defaults without one. ConfigError names the key that is wrong."""
    if path is None:
        return ActorHost()
    try:
        table: Any = tomllib.loads(path.read_text()).get("actor", {})
    except OSError as error:
        raise ConfigError(f"host file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"host file {path}: not TOML: {error}") from error
    known = [f.name for f in fields(ActorHost)]
    for key in table if isinstance(table, dict) else ["actor"]:
        if key not in known:
            raise ConfigError(f"host file {path}: unknown key actor.{key}, expected one of {', '.join(known)}")
    domains, slots = table.get("domains"), table.get("slots", 0)
    if domains is not None and not (isinstance(domains, list) and all(isinstance(name, str) for name in domains)):
        raise ConfigError(f"host file {path}: actor.domains = {domains!r}, expected a list of module names")
    if isinstance(slots, bool) or not isinstance(slots, int) or not 0 <= slots <= 4096:
        raise ConfigError(f"host file {path}: actor.slots = {slots!r}, expected a whole number from 0 to 4096")
    return ActorHost(None if domains is None else tuple(domains), slots)


def built_in_domains() -> list[str]:
    """The domain modules that Temper ships, found without importing them."""
    package = importlib.util.find_spec(BUILT_IN)
    paths = list(package.submodule_search_locations or ()) if package else []
    return sorted(f"{BUILT_IN}.{module.name}" for module in pkgutil.iter_modules(paths))


def domain_digests(modules: Sequence[str]) -> dict[str, str]:
    """Module -> blake2b-16 (hex) of its source, without importing it. ConfigError if one can't be found."""
    found: dict[str, str] = {}
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"domain module {name}: {error}") from error
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            raise ConfigError(f"domain module {name} of this host's allow-list is not installed here")
        found[name] = hashlib.blake2b(Path(spec.origin).read_bytes(), digest_size=16).hexdigest()
    return found
