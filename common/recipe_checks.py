"""What a recipe must fulfil beyond types: ranges, keys that agree with each other, and no key without effect.

Three declarative tables and the functions that run them; pure. `recipe` calls them for every recipe that is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields

from temper.common.config import LORA_TARGETS, DomainConfig, Recipe
from temper.common.errors import ConfigError
from temper.common.grading import program_budget_s

Rule = tuple[Callable[[Recipe], bool], Callable[[Recipe], str]]

# Smallest allowed value of each number; "+" in front: strictly above it. Keys that may hold anything are absent.
RANGES: dict[str, str] = {
    "run.seed": ">=0",
    "run.max_steps": ">=0",
    "run.checkpoint_every_steps": ">=0",
    "run.checkpoints_kept": ">=1",
    "run.connect_timeout_s": ">0",
    "run.stall_timeout_s": ">0",
    "run.drain_timeout_s": ">0",
    "model.hidden_size": ">=2",
    "model.layers": ">=1",
    "model.heads": ">=1",
    "model.intermediate_size": ">=1",
    "model.max_length_tokens": ">=2",
    "model.lora_rank": ">=0",
    "model.lora_alpha": ">0",
    "pacing.groups_per_step": ">=1",
    "pacing.samples_per_group": ">=1",
    "pacing.max_staleness": ">=0",
    "pacing.max_token_lag": ">=0",
    "pacing.lease_timeout_s": ">0",
    "pacing.weights_timeout_s": ">0",
    "pacing.task_attempts": ">=1",
    "pacing.infra_attempts": ">=1",
    "pacing.max_void_in_a_row": ">=0",
    "sampling.temperature": ">0",
    "sampling.top_p": ">0 <=1",
    "sampling.top_k": ">=0",
    "sampling.min_p": ">=0 <=1",
    "sampling.max_new_tokens": ">=1",
    "objective.clip_low": ">=0",
    "objective.clip_high": ">=0",
    "objective.weight_cap": ">0",
    "objective.weight_floor": ">=0",
    "objective.dual_clip": ">=0",
    "objective.veto": ">=0",
    "objective.geometric_low": ">=0",
    "objective.geometric_high": ">=0",
    "objective.opsm_delta": ">=0",
    "objective.tv_delta": ">0",
    "objective.m2_tau": ">0",
    "objective.dro_beta": ">=0",
    "objective.advantage_epsilon": ">=0",
    "objective.gamma": ">=0 <=1",
    "objective.lam": ">=0 <=1",
    "objective.kl_coefficient": ">=0",
    "objective.entropy_coefficient": ">=0",
    "objective.updates_per_step": ">=1",
    "objective.overlong_buffer_tokens": ">=0",
    "reference.ema_decay": ">=0 <1",
    "reference.reset_every_steps": ">=1",
    "reference.reset_gain": ">=0 <1",
    "reference.kl_target_nats": ">=0",
    "reference.kl_horizon_steps": ">=1",
    "critic.learning_rate": ">0",
    "critic.clip": ">=0",
    "critic.coefficient": ">=0",
    "optimizer.learning_rate": ">0",
    "optimizer.warmup_steps": ">=0",
    "optimizer.final_share": ">=0 <=1",
    "optimizer.beta1": ">=0 <1",
    "optimizer.beta2": ">=0 <1",
    "optimizer.epsilon": ">0",
    "optimizer.weight_decay": ">=0",
    "optimizer.max_gradient_norm": ">0",
    "optimizer.tokens_per_microbatch": ">=1",
    "warm_start.max_steps": ">=0",
    "warm_start.until_likelihood": ">0 <=1",
    "warm_start.groups_per_step": ">=1",
    "warm_start.samples_per_group": ">=1",
    "warm_start.learning_rate": ">0",
    "eval.every_steps": ">=0",
    "eval.tasks_per_domain": ">=1",
    "eval.samples_per_task": ">=1",
    "eval.temperature": ">=0",
    "eval.top_p": ">0 <=1",
    "eval.timeout_s": ">0",
    "engine.max_rows": ">=1",
    "engine.leases_in_flight": ">=1",
    "sandbox.slots": ">=1",
    "sandbox.wall_s": ">0",
    "sandbox.cpu_s": ">0",
    "sandbox.memory_mb": ">=16",
    "sandbox.output_kb": ">=1",
    "daemons.actors": ">=0",
    "daemons.sandboxes": ">=0",
    "daemons.evaluators": ">=0",
    "daemons.threads_per_process": ">=1",
}
DOMAIN_RANGES = {
    "share": ">0",
    "level": ">=0",
    "max_new_tokens": ">=0",
    "eval_tasks": ">=0",
    "eval_samples": ">=0",
    "eval_temperature": ">=0",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BOUND = re.compile(r"(>=|<=|>|<)([0-9.]+)")


def _micro(recipe: Recipe) -> bool:
    return recipe.model.path == "micro"


def _reference(recipe: Recipe) -> bool:
    return recipe.objective.kl_coefficient > 0


def _critic(recipe: Recipe) -> bool:
    advantage = recipe.objective.advantage
    return advantage in ("gae", "vtrace_critic") or (
        not advantage and recipe.objective.name in ("ppo_critic", "impala")
    )


SUPPORT_LIMIT = 4096  # most ids that truncated sampling may keep for one token; `kernels.flags` has the same


def _support_bound(recipe: Recipe) -> float:
    """Most ids that a token's truncated distribution can hold; 0 where nothing is cut."""
    s = recipe.sampling
    bounds = [float(s.top_k)] if s.top_k else []
    if s.min_p > 0:
        bounds.append(1 / s.min_p)
    if _micro(recipe):
        bounds.append(float(len(recipe.model.vocabulary)))
    return min(bounds, default=math.inf) if s.top_p < 1 or s.top_k or s.min_p > 0 else 0.0


