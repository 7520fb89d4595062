"""The one registry of metrics: name, unit, kind, definition. It yields TensorBoard tags and the table in common/README.md.

A metric is named ``<daemon>/<group>/<name>_<unit>``. A daemon holds a `Meter`, counts into it, and reports the full
key set of its role every tick (`Meter.tick`): counters since the last tick, gauges as last seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from temper.common.errors import ConfigError

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` may end in ``/*``: one series per domain, outcome or reason, whose name replaces the star."""

    name: str
    unit: str
    kind: Kind
    definition: str


REGISTRY: dict[str, Metric] = {}


def declare(name: str, unit: str, kind: Kind, definition: str) -> str:
    """Register a metric once, at import; returns its name so that modules hold constants."""
    if name in REGISTRY:
        raise ConfigError(f"metric {name} is declared twice")
    REGISTRY[name] = Metric(name, unit, kind, definition)
    return name


def kind_of(name: str) -> Kind | None:
    """Whether a name is a declared counter or gauge; None for any other."""
    metric = REGISTRY.get(name) or REGISTRY.get(name.rsplit("/", 1)[0] + "/*")
    return metric.kind if metric else None


class Meter:
    """Counts of one daemon. Unknown names raise: the registry is the whole list."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.counters = {m.name: 0.0 for m in REGISTRY.values() if self._mine(m) and m.kind == "counter"}
        self.gauges = {m.name: 0.0 for m in REGISTRY.values() if self._mine(m) and m.kind == "gauge"}

    def _mine(self, metric: Metric) -> bool:
        return metric.name.split("/", 1)[0] == self.role and not metric.name.endswith("/*")

    @staticmethod
    def _check(name: str, kind: Kind) -> None:
        if kind_of(name) != kind:
            raise KeyError(f"{name} is not a declared {kind}: declare it in common/metrics.py")

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to a counter."""
        if name not in self.counters:
            self._check(name, "counter")
            self.counters[name] = 0.0
        self.counters[name] += value

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        if name not in self.gauges:
            self._check(name, "gauge")
        self.gauges[name] = value

    def tick(self) -> tuple[dict[str, float], dict[str, float]]:
        """(counters since the last tick, gauges); counters restart at 0, the key set stays."""
        counters, gauges = dict(self.counters), dict(self.gauges)
        self.counters = dict.fromkeys(counters, 0.0)
        return counters, gauges


# ---------------------------------------------------------------- actor
ACTOR_TOKENS = declare("actor/engine/sampled_tokens", "tokens", "counter", "Tokens sampled by the engine.")
ACTOR_ROWS = declare("actor/engine/rows_count", "rows", "gauge", "Rows being decoded.")
ACTOR_STARTING = declare(
    "actor/engine/starting_seconds",
    "s",
    "gauge",
    "For how long the engine has not answered, because it starts or comes back; 0 while it can sample.",
)
ACTOR_RESTARTS = declare("actor/engine/restarts_count", "restarts", "counter", "Inference servers lost and replaced.")
ACTOR_RETRACTIONS = declare(
    "actor/engine/retractions_count", "rows", "counter", "Rows that a server took back for want of KV memory."
)
ACTOR_WAIT = declare("actor/wait/seconds", "s", "counter", "Time without anything to decode.")
ACTOR_PAUSE = declare("actor/weights/pause_seconds", "s", "gauge", "Pause of the last weight commit.")
ACTOR_SWAPS = declare("actor/weights/swaps_count", "swaps", "counter", "Weight versions committed.")
ACTOR_RESEEDS = declare(
    "actor/weights/reseeds_count", "reseeds", "counter", "Times a full copy was taken instead of a delta."
)
ACTOR_RESEED_REASONS = declare(
    "actor/weights/reseeds_by_reason_count/*",
    "reseeds",
    "counter",
    "The same by reason: gap, base, layout, malformed, truncated, digest, engine, scrub.",
)
ACTOR_FETCHED = declare("actor/weights/fetched_bytes", "bytes", "counter", "Weight bytes received and staged.")
ACTOR_FETCH_TIME = declare("actor/weights/fetch_seconds", "s", "gauge", "Last fetch: from asking to the last byte.")
ACTOR_STAGE_TIME = declare(
    "actor/weights/stage_seconds", "s", "gauge", "Last fetch: decoding and hashing, beside sampling."
)
ACTOR_SAMPLES = declare("actor/samples/finished_count", "samples", "counter", "Samples finished and scored.")
ACTOR_CACHE_HITS = declare(
    "actor/sandbox/shared_verdicts_count", "jobs", "counter", "Jobs answered by an identical job's verdict."
)
ACTOR_JOBS = declare("actor/sandbox/jobs_count", "jobs", "counter", "Jobs sent to sandbox workers.")
ACTOR_TASK_ERRORS = declare(
    "actor/domain/errors_count", "errors", "counter", "Domain or task failures (raised, hung, NaN)."
)


