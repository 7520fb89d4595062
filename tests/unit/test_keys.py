"""Key files and the allow-list."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from temper.common import keys
from temper.common.errors import ConfigError


def test_a_new_peer_gets_a_file_of_its_own_and_is_let_in(tmp_path: Path) -> None:
    file = keys.new_peer(tmp_path / "k", "actor-1")
    peer, broker = keys.load_peer(file), keys.load_broker(tmp_path / "k")
    assert peer.broker == broker.public and keys.allowed(tmp_path / "k") == {"actor-1": peer.public}
    assert file.stat().st_mode & 0o777 == 0o600
    assert peer.secret not in repr(peer) and broker.secret not in repr(broker)


def test_the_brokers_keys_are_made_once(tmp_path: Path) -> None:
    assert keys.new_broker(tmp_path / "k") == keys.new_broker(tmp_path / "k")


def test_a_revoked_key_is_gone_and_its_name_free(tmp_path: Path) -> None:
    keys.new_peer(tmp_path, "a")
    public = keys.allowed(tmp_path)["a"]
    keys.revoke(tmp_path, "a")
    assert keys.allowed(tmp_path) == {}
    keys.allow(tmp_path, "b", public)
    assert keys.allowed(tmp_path) == {"b": public}
    with pytest.raises(ConfigError, match="no key of 'a' is allowed; there are: b"):
        keys.revoke(tmp_path, "a")


def test_an_existing_key_is_not_replaced(tmp_path: Path) -> None:
    keys.new_peer(tmp_path, "a")
    with pytest.raises(ConfigError, match="exists already"):
        keys.new_peer(tmp_path, "a")


@pytest.mark.parametrize("name", ["", "../a", "a b", ".hidden", "a" * 65, 'a"b'])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="key name"):
        keys.new_peer(tmp_path, name)


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = keys.new_peer(tmp_path, "a")
    os.chmod(file, 0o640)
    with pytest.raises(ConfigError, match=r"mode 640, others may read it: chmod 600"):
        keys.load_peer(file)


@pytest.mark.parametrize("text", ["", "public = 3", "[[", 'public = "short"\nsecret="x"\nbroker="y"', "\x00"])
def test_a_malformed_key_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"a\.key"):
        keys.load_peer(file)


def test_a_missing_key_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: make one beside the broker with: temper keys new NAME"):
        keys.load_peer(tmp_path / "none.key")
    with pytest.raises(ConfigError, match="temper keys new --keys"):
        keys.load_broker(tmp_path)
