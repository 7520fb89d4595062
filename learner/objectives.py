"""Algorithms as data: an objective is one frozen row of orthogonal choices, compiled to plain flags for `kernels`.

Adding an algorithm is adding a row to `TABLE`. `objective_rules.resolve` turns a recipe's ``[objective]`` into a row,
`advantages` computes what its `advantage` says. Pure; torch and kernels are imported when used. Called by both, by the
learner's steps, and by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from temper.kernels.flags import PolicyFlags

Advantage = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "batch_std",
    "opo",
    "passk",
    "ema",
    "per_component",
    "reinforce++",
    "reinforce++_baseline",
    "vtrace",
    "gae",
    "vtrace_critic",
    "likelihood",
]
Correction = Literal["none", "ratio", "truncate", "mask", "clip", "vtrace", "supervised"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

PER_TOKEN = ("reinforce++", "vtrace", "gae", "vtrace_critic")  # computed on the packed batch (`token_advantages`)
CRITIC = ("gae", "vtrace_critic")  # advantages that need a value head
NORMALISED = ("grpo", "batch_std", "per_component")  # advantages that divide by a standard deviation
CLIPPED = ("ppo", "cispo", "gmpo")  # losses that use clip_low and clip_high
RATIO_FREE = ("score",)  # losses without a ratio: pi/mu can only enter as a weight


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective. Fields that `kernels.flags.PolicyFlags` has too mean what they mean there.

    `correction` says how tokens that other weights sampled are accounted for: none; ratio (rho is pi/mu); truncate, mask or
    clip (a weight beside rho = pi/prox); vtrace (inside the advantage); supervised (demonstrations: nothing to correct).
    """

    name: str
    source: str  # paper, or what the row is for
    confirmed: str = "own tests; no peer has it"  # who else computes it and agrees, in tests: a peer, or golden values
    advantage: Advantage = "grpo"
    std: Literal["sample", "population"] = "sample"  # of advantages that divide by one
    epsilon: float = 1e-6  # added to that std
    gamma: float = 1.0  # discount of token returns
    lam: float = 1.0  # lambda of vtrace and gae
    rho_bar: float = 1.0  # vtrace
    c_bar: float = 1.0  # vtrace
    loss: str = "ppo"
    level: str = "token"
    correction: Correction = "none"
    weight_of: str = "prox"
    weight_level: str = "token"
    weight_low: float = 0.0
    weight_high: float = inf
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    loglinear_prox: bool = False
    geometric_low: float = 0.0
    geometric_high: float = inf
    veto: float = 0.0
    opsm_delta: float = inf
    tv_delta: float = inf
    m2_tau: float = inf
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    dro_beta: float = 0.0
    kl: str = "none"  # in the loss
    kl_coefficient: float = 0.0
    kl_reward: bool = False  # the KL (k1) is taken off the reward, token by token, instead
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    updates_per_step: int = 1
    component_weights: Mapping[str, float] = field(default_factory=dict)  # per_component; empty = 1 each

    @property
    def base(self) -> str:
        """The denominator of rho."""
        return "mu" if self.correction == "ratio" else "prox"

    @property
    def weight(self) -> str:
        """The kind of the correction weight."""
        return self.correction if self.correction in ("truncate", "mask", "clip") else "none"

    @property
    def uses_prox(self) -> bool:
        """The proximal policy enters the loss."""
        in_ratio = self.base == "prox" and self.loss not in RATIO_FREE
        return in_ratio or (self.weight != "none" and self.weight_of == "prox")

    @property
    def needs_prox(self) -> bool:
        """The learner must compute log prox before the first of several updates of a step."""
        return self.uses_prox and self.updates_per_step > 1 and not self.loglinear_prox

    @property
    def needs_entropy(self) -> bool:
        """The entropy of pi is needed with gradient."""
        return self.entropy_coefficient != 0

    @property
    def needs_reference(self) -> bool:
        """A reference policy's log-probabilities are needed."""
        return (self.kl != "none" or self.kl_reward) and self.kl_coefficient != 0

    @property
    def needs_critic(self) -> bool:
        """A value head is trained beside the policy."""
        return self.advantage in CRITIC


def _row(name: str, source: str, **choices: object) -> tuple[str, Objective]:
    return name, Objective(name=name, source=source, **choices)  # type: ignore[arg-type]


