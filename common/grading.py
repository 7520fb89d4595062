"""How long the machinery may take to judge a program: what every deadline around a sandbox job must leave room for.

A worker ends each program itself: at its wall limit, prolonged by the time that the program was ready to run but got no cpu
(at most `MOST_SLACK` times the limit), and a kill. A job is all of its tests one after the other, so its budget is their sum.
What a job waits before its turn is no property of the job: the actor measures it. Pure; used by recipe checks, actors and
sandbox workers.
"""

from __future__ import annotations

from temper.common.schema import SandboxJob

MOST_SLACK = 5.0  # times the wall limit: the most that a loaded host may prolong it
KILL_TIMEOUT_S = 3.0
START_TIMEOUT_S = 20.0  # of a jail
BUILD_WALL_S = 60.0
INTERPRETED = ("python", "grader", "bash", "javascript")  # every other language is built first
QUEUE_FACTOR = 2.0  # times the wait that was measured: load changes while a job waits
MOST_GRADING_S = 86_400.0  # what one job may prolong a lease by


def suite_wall_s(wall_s: float) -> float:
    """Wall limit of a suite of asserts beside a program of `wall_s`: it waits for the program, so it is the last to run out."""
    return wall_s * 2 + 5


def program_budget_s(wall_s: float) -> float:
    """The longest that one program with this wall limit can occupy a jail on a loaded host."""
    return wall_s * (1 + MOST_SLACK) + KILL_TIMEOUT_S


def job_budget_s(job: SandboxJob) -> float:
    """The longest that a worker can take for `job`, all of its tests included, once it has begun."""
    wall_s = job.limits.wall_s
    plain, suites = program_budget_s(wall_s), program_budget_s(suite_wall_s(wall_s))
    tests_s = sum(suites if test.suite and not test.weak else plain for test in job.tests) or plain
    if job.checker is not None:
        tests_s += max(1, len(job.tests)) * program_budget_s(job.checker.limits.wall_s)
    build_s = 0.0 if job.language in INTERPRETED else program_budget_s(BUILD_WALL_S)
    jails = max(1, len(job.tests)) if job.jail_per_test else 1
    return jails * START_TIMEOUT_S + build_s + tests_s
