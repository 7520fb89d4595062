"""Every message body, one struct each, and the numbers of their kinds.

Bodies travel as MessagePack arrays (``array_like``): a schema evolves by *appending optional fields*, never otherwise.
Two sockets: *control* (small, urgent) and *bulk* (weights, bundle files), so that a snapshot never delays a heartbeat.
Reliable kinds carry a sequence number, are resent until acknowledged and delivered once and in order; transient kinds
(sequence 0) are neither.

Arrow = direction; B = broker.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import field

Lane = Literal["train", "eval", "demo"]
Role = Literal["actor", "sandbox", "learner", "eval", "broker", "status"]
Outcome = Literal["ok", "wrong", "error", "timeout", "memory", "output", "signal", "policy", "infra", "compile"]
FinishReason = Literal["stop", "length", "abort"]
State = Literal["STARTING", "READY", "DRAINING", "STOPPED", "FAILED"]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=False, frozen=True):
    """Base of all bodies. `KIND` is the header's kind; `RELIABLE` and `BULK` say how it travels."""

    KIND: ClassVar[int] = 0
    RELIABLE: ClassVar[bool] = True
    BULK: ClassVar[bool] = False


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Base of the structs nested in bodies."""


# ---------------------------------------------------------------- session


class Version(Part, frozen=True):
    """A version of the weights: the ordinal paces, the digest (blake2b-16 root, hex) decides equality."""

    ordinal: int
    lineage: int
    digest: str


class Hello(Body, frozen=True):
    """peer -> B, first message on each socket; transient, repeated until answered.

    `session` is a random token that both sockets of one process share; the header's epoch is its incarnation.
    `slots` is how many leases (actor, eval) or jobs (sandbox) it takes at once. `domains` maps an allowed domain module
    to the digest of its source.
    """

    KIND: ClassVar[int] = 1
    RELIABLE: ClassVar[bool] = False
    role: Role
    name: str
    session: str
    run_id: str | None = None
    host: str = ""
    pid: int = 0
    slots: int = 0
    domains: dict[str, str] = field(default_factory=dict)
    received: int = 0  # highest sequence received from the broker on this socket (resume after a broker restart)
    limit_messages: int = 0  # credit the broker has to begin with, cumulative like an Ack's
    limit_bytes: int = 0
    known_epoch: int = 0  # the broker's incarnation that this peer last shook hands with, 0 = none
    via: list[str] = field(default_factory=list)  # relays that passed this on, the nearest to the peer first


class Welcome(Body, frozen=True):
    """B -> peer: accepted. `recipe` is the run's recipe as JSON (it travels in the one array frame, empty in the meta);
    `received` the highest sequence taken from this peer."""

    KIND: ClassVar[int] = 2
    RELIABLE: ClassVar[bool] = False
    run_id: str
    recipe: str
    lineage: int
    heartbeat_s: float
    received: int = 0
    limit_messages: int = 0
    limit_bytes: int = 0
    largest_bytes: int = 0  # of one message; who has no credit for one asks by Blocked. 0: limit_bytes, and nobody asks


class Refused(Body, frozen=True):
    """B -> peer: this peer is closed. `code`: run_mismatch, protocol, role_taken, malformed, overflow, key, domain."""

    KIND: ClassVar[int] = 3
    RELIABLE: ClassVar[bool] = False
    code: str
    reason: str


class Heartbeat(Body, frozen=True):
    """Both ways every second from the pump, carrying the main task's last progress."""

    KIND: ClassVar[int] = 4
    RELIABLE: ClassVar[bool] = False
    state: State
    progress: str = ""
    progress_age_s: float = 0.0
    waiting_for: str = ""
    version: Version | None = None


class Goodbye(Body, frozen=True):
    """peer -> B: clean end (exit_code 0) or the cause of a failing one. Leases and jobs were returned before."""

    KIND: ClassVar[int] = 5
    exit_code: int
    reason: str


class Ack(Body, frozen=True):
    """Both ways: everything up to `received` has arrived (and is durable, where that is promised).

    The window of the receiver, cumulative since HELLO: the sender may have sent at most `limit_messages` messages and
    `limit_bytes` bytes in all. `gap` asks for everything after `received` again.
    """

    KIND: ClassVar[int] = 6
    RELIABLE: ClassVar[bool] = False
    received: int
    limit_messages: int
    limit_bytes: int
    gap: bool = False


