"""What a recipe implies, as a table: printed when a run starts, so that nobody has to multiply batch sizes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from temper.common.config import DomainConfig, Recipe

TOKEN_BYTES = 9  # of a sample: int32 token, float32 log-probability, uint8 mask
LARGE_SAMPLE_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class DomainSampling:
    """How a domain is sampled: its own keys where it has them, else the recipe's."""

    stop: tuple[str, ...]
    max_new_tokens: int
    eval_tasks: int
    eval_samples: int
    eval_temperature: float
    stop_unindented: bool = False


def domain_sampling(recipe: Recipe, domain: DomainConfig | None) -> DomainSampling:
    """The sampling of a domain; of None the recipe's own."""
    own = domain or DomainConfig("", "")
    temperature = recipe.eval.temperature if own.eval_temperature is None else own.eval_temperature
    return DomainSampling(
        stop=recipe.sampling.stop if own.stop is None else own.stop,
        max_new_tokens=own.max_new_tokens or recipe.sampling.max_new_tokens,
        eval_tasks=own.eval_tasks or recipe.eval.tasks_per_domain,
        eval_samples=own.eval_samples or recipe.eval.samples_per_task,
        eval_temperature=temperature,
        stop_unindented=own.stop_unindented,
    )


def leases_held(recipe: Recipe, role: str) -> int:
    """Leases that an actor or evaluator may hold at once. An evaluation's have few samples each: an evaluator gets as many
    as fill the rows of its engine, two samples a lease."""
    if role not in ("actor", "eval"):
        return 0
    least = recipe.engine.max_rows // 2 if role == "eval" else 0
    return max(recipe.engine.leases_in_flight, least)


def capacity_groups(recipe: Recipe) -> int:
    """Groups that may be ahead of the learner at once: (S + 1) * groups_per_step."""
    return (recipe.pacing.max_staleness + 1) * recipe.pacing.groups_per_step


def io_threads(recipe: Recipe) -> int:
    """ZeroMQ I/O threads of the run's broker: several where a sample may be large, so that one leaves while others come;
    small ones would only wake more threads (`bin/bench broker`, rows of 64 KiB and 1 MiB). Three, because the sockets of a peer
    come in pairs and ZeroMQ gives them to its threads in turn: with two all control sockets could meet in one."""
    longest_bytes = TOKEN_BYTES * recipe.model.max_length_tokens
    return 3 if longest_bytes >= LARGE_SAMPLE_BYTES or recipe.engine.routed_experts else 1


def max_void_in_a_row(recipe: Recipe) -> int:
    """Void groups in a row that end the run: the recipe's, or 20 * groups_per_step."""
    return recipe.pacing.max_void_in_a_row or 20 * recipe.pacing.groups_per_step


def derived_table(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Rows (name, value with its unit, how it follows from the recipe)."""
    pacing, run = recipe.pacing, recipe.run
    samples = pacing.groups_per_step * pacing.samples_per_group
    new_tokens = recipe.sampling.max_new_tokens
    evaluated = [domain_sampling(recipe, domain) for domain in recipe.domains]
    shares = sum(domain.share for domain in recipe.domains if domain.train)
    asynchronous = pacing.max_staleness > 0
    order = pacing.batch_order if asynchronous else "lease"
    rows = [
        ("samples per step", f"{samples:,}", "groups_per_step * samples_per_group"),
        ("samples in all", f"{samples * run.max_steps:,}", "samples per step * max_steps"),
        ("sampled tokens per step", f"at most {samples * new_tokens:,}", "samples per step * max_new_tokens"),
        (
            "prompt tokens",
            f"at most {recipe.model.max_length_tokens - new_tokens:,}",
            "max_length_tokens - max_new_tokens",
        ),
        (
            "samples per optimiser step",
            f"{samples / recipe.objective.updates_per_step:,.0f}",
            "samples per step / updates_per_step",
        ),
        (
            "groups ahead of the learner",
            f"at most {capacity_groups(recipe):,}",
            "(max_staleness + 1) * groups_per_step",
        ),
        (
            "lag",
            "0 (synchronous)"
            if not asynchronous
            else f"at most {pacing.max_staleness} versions"
            if order == "lease"
            else f"about {pacing.max_staleness} versions; single tokens above {pacing.max_token_lag} are masked",
            f"max_staleness, batch_order = {order}",
        ),
        ("void groups in a row that end the run", f"{max_void_in_a_row(recipe):,}", "max_void_in_a_row"),
        (
            "held-out samples per evaluation",
            f"{sum(own.eval_tasks * own.eval_samples for own in evaluated):,}",
            "sum over domains of tasks * samples_per_task",
        ),
    ]
    rows += [
        (
            f"share of {domain.name}",
            f"{domain.share / shares:.0%}" if domain.train else "a floor" if domain.floor else "evaluated only",
            "share / all shares",
        )
        for domain in recipe.domains
    ]
    return rows
