"""The domains of a run on this host: loaded only if the host allows them, and only kept if their own answers score 1.

A domain whose module is not allowed here is a configuration error; one that cannot be loaded, or whose demonstration
does not score 1 by its own rules, is *refused*: its leases go back with that reason. Called by the daemon and (for
loading and checking) by the in-process loop.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from temper.actor.episodes import Failed, demonstration, describe, score_completion
from temper.actor.text import Text
from temper.common.config import DomainConfig, Recipe
from temper.common.domains import Domain, Grader
from temper.common.errors import ConfigError, RunFailed

CHECKED_TASKS = 3


class DomainRefused(RunFailed):
    """This domain can't be used here; the text says why."""


def check_allowed(recipe: Recipe, allowed: Collection[str]) -> None:
    """ConfigError if the recipe names a domain module that this host does not allow."""
    for domain in recipe.domains:
        if domain.module not in allowed:
            raise ConfigError(
                f"domain {domain.name}: module {domain.module} is not allowed on this host; to allow it, start with"
                f' --host FILE holding [actor] domains = ["{domain.module}", ...]; allowed now: {", ".join(sorted(allowed))}'
            )


def load_domain(config: DomainConfig) -> Domain:
    """The domain of a recipe entry. DomainRefused if its module can't be imported or refuses its options."""
    try:
        module: Any = importlib.import_module(config.module)
        made = module.make(dict(config.options))
    except Exception as error:  # whatever a domain's module raises
        raise DomainRefused(f"domain {config.name} can't be loaded from {config.module}: {describe(error)}") from error
    if not isinstance(made, Domain):
        absent = [name for name in ("tasks", "score", "demonstration") if not hasattr(made, name)]
        raise DomainRefused(f"domain {config.name}: make() returned {type(made).__name__} without {', '.join(absent)}")
    return made


async def check_domain(
    config: DomainConfig, domain: Domain, text: Text, grader: Grader, stops: tuple[int, ...]
) -> None:
    """Score the domain's own demonstrations of a few tasks (held-out ones where it is not trained): DomainRefused unless
    each gets reward 1 and correct.

    A domain without demonstrations passes. `Failed("infra")` when the sandbox could not judge.
    """
    for seed in range(CHECKED_TASKS):
        try:
            task = domain.tasks("train" if config.train else "eval", config.level, seed)
            if domain.demonstration(task) is None:
                return
            completion = demonstration(domain, config.name, task, text, stops)
            score = await score_completion(domain, config.name, task, completion, grader)
        except Failed as error:
            if error.cause == "infra":
                raise
            raise DomainRefused(f"domain {config.name}: {error}") from error
        except Exception as error:
            raise DomainRefused(f"domain {config.name}: {describe(error)}") from error
        if score.correct is not True or score.reward is None or score.reward < 1.0:
            raise DomainRefused(
                f"domain {config.name}: its own answer {completion.text[:80]!r} to {task.key[:80]!r} got reward"
                f" {score.reward}, correct {score.correct} ({score.outcome}), expected 1 and true"
            )


def by_name(recipe: Recipe) -> Mapping[str, DomainConfig]:
    """The recipe's domains by name."""
    return {domain.name: domain for domain in recipe.domains}
