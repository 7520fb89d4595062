"""This host's own configuration: what may execute here. It never comes from the recipe or the broker.

[actor]
domains = ["temper.actor.domains.reverse", "my_package.my_domain"]   # default: the built-in domains
slots = 16                                                           # default: the recipe's leases_in_flight

[actor.sglang]                      # see `engines.sglang_host.SglangHost`
python = "/opt/sglang/bin/python"   # default: what `temper engine install` made
count = 2                           # servers of this actor (default 1); requests go to the least loaded
tp_size = 2                         # SGLang's tensor, data and expert parallelism: tp_size, dp_size, ep_size
flags = ["--mem-fraction-static", "0.8"]   # appended to the server's command line
environment = { OMP_NUM_THREADS = "4" }
cpu = false                         # true: run it without a GPU
bind = "127.0.0.1"                  # where they listen
log_dir = "/var/log/temper"         # default: a temporary folder, named in the log
start_timeout_s = 600.0
servers = ["http://127.0.0.1:30000"]       # running servers instead, each of this actor alone
router = "http://127.0.0.1:30080"          # an sglang-router before them
admin_key_file = "/etc/temper/sglang.key"  # their admin key
transfer = "auto"                   # of weights: shared (memory), copy (in the request), disk (files in disk_dir)
disk_dir = ""
"""

from __future__ import annotations

import hashlib
import importlib.util
import pkgutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
from temper.actor.engines.sglang_host import SglangHost
from temper.common.errors import ConfigError

BUILT_IN = "temper.actor.domains"


@dataclass(frozen=True, slots=True)
class ActorHost:
    """`domains`: modules that may be loaded; None means the built-in ones. `slots`: leases at once, 0 = the recipe's."""

    domains: tuple[str, ...] | None = None
    slots: int = 0
    sglang: SglangHost = field(default_factory=SglangHost)


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
    try:
        return msgspec.convert(table, type=ActorHost) if _known(table, ActorHost, "actor") else ActorHost()
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"host file {path}: {error}") from error


def _known(table: Any, kind: Any, name: str) -> bool:
    """True if `table` is one and holds only fields of `kind`, its tables too; ConfigError otherwise."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name} = {table!r}, expected a table")
    known = [entry.name for entry in fields(kind)]
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"unknown key {name}.{key}, expected one of {', '.join(known)}")
        if isinstance(value, dict) and key == "sglang":
            _known(value, SglangHost, f"{name}.sglang")
    return True


def built_in_domains() -> list[str]:
    """The domain modules that Temper ships, found without importing them."""
    package = importlib.util.find_spec(BUILT_IN)
    paths = list(package.submodule_search_locations or ()) if package else []
    return sorted(f"{BUILT_IN}.{module.name}" for module in pkgutil.iter_modules(paths))


def domain_digests(modules: Sequence[str]) -> dict[str, str]:
    """Module -> blake2b-16 (hex) of its source; only the packages it lies in are imported. ConfigError if one can't be
    found."""
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
