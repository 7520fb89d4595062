"""Addresses."""

from __future__ import annotations

import os

import pytest
from temper.common.errors import ConfigError
from temper.common.sockets import parse_address, routing_id


def test_an_ipc_address_is_two_sockets_in_a_folder() -> None:
    address = parse_address("ipc:///run/x")
    assert address.endpoint("control") == "ipc:///run/x/control.sock"
    assert address.endpoint("bulk") == "ipc:///run/x/bulk.sock"
    assert str(address) == "ipc:///run/x"
    assert parse_address("ipc://x").place == os.path.abspath("x")


def test_a_tcp_address_is_a_port_and_the_next_one() -> None:
    address = parse_address("tcp://[::1]:5000")
    assert (address.endpoint("control"), address.endpoint("bulk")) == ("tcp://[::1]:5000", "tcp://[::1]:5001")
    assert str(parse_address("tcp://gpu-host:7000")) == "tcp://gpu-host:7000"


@pytest.mark.parametrize(
    "text",
    ["", "x", "udp://a:1", "ipc://", "tcp://", "tcp://a", "tcp://:1", "tcp://a:", "tcp://a:0", "tcp://a:65535",
     "tcp://a:x", "tcp://a:-1", "tcp://a:١"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_address(text)


def test_a_path_too_long_for_a_unix_socket_is_refused_before_it_is_cut() -> None:
    folder = "/tmp/" + "x" * (107 - len("/tmp/") - len("/control.sock"))
    assert len(parse_address(f"ipc://{folder}").endpoint("control")) == len("ipc://") + 107
    with pytest.raises(ConfigError, match="has 108 bytes, at most 107"):
        parse_address(f"ipc://{folder}x")


def test_routing_ids_are_never_used_twice() -> None:
    assert len({routing_id() for _ in range(1000)}) == 1000
