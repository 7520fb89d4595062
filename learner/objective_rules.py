"""From a recipe's ``[objective]`` to a row of the table, with what was overridden; senseless compositions say why.

Guarantees: what `resolve` returns is consistent (nothing counts twice, nothing is ignored), and asynchronous sampling is
corrected unless the recipe says otherwise. Pure, without torch. Called when a recipe is checked and by the learner.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from math import isfinite
from typing import get_args

from temper.common import config
from temper.common.errors import ConfigError
from temper.learner.objectives import (
    CLIPPED,
    NORMALISED,
    RATIO_FREE,
    TABLE,
    Advantage,
    Aggregation,
    Correction,
    Objective,
)


def _nearest(found: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(found, valid, 1, 0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; valid are {', '.join(valid)}"


# recipe key -> field of the row, where the names differ
RENAMED = {"weight_cap": "weight_high", "weight_floor": "weight_low", "advantage_epsilon": "epsilon"}
# keys of the recipe that are not a row's: they are read by the learner or only here
ASIDE = {"name", "allow_uncorrected", "proximal", "kl", "overlong", "overlong_buffer_tokens"}


def _choices() -> dict[str, Sequence[str]]:
    from temper.kernels import flags

    return {
        "advantage": get_args(Advantage),
        "aggregation": get_args(Aggregation),
        "loss": get_args(flags.Loss),
        "level": get_args(flags.Level),
        "correction": get_args(Correction),
        "weight_of": ("prox", "pi"),
        "weight_level": get_args(flags.WeightLevel),
        "std": ("sample", "population"),
        "proximal": ("recompute", "loglinear"),
        "kl": ("k2", "k3_straight_through", "k3_weighted", "reward"),
    }


def resolve(recipe: config.Objective, pacing: config.Pacing) -> Objective:
    """The objective that a recipe's ``[objective]`` describes. ConfigError names the key, the reason and what to do."""
    if recipe.name not in TABLE:
        raise ConfigError(f"objective.name = {recipe.name!r} is not an objective{_nearest(recipe.name, list(TABLE))}")
    row = TABLE[recipe.name]
    valid = _choices()
    changes: dict[str, object] = {}
    for key in (f.name for f in fields(recipe)):
        value = getattr(recipe, key)
        if value is None or value in ("", {}):
            continue
        if key in valid and value not in valid[key]:
            raise ConfigError(f"objective.{key} = {value!r} is not one{_nearest(value, valid[key])}")
        if isinstance(value, float) and not (isfinite(value) and value >= 0):
            raise ConfigError(f"objective.{key} = {value}: expected a finite number >= 0")
        if key not in ASIDE:
            changes[RENAMED.get(key, key)] = value
    if recipe.updates_per_step < 1:
        raise ConfigError(f"objective.updates_per_step = {recipe.updates_per_step}: expected at least 1")
    if recipe.proximal:
        changes["loglinear_prox"] = recipe.proximal == "loglinear"
    if recipe.kl_coefficient > 0:
        changes["kl"], changes["kl_reward"] = ("none", True) if recipe.kl == "reward" else (recipe.kl or "k2", False)
    objective = replace(row, **changes)  # type: ignore[arg-type]
    check(objective, asynchronous=pacing.max_staleness > 0, allow_uncorrected=recipe.allow_uncorrected)
    for key, (used, reason) in USED.items():
        value = getattr(recipe, key)
        if value is not None and value not in ("", {}) and not used(objective):
            raise ConfigError(f"objective.{key} has no effect: {objective.name} {reason(objective)}; remove it")
    return objective


def _weighted(o: Objective) -> bool:
    return o.weight != "none"


def _without_weight(o: Objective) -> str:
    return f"has no correction weight (correction {o.correction}): use correction truncate, mask or clip"


Used = tuple[Callable[[Objective], bool], Callable[[Objective], str]]
# Recipe keys that do nothing in some compositions: key -> (is it in use?, why it is not).
USED: dict[str, Used] = {
    "clip_low": (lambda o: o.loss in CLIPPED, lambda o: f"does not clip a ratio (loss {o.loss})"),
    "clip_high": (lambda o: o.loss in CLIPPED, lambda o: f"does not clip a ratio (loss {o.loss})"),
    "dual_clip": (lambda o: o.loss == "ppo", lambda o: f"has no dual clip (loss {o.loss})"),
    "dro_beta": (lambda o: o.loss == "dro", lambda o: f"has no quadratic term (loss {o.loss})"),
    "weight_cap": (_weighted, _without_weight),
    "weight_of": (_weighted, _without_weight),
    "weight_level": (_weighted, _without_weight),
    "weight_floor": (
        lambda o: o.weight in ("mask", "clip"),
        lambda o: f"has no lower bound of a weight (correction {o.correction}): use correction mask or clip",
    ),
    "std": (lambda o: o.advantage in NORMALISED, lambda o: f"divides by no deviation (advantage {o.advantage})"),
    "advantage_epsilon": (
        lambda o: o.advantage in NORMALISED,
        lambda o: f"divides by no deviation (advantage {o.advantage})",
    ),
    "lam": (
        lambda o: o.advantage in ("vtrace", "vtrace_critic", "gae"),
        lambda o: f"has no lambda (advantage {o.advantage})",
    ),
    "component_weights": (
        lambda o: o.advantage == "per_component",
        lambda o: f"does not look at components (advantage {o.advantage})",
    ),
    "proximal": (
        lambda o: o.uses_prox,
        lambda o: f"never looks at the proximal policy (correction {o.correction}, loss {o.loss})",
    ),
    "kl": (lambda o: o.kl_coefficient > 0, lambda o: "has kl_coefficient = 0"),
}


