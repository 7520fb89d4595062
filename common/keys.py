"""CURVE keys: who may talk to a broker over TCP. Key folder of a broker, key files of peers, the allow-list.

A key folder (0700) lies beside the broker: ``broker.key`` holds its pair, ``allowed.toml`` the public keys of the peers
it lets in, by name. A peer's key file (0600) holds its own pair and the broker's public key; it is made next to the
broker and carried to the peer's machine. Files are TOML, replaced atomically, never half-written.

Called by ``temper keys`` (new, allow, list, revoke), by ``sockets`` (load) and by ``admission`` (the allow-list).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from temper.common.errors import ConfigError, EnvironmentFault

BROKER_FILE = "broker.key"
ALLOWED_FILE = "allowed.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 of 32 bytes


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """The broker's pair (Z85 text) and the folder with its allow-list."""

    public: str
    secret: str
    folder: Path

    def __repr__(self) -> str:
        return f"BrokerKeys(public={self.public!r}, folder={str(self.folder)!r})"


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """A peer's pair and the public key of the broker it trusts (Z85 text)."""

    name: str
    public: str
    secret: str
    broker: str

    def __repr__(self) -> str:
        return f"PeerKeys(name={self.name!r}, public={self.public!r})"


def new_broker(folder: Path) -> BrokerKeys:
    """The keys in `folder`, made if there are none yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise EnvironmentFault(f"key folder {folder}: {error.strerror}") from error
    if not (folder / BROKER_FILE).exists():
        public, secret = (key.decode() for key in zmq.curve_keypair())
        _write(folder / BROKER_FILE, {"public": public, "secret": secret})
    if not (folder / ALLOWED_FILE).exists():
        _write(folder / ALLOWED_FILE, {})
    return load_broker(folder)


def load_broker(folder: Path) -> BrokerKeys:
    """The keys in `folder`; ConfigError if it has none or others may read them."""
    found = _read_secret(folder / BROKER_FILE, f"make them with: temper keys new --keys {folder}")
    return BrokerKeys(_key(found, "public", folder), _key(found, "secret", folder), folder)


def new_peer(folder: Path, name: str, file: Path | None = None) -> Path:
    """Make a key file for the peer `name` (default ``folder/NAME.key``) and let it in. Refuses to replace a key."""
    _check_name(name)
    broker = new_broker(folder)
    file = file or folder / f"{name}.key"
    if file.exists() or name in allowed(folder):
        raise ConfigError(f"a key for {name!r} exists already: revoke it first or choose another name")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    _write(file, {"name": name, "public": public, "secret": secret, "broker": broker.public})
    allow(folder, name, public)
    return file


def load_peer(file: Path) -> PeerKeys:
    """A peer's key file; ConfigError if it is missing, malformed or readable by others."""
    found = _read_secret(file, "make one beside the broker with: temper keys new NAME")
    return PeerKeys(
        found.get("name", ""), _key(found, "public", file), _key(found, "secret", file), _key(found, "broker", file)
    )


def allowed(folder: Path) -> dict[str, str]:
    """name -> public key of every peer that is let in."""
    found = _read(folder / ALLOWED_FILE, f"make it with: temper keys new --keys {folder}")
    return {name: _key(found, name, folder / ALLOWED_FILE) for name in found}


def allow(folder: Path, name: str, public: str) -> None:
    """Let the peer with this public key in."""
    _check_name(name)
    if not _KEY.fullmatch(public):
        raise ConfigError(f"public key of {name!r} is {public!r}, expected 40 characters of Z85")
    _write(folder / ALLOWED_FILE, {**allowed(folder), name: public})


def revoke(folder: Path, name: str) -> None:
    """Shut the peer out; a running broker closes it within seconds."""
    keys = allowed(folder)
    if name not in keys:
        raise ConfigError(f"no key of {name!r} is allowed; there are: {', '.join(sorted(keys)) or 'none'}")
    del keys[name]
    _write(folder / ALLOWED_FILE, keys)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r}: expected letters, digits, dots, dashes and underscores, at most 64")


def _key(found: Mapping[str, str], name: str, source: Path) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise ConfigError(f"{source}: {name!r} is no CURVE key (40 characters of Z85 expected)")
    return value


def _read(file: Path, remedy: str) -> dict[str, str]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"key file {file} does not exist: {remedy}") from error
    except OSError as error:
        raise ConfigError(f"key file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {file} is malformed: {error}") from error


def _read_secret(file: Path, remedy: str) -> dict[str, str]:
    found = _read(file, remedy)
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(f"key file {file} has mode {mode:o}, others may read it: chmod 600 {file}")
    return found


def _write(file: Path, values: Mapping[str, str]) -> None:
    text = "".join(f'"{name}" = "{value}"\n' for name, value in values.items())
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError as error:
        raise EnvironmentFault(f"key file {file}: {error.strerror}") from error