# ---------------------------------------------------------------- sandbox
SANDBOX_JOBS = declare("sandbox/jobs/finished_count", "jobs", "counter", "Jobs answered with a verdict.")
SANDBOX_CANCELLED = declare("sandbox/jobs/cancelled_count", "jobs", "counter", "Jobs cancelled while they ran.")
SANDBOX_OUTCOMES = declare("sandbox/outcomes/*", "jobs", "counter", "Jobs by outcome.")
SANDBOX_PROGRAMS = declare("sandbox/programs/finished_count", "programs", "counter", "Program runs (tests) finished.")
SANDBOX_RUNNING = declare("sandbox/jobs/running_count", "jobs", "gauge", "Jobs running.")
SANDBOX_WALL = declare("sandbox/jobs/wall_seconds", "s", "counter", "Wall time of jobs, jails' starts included.")
SANDBOX_CPU = declare("sandbox/programs/cpu_seconds", "s", "counter", "CPU time of programs.")
SANDBOX_RERUNS = declare(
    "sandbox/jobs/rerun_count", "jobs", "counter", "Answered jobs of a sampled share that were run a second time."
)
SANDBOX_FLAKY = declare(
    "sandbox/jobs/flaky_count", "jobs", "counter", "Jobs whose second run had another outcome in some test."
)
SANDBOX_SESSIONS = declare("sandbox/sessions/open_count", "sessions", "gauge", "Sessions that live.")
SANDBOX_JAILS = declare("sandbox/jails/started_count", "jails", "counter", "Jails started.")

# ---------------------------------------------------------------- broker
BROKER_QUEUED = declare("broker/groups/queued_count", "groups", "gauge", "Complete groups that wait for the learner.")
BROKER_QUEUED_BYTES = declare("broker/groups/queued_bytes", "bytes", "gauge", "Array bytes of the queued groups.")
BROKER_LEASED = declare("broker/groups/leased_count", "groups", "gauge", "Groups that the learner holds.")
BROKER_TRAINED = declare("broker/groups/trained_count", "groups", "gauge", "Groups trained in the surviving lineage.")
BROKER_VOID = declare("broker/void/*", "groups", "gauge", "Groups of the train lane given up, by reason.")
BROKER_IN_FLIGHT = declare(
    "broker/leases/in_flight_count", "leases", "gauge", "Leases that are out or wait to go out again."
)
BROKER_EXPIRED = declare("broker/leases/expired_count", "attempts", "counter", "Attempts whose deadline passed.")
BROKER_RETURNED = declare("broker/leases/returned_count", "attempts", "counter", "Attempts that ended unfinished.")
BROKER_ACCEPTED = declare("broker/samples/accepted_count", "samples", "counter", "Samples accepted.")
BROKER_REFUSED = declare(
    "broker/samples/refused_count", "samples", "counter", "Samples refused: abandoned attempts, malformed values."
)
BROKER_JOBS_WAITING = declare("broker/jobs/waiting_count", "jobs", "gauge", "Sandbox jobs that no worker runs yet.")
BROKER_JOBS_RUNNING = declare("broker/jobs/running_count", "jobs", "gauge", "Sandbox jobs being run.")
BROKER_OUTCOMES = declare("broker/outcomes/*", "jobs", "counter", "Finished sandbox jobs by outcome.")
BROKER_COMMIT = declare("broker/ledger/commit_seconds", "s", "counter", "Time spent in the ledger's transactions.")
BROKER_COMMITS = declare("broker/ledger/commits_count", "transactions", "counter", "Transactions of the ledger.")
BROKER_SEGMENT_BYTES = declare("broker/ledger/segment_bytes", "bytes", "counter", "Bytes written to segment files.")
BROKER_WEIGHTS_STORED = declare(
    "broker/weights/stored_bytes", "bytes", "counter", "Weight bytes that the learner sent."
)
BROKER_WEIGHTS_SERVED = declare("broker/weights/served_bytes", "bytes", "counter", "Weight bytes that peers fetched.")
BROKER_PEERS = declare("broker/peers/connected_count", "peers", "gauge", "Peers connected.")

