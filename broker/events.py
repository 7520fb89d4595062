"""What the broker's core is told and what it answers: events in, actions out, both plain values.

`BrokerCore.on` takes one event and the time; the daemon makes events from messages and clocks, writes the core's
changes to the ledger, and then carries the actions out, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from temper.common.schema import Body, JobDone, Lease, Role, SampleMeta

PeerKey = str
"""A peer's session token: the same on both sockets, new for every process."""

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
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


@dataclass(frozen=True, slots=True)
class Left:
    """A peer is gone: Goodbye, silence, or malformed input. What it held goes out again.

    `clean`: it said goodbye with exit code 0, so what it held is not held against anybody.
    """

    peer: PeerKey
    reason: str
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Availability:
    """A peer began to drain or its engine is down (it gets nothing new), or it takes work (again)."""

    peer: PeerKey
    draining: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """The broker itself drains: nothing new goes out; what returns stays."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of `peer` that steers the run: everything of the schema except `Samples`."""

    peer: PeerKey
    body: Body
    nbytes: int = 0


class SamplesArrived(msgspec.Struct, frozen=True, gc=False):
    """Validated samples of one message; `nbytes` is what their arrays take."""

    peer: PeerKey
    lease_id: int
    attempt: int
    samples: Sequence[SampleMeta]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SamplesBatch:
    """Several of them, one after another. The first actions are what becomes of each, in order; then come the others."""

    arrivals: Sequence[SamplesArrived]


@dataclass(frozen=True, slots=True)
class Unsendable:
    """A group that was to be delivered fits no message."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


Event = Joined | Left | Availability | Closing | Received | SamplesArrived | SamplesBatch | Unsendable | Tick

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SendLease:
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


@dataclass(frozen=True, slots=True)
class RefuseAttempt:
    """Tell `peer` to stop working on an attempt (SampleRefused); what it sent for it is not taken."""

    peer: PeerKey
    lease_id: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send the group to the learner. `void` is set for evaluation groups that end void; `filled` samples are missing."""

    peer: PeerKey
    group_id: int
    void: str | None = None


@dataclass(frozen=True, slots=True)
class RefusePeer:
    """Close `peer` with a typed error; no other peer is touched."""

    peer: PeerKey
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class AssignJob:
    """Send the job's frames to this worker."""

    worker: PeerKey
    job_id: str


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Tell the worker to kill the job."""

    worker: PeerKey
    job_id: str


@dataclass(frozen=True, slots=True)
class EndSession:
    """Tell the worker that nobody needs the session any more."""

    worker: PeerKey
    name: str


@dataclass(frozen=True, slots=True)
class ForwardVerdict:
    """Send the verdict just received to the requester."""

    requester: PeerKey
    done: JobDone


@dataclass(frozen=True, slots=True)
class FailJob:
    """Send the requester an `infra` verdict with this reason: no worker will finish the job."""

    requester: PeerKey
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropJob:
    """Nothing needs the job's frames any more."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on: tell the learner (RunFailed), or end the broker when there is none."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Inform:
    """Tell the learner what went wrong with those who sample (Trouble)."""

    learner: PeerKey
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over: drain everybody, then exit with this code."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Release:
    """Payloads of these groups are not needed any more, whatever happens."""

    group_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str


Action = (
    SendLease
    | Store
    | Ignore
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
