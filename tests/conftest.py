"""For every test: those that look at the host's jails before and after run one after the other, the rest side by side."""

from __future__ import annotations

from typing import Any

import pytest

ATTACK = "tests/attack/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """All attacks on one worker, every other test wherever there is room. (xdist's own `loadgroup` renames tests, which newer
    versions of pytest do not let it.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ATTACK if nodeid.startswith(ATTACK) else nodeid

    return Scheduling(config, log)
