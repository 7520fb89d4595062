"""For every test: those that look at the host's jails before and after run one after the other, the rest side by side."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# how fast examples are made says how busy the machine is, and nothing of what is tested
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ATTACK = "tests/attack/"


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C is tried on many processes: where these tests run in the background of a script, a shell has had it ignored,
    and every process that they start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All attacks on one worker, every other test wherever there is room. (xdist's own `loadgroup` renames tests, which newer
    versions of pytest do not let it.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ATTACK if nodeid.startswith(ATTACK) else nodeid

    return Scheduling(config, log)
