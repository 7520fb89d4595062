"""What the worker and the init of a jail say to each other, over a SEQPACKET socket. Read by both sides.

Worker -> init: ``REQUEST`` with descriptors (bundle, stdin, stdout, stderr, and more that the program gets from 3 on),
``b"I"`` (interrupt what runs), ``b"K"`` (kill it) or ``b"Q"`` (end). Init -> worker: ``b"R"`` (ready: clean, nothing runs),
``REPORT``, ``b"E"`` and an error (it cannot go on).

The bundle is a sequence of length-prefixed byte strings: the seed, number of arguments, arguments, then name and content of
each file.
"""

import _struct as struct  # as little as possible: what an init imports costs every jail

REQUEST = struct.Struct("<BBdQQII")  # kind, flags, cpu seconds, address space, file size, processes, descriptors
REPORT = struct.Struct("<iddQIB")  # wait status, cpu seconds, wall seconds, peak KiB, processes killed, cpu limit hit
PYTHON, COMMAND = 1, 2
KEEP = 1  # flag: leave the workspace as it is after this program
LOUD = 2  # flag: an uncaught exception is exit code 70, not 1
UNCAUGHT = 70
