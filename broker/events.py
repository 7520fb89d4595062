"""What the broker's core is told and what it answers: events in, actions out, both plain values.

`BrokerCore.on` takes one event and the time; the daemon makes events from messages and clocks, writes the core's
changes to the ledger, and then carries the actions out, in order (but for those of ``ahead``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from temper.common.schema import Body, JobDone, Lease, Role, SampleMeta, Touch

PeerKey = str
"""A peer's session token: the same on both sockets, new for every process."""

# ---------------------------------------------------------------- events


class Joined(msgspec.Struct, frozen=True, gc=False):
    """A peer said HELLO and was welcomed. `slots`: leases or jobs it takes at once.

    `returning`: it knew an earlier incarnation of this broker, and will say what it still holds. `ready`: it can work
    now; otherwise it gets nothing until an `Availability` says so.
    """

    peer: PeerKey
    role: Role
    name: str
    slots: int = 0
    returning: bool = False
    ready: bool = True


class Left(msgspec.Struct, frozen=True, gc=False):
    """A peer is gone: Goodbye, silence, or malformed input. What it held goes out again.

    `clean`: it said goodbye with exit code 0, so what it held is not held against anybody.
    """

    peer: PeerKey
    reason: str
    clean: bool = False


class Availability(msgspec.Struct, frozen=True, gc=False):
    """A peer began to drain or its engine is down (it gets nothing new), or it takes work (again)."""

    peer: PeerKey
    draining: bool


class Closing(msgspec.Struct, frozen=True, gc=False):
    """The broker itself drains: nothing new goes out; what returns stays."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message of `peer` that steers the run: everything of the schema except `Samples`. `Touch` may come as `Touched` too."""

    peer: PeerKey
    body: Body
    nbytes: int = 0


class Touched(msgspec.Struct, frozen=True, gc=False):
    """Touch messages of `peer`, one after another."""

    peer: PeerKey
    touches: Sequence[Touch]


class SamplesArrived(msgspec.Struct, frozen=True, gc=False):
    """Validated samples of one message; `nbytes` is what their arrays take. `joined`: of several messages, which are stored
    together or not at all (`Apart`)."""

    peer: PeerKey
    lease_id: int
    attempt: int
    samples: Sequence[SampleMeta]
    nbytes: int
    joined: bool = False


class SamplesBatch(msgspec.Struct, frozen=True, gc=False):
    """Several of them, one after another. The first actions are what becomes of each, in order; then come the others."""

    arrivals: Sequence[SamplesArrived]


class Unsendable(msgspec.Struct, frozen=True, gc=False):
    """A group that was to be delivered fits no message."""

    group_id: int


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: deadlines are looked at."""


Event = Joined | Left | Availability | Closing | Received | Touched | SamplesArrived | SamplesBatch | Unsendable | Tick

# ---------------------------------------------------------------- actions


class SendLease(msgspec.Struct, frozen=True, gc=False):
    """Send `lease` to `peer`."""

    peer: PeerKey
    lease: Lease


class Store(msgspec.Struct, frozen=True, gc=False):
    """The samples just handed in are accepted: write them to the ledger, then acknowledge."""

    lease_id: int
    indices: tuple[int, ...]


class Ignore(msgspec.Struct, frozen=True, gc=False):
    """The samples just handed in are already there (a repeated message): acknowledge only."""

    lease_id: int
    indices: tuple[int, ...]


class Apart(msgspec.Struct, frozen=True, gc=False):
    """Joined messages that do not fare alike: nothing was done with them, they are to be handed in one by one."""

    lease_id: int


class RefuseAttempt(msgspec.Struct, frozen=True, gc=False):
    """Tell `peer` to stop working on an attempt (SampleRefused); what it sent for it is not taken."""

    peer: PeerKey
    lease_id: int
    attempt: int
    reason: str


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Send the group to the learner. `void` is set for evaluation groups that end void; `filled` samples are missing."""

    peer: PeerKey
    group_id: int
    void: str | None = None


class RefusePeer(msgspec.Struct, frozen=True, gc=False):
    """Close `peer` with a typed error; no other peer is touched."""

    peer: PeerKey
    code: str
    reason: str


class AssignJob(msgspec.Struct, frozen=True, gc=False):
    """Send the job's frames to this worker."""

    worker: PeerKey
    job_id: str


class CancelJob(msgspec.Struct, frozen=True, gc=False):
    """Tell the worker to kill the job."""

    worker: PeerKey
    job_id: str


class EndSession(msgspec.Struct, frozen=True, gc=False):
    """Tell the worker that nobody needs the session any more."""

    worker: PeerKey
    name: str


class ForwardVerdict(msgspec.Struct, frozen=True, gc=False):
    """Send the verdict just received to the requester."""

    requester: PeerKey
    done: JobDone


class FailJob(msgspec.Struct, frozen=True, gc=False):
    """Send the requester an `infra` verdict with this reason: no worker will finish the job."""

    requester: PeerKey
    job_id: str
    reason: str


class DropJob(msgspec.Struct, frozen=True, gc=False):
    """Nothing needs the job's frames any more."""

    job_id: str


class Fail(msgspec.Struct, frozen=True, gc=False):
    """The run cannot go on: tell the learner (RunFailed), or end the broker when there is none."""

    reason: str
    exit_code: int


class Inform(msgspec.Struct, frozen=True, gc=False):
    """Tell the learner what went wrong with those who sample (Trouble)."""

    learner: PeerKey
    reason: str


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The run is over: drain everybody, then exit with this code."""

    reason: str
    exit_code: int


class Release(msgspec.Struct, frozen=True, gc=False):
    """Payloads of these groups are not needed any more, whatever happens."""

    group_ids: tuple[int, ...]


class Note(msgspec.Struct, frozen=True, gc=False):
    """A line for the log."""

    text: str


Action = (
    SendLease
    | Store
    | Ignore
    | Apart
    | RefuseAttempt
    | Deliver
    | RefusePeer
    | AssignJob
    | CancelJob
    | EndSession
    | ForwardVerdict
    | FailJob
    | DropJob
    | Fail
    | Inform
    | Finish
    | Release
    | Note
)
