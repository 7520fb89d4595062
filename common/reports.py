"""What a run tells its readers: the broker's status report, the learner's progress lines, the summary.

Writers fill these structs, readers (`temper run`, `status`, `inspect`, `plot`) decode them; neither knows the other. JSON on
disk and on the wire. Every field has a default and unknown fields are ignored, so that versions can differ by appending.

- `RunStatus`: answer to a StatusRequest, written by the broker.
- `Progress`: one line of RUN/progress.jsonl, appended by the learner.
- `Evaluated`: one line of RUN/evaluations.jsonl: every task of a finished evaluation, appended by the learner.
- `Summary`: RUN/summary.json, written by the learner at the end and completed by `temper run`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import field
from temper.common.errors import ProtocolError

PROGRESS_FILE = "progress.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SUMMARY_FILE = "summary.json"
RECIPE_FILE = "recipe.json"


class PeerStatus(msgspec.Struct, frozen=True):
    """One peer of the broker, as its heartbeats and its connection describe it."""

    name: str  # what it calls itself
    role: str  # actor, sandbox, learner, eval, or broker for a relay
    state: str = ""  # STARTING, READY, DRAINING, STOPPED, FAILED
    host: str = ""  # where it runs
    pid: int = 0  # its process there
    progress: str = ""  # the last thing it got done
    progress_age_s: float = 0.0  # seconds since then
    waiting_for: str = ""  # whom it waits for, for what, how long; "WHOM: WHAT (n s)", joined by "; "
    silent_s: float = 0.0  # seconds since the broker heard of it
    version: int | None = None  # ordinal of the weights it serves (actor, eval), has published (learner), keeps (relay)
    digest: str = ""  # root digest of those weights
    in_flight: int = 0  # leases or sandbox jobs it holds
    slots: int = 0  # how many of them it takes at once
    via: list[str] = field(default_factory=list)  # relays between it and the broker, the nearest to the peer first
    credit_messages: int = 0  # messages that the broker may still send to it
    credit_bytes: int = 0  # bytes that the broker may still send to it
    unacked_messages: int = 0  # messages sent to it and not acknowledged yet
    queued_messages: int = 0  # messages that wait for its credit
    queued_bytes: int = 0  # bytes of those
    blocked_bytes: int = 0  # bytes that it has to send and that wait for room in the broker


class LagStatus(msgspec.Struct, frozen=True):
    """Token lag of the last training step: version at its start minus the version that sampled the token."""

    mean: float = 0.0  # versions
    p99: float = 0.0  # versions
    max: float = 0.0  # versions
    shares: dict[str, float] = field(default_factory=dict)  # lag -> share of the trained tokens; "16": 16 and more
    by_length: list[float] = field(default_factory=list)  # mean lag by decile of generated length, shortest first


class WeightsStatus(msgspec.Struct, frozen=True):
    """The weight log: one snapshot, then deltas."""

    ordinal: int | None = None  # newest version; null: nothing was published yet
    lineage: int = 0  # its lineage
    digest: str = ""  # its root digest
    versions: int = 0  # versions that can be fetched
    snapshot: int | None = None  # ordinal of the snapshot that a newcomer starts from
    snapshot_bytes: int = 0  # its size
    deltas: int = 0  # deltas from there to the newest version
    delta_bytes: int = 0  # their size
    full_bytes: int = 0  # a full copy of the newest version
    disk_bytes: int = 0  # everything the log keeps
    stored_bytes: int = 0  # taken from the learner since the broker started
    served_bytes: int = 0  # sent to peers since the broker started
    needed: dict[str, list[str]] = field(default_factory=dict)  # "ordinal digest" -> who holds or needs that version
    newest_bytes: int = 0  # the entry that brought the newest version, delta or full copy
    newest_density: float = 0.0  # share of the values that it changed
    encode_s: float = 0.0  # seconds: hashing and encoding of the last version at the learner, beside training
    publish_s: float = 0.0  # seconds: from the end of the last step to its version being stored
    fetch_s: float = 0.0  # seconds: the slowest of the actors' last transfers
    stage_s: float = 0.0  # seconds: the slowest of the actors' last decodings, beside sampling
    pause_s: float = 0.0  # seconds: the longest of the actors' last pauses of sampling
    reseeds: dict[str, int] = field(default_factory=dict)  # full copies taken instead of deltas, by reason


class LetterStatus(msgspec.Struct, frozen=True):
    """A dead letter: a lease that was given up, wholly or in part."""

    lease_id: int  # also the group's id
    lane: str  # train, eval or demo
    domain: str  # whose task it was
    task_seed: int  # with the level, what makes the task again
    reason: str  # quarantined (the task failed by itself) or infra (its budget of infrastructure failures was spent)
    attempts: int  # how often it went out
    error: str  # what the last attempt died of


class WaitStatus(msgspec.Struct, frozen=True):
    """One link of the chain of who waits for whom."""

    who: str  # the waiting side
    whom: str  # the side waited for; empty: it works, and the chain ends here
    what: str  # for what, or what it does


class RunStatus(msgspec.Struct, frozen=True):
    """The whole picture at one moment. Counts are totals since the run began unless they say "now"."""

    run_id: str = ""  # drawn at the run's start
    name: str = ""  # run.name of the recipe
    phase: str = ""  # waiting, warm, train, eval, over
    reason: str = ""  # of the phase: what is waited for, or how the run ended
    uptime_s: float = 0.0  # of the broker's process
    steps_done: int = 0  # RL steps
    max_steps: int = 0  # of the recipe
    version: int = 0  # ordinal: steps done, warm-start steps included
    lineage: int = 0  # of the present learner
    queued_groups: int = 0  # now: complete, waiting for the learner
    queued_bytes: int = 0  # now
    leased_groups: int = 0  # now: with the learner
    leases_in_flight: int = 0  # now: being sampled, returned or expired
    jobs_queued: int = 0  # now
    jobs_running: int = 0  # now
    groups: dict[str, int] = field(default_factory=dict)  # by fate: trained, void (reason), quarantined ...
    samples: dict[str, int] = field(default_factory=dict)  # by fate: accepted, refused ...
    jobs: dict[str, int] = field(default_factory=dict)  # finished sandbox jobs by outcome
    sampled_tokens: int = 0  # by all actors, as they report
    peers: list[PeerStatus] = field(default_factory=list)  # everybody connected but status clients
    paused_domains: dict[str, str] = field(default_factory=dict)  # domain -> why it gets no leases
    letters: list[str] = field(default_factory=list)  # the last things that were given up, and why
    leases: dict[str, dict[str, int]] = field(default_factory=dict)  # lane -> state -> leases; now: out, waiting
    attempts: dict[str, int] = field(default_factory=dict)  # ended attempts: done, returned, expired
    queues: dict[str, dict[str, int]] = field(default_factory=dict)  # lane -> assembling, queued, leased -> groups now
    group_bytes: dict[str, int] = field(default_factory=dict)  # now: assembling, queued, leased -> bytes
    demand: dict[str, int] = field(default_factory=dict)  # now: lane -> groups the learner still asks for
    jobs_by_domain: dict[str, dict[str, int]] = field(default_factory=dict)  # now: domain -> waiting, running
    lag: LagStatus | None = None  # of the last step; null before the first
    weights: WeightsStatus | None = None  # the weight log
    dead_letters: list[LetterStatus] = field(default_factory=list)  # the last 200, oldest first
    waits: list[WaitStatus] = field(default_factory=list)  # who waits for whom, link by link, from the learner on
    chain: str = ""  # the same in words


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: a warm-start step, an RL step or a finished evaluation. `time_s` counts from the learner's start."""

    kind: Literal["warm", "step", "eval"]
    time_s: float
    step: int = 0  # RL steps done (after this one)
    version: int = 0  # ordinal after this step; for an evaluation the pinned one
    reward: dict[str, float] = field(default_factory=dict)  # domain -> mean reward of the step's samples
    accuracy: dict[str, float | None] = field(default_factory=dict)  # domain -> share correct (step or evaluation)
    likelihood: float | None = None  # warm start: mean probability of a whole demonstration
    loss: float | None = None
    entropy: float | None = None
    lag_mean: float = 0.0  # versions, over the step's tokens
    lag_max: float = 0.0
    tokens: int = 0  # tokens the step trained
    samples: int = 0  # samples the step trained
    step_s: float = 0.0  # the step itself
    wait_s: float = 0.0  # waiting for groups before it
    when: Literal["", "before", "step", "after"] = ""  # evaluations only
    reason: str = ""  # why an accuracy is null
    floors: list[str] = field(default_factory=list)  # domains of `accuracy` that belong to no mean


class TaskResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One held-out task: of `samples` judged ones `correct` were right. Tokens and truncation count every sample."""

    task: int  # its number within the domain's held-out tasks
    samples: int = 0
    correct: int = 0
    tokens: int = 0  # generated, over all samples
    truncated: int = 0  # samples that ended at the length limit
    unscored: int = 0  # samples without a verdict (infrastructure)
    void: str = ""  # why the task was given up


class Evaluated(msgspec.Struct, frozen=True):
    """A finished evaluation, task by task; domains whose tasks are not all there are incomplete."""

    version: int
    step: int
    when: str
    expected: dict[str, int]  # domain -> tasks asked for
    domains: dict[str, list[TaskResult]]


class DomainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One domain's row of the summary; null accuracies have their reason."""

    status: Literal["trained", "evaluated", "floor", "unavailable"] = "trained"
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    tasks: int = 0  # held-out tasks evaluated
    samples: int = 0  # samples trained
    reason: str = ""
    interval_before: tuple[float, float] | None = None  # 95 %, over tasks
    interval_after: tuple[float, float] | None = None
    solved_before: float | None = None  # share of tasks with at least one correct sample (pass@k)
    solved_after: float | None = None
    eval_samples: int = 0  # held-out samples judged, in the last evaluation


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. Accuracies over all domains are means of the domains' accuracies, floors left out."""

    name: str = ""
    run_dir: str = ""
    exit_code: int = 0
    exit_reason: str = ""
    steps: int = 0
    warm_start_steps: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    domains: dict[str, DomainSummary] = field(default_factory=dict)
    wall_s: float = 0.0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    samples: dict[str, int] = field(default_factory=dict)  # by fate
    samples_per_s: float | None = None  # trained, over the RL steps
    lag_mean: float | None = None
    checkpoint: str = ""
    tensorboard: str = ""
    groups: dict[str, int] = field(default_factory=dict)  # by fate; zero_variance ones are among the trained
    lag_max: float | None = None
    warm_start_likelihood: float | None = None  # mean probability of a whole demonstration at its end
    peak_bytes: dict[str, int] = field(default_factory=dict)  # resident memory, by daemon; of `temper run` only


