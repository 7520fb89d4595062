"""A domain that raises, returns NaN or never returns is counted and quarantined, and the run goes on without it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MODULE = '''
"""Misbehaves as its options say."""
from temper.common.domains import Score, SingleTurn, Task

class Bad(SingleTurn):
    def __init__(self, mode):
        self.mode, self.calls = mode, 0

    def tasks(self, split, level, seed):
        return Task(f"bad {split} {seed}", "ab>")

    async def score(self, task, completion, grader):
        self.calls += 1
        if self.mode == "raise":
            raise KeyError("no such answer")
        if self.mode == "nan":
            return Score(float("nan"), None)
        while self.mode == "hang" and self.calls == 1:
            pass
        return Score(0.5, False, outcome="wrong")

def make(options):
    return Bad(options["mode"])
'''

RECIPE = """
[run]
name = "bad"
max_steps = 6
[model]
path = "micro"
vocabulary = "abcdef>"
hidden_size = 16
intermediate_size = 32
max_length_tokens = 12
[pacing]
groups_per_step = 4
samples_per_group = 4
max_staleness = 1
lease_timeout_s = 60
[sampling]
max_new_tokens = 4
[eval]
tasks_per_domain = 2
samples_per_task = 2
[engine]
kind = "embedded"
max_rows = 32
[daemons]
sandboxes = 0
"""
GOOD = """
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
share = 0.6
options = { letters = "abcdef", length = 2 }
"""
BAD = """
[[domains]]
name = "MODE"
module = "bad_domain_of_a_test"
share = 0.4
options = { mode = "MODE" }
"""
HOST = '[actor]\ndomains = ["temper.actor.domains.reverse", "bad_domain_of_a_test"]\n'


def start(fleet: Any, folder: Path, domains: str) -> None:
    """All daemons on a recipe of `domains`."""
    broker(fleet, folder, domains)
    (folder / "bad_domain_of_a_test.py").write_text(MODULE)
    (folder / "host.toml").write_text(HOST)
    allowed = ("--host", str(folder / "host.toml"))
    fleet.learner()
    fleet.peer("actor-1", "temper.actor", *allowed)
    fleet.peer("eval-1", "temper.actor", "--lane", "eval", *allowed)


def broker(fleet: Any, folder: Path, domains: str) -> None:
    """The broker on a recipe of `domains`."""
    recipe = folder / "bad.toml"
    recipe.write_text(RECIPE + domains)
    fleet.broker(str(recipe))


def voids(run_dir: Path) -> Counter[tuple[str, str]]:
    """(domain, reason) of the train lane's void groups."""
    (path,) = run_dir.rglob("ledger.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db:
        rows = db.execute(
            "SELECT leases.domain, groups.reason FROM groups JOIN leases ON lease_id = group_id"
            " WHERE groups.lane = 'train' AND groups.state = 'void'"
        ).fetchall()
    return Counter((domain, reason) for domain, reason in rows)


def test_the_run_goes_on_without_them(fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start(fleet, tmp_path, GOOD + BAD.replace("MODE", "raise") + BAD.replace("MODE", "nan"))
    assert fleet.wait_exit("learner", 300) == 0, fleet.logs()
    assert fleet.summary().steps == 6
    found = voids(fleet.run_dir)
    assert found["raise", "quarantined"] >= 1 and found["nan", "quarantined"] >= 1, found
    assert not found["reverse", "quarantined"]
    log = fleet.daemons["actor-1"].text()
    assert "KeyError: 'no such answer'" in log and "not a finite number" in log


def test_a_domain_that_blocks_once_costs_one_attempt(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocked thread is given up, the lease goes out again, and the broker never misses a heartbeat."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start(fleet, tmp_path, GOOD + BAD.replace("MODE", "hang"))
    assert fleet.wait_exit("learner", 300) == 0, fleet.logs()
    assert fleet.summary().steps == 6
    assert not voids(fleet.run_dir)["hang", "quarantined"]
    log = fleet.daemons["actor-1"].text()
    assert "has blocked its thread" in log and "did not return within" in log
    assert "silent" not in fleet.daemons["broker"].text()


def test_no_domain_left_ends_the_run_with_its_reason(
    fleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start(fleet, tmp_path, BAD.replace("MODE", "raise"))
    assert fleet.wait_exit("learner", 240) == 2, fleet.logs()
    assert "no domain is left" in fleet.daemons["learner"].text()
    assert "no such answer" in fleet.daemons["learner"].text()


def test_a_module_that_the_host_does_not_allow_is_a_configuration_error(fleet: Any, tmp_path: Path) -> None:
    broker(fleet, tmp_path, GOOD + BAD.replace("MODE", "raise"))
    fleet.peer("actor-1", "temper.actor")
    assert fleet.wait_exit("actor-1", 120) == 2
    last = fleet.daemons["actor-1"].text().splitlines()[-1]
    assert last.startswith("temper actor: domain raise: module bad_domain_of_a_test is not allowed on this host")