def _executes(recipe: Recipe) -> bool:
    return any(domain.needs_sandbox for domain in recipe.domains)


# Keys that do nothing in some combinations: key -> (is it in use?, why it is not).
INERT: dict[str, tuple[Callable[[Recipe], bool], str]] = {
    **{
        f"model.{key}": (_micro, "only the model made by the recipe (model.path = micro) reads it")
        for key in ("vocabulary", "hidden_size", "layers", "heads", "intermediate_size")
    },
    **{
        f"warm_start.{key}": (lambda r: r.warm_start.max_steps > 0, "warm_start.max_steps is 0: there is no warm start")
        for key in ("until_likelihood", "groups_per_step", "samples_per_group", "learning_rate")
    },
    **{
        f"critic.{key}": (_critic, "the objective's advantage has no value head (gae and vtrace_critic have)")
        for key in ("learning_rate", "clip", "coefficient")
    },
    "reference.kind": (_reference, "objective.kl_coefficient is 0: there is no reference policy"),
    "reference.ema_decay": (
        lambda r: _reference(r) and r.reference.kind == "ema",
        "only a reference of kind ema decays",
    ),
    "reference.reset_every_steps": (
        lambda r: _reference(r) and r.reference.kind == "reset",
        "only a reference of kind reset is reset every n steps",
    ),
    "reference.reset_gain": (
        lambda r: _reference(r) and r.reference.kind == "reset_on_gain",
        "only a reference of kind reset_on_gain looks at held-out accuracy",
    ),
    "reference.kl_target_nats": (_reference, "objective.kl_coefficient is 0: there is no KL to steer"),
    "reference.kl_horizon_steps": (
        lambda r: _reference(r) and r.reference.kl_target_nats > 0,
        "reference.kl_target_nats is 0: the coefficient is not steered",
    ),
    "objective.overlong_buffer_tokens": (
        lambda r: r.objective.overlong == "penalise",
        "only overlong = penalise has a buffer",
    ),
    **{
        f"sandbox.{key}": (_executes, "no domain has needs_sandbox = true")
        for key in ("required", "mode", "slots", "wall_s", "cpu_s", "memory_mb", "output_kb", "jail_per_test")
    },
    "daemons.sandboxes": (
        lambda r: _executes(r) or r.daemons.sandboxes == 0,
        "no domain has needs_sandbox = true, so none is started",
    ),
    **{
        key: (
            lambda r: r.pacing.max_staleness > 0,
            "pacing.max_staleness is 0: sampling is synchronous, no token has a lag",
        )
        for key in ("pacing.max_token_lag", "engine.on_swap", "objective.allow_uncorrected")
    },
    "engine.kv_on_swap": (
        lambda r: r.pacing.max_staleness > 0 and r.engine.on_swap == "in_flight",
        "no generation goes on under new weights (pacing.max_staleness > 0 and engine.on_swap = in_flight let it)",
    ),
    **{
        f"model.{key}": (lambda r: r.model.lora_rank > 0, "model.lora_rank is 0: there are no adapters")
        for key in ("lora_alpha", "lora_targets")
    },
    "pacing.batch_order": (
        lambda r: r.pacing.max_staleness > 0 or r.pacing.batch_order == "lease",
        "pacing.max_staleness is 0, which forces batch_order = lease",
    ),
}
DOMAIN_INERT: dict[str, tuple[Callable[[Recipe, DomainConfig], bool], str]] = {
    "share": (lambda r, d: d.train, "train = false: it gets no groups"),
    "warm_start_share": (
        lambda r, d: r.warm_start.max_steps > 0 and d.train,
        "warm_start.max_steps is 0 (there is no warm start) or train = false (it takes no part)",
    ),
}