# ---------------------------------------------------------------- relay
RELAY_FETCHED = declare("relay/weights/fetched_bytes", "bytes", "counter", "Weight bytes that the parent sent.")
RELAY_SERVED = declare("relay/weights/served_bytes", "bytes", "counter", "Weight bytes that peers of the site fetched.")
RELAY_ASKED = declare("relay/weights/asked_count", "requests", "counter", "Times the parent was asked for weights.")
RELAY_PASSED = declare("relay/messages/passed_count", "messages", "counter", "Control messages passed, both ways.")
RELAY_DROPPED = declare(
    "relay/messages/dropped_count", "messages", "counter", "Control messages beyond what a line may have under way."
)
RELAY_PEERS = declare("relay/peers/connected_count", "peers", "gauge", "Peers of the site.")

# ---------------------------------------------------------------- learner
LEARNER_REWARD = declare("learner/reward/*", "reward", "gauge", "Mean reward of a domain's trained samples in a step.")
LEARNER_COMPONENT = declare(
    "learner/component/*", "reward", "gauge", "Mean of a reward component (domain.component) in a step."
)
LEARNER_ACCURACY = declare(
    "learner/accuracy/*", "share", "gauge", "Share of raw correct samples of a domain in a step, before any shaping."
)
LEARNER_EVAL = declare("learner/eval/*", "share", "gauge", "Held-out accuracy of a domain, mean over samples.")
LEARNER_EVAL_PASS = declare(
    "learner/eval_pass/*", "share", "gauge", "Held-out share of a domain's tasks with at least one correct sample."
)
LEARNER_FLOOR = declare(
    "learner/floor/*", "share", "gauge", "Accuracy of a domain that is only measured before and after a run."
)
LEARNER_SHARE = declare("learner/curriculum/*", "share", "gauge", "Share of the groups that a domain gets.")
LEARNER_LAG_MEAN = declare(
    "learner/lag/mean_versions", "versions", "gauge", "Mean over trained tokens of step version - sampling version."
)
LEARNER_LAG_P99 = declare("learner/lag/p99_versions", "versions", "gauge", "99th percentile of the token lag.")
LEARNER_LAG_MAX = declare("learner/lag/max_versions", "versions", "gauge", "Largest token lag of the step.")
LEARNER_LAG_SHARE = declare(
    "learner/lag_share/*", "share", "gauge", "Share of the trained tokens with this lag; 16 stands for 16 and more."
)
LEARNER_LAG_LENGTH = declare(
    "learner/lag_by_length/*",
    "versions",
    "gauge",
    "Mean token lag by decile of the samples' generated length (0 = shortest).",
)
LEARNER_ENTROPY = declare(
    "learner/policy/entropy_nats", "nats", "gauge", "Mean entropy of the policy at trained tokens."
)
LEARNER_KL_BEHAVIOUR = declare(
    "learner/policy/kl_behaviour_nats", "nats", "gauge", "k3 estimate of KL(behaviour || policy) per trained token."
)
LEARNER_KL_REFERENCE = declare(
    "learner/policy/kl_reference_nats", "nats", "gauge", "k3 estimate of KL(policy || reference) per trained token."
)
LEARNER_KL_COEFFICIENT = declare(
    "learner/policy/kl_coefficient", "1", "gauge", "Coefficient of the KL to the reference policy in this step."
)
LEARNER_VALUE_LOSS = declare(
    "learner/critic/loss_mean", "reward^2", "gauge", "Squared error / 2 of the critic's values, where there is one."
)
LEARNER_CLIP = declare("learner/policy/clip_share", "share", "gauge", "Trained tokens whose ratio was clipped.")
LEARNER_CLAMP = declare(
    "learner/policy/clamped_share", "share", "gauge", "Trained tokens whose log-ratio hit the +-20 clamp."
)
LEARNER_DROPPED = declare(
    "learner/policy/dropped_share", "share", "gauge", "Trained tokens whose loss a filter or a zero weight removed."
)
LEARNER_STALE = declare(
    "learner/policy/stale_share", "share", "gauge", "Sampled tokens masked for being older than max_token_lag."
)
LEARNER_RATIO = declare("learner/policy/ratio_mean", "ratio", "gauge", "Mean ratio of the objective (policy / base).")
LEARNER_WEIGHT = declare("learner/policy/weight_mean", "ratio", "gauge", "Mean off-policy correction weight.")
LEARNER_ESS = declare(
    "learner/policy/effective_share", "share", "gauge", "Effective sample size of the correction weights / tokens."
)
LEARNER_ADVANTAGE = declare(
    "learner/policy/advantage_magnitude", "advantage", "gauge", "Mean absolute advantage of trained tokens."
)
LEARNER_LOSS = declare("learner/policy/loss_mean", "loss", "gauge", "Mean loss per trained token before aggregation.")
LEARNER_GAP = declare(
    "learner/engine/logprob_gap_nats",
    "nats",
    "gauge",
    "Mean |learner - engine| log-probability over samples that the version at the start of the step sampled alone.",
)
LEARNER_REPLACED = declare(
    "learner/routing/replaced_share",
    "share",
    "gauge",
    "Replayed (token, layer) pairs where the policy itself would have used other experts (engine.routed_experts).",
)
LEARNER_RECORDED = declare(
    "learner/routing/recorded_share", "share", "gauge", "(Token, layer) pairs whose experts the engine recorded."
)
LEARNER_GRADIENT = declare(
    "learner/optimizer/gradient_norm",
    "norm",
    "gauge",
    "Global gradient norm before clipping, mean over a step's updates.",
)
LEARNER_RATE = declare("learner/optimizer/learning_rate", "rate", "gauge", "Learning rate of the step.")
LEARNER_SKIPPED = declare(
    "learner/optimizer/skipped_count", "updates", "counter", "Updates skipped for a gradient that was not finite."
)
LEARNER_TOKENS = declare("learner/speed/trained_tokens", "tokens", "counter", "Completion tokens with gradient.")
LEARNER_PACKED = declare(
    "learner/speed/packed_tokens", "tokens", "counter", "Tokens forwarded and backpropagated after sharing prefixes."
)
LEARNER_ROW_TOKENS = declare(
    "learner/speed/row_tokens", "tokens", "counter", "Tokens the same rows hold without sharing, prompts included."
)
LEARNER_STEPS = declare("learner/step/done_count", "steps", "counter", "RL steps done.")
LEARNER_STEP_TIME = declare("learner/step/train_seconds", "s", "gauge", "Wall time of the last training step.")
LEARNER_WAIT = declare("learner/wait/seconds", "s", "counter", "Time the learner waited for its batch.")
LEARNER_ENCODE_TIME = declare(
    "learner/weights/encode_seconds", "s", "gauge", "Hashing and encoding of the last version, beside training."
)
LEARNER_PUBLISH_TIME = declare(
    "learner/publish/seconds", "s", "gauge", "From the end of a step to its version being stored at the broker."
)
LEARNER_DELTA_BYTES = declare(
    "learner/publish/delta_bytes", "bytes", "gauge", "Bytes of the last version on the wire, delta or full copy."
)
LEARNER_DELTA_SHARE = declare(
    "learner/publish/delta_share", "share", "gauge", "Those bytes relative to a full copy of the version."
)
LEARNER_DELTA_DENSITY = declare(
    "learner/publish/changed_share",
    "share",
    "gauge",
    "Share of the weights' values whose bits changed since the version before.",
)
LEARNER_CHECKPOINT_TIME = declare("learner/checkpoint/seconds", "s", "gauge", "Wall time of the last checkpoint.")
LEARNER_SAMPLES = declare(
    "learner/samples/*", "samples", "counter", "Samples by fate: trained, masked (no trained token), unscored, void."
)
LEARNER_GROUPS = declare(
    "learner/groups/*", "groups", "counter", "Groups by fate: trained, zero_variance (of these), void reasons."
)
LEARNER_MIXED = declare(
    "learner/collapse/mixed_share", "share", "gauge", "Trained groups with both right and wrong samples."
)
LEARNER_PASS = declare(
    "learner/collapse/pass_share", "share", "gauge", "Trained groups with at least one right sample."
)
LEARNER_LENGTH = declare("learner/length/mean_tokens", "tokens", "gauge", "Mean generated tokens of a sample.")
LEARNER_TRUNCATED = declare(
    "learner/length/truncated_share", "share", "gauge", "Samples that ended at the length limit."
)
LEARNER_LIKELIHOOD = declare(
    "learner/warm/likelihood_share", "share", "gauge", "Mean probability of a whole demonstration before the warm step."
)
LEARNER_ALARMS = declare("learner/oversight/alarms_count", "alarms", "counter", "Alarms raised by oversight.")
