"""What the worker and the init of a jail say to each other, over a SEQPACKET socket. Read by both sides.

Worker -> init: a request with descriptors (bundle, stdin, stdout, stderr, and more that the program gets from 3 on),
``b"I"`` (interrupt what runs), ``b"K"`` (kill it) or ``b"Q"`` (end). Init -> worker: ``b"R"`` (ready: clean, nothing runs),
a report (which says "ready" as well where that took no time), ``b"E"`` and an error (it cannot go on).

The bundle is a sequence of length-prefixed byte strings: the seed, number of arguments, arguments, then name and content of
each file.
"""

NUMBER_BYTES = 8
REQUEST_BYTES = 7 * NUMBER_BYTES  # kind, flags, cpu seconds, address space, file size, processes, descriptors
REPORT_BYTES = 7 * NUMBER_BYTES  # wait status, cpu s, wall s, peak KiB, processes killed, cpu limit hit, ready
PYTHON, COMMAND = 1, 2
KEEP = 1  # flag: leave the workspace as it is after this program
LOUD = 2  # flag: an uncaught exception is exit code 70, not 1
UNCAUGHT = 70


def pack(*numbers: float) -> bytes:
    """A request or a report: doubles, which hold every size exactly. (`struct` would cost every start of an init.)"""
    data = bytearray(NUMBER_BYTES * len(numbers))
    view = memoryview(data).cast("d")
    for place, number in enumerate(numbers):
        view[place] = number
    return bytes(data)


def unpack(data: bytes) -> list[float]:
    """The numbers of a message."""
    return list(memoryview(data).cast("d"))