# Combinations that cannot work: (is it wrong?, what to say).
CROSS: list[Rule] = [
    (
        lambda r: not r.domains,
        lambda r: "the recipe has no [[domains]]: a run needs at least one, with name and module",
    ),
    (
        lambda r: bool(r.domains) and r.run.max_steps > 0 and not any(d.train for d in r.domains),
        lambda r: "every domain has train = false: at least one must be trained (or run.max_steps = 0: only evaluated)",
    ),
    (
        lambda r: r.pacing.max_token_lag < r.pacing.max_staleness,
        lambda r: (
            f"pacing.max_token_lag = {r.pacing.max_token_lag} is below pacing.max_staleness = "
            f"{r.pacing.max_staleness}: tokens that pacing admits would be masked; raise max_token_lag"
        ),
    ),
    (
        lambda r: r.pacing.samples_per_group < 2 and r.objective.name != "sft" and r.objective.advantage != "ema",
        lambda r: "pacing.samples_per_group = 1: a group of one has no baseline, its advantage is 0; use 2 or more",
    ),
    (
        lambda r: r.sampling.max_new_tokens >= r.model.max_length_tokens,
        lambda r: (
            f"sampling.max_new_tokens = {r.sampling.max_new_tokens} leaves no room for a prompt in "
            f"model.max_length_tokens = {r.model.max_length_tokens}; prompt and completion must fit together"
        ),
    ),
    (
        lambda r: r.optimizer.tokens_per_microbatch < r.model.max_length_tokens,
        lambda r: (
            f"optimizer.tokens_per_microbatch = {r.optimizer.tokens_per_microbatch} does not hold one sequence of "
            f"model.max_length_tokens = {r.model.max_length_tokens}"
        ),
    ),
    (
        lambda r: _reference(r) and r.reference.kind == "reset_on_gain" and r.eval.every_steps == 0,
        lambda r: (
            "reference.kind = 'reset_on_gain' needs held-out accuracy during training: set eval.every_steps to at least 1"
        ),
    ),
    (
        lambda r: r.run.deterministic and _reference(r) and r.reference.kind == "reset_on_gain",
        lambda r: (
            "run.deterministic does not go with reference.kind = 'reset_on_gain': when an evaluation ends depends on "
            "timing; use kind = 'reset'"
        ),
    ),
    (
        lambda r: _support_bound(r) > SUPPORT_LIMIT,
        lambda r: (
            f"sampling.top_k = {r.sampling.top_k}, top_p = {r.sampling.top_p:g}, min_p = {r.sampling.min_p:g} may keep more "
            f"than {SUPPORT_LIMIT} ids for a token, and each of them is sent to the learner, which normalises over the "
            f"same ids: set sampling.top_k to at most {SUPPORT_LIMIT}, or sample from the whole vocabulary"
        ),
    ),
    (
        lambda r: r.objective.updates_per_step > r.pacing.groups_per_step,
        lambda r: (
            f"objective.updates_per_step = {r.objective.updates_per_step} is more than pacing.groups_per_step = "
            f"{r.pacing.groups_per_step}: every update needs a group"
        ),
    ),
    (
        lambda r: (
            r.objective.overlong == "penalise"
            and not 1 <= r.objective.overlong_buffer_tokens <= r.sampling.max_new_tokens
        ),
        lambda r: (
            f"objective.overlong_buffer_tokens = {r.objective.overlong_buffer_tokens}: expected 1 to "
            f"sampling.max_new_tokens = {r.sampling.max_new_tokens} with overlong = penalise"
        ),
    ),
    (
        lambda r: _executes(r) and r.sandbox.wall_s >= r.pacing.lease_timeout_s,
        lambda r: (
            f"pacing.lease_timeout_s = {r.pacing.lease_timeout_s:g} leaves no time for grading, which may take "
            f"sandbox.wall_s = {r.sandbox.wall_s:g}"
        ),
    ),
    (
        lambda r: (
            _executes(r)
            and r.run.stall_timeout_s < r.pacing.lease_timeout_s + program_budget_s(r.sandbox.wall_s)
            and r.run.stall_timeout_s >= r.pacing.lease_timeout_s
        ),
        lambda r: (
            f"run.stall_timeout_s = {r.run.stall_timeout_s:g} leaves no time for grading: a program of sandbox.wall_s = "
            f"{r.sandbox.wall_s:g} may take {program_budget_s(r.sandbox.wall_s):g} s on a loaded host, beyond "
            f"pacing.lease_timeout_s = {r.pacing.lease_timeout_s:g}: expected at least "
            f"{r.pacing.lease_timeout_s + program_budget_s(r.sandbox.wall_s):g}"
        ),
    ),
    (
        lambda r: r.run.stall_timeout_s < r.pacing.lease_timeout_s,
        lambda r: (
            f"run.stall_timeout_s = {r.run.stall_timeout_s:g} is below pacing.lease_timeout_s = "
            f"{r.pacing.lease_timeout_s:g}: the run would fail before a dead actor's lease goes out again"
        ),
    ),
    (
        lambda r: _micro(r) and not r.model.vocabulary,
        lambda r: "model.path = micro needs model.vocabulary: the characters of its tasks, one token each",
    ),
    (
        lambda r: _micro(r) and len(set(r.model.vocabulary)) != len(r.model.vocabulary),
        lambda r: (
            "model.vocabulary holds "
            + repr(next(c for c in r.model.vocabulary if r.model.vocabulary.count(c) > 1))
            + " twice: each character is one token"
        ),
    ),
    (
        lambda r: _micro(r) and bool(r.model.hidden_size % r.model.heads or (r.model.hidden_size // r.model.heads) % 2),
        lambda r: (
            f"model.hidden_size = {r.model.hidden_size} over model.heads = {r.model.heads}: "
            "expected an even number of channels in each head"
        ),
    ),
    (
        lambda r: not r.model.lora_targets or not set(r.model.lora_targets) <= set(LORA_TARGETS),
        lambda r: f"model.lora_targets = {list(r.model.lora_targets)}: expected some of {', '.join(LORA_TARGETS)}",
    ),
    (
        lambda r: r.run.deterministic and r.pacing.max_staleness > 0,
        lambda r: (
            f"run.deterministic needs pacing.max_staleness = 0, found {r.pacing.max_staleness}: "
            "when weights swap during sampling depends on timing"
        ),
    ),
    (
        lambda r: r.run.deterministic and r.daemons.actors != 1,
        lambda r: f"run.deterministic needs daemons.actors = 1, found {r.daemons.actors}",
    ),
    (
        lambda r: r.engine.routed_experts and r.engine.kind == "embedded",
        lambda r: (
            "engine.routed_experts needs engine.kind = sglang, found embedded: only SGLang says where tokens went"
        ),
    ),
    (
        lambda r: r.run.deterministic and r.engine.kind != "embedded",
        lambda r: f"run.deterministic needs engine.kind = embedded, found {r.engine.kind}",
    ),
    (
        lambda r: r.run.deterministic and r.daemons.threads_per_process != 1,
        lambda r: f"run.deterministic needs daemons.threads_per_process = 1, found {r.daemons.threads_per_process}",
    ),
]

DomainRule = tuple[Callable[[Recipe, DomainConfig], bool], Callable[[Recipe, DomainConfig], str]]
_DOMAIN_RULES: list[DomainRule] = [
    (
        lambda r, d: d.floor and d.train,
        lambda r, d: ".floor = true needs train = false: what is trained on is no floor",
    ),
    (
        lambda r, d: d.max_new_tokens >= r.model.max_length_tokens,
        lambda r, d: (
            f".max_new_tokens = {d.max_new_tokens} leaves no room for a prompt in model.max_length_tokens = "
            f"{r.model.max_length_tokens}"
        ),
    ),
    (
        lambda r, d: d.train and d.max_new_tokens > r.sampling.max_new_tokens,
        lambda r, d: (
            f".max_new_tokens = {d.max_new_tokens} is above sampling.max_new_tokens = {r.sampling.max_new_tokens}, "
            "the longest completion of any trained domain; raise that one, or set train = false"
        ),
    ),
]


def check(recipe: Recipe, source: str) -> None:
    """ConfigError for the first value out of range or combination that cannot work; names `source` and the key."""
    for path, bounds in RANGES.items():
        section, key = path.split(".")
        _in_range(path, getattr(getattr(recipe, section), key), bounds, source)
    for table in fields(recipe):
        if table.name != "domains":
            _finite(table.name, getattr(recipe, table.name), source)
    if not _NAME.fullmatch(recipe.run.name):
        raise ConfigError(f"{source}: run.name = {recipe.run.name!r}: expected letters, digits, - and _, at most 64")
    _check_domains(recipe, source)
    for wrong, say in CROSS:
        if wrong(recipe):
            raise ConfigError(f"{source}: {say(recipe)}")


def check_inert(recipe: Recipe, keys: Iterable[str], source: str) -> None:
    """ConfigError for the first of `keys` (dotted, as set by `source`) that has no effect in this recipe."""
    domains = {domain.name: domain for domain in recipe.domains}
    for path in sorted(keys):
        section, *rest = path.split(".")
        if section == "domains":
            domain_rule = DOMAIN_INERT.get(rest[1])
            if domain_rule and not domain_rule[0](recipe, domains[rest[0]]):
                raise ConfigError(f"{source}: {path} has no effect: {domain_rule[1]}; remove it")
            continue
        rule = INERT.get(path)
        if rule and not rule[0](recipe):
            raise ConfigError(f"{source}: {path} has no effect: {rule[1]}; remove it")


def _check_domains(recipe: Recipe, source: str) -> None:
    seen: set[str] = set()
    for domain in recipe.domains:
        if not _NAME.fullmatch(domain.name):
            raise ConfigError(f"{source}: domain {domain.name!r}: expected letters, digits, - and _, at most 64")
        if domain.name in seen:
            raise ConfigError(f"{source}: two domains are called {domain.name}: names are unique in a recipe")
        seen.add(domain.name)
        if not _MODULE.fullmatch(domain.module):
            raise ConfigError(
                f"{source}: domains.{domain.name}.module = {domain.module!r}: expected a Python module, "
                "such as temper.actor.domains.reverse"
            )
        for key, bounds in DOMAIN_RANGES.items():
            _in_range(f"domains.{domain.name}.{key}", getattr(domain, key), bounds, source)
        _finite(f"domains.{domain.name}", domain, source)
        for wrong, text in _DOMAIN_RULES:
            if wrong(recipe, domain):
                raise ConfigError(f"{source}: domains.{domain.name}{text(recipe, domain)}")


def _finite(section: str, table: object, source: str) -> None:
    for field in fields(table):  # type: ignore[arg-type]
        value = getattr(table, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{source}: {section}.{field.name} = {value}: expected a finite number")


def _in_range(path: str, value: float | None, bounds: str, source: str) -> None:
    if value is None:
        return
    for sign, limit_text in _BOUND.findall(bounds):
        limit = float(limit_text)
        fits = {">=": value >= limit, "<=": value <= limit, ">": value > limit, "<": value < limit}[sign]
        if not fits:
            why = ""
            if path == "sampling.temperature":
                why = ": greedy sampling has no log-probabilities to learn from"
            raise ConfigError(f"{source}: {path} = {value:g}, expected {sign[0]}{sign[1:]} {limit_text}{why}")
