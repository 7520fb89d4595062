"""Who may open a CURVE connection: answers ZeroMQ's authentication requests (ZAP) from a broker's allow-list.

Without it a CURVE server would let every key in. One handler for the process, on the event loop; each key folder is a
ZAP domain of its own. The allow-list is read again whenever its file changes, so `temper keys allow` and `revoke` act
on a running broker. Used by ``pump.Router``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
from temper.common.errors import TemperError
from temper.common.keys import ALLOWED_FILE, BrokerKeys, allowed
from temper.common.log import log
from temper.common.sockets import domain_of
from zmq.utils import z85

ENDPOINT = "inproc://zeromq.zap.01"
LOG_EVERY_S = 5.0


class AllowList:
    """The allow-list of one folder, as its file last was. An unreadable file lets nobody in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._names: dict[str, str] = {}

    def names(self) -> dict[str, str]:
        """public key (Z85) -> name."""
        try:
            status = (self._folder / ALLOWED_FILE).stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._names = {public: name for name, public in allowed(self._folder).items()}
                self._stamp = stamp
        except (OSError, TemperError) as error:
            if self._stamp is not None or self._names:
                log(f"allow-list {self._folder / ALLOWED_FILE} cannot be read, nobody is let in: {error}")
            self._stamp, self._names = None, {}
        return self._names


class Admission:
    """The process's ZAP handler; `of` joins it, `leave` undoes that."""

    _current: Admission | None = None

    def __init__(self) -> None:
        self._lists: dict[str, AllowList] = {}
        self._users = 0
        self._refusals = 0
        self._log_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)

    @classmethod
    def of(cls, keys: BrokerKeys) -> Admission:
        """The handler, now also for the folder of `keys`."""
        if cls._current is not None and cls._current._loop.is_closed():
            cls._current._socket.close(linger=0)  # left over from a loop that ended without `leave`
            cls._current = None
        if cls._current is None:
            cls._current = cls()
        current = cls._current
        current._users += 1
        current._lists.setdefault(domain_of(keys), AllowList(keys.folder))
        return current

    def leave(self) -> None:
        """One user less; the last one closes the handler."""
        self._users -= 1
        if self._users == 0:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=0)
            Admission._current = None

    def admits(self, keys: BrokerKeys, public: str) -> bool:
        """True if that public key is (still) let in."""
        return public in self._lists[domain_of(keys)].names()

    def _drain(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._socket.send_multipart(self._answer(request), zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address = (request + [b""] * 4)[:4]
        credentials = request[6:]
        names = self._lists.get(domain.decode("utf-8", "replace"))
        public = ""
        if version == b"1.0" and names is not None and request[5:6] == [b"CURVE"] and len(credentials) == 1:
            public = z85.encode(credentials[0]).decode() if len(credentials[0]) == 32 else ""
        if names is not None and public in names.names():
            return [b"1.0", request_id, b"200", b"OK", public.encode(), b""]
        self._log_refusal(address.decode("ascii", "replace"), public)
        return [b"1.0", request_id, b"400", b"key not allowed", b"", b""]

    def _log_refusal(self, address: str, public: str) -> None:
        """One line in `LOG_EVERY_S`: whoever knocks often must not fill the disk."""
        self._refusals += 1
        now = self._loop.time()
        if now < self._log_at:
            return
        more = f" ({self._refusals} since the last such line)" if self._refusals > 1 else ""
        log(f"a connection from {address} was refused: its key {public or '?'} is not allowed{more}")
        self._refusals, self._log_at = 0, now + LOG_EVERY_S