class Blocked(Body, frozen=True):
    """peer -> B: messages wait here for credit in bytes. The first needs a `limit_bytes` of `least`; `more` are those with which
    others could leave too, ascending. Repeated every second while it is so; answered by an Ack."""

    KIND: ClassVar[int] = 12
    RELIABLE: ClassVar[bool] = False
    least: int
    more: list[int] = []


class Unneeded(Body, frozen=True):
    """peer -> B: what it may send beyond this message, and beyond its window, is given back: what it had asked for it for was
    cancelled. Reliable, so that both ends count from the same message."""

    KIND: ClassVar[int] = 13


class Drain(Body, frozen=True):
    """B -> peer: finish or return what you hold, flush, say goodbye, exit 0. `reason` is shown."""

    KIND: ClassVar[int] = 7
    reason: str
    deadline_s: float


class Metrics(Body, frozen=True):
    """peer -> B -> learner: the full key set of one tick. `counters` add over ticks, `gauges` hold last values.

    Declared names of the sender's own role and finite values, or the peer is closed.
    """

    KIND: ClassVar[int] = 8
    RELIABLE: ClassVar[bool] = False
    source: str
    counters: dict[str, float]
    gauges: dict[str, float]


class StatusRequest(Body, frozen=True):
    """status client -> B."""

    KIND: ClassVar[int] = 9
    RELIABLE: ClassVar[bool] = False


