"""Every error that Temper raises on purpose, with the exit code that it ends a process with.

Exit codes: 0 clean, 1 bug, 2 configuration, 3 peer lost, 4 environment. A message says what was found,
what was expected and what to do; the command line prints it alone, without a traceback.
"""

from __future__ import annotations


class TemperError(Exception):
    """Base of all expected errors; ``exit_code`` is what a process ends with when it is not handled."""

    exit_code = 1


class ConfigError(TemperError):
    """The recipe, a flag or the host file is wrong. Names the key, what it held and the nearest valid one."""

    exit_code = 2


class RunFailed(TemperError):
    """The run cannot go on for a reason that its configuration or domains caused (all groups void, no domain left)."""

    exit_code = 2


class PeerLost(TemperError):
    """A peer that this process needs is gone or never came within its deadline."""

    exit_code = 3


class EnvironmentFault(TemperError):
    """The host cannot do what is needed: nsjail impossible, disk full, port taken, file missing."""

    exit_code = 4


class ProtocolError(TemperError):
    """A peer sent something malformed. It closes that peer with this reason and hurts no other."""

    exit_code = 3


class EngineError(TemperError):
    """The inference engine cannot do what was asked: the request is impossible or the engine is gone."""

    exit_code = 4
