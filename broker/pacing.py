"""Pacing, not discarding: how many new groups may be begun, and when an attempt may go out.

S = max_staleness, g = groups_per_step. No history enters, so neither a resume nor a changed batch size breaks it.
"""

from __future__ import annotations


def capacity(max_staleness: int, groups_per_step: int, active: int, steps_left: int | None) -> int:
    """New groups that may be begun now.

    `active` = groups assembling (every lease in flight), queued, or leased to the learner; `steps_left` = RL steps to
    go, None for the warm start, whose end the learner decides.
    """
    steps = max_staleness + 1 if steps_left is None else min(max_staleness + 1, steps_left)
    return max(0, steps * groups_per_step - active)


def may_go_out(max_staleness: int, groups_per_step: int, ahead: int) -> bool:
    """Whether an attempt with `ahead` active groups before it may start: in lease order its lag stays <= S."""
    return ahead < (max_staleness + 1) * groups_per_step
