"""What an init needs of the C library and Python has in no module that is built in: limits, capabilities, poll, descriptors.

`_socket`, `select`, `_struct`, `resource` and `fcntl` are shared objects, and to load one costs every start of a jail about a
third of a millisecond; `_ctypes` alone does for all of them (not `ctypes`, which would cost milliseconds). Used by the init,
which has no signal handlers: no call is ever interrupted.
"""

import sys
from _ctypes import Array, _SimpleCData, addressof, call_function, dlopen, dlsym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CPU, FILE, PROCESSES, DESCRIPTORS, ADDRESSES, QUEUED_SIGNALS, NICE = 0, 1, 6, 7, 9, 11, 13  # RLIMIT_*, on x86 and ARM
POLLIN = 1
LIBC = dlopen(None, 0)  # type: ignore[arg-type]  # the process itself
PRLIMIT, RECVMSG, POLL, KILL, WAIT4 = (dlsym(LIBC, name) for name in ("prlimit64", "recvmsg", "poll", "kill", "wait4"))
HEAD_BYTES = 16  # of a control message
ORDER = sys.byteorder


class Byte(_SimpleCData):
    _type_ = "c"


def buffer(size: int) -> "tuple[Array, memoryview]":
    """Zeroed memory that C may write to, and its bytes."""

    class Buffer(Array):
        _type_ = Byte
        _length_ = size

    made = Buffer()
    return made, memoryview(made).cast("B")


def set_limit(which: int, soft: int, hard: int) -> None:
    """The soft and the hard limit of one resource, for the calling process."""
    if call_function(PRLIMIT, (0, which, soft.to_bytes(8, ORDER) + hard.to_bytes(8, ORDER), None)):
        raise OSError(f"limit {which} cannot be set to {soft}, {hard}")


def capability_dropper() -> "Callable[[], None]":
    """A function that gives up every capability of the calling process for good."""
    prctl, capset = dlsym(LIBC, "prctl"), dlsym(LIBC, "capset")
    header = (0x20080522).to_bytes(4, ORDER) + bytes(4)  # version 3, this process
    nothing = bytes(24)

    def drop() -> None:
        call_function(prctl, (47, 4, 0, 0, 0))  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
        if call_function(capset, (header, nothing)):
            raise PermissionError("capset")

    return drop


class Reaper:
    """wait4(2) for any child. Python's own looks the module `resource` up each time, makes 18 objects, and raises when there is
    no child, as after most programs."""

    def __init__(self) -> None:
        self._state, state = buffer(8)
        self._used, used = buffer(144)
        self._status, self._numbers = state.cast("i"), used.cast("q")

    def reap(self, options: int) -> int:
        """The process id of one that ended; 0 when none has (WNOHANG), negative when there is no child."""
        return call_function(WAIT4, (-1, self._state, options, self._used))

    def found(self) -> "tuple[int, float, int]":
        """Its wait status, cpu seconds, peak KiB."""
        numbers = self._numbers
        return self._status[0], numbers[0] + numbers[2] + (numbers[1] + numbers[3]) / 1e6, numbers[4]


def kill_all() -> None:
    """SIGKILL to every process of the jail but this one; the kernel does it atomically against forks."""
    call_function(KILL, (-1, 9))


class Control:
    """The socket to the worker: whole messages of at most `size` bytes, with at most 12 descriptors."""

    ROOM_BYTES = 64

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._data, self._bytes = buffer(size)
        self._rights, rights = buffer(self.ROOM_BYTES)
        self._head_bytes, self._descriptors = rights[:8].cast("q"), rights[HEAD_BYTES:].cast("i")
        self._part, part = buffer(16)
        part.cast("q")[0], part.cast("q")[1] = addressof(self._data), size
        self._message, message = buffer(56)
        self._fields = message.cast("q")  # name, its length, parts, their number, control messages, their length, flags
        self._fields[2], self._fields[3], self._fields[4] = addressof(self._part), 1, addressof(self._rights)
        self._polled, polled = buffer(16)
        self._watched, self._events = polled.cast("i"), polled.cast("h")
        self._watched[0] = fd
        self._events[2] = self._events[6] = POLLIN

    def receive(self) -> "tuple[bytes, list[int]]":
        """The next message with its descriptors; empty when the worker is gone."""
        self._fields[5] = self.ROOM_BYTES
        size = call_function(RECVMSG, (self.fd, self._message, 0))
        if size < 0:
            raise OSError("the worker's socket cannot be read")
        count = (self._head_bytes[0] - HEAD_BYTES) // 4 if self._fields[5] >= HEAD_BYTES else 0
        return bytes(self._bytes[:size]), self._descriptors[:count].tolist()

    def wait(self, pidfd: int, patience_ms: int) -> bool:
        """Wait until there is a message, the process has ended or the time is over; whether there is a message."""
        self._watched[2] = pidfd
        call_function(POLL, (self._polled, 2, patience_ms))
        return self._events[3] != 0