class Holding(Body, frozen=True):
    """peer -> B, when the broker came back as a new incarnation: what this peer still has (RESYNC).

    Actors: `attempts` (lease_id, attempt) that they work on. Learner: ids of `groups` received and not yet done or void
    (those of evaluations under way too), and the `demand` outstanding by lane. Sandbox workers: `jobs` they run and names
    of `sessions` that live there.
    `epoch` is the incarnation of the broker that is told: said to one that died meanwhile, it is stale and ignored.
    """

    KIND: ClassVar[int] = 11
    epoch: int
    attempts: list[tuple[int, int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    demand: dict[str, int] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)


class StatusReport(Body, frozen=True):
    """B -> status client: JSON of the whole picture, in the single array frame."""

    KIND: ClassVar[int] = 10
    RELIABLE: ClassVar[bool] = False


# ---------------------------------------------------------------- leases and samples


class Lease(Body, frozen=True):
    """B -> actor: run these samples of this task. `lease_id` is the order of creation and the group's id.

    In lane ``demo`` each index is a task of its own (a demonstration has no variance); elsewhere the indices are
    samples of one task. `deadline_s` runs from the actor's first token (`Touch`); waiting for weights has its own.
    """

    KIND: ClassVar[int] = 16
    lease_id: int
    attempt: int
    lineage: int
    lane: Lane
    domain: str
    level: int
    task_seed: int
    indices: list[int]
    min_version: int
    pinned_version: int | None
    deadline_s: float


class Touch(Body, frozen=True):
    """actor -> B: the attempt has started (its weights are there): the deadline runs from here. Again with `grading_s`: its
    jobs may take that many seconds from now, so its deadline does not come sooner."""

    KIND: ClassVar[int] = 17
    lease_id: int
    attempt: int
    grading_s: float = 0.0


class Return(Body, frozen=True):
    """actor -> B: the attempt ends without its missing samples.

    `cause`: drain (a clean return), task (the task or domain failed: counts against its attempts), infra (sandbox or
    engine failed: counts against the infrastructure budget).
    """

    KIND: ClassVar[int] = 18
    lease_id: int
    attempt: int
    cause: Literal["drain", "task", "infra"]
    error: str


class SampleMeta(Part, frozen=True, gc=False):
    """One sample's facts; its tokens are rows of the message's concatenated arrays."""

    index: int
    finish_reason: FinishReason
    reward: float | None
    correct: bool | None
    components: dict[str, float]
    outcome: Outcome
    version_runs: list[
        tuple[int, int, int]
    ]  # lineage, ordinal, count over all N tokens; prompt tokens count to the first
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    task_key: str = ""


class ArraySpec(Part, frozen=True, gc=False):
    """Describes one array frame: numpy dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Samples(Body, frozen=True, gc=False):
    """actor -> B: finished samples of one lease; acknowledged once they are durable.

    Frames as `arrays` says (small arrays share one, see ``arrays``), concatenated over the samples in order: tokens
    i32[N] (prompt included), behaviour_logprob f32[N], loss_mask u8[N], cu_seqlens i64[S+1], optional support_ids i32[M]
    with support_cu i64[N+1], optional routed_experts i16[N, layers * experts per token]. Prompt and tool tokens: mask 0.
    """

    KIND: ClassVar[int] = 19
    lease_id: int
    attempt: int
    lineage: int
    samples: list[SampleMeta]
    arrays: list[ArraySpec]


class SampleRefused(Body, frozen=True):
    """B -> actor: samples of an abandoned attempt or malformed ones were not taken; stop working on that attempt."""

    KIND: ClassVar[int] = 20
    lease_id: int
    attempt: int
    reason: str


# ---------------------------------------------------------------- sandbox


class Limits(Part, frozen=True):
    """Limits of one program. Memory, output and file sizes in bytes, times in seconds."""

    wall_s: float = 5.0
    cpu_s: float = 2.0
    memory_bytes: int = 256 * 1024 * 1024
    pids: int = 32
    output_bytes: int = 64 * 1024


class TestCase(Part, frozen=True):
    """One test: `stdin` goes in, stdout is compared with `expected` *outside* the jail (trailing white space aside).

    `expected` None only runs the program: `ok` if it exits 0. `suite` (Python): asserts that call the program's functions,
    run in another jail than the program; with `weak` in the program's own interpreter, and the verdict says so.
    """

    stdin: bytes = b""
    expected: bytes | None = None
    name: str = ""
    suite: bytes = b""
    weak: bool = False
    __test__: ClassVar[bool] = False


class Checker(Part, frozen=True):
    """A program that judges output, in a jail of its own: it finds the files `input`, `output` and `expected`.

    Exit code 0: right, 1: wrong, anything else (also an uncaught exception): the checker is broken (`infra`).
    """

    language: str
    files: dict[str, bytes]
    limits: Limits = Limits()


class SandboxJob(Part, frozen=True):
    """A program to execute: `files["main.py"]` etc. (the language's table row names the entry file)."""

    job_id: str
    language: str
    files: dict[str, bytes]
    tests: list[TestCase]
    limits: Limits = Limits()
    seed: int = 0
    mode: Literal["fresh", "pool", "fork"] = "fresh"
    session_id: str | None = None
    checker: Checker | None = None  # judges every test's stdout instead of the comparison
    session_s: float = 600.0  # how long a session may live; the first job of a session says it
    close_session: bool = False  # the session ends after this job, whose verdict brings its files
    jail_per_test: bool = False  # every test in a jail of its own, instead of all in one visit
    resume: bool = False  # the session must be there already: else infra, for what it held is lost


class TestResult(Part, frozen=True):
    """The outcome of one test of a job; `stdout` is bounded."""

    outcome: Outcome
    stdout: bytes = b""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    __test__: ClassVar[bool] = False


class Verdict(Part, frozen=True):
    """What happened. `outcome` of the job = the first outcome that is not ok, else ok. A value, never an exception.

    `infra` never becomes a reward. `signal` is set when the program died of one. `stdout`/`stderr` are bounded bytes of
    the first failing test (or the last one), `truncated` when something was cut.
    """

    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int | None = None
    tests: list[TestResult] = field(default_factory=list)
    detail: str = ""
    weak: bool = False  # decided inside the program's own interpreter: it could have been forged
    files: dict[str, bytes] = field(default_factory=dict)  # the workspace of a session that this job closed


class Job(Body, frozen=True):
    """actor -> B -> sandbox: one job; the frames hold MessagePack of the SandboxJob, split at 16 MiB.

    `lease_id` orders jobs (grading of the oldest lease first). `domain` is for fairness and counts. `close_session`: as the
    SandboxJob's, the session's worker need not be remembered after this job.
    """

    KIND: ClassVar[int] = 32
    job_id: str
    lease_id: int
    domain: str
    session_id: str | None = None
    close_session: bool = False


class JobDone(Body, frozen=True):
    """sandbox -> B -> actor: the frames hold MessagePack of the Verdict. `outcome` is repeated for the broker's counts."""

    KIND: ClassVar[int] = 33
    job_id: str
    outcome: Outcome
    wall_s: float = 0.0


class JobCancel(Body, frozen=True):
    """actor -> B -> sandbox: the episode is over; kill what runs. With `session`, `job_id` is the name of a session."""

    KIND: ClassVar[int] = 34
    job_id: str
    session: bool = False


# ---------------------------------------------------------------- learner


class LearnerReady(Body, frozen=True):
    """learner -> B: after start or resume. Ledger cursor: groups trained(v >= resumed_from) go back to queued.

    `lineage` is drawn by the learner (random u32) at each start; `steps_done` RL steps; `version` ordinal. `trained`: (version,
    group ids) of the last steps before it, as in their `Done`, which may never have arrived.
    """

    KIND: ClassVar[int] = 48
    lineage: int
    resumed_from: int | None
    steps_done: int
    version: int
    trained: list[tuple[int, list[int]]] = []


class Phase(Body, frozen=True):
    """learner -> B: which lane is leased from now on. ``warm``: demo lane; ``train``; ``eval`` (only eval); ``over``.

    `shares`: domain -> (level, share) for the demo or train lane. `groups_per_step`, `samples_per_group` of that lane.
    """

    KIND: ClassVar[int] = 49
    phase: Literal["warm", "train", "eval", "over"]
    shares: dict[str, tuple[int, float]]
    groups_per_step: int
    samples_per_group: int
    reason: str = ""


class Demand(Body, frozen=True):
    """learner -> B: lease me up to `groups` more groups of `lane` as they become ready (adds to the outstanding demand)."""

    KIND: ClassVar[int] = 50
    lane: Lane
    groups: int


class Group(Body, frozen=True):
    """B -> learner: a complete group. `parts`: the accepted Samples messages, as they came.

    Frames: first `facts` frames that hold `parts` as MessagePack, where they are too large for the meta (then `parts` is
    empty here); then those of the parts whose arrays share a frame, small ones joined (``arrays.divide``); then the other
    parts' array frames, in order.

    A void group of the eval lane is sent too (`void` says why, parts hold what there was), so that an evaluation ends.
    """

    KIND: ClassVar[int] = 51
    group_id: int
    lane: Lane
    domain: str
    level: int
    task_seed: int
    lineage: int
    parts: list[Samples]
    pinned_version: int | None = None
    void: str | None = None
    facts: int = 0


class Done(Body, frozen=True):
    """learner -> B: one step is done. `version` = ordinal *at its start*; the next ordinal is version + 1.

    `trained` groups are now trained(version); `void` maps group id to a reason (no contrast, ...).
    `counted` is False for warm-start steps, which raise the version but are not counted in max_steps.
    """

    KIND: ClassVar[int] = 52
    version: int
    trained: list[int]
    void: dict[str, str]
    counted: bool


class Void(Body, frozen=True):
    """learner -> B: groups given up before a step (no contrast): their places are free at once."""

    KIND: ClassVar[int] = 53
    groups: dict[str, str]


class Covered(Body, frozen=True):
    """learner -> B: a checkpoint of version `version` is complete; `oldest` is the oldest one retained. Every evaluation of a
    version below `examined` is over: its groups are not needed any more."""

    KIND: ClassVar[int] = 54
    version: int
    oldest: int
    path: str
    examined: int


class Evaluate(Body, frozen=True):
    """learner -> B: evaluate `version` on these held-out tasks, in the eval lane.

    `tasks` are (domain, level, number of tasks); task i of a domain has the task_seed i: a domain gives different
    held-out tasks for different i as long as it has them.
    The groups come back as Group(lane="eval", pinned_version=version).
    """

    KIND: ClassVar[int] = 55
    version: int
    tasks: list[tuple[str, int, int]]
    samples_per_task: int
    request: int = 0  # counts the learner's requests from 1, so that a repeated one is recognised


class RunOver(Body, frozen=True):
    """learner -> B, B -> everybody through Drain: the run has ended; groups left become void(run over)."""

    KIND: ClassVar[int] = 56
    reason: str
    exit_code: int


class RunFailed(Body, frozen=True):
    """B -> learner: the run cannot go on (too many void groups in a row, no domain left). The learner ends it."""

    KIND: ClassVar[int] = 57
    reason: str
    exit_code: int


class Trouble(Body, frozen=True):
    """B -> learner: what last went wrong with an actor or evaluator; said again only when it has changed."""

    KIND: ClassVar[int] = 58
    reason: str


# ---------------------------------------------------------------- bundle and weights (bulk socket)


class BundleFile(Part, frozen=True):
    """A file of the model bundle: `frames` consecutive array frames hold it; digest blake2b-16, hex."""

    name: str
    digest: str
    frames: int


class Bundle(Body, frozen=True):
    """learner -> B -> peers, bulk: config.json, tokenizer.json, chat template ... everything but weights and code."""

    KIND: ClassVar[int] = 64
    BULK: ClassVar[bool] = True
    files: list[BundleFile]
    model: str = ""


class NeedBundle(Body, frozen=True):
    """peer -> B, bulk: send the bundle when it is there."""

    KIND: ClassVar[int] = 65
    BULK: ClassVar[bool] = True


class Manifest(Part, frozen=True):
    """One entry of the weight log: base None = snapshot (full copy), else the delta base -> version.

    `chunks` messages follow (`Chunk`), `size` bytes in all; both 0 in the `Publish` of a snapshot (see `Chunk.last`).
    """

    version: Version
    base: Version | None
    chunks: int
    size: int
    full_size: int  # bytes of a full copy of this version, for the ratio
    density: float  # share of values that changed (1.0 for a snapshot)
    keep: bool = False  # an evaluation will ask for this very version: don't retire it with the others


class Publish(Body, frozen=True):
    """learner -> B, bulk: the chunks of this entry follow on the same socket, in order."""

    KIND: ClassVar[int] = 66
    BULK: ClassVar[bool] = True
    manifest: Manifest


class Chunk(Body, frozen=True):
    """One piece of an entry's payload in one frame (<= 16 MiB); `digest` blake2b-16 of the frame, hex.

    `last` ends the entry: a snapshot is sent while it is made, its manifest says chunks 0 and size 0 until then.
    """

    KIND: ClassVar[int] = 67
    BULK: ClassVar[bool] = True
    ordinal: int
    snapshot: bool
    index: int
    digest: str
    last: bool = False


class Stored(Body, frozen=True):
    """B -> learner, bulk: the log ends with `version`, which is on disk; the next delta may be based on it.

    Another version than the one published says that that one was not taken (its base is not there, a chunk was
    damaged or missing): publish a snapshot. `answers` is the ordinal that was published.
    """

    KIND: ClassVar[int] = 68
    BULK: ClassVar[bool] = True
    version: Version
    answers: int | None = None


class NewVersion(Body, frozen=True):
    """B -> actors, learner, control: the weight log now ends here."""

    KIND: ClassVar[int] = 69
    version: Version


class Fetch(Body, frozen=True):
    """actor -> B, bulk: bring me from `have` (None: nothing usable) to `want` (None: the newest).

    `request` comes back in the Chain; a later Fetch of the same peer ends an earlier one.
    """

    KIND: ClassVar[int] = 70
    BULK: ClassVar[bool] = True
    have: Version | None
    want: int | None
    request: int = 0


class Chain(Body, frozen=True):
    """B -> actor, bulk: the entries that lead there, in order; their chunks follow, entry by entry.

    Empty with `reason` when it cannot be served (not stored yet, retired): wait for it or ask for another.
    `version` is where they lead (with a reason: where the log ends); empty without a reason: the asker has those bits.
    """

    KIND: ClassVar[int] = 71
    BULK: ClassVar[bool] = True
    entries: list[Manifest]
    reason: str = ""
    version: Version | None = None
    request: int = 0


def _bodies(base: type[Body]) -> dict[int, type[Body]]:
    found = {body.KIND: body for body in base.__subclasses__()}
    if len(found) != len(base.__subclasses__()):
        raise AssertionError("two bodies share a kind")
    return found


BODIES: dict[int, type[Body]] = _bodies(Body)


def _split(data: bytes, limit: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[start : start + limit] for start in range(0, max(len(view), 1), limit)]


def pack_frames(value: Any) -> list[memoryview]:
    """A `Part` (SandboxJob, Verdict) as MessagePack, split into frames of at most 16 MiB."""
    from temper.common.wire import FRAME_LIMIT_BYTES, pack_meta

    return _split(pack_meta(value), FRAME_LIMIT_BYTES)


def unpack_frames(frames: list[memoryview], kind: type[Any]) -> Any:
    """The inverse of `pack_frames`, validated; ProtocolError when malformed."""
    from temper.common.wire import unpack_meta

    return unpack_meta(b"".join(frames), kind)