def check(objective: Objective, *, asynchronous: bool, allow_uncorrected: bool = False) -> None:
    """ConfigError for a composition that makes no sense, saying why."""
    for wrong, say in SENSELESS:
        if wrong(objective):
            raise ConfigError(f"objective.{say(objective)}")
    o = objective
    if o.correction == "none" and asynchronous and not allow_uncorrected:
        raise ConfigError(
            f"objective.name = {o.name!r} does not correct for stale samples, but pacing.max_staleness > 0 makes sampling "
            "asynchronous: use an objective with a correction (decoupled_ppo, dapo, tis, icepop), set "
            "pacing.max_staleness = 0, or objective.allow_uncorrected = true"
        )


Senseless = tuple[Callable[[Objective], bool], Callable[[Objective], str]]
# Compositions that make no sense: (is it one?, why, and what to do).
SENSELESS: tuple[Senseless, ...] = (
    (
        lambda o: (o.correction == "supervised") != (o.advantage == "likelihood"),
        lambda o: (
            f"advantage = {o.advantage!r} does not fit {o.name}: only sft has the advantage 'likelihood' (1 everywhere), "
            "because demonstrations have neither rewards nor a behaviour policy"
        ),
    ),
    (
        lambda o: o.correction == "supervised" and (o.loss != "score" or o.kl_coefficient > 0),
        lambda o: (
            "name = 'sft' has no policy gradient to clip, weigh or restrain: loss must be score, kl_coefficient 0"
        ),
    ),
    (
        lambda o: (o.correction == "vtrace") != (o.advantage in ("vtrace", "vtrace_critic")),
        lambda o: (
            f"advantage = {o.advantage!r} does not fit {o.name}: V-trace corrects inside the advantage; correction vtrace "
            "goes with the advantages vtrace and vtrace_critic and no other, or weights would count twice or not at all"
        ),
    ),
    (
        lambda o: o.correction == "vtrace" and o.loss != "score",
        lambda o: (
            f"loss = {o.loss!r}: V-trace's advantage holds pi/mu already, a ratio would count it twice; use score"
        ),
    ),
    (
        lambda o: o.loss in RATIO_FREE and o.correction == "ratio",
        lambda o: (
            f"correction = 'ratio' with loss = {o.loss!r}, which has no ratio: nothing would be corrected; use correction "
            "truncate or mask with weight_of = pi"
        ),
    ),
    (
        lambda o: o.loss in RATIO_FREE and o.updates_per_step > 1 and not (o.weight != "none" and o.weight_of == "pi"),
        lambda o: (
            f"updates_per_step = {o.updates_per_step}: loss score has no ratio, so a second update on the same batch is "
            "uncorrected; set it to 1, use weight_of = pi, or a loss with a ratio"
        ),
    ),
    (
        lambda o: o.weight != "none" and o.weight_of == "pi" and o.loss not in RATIO_FREE,
        lambda o: (
            f"weight_of = 'pi' with loss = {o.loss!r}: pi/mu beside a ratio pi/prox counts pi/prox twice; use "
            "weight_of = prox"
        ),
    ),
    (
        lambda o: o.level == "sequence" and o.loss in ("score", "gmpo", "dro"),
        lambda o: (
            f"level = 'sequence' has no effect with loss = {o.loss!r}, which does not use a ratio of the sequence"
        ),
    ),
    (
        lambda o: o.loss in ("ppo", "cispo") and o.clip_low > 1,
        lambda o: f"clip_low = {o.clip_low}: expected at most 1, a ratio is never below 0",
    ),
    (
        lambda o: o.loss == "ppo" and 0 < o.dual_clip <= 1 + o.clip_high,
        lambda o: (
            f"dual_clip = {o.dual_clip}: expected more than 1 + clip_high, or it would bound what the clip allows"
        ),
    ),
    (
        lambda o: o.weight in ("mask", "clip") and not o.weight_low <= 1 <= o.weight_high,
        lambda o: (
            f"weight_floor..weight_cap = {o.weight_low}..{o.weight_high}: the band must hold 1, or tokens sampled by the "
            "current weights would be changed or dropped"
        ),
    ),
    (
        lambda o: o.weight == "truncate" and o.weight_high < 1,
        lambda o: (
            f"weight_cap = {o.weight_high}: expected at least 1, the weight of a token sampled by current weights"
        ),
    ),
    (
        lambda o: not o.geometric_low <= 1 <= o.geometric_high,
        lambda o: (
            f"geometric_low..geometric_high = {o.geometric_low}..{o.geometric_high}: the band must hold 1, the on-policy ratio"
        ),
    ),
    (
        lambda o: o.veto >= 1,
        lambda o: f"veto = {o.veto}: expected below 1, the on-policy ratio, or everything would be dropped",
    ),
    (
        lambda o: o.kl in ("k1", "k3") and o.kl_coefficient > 0,
        lambda o: (
            f"kl = {o.kl!r} in the loss has the wrong gradient (k1: zero on average, k3: not that of the KL); use k2, "
            "k3_straight_through or k3_weighted"
        ),
    ),
    (
        lambda o: o.loglinear_prox and o.base == "mu" and o.weight == "none",
        lambda o: "proximal = 'loglinear' approximates a proximal policy that this objective never looks at",
    ),
)
