"""What a host says about SGLang ([actor.sglang] of its file), and what the recipe says about a server. Values only."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from temper.common.errors import ConfigError

Transfer = Literal["auto", "shared", "copy", "disk"]


@dataclass(frozen=True, slots=True)
class SglangHost:
    """[actor.sglang] of the host file.

    Own servers: `count` of them with the interpreter `python`, `flags` appended to ours, listening on `bind`; `cpu`: without
    a GPU, with the flags and stand-ins that needs; `tp_size`, `dp_size`, `ep_size`: SGLang's parallelism of one server;
    `log_dir`: where their logs go. Running servers instead: `servers` (addresses), of one actor each, with the admin key in
    `admin_key_file`; `router`: the address of an sglang-router before them that takes the requests. `transfer`: how weights
    reach a server: ``shared`` memory of this machine, ``copy`` (inside the request), ``disk`` (as files in `disk_dir`);
    ``auto`` is shared where every server is on this machine.
    """

    python: str = ""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu: bool = False
    log_dir: str = ""
    start_timeout_s: float = 600.0
    count: int = 1
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    bind: str = "127.0.0.1"
    servers: tuple[str, ...] = ()
    router: str = ""
    admin_key_file: str = ""
    transfer: Transfer = "auto"
    disk_dir: str = ""

    @property
    def usable(self) -> bool:
        """Whether there is anything to sample with."""
        return bool(self.python or self.servers)

    @property
    def how(self) -> Transfer:
        """`transfer`, auto resolved."""
        if self.transfer != "auto":
            return self.transfer
        if self.dp_size > 1:
            return "disk"
        return "shared" if all(is_loopback(url) for url in self.servers) else "copy"


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What the recipe says about each server."""

    dtype: str
    max_rows: int
    max_length_tokens: int
    routed_experts: bool = False


def check(host: SglangHost) -> None:
    """ConfigError if the table contradicts itself."""
    if min(host.count, host.tp_size, host.dp_size, host.ep_size) < 1:
        raise ConfigError("[actor.sglang] count, tp_size, dp_size and ep_size are at least 1")
    for url in (*host.servers, *([host.router] if host.router else [])):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"[actor.sglang] {url!r} is no address, expected one like http://127.0.0.1:30000")
    if host.router and not host.servers:
        raise ConfigError("[actor.sglang] router needs servers: weights go to the servers behind it, one by one")
    if host.servers and host.count > 1:
        raise ConfigError("[actor.sglang] has both count and servers: start servers, or name running ones")
    if host.dp_size > 1 and host.transfer not in ("auto", "disk"):
        raise ConfigError(
            f"[actor.sglang] transfer = {host.transfer} with dp_size = {host.dp_size}: SGLang's replicas take weights from"
            ' disk only; use transfer = "disk", or count servers instead of dp_size'
        )
    if host.how == "disk" and host.servers and not host.disk_dir:
        raise ConfigError(
            "[actor.sglang] transfer = disk needs disk_dir, a folder that the servers see under that path"
        )
    if host.how == "shared" and not all(is_loopback(url) for url in host.servers):
        raise ConfigError("[actor.sglang] transfer = shared, but a server is on another machine: use copy or disk")


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own."""
    name = urlsplit(url).hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def read_key(path: str) -> str:
    """The admin key in a file; empty without one."""
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[actor.sglang] admin_key_file {path}: {error}") from error