Report = TypeVar("Report", bound=msgspec.Struct)


def encode(report: msgspec.Struct) -> bytes:
    """JSON of a report, one line."""
    return msgspec.json.encode(report)


def decode(data: bytes | memoryview, kind: type[Report], source: str) -> Report:
    """The report in `data`; ProtocolError names `source` when it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{source}: not a {kind.__name__}: {error}") from error


def read_summary(run_dir: Path) -> Summary | None:
    """The summary in a run directory, None when there is none yet."""
    try:
        data = (run_dir / SUMMARY_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return decode(data, Summary, str(run_dir / SUMMARY_FILE))


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Replace the summary atomically: a reader sees the old or the new one, never half of one."""
    write_atomically(run_dir / SUMMARY_FILE, msgspec.json.format(encode(summary), indent=1) + b"\n")


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, sync, rename; OSError leaves what was there before."""
    partial = path.with_name(f".{path.name}.part")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class ProgressReader:
    """Reads the lines that were appended to RUN/progress.jsonl since the last call.

    A line without its end waits; a malformed one (a crash in the middle of a write, then a resume) is skipped and counted.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / PROGRESS_FILE
        self.skipped = 0
        self._offset = 0

    def read(self) -> list[Progress]:
        """New complete lines, oldest first; nothing while there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        found = []
        for line in complete.splitlines():
            try:
                found.append(decode(line, Progress, str(self.path)))
            except ProtocolError:
                self.skipped += 1
        return found
