"""For every test: those that look at the host's jails before and after run one after the other, the rest side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

ATTACK = Path(__file__).with_name("attack")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--dist loadgroup` keeps a group on one worker."""
    for item in items:
        if ATTACK in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("attack"))