TABLE: dict[str, Objective] = dict(
    (
        _row("ppo", "1707.06347, rho against the behaviour policy", confirmed="TRL, torchrl", correction="ratio"),
        _row("grpo", "2402.03300; synchronous", confirmed="TRL, torchrl", aggregation="seq_mean_token_mean"),
        _row(
            "dr_grpo",
            "2503.20783; synchronous",
            confirmed="TRL",
            advantage="dr_grpo",
            aggregation="seq_mean_token_sum_norm",
        ),
        _row("dapo", "2503.14476", confirmed="TRL, torchrl", clip_high=0.28, correction="ratio"),
        _row(
            "gspo",
            "2507.18071",
            confirmed="TRL",
            level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            dual_clip=0.0,
            correction="ratio",
            aggregation="seq_mean_token_mean",
        ),
        _row(
            "gmpo",
            "2507.20673",
            confirmed="TRL",
            loss="gmpo",
            clip_low=0.4,
            clip_high=0.4,
            correction="ratio",
            aggregation="seq_mean_token_mean",
        ),
        _row(
            "cispo",
            "2506.13585, 2510.13786",
            confirmed="TRL",
            loss="cispo",
            clip_low=1.0,
            clip_high=0.28,
            correction="ratio",
        ),
        _row("sapo", "2511.20347", confirmed="TRL", loss="sapo", correction="ratio", aggregation="seq_mean_token_mean"),
        _row(
            "decoupled_ppo",
            "2110.00641, 2505.24298",
            confirmed="TRL",
            advantage="dr_grpo",
            correction="truncate",
            weight_high=5.0,
            clip_high=0.28,
        ),
        _row(
            "decoupled_ppo_loglinear",
            "2512.06547: no extra forward for the proximal policy",
            advantage="dr_grpo",
            correction="truncate",
            weight_high=5.0,
            clip_high=0.28,
            loglinear_prox=True,
        ),
        _row(
            "tis",
            "truncated importance sampling",
            confirmed="TRL",
            loss="score",
            correction="truncate",
            weight_of="pi",
            weight_high=2.0,
        ),
        _row(
            "seq_is",
            "one truncated weight per sequence",
            confirmed="TRL",
            correction="truncate",
            weight_level="sequence",
            weight_high=2.0,
        ),
        _row(
            "icepop",
            "tokens outside a band weigh 0",
            confirmed="TRL",
            correction="mask",
            weight_low=0.5,
            weight_high=5.0,
        ),
        _row(
            "mis",
            "masked importance sampling",
            confirmed="golden values; no peer has it",
            loss="score",
            correction="mask",
            weight_of="pi",
            weight_low=0.5,
            weight_high=1.5,
        ),
        _row(
            "geo_rs",
            "sequences outside a band of the geometric mean ratio are dropped, with veto",
            correction="truncate",
            weight_high=2.0,
            geometric_low=0.99,
            geometric_high=1.01,
            veto=1e-4,
        ),
        _row(
            "dppo_tv",
            "2602.04879",
            loss="ratio",
            correction="ratio",
            tv_delta=0.2,
        ),
        _row("topr", "2503.14286", loss="topr", correction="ratio", advantage="dr_grpo"),
        _row(
            "aipo",
            "2505.24034",
            confirmed="TRL",
            loss="score",
            correction="truncate",
            weight_of="pi",
            weight_high=5.0,
        ),
        _row("opsm", "off-policy sequence masking", confirmed="TRL", correction="ratio", opsm_delta=0.05),
        _row("m2po", "2510.01161", correction="ratio", m2_tau=0.04),
        _row("dro", "2405.19107", loss="dro", correction="ratio", dro_beta=0.1, advantage="dr_grpo"),
        _row(
            "vtrace",
            "1802.01561, V = the group's mean",
            confirmed="torchrl",
            advantage="vtrace",
            loss="score",
            correction="vtrace",
        ),
        _row(
            "ppo_critic",
            "1707.06347 with a value head and gae",
            confirmed="TRL, torchrl",
            advantage="gae",
            lam=0.95,
            correction="ratio",
        ),
        _row(
            "impala",
            "1802.01561 with a value head",
            confirmed="torchrl",
            advantage="vtrace_critic",
            loss="score",
            correction="vtrace",
        ),
        _row(
            "rloo",
            "2402.14740; synchronous",
            confirmed="TRL",
            advantage="rloo",
            loss="score",
            aggregation="seq_mean_token_sum",
        ),
        _row("maxrl", "2602.02710", confirmed="golden values; no peer has it", advantage="maxrl", correction="ratio"),
        _row("opo", "2505.23585", advantage="opo", correction="ratio"),
        _row("passk", "2503.19595", advantage="passk", correction="ratio"),
        _row(
            "reinforce++",
            "2501.03262",
            confirmed="golden values; returns: torchrl",
            advantage="reinforce++",
            correction="ratio",
        ),
        _row("reinforce++_baseline", "2501.03262", advantage="reinforce++_baseline", correction="ratio"),
        _row(
            "sft",
            "maximum likelihood of demonstrations",
            confirmed="torch",
            advantage="likelihood",
            loss="score",
            correction="supervised",
        ),
    )
)
"""Every named objective."""


def compile(objective: Objective) -> PolicyFlags:
    """The kernel's flags of an objective."""
    from temper.kernels.flags import PolicyFlags

    return PolicyFlags(**{flag.name: getattr(objective, flag.name) for flag in fields(PolicyFlags)})
