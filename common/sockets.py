"""Addresses and sockets: where a broker listens, how a peer reaches it, and every limit that ZeroMQ itself enforces.

``ipc://DIR``: two sockets in a folder only its owner can enter. ``tcp://HOST:PORT``: control on PORT, bulk on PORT + 1,
CURVE keys on both ends or nothing. Binding holds a lock, so a second broker on the same folder is refused instead of
stealing the path from the first. Called by ``pump.Router`` (bind) and ``peer.Peer`` (connect).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zmq
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.keys import BrokerKeys, PeerKeys
from temper.common.wire import FRAME_LIMIT_BYTES

SocketKind = Literal["control", "bulk"]
Socket = zmq.Socket[bytes]

IPC_PATH_LIMIT_BYTES = 107
SEND_HIGH_WATER = 8192  # messages to one peer inside ZeroMQ; credit stays far below it, so only a flood meets it
RECEIVE_HIGH_WATER = 2048
HEARTBEAT_MS = {
    "tcp": 5_000,
    "ipc": 30_000,
}  # ZMTP's own, from the I/O thread: finds dead connections, says nothing about
HEARTBEAT_TIMEOUT_MS = 30_000  # the process. One on this host dies with its process, unless that is stopped


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's address. `scheme` ipc: `place` is a folder; tcp: `place` is a host and `port` the control port."""

    scheme: Literal["ipc", "tcp"]
    place: str
    port: int = 0

    def endpoint(self, kind: SocketKind) -> str:
        """The ZeroMQ endpoint of one of the two sockets."""
        if self.scheme == "ipc":
            return f"ipc://{self.place}/{kind}.sock"
        return f"tcp://{self.place}:{self.port + (kind == 'bulk')}"

    def __str__(self) -> str:
        return f"ipc://{self.place}" if self.scheme == "ipc" else f"tcp://{self.place}:{self.port}"


def parse_address(text: str) -> Address:
    """`text` as an Address; ConfigError says what is wrong with it."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(f"address {text!r}: expected ipc://FOLDER or tcp://HOST:PORT")
    if scheme == "ipc":
        folder = os.path.abspath(rest)
        address = Address("ipc", folder)
        length = len(os.fsencode(address.endpoint("control").removeprefix("ipc://")))
        if length > IPC_PATH_LIMIT_BYTES:
            raise ConfigError(
                f"address {text!r}: the socket's path has {length} bytes, at most {IPC_PATH_LIMIT_BYTES} are possible: "
                "choose a shorter folder, for example under /tmp or /run/user"
            )
        return address
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65534:
        raise ConfigError(
            f"address {text!r}: expected tcp://HOST:PORT with PORT from 1 to 65534 (PORT + 1 is used too)"
        )
    return Address("tcp", host, int(port))


def routing_id() -> bytes:
    """A random routing id: a restarted process is a new peer, never the mute shadow of the old one."""
    return b"T" + secrets.token_bytes(8)


def new_epoch() -> int:
    """A random incarnation, u32, never 0."""
    return secrets.randbelow(2**32 - 1) + 1


def domain_of(keys: BrokerKeys) -> str:
    """The ZAP domain of a key folder."""
    return f"temper:{keys.folder.absolute()}"


@dataclass(slots=True)
class Bound:
    """A bound ROUTER socket and what must be given back with it."""

    socket: Socket
    lock: int | None = None  # file descriptor of the ipc lock
    path: str | None = None
    side_door: str = ""  # an inproc endpoint of the same socket

    def drop(self, peer: bytes) -> None:
        """Take `peer`'s routing id over and give it up again: nothing is read from its connection any more, so it costs
        nothing, however much it sends. ZeroMQ has no other way to end one connection of a ROUTER. It may connect anew."""
        ghost: Socket = zmq.Context.instance().socket(zmq.DEALER)
        try:
            ghost.setsockopt(zmq.LINGER, 0)
            ghost.setsockopt(zmq.ROUTING_ID, peer)
            ghost.connect(self.side_door)
            self.socket.getsockopt(zmq.EVENTS)  # have the ROUTER take note of it
        finally:
            ghost.close()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket, remove its path, free the lock."""
        self.socket.close(linger=linger_ms)
        if self.lock is not None:
            if self.path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self.lock)
            self.lock = None


def require_keys(address: Address, keys: BrokerKeys | None) -> None:
    """ConfigError for TCP without keys; a broker asks before it writes anything."""
    if address.scheme == "tcp" and keys is None:
        raise ConfigError(
            f"{address} needs keys: everybody who reaches the port could take part in the run. "
            "Make them with `temper keys new` and name the folder with --keys FOLDER, or bind ipc://FOLDER"
        )


def bind(address: Address, kind: SocketKind, keys: BrokerKeys | None = None) -> Bound:
    """A bound ROUTER. EnvironmentFault if somebody else has the place, ConfigError for TCP without keys.

    With keys, the caller must have ``admission.Admission`` running first: a server without it lets nobody in.
    """
    require_keys(address, keys)
    lock, path = None, None
    if address.scheme == "ipc":
        lock, path = _lock(address, kind), address.endpoint(kind).removeprefix("ipc://")
    socket = _socket(zmq.ROUTER, address)
    bound = Bound(socket, lock, path)
    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnected peer need not wait for its dead connection
        if keys is not None and address.scheme == "tcp":
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            socket.setsockopt(zmq.ZAP_DOMAIN, domain_of(keys).encode())
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.bind(address.endpoint(kind))
        bound.side_door = f"inproc://temper-{secrets.token_hex(8)}"
        socket.bind(bound.side_door)
    except zmq.ZMQError as error:
        bound.close()
        raise _bind_fault(address, kind, error) from error
    return bound


def connect(address: Address, kind: SocketKind, identity: bytes, keys: PeerKeys | None = None) -> Socket:
    """A connecting DEALER; the broker need not be there yet. ConfigError for TCP without keys."""
    if address.scheme == "tcp" and keys is None:
        raise ConfigError(f"{address} needs a key file: make one beside the broker with `temper keys new NAME`")
    socket = _socket(zmq.DEALER, address)
    try:
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a broker that is not there
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        if keys is not None and address.scheme == "tcp":
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.broker.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.connect(address.endpoint(kind))
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"cannot connect to {address}: {error.strerror}") from error
    return socket


def use_io_threads(count: int) -> None:
    """Let ZeroMQ move bytes in that many threads. Call it before the process's first socket; later it does nothing."""
    zmq.Context.instance().set(zmq.IO_THREADS, count)


def _socket(kind: Any, address: Address) -> Socket:
    socket: Socket = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_BYTES)  # of one frame; the rest is checked above ZeroMQ
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS[address.scheme])
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    return socket


def _lock(address: Address, kind: SocketKind) -> int:
    folder = Path(address.place)
    try:
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700)
        status = folder.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise EnvironmentFault(
                f"{address}: the folder must be yours alone (mode 700), it has mode {stat.S_IMODE(status.st_mode):o} and "
                f"owner {status.st_uid}: choose a new folder, or chmod 700 {folder}"
            )
        lock = os.open(folder / f"{kind}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvironmentFault(f"{address}: {error.strerror} ({error.filename})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise EnvironmentFault(
            f"{address} is served by another broker (pid {owner}): stop it or choose another --bind"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _bind_fault(address: Address, kind: SocketKind, error: zmq.ZMQError) -> EnvironmentFault:
    place = address.endpoint(kind)
    if error.errno == errno.EADDRINUSE:
        return EnvironmentFault(f"{place} is taken by another process: stop it or choose another --bind")
    return EnvironmentFault(f"cannot listen on {place}: {error.strerror}")
