"""What users of comparable systems reported about rewards, where no jail is needed to show it; the rest is in tests/attack."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from temper.common import recipe as recipes
from temper.common.domains import Completion, Score, Task
from temper.common.errors import ConfigError
from temper.learner.advantages import GroupRewards, advantages
from temper.learner.objectives import TABLE

from tests.unit.test_episodes import LEASE, Toy, hanging, run

EXECUTES = """
[model]
vocabulary = "abc"
[pacing]
lease_timeout_s = {lease:g}
[sandbox]
wall_s = {wall:g}
[[domains]]
name = "code"
module = "temper.actor.domains.tinycode"
needs_sandbox = true
"""


@pytest.mark.parametrize(("lease", "wall", "allowed"), [(60.0, 60.0, False), (60.0, 90.0, False), (60.0, 20.0, True)])
def test_a_deadline_without_a_grading_budget_is_refused_at_configuration(
    tmp_path: Any, lease: float, wall: float, allowed: bool
) -> None:
    """Where the sandbox's deadline is the rollout's, the last programs are graded on a dead box."""
    path = tmp_path / "r.toml"
    path.write_text(EXECUTES.format(lease=lease, wall=wall))
    if allowed:
        assert recipes.load(str(path)).sandbox.wall_s == wall
        return
    with pytest.raises(ConfigError, match=r"lease_timeout_s = 60 leaves no time for grading"):
        recipes.load(str(path))


def test_a_timeout_of_the_longest_rollouts_does_not_bias_training() -> None:
    """The rollouts that a deadline cuts are the longest ones: as zeros, or as shortened samples, they would teach brevity."""

    def longest_hangs(task: Task, completion: Completion) -> Any:
        asked.append(1)
        return hanging() if len(asked) == 4 else Score(float(len(asked) != 2), len(asked) != 2)

    asked: list[int] = []
    result = run(Toy(longest_hangs), msgspec.structs.replace(LEASE, deadline_s=0.05))
    assert result.cause == "infra" and len(result.samples) == 3, "not a task's failure, and no sample"
    rewards: list[float | None] = [sample.meta.reward for sample in result.samples]
    (found,) = advantages(TABLE["dr_grpo"], [GroupRewards([*rewards, None])])
    mean = 2 / 3
    assert [round(value, 6) if value is not None else None for value in found] == [
        *(round((reward or 0.0) - mean, 6) for reward in rewards),
        None,
    ]
