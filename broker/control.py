"""What comes on the control socket: messages become events, what they decide is written down, then told.

The order is the guarantee: the core decides, the ledger commits, and only then are messages acknowledged and actions
carried out (``commits``), but for those that a broker killed before may forget without harm (``ahead``). Nothing that was
acknowledged can be lost by killing this process. A broken message closes its sender
and nobody else; a ledger that cannot be written stops everything before anything is acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from temper.broker import events as ev
from temper.broker import intake
from temper.broker.assembly import Unsendable, build_group
from temper.broker.commits import Commits, Turn
from temper.broker.core import BrokerCore
from temper.broker.guests import Guests
from temper.broker.ledger import Accepted, Ledger
from temper.broker.messages import Messages, Uniform, by_attempt
from temper.broker.pending import STEP_MESSAGES, Pending
from temper.broker.reported import Reported
from temper.broker.validate import BadSamples, check_metrics
from temper.common import schema
from temper.common.errors import ProtocolError, TemperError
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.pump import Arrival, Delivery, DeliveryRun, PeerId, Router
from temper.common.schema import pack_frames
from temper.common.wire import unpack_meta

SAMPLES, TOUCH = schema.Samples.KIND, schema.Touch.KIND
LAZY = frozenset({SAMPLES, TOUCH})
"""Kinds that come undecoded, and several in one delivery (``pump.Router``)."""
BESIDE_SAMPLES = frozenset(
    body.KIND for body in (schema.Touch, schema.Heartbeat, schema.Metrics, schema.Job, schema.JobDone, schema.JobCancel)
)
"""Kinds that may be handled before samples that came earlier: what they change, samples do not look at."""
TOLD_READY = ("actor", "eval")
"""Roles that get nothing before their heartbeats say READY: an engine may start for minutes."""


def takes_nothing(role: schema.Role, beat: schema.Heartbeat) -> bool:
    """Whether a peer that says `beat` gets nothing new."""
    return beat.state == "DRAINING" or (role in TOLD_READY and beat.state != "READY")


class ControlDesk:
    """Joins core, ledger and control Router. `finish(Finish)` ends the run, `broken(error)` the process, `status()` makes
    the report for a status client."""

    def __init__(
        self,
        core: BrokerCore,
        ledger: Ledger,
        guests: Guests,
        meter: Meter,
        *,
        finish: Callable[[ev.Finish], None],
        broken: Callable[[BaseException], None],
        status: Callable[[], bytes],
        fail_after_s: float,
    ) -> None:
        self.core = core
        self.ledger = ledger
        self.guests = guests
        self.meter = meter
        self.router: Router
        self.samples: Counter[str] = Counter()
        self.reported = Reported()
        self._finish, self._status, self._fail_after_s = finish, status, fail_after_s
        self.commits = Commits(core, ledger, meter, self._perform, broken)
        self._scheduled = False
        self._pending = Pending()
        self._step: asyncio.Handle | None = None  # the next decision about samples that wait
        self._deciding = False
        self._jobs: dict[str, tuple[bytes, Sequence[Any]]] = {}  # job id -> its message, until its verdict is there

    # ------------------------------------------------------------ a turn

    def on_batch(self, batch: list[Arrival]) -> None:
        """One loop turn's messages. Samples that came one after another are taken together."""
        if self.commits.is_broken:
            return
        find, taken, pending = self.guests.key, self.commits.turn.taken, self._pending
        known, key = b"", None
        for delivery in batch:
            peer = delivery.peer
            if peer is not known:
                known, key = peer, find(peer)
            if key is None:
                continue  # closed within this batch
            if delivery.sequence:
                taken[peer] = delivery.sequence  # unless something is wrong with it, see `_refuse`
            if delivery.kind == SAMPLES:
                pending.add(key, delivery)
                continue
            known = b""
            if delivery.kind not in BESIDE_SAMPLES:
                self._decide()
            try:
                if delivery.kind == TOUCH:
                    self._touch(key, delivery)
                else:
                    assert isinstance(delivery, Delivery)  # nothing else is lazy
                    self._handle(key, delivery)
            except ProtocolError as error:
                self._refuse(peer, error)
        if pending:
            self._decide_soon()
        self.settle()

    def take(self, event: ev.Event) -> list[ev.Action]:
        """Tell the core; its actions are carried out with the next `settle`, which is on its way."""
        self._decide()
        return self._tell(event)

    def _tell(self, event: ev.Event) -> list[ev.Action]:
        """`take` for what may come before samples that wait."""
        actions = self.core.on(event, time.monotonic())
        self.commits.turn.actions += actions
        return actions

    def settle_soon(self) -> None:
        """Have `settle` called in the next loop turn."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self, books: bool = False) -> None:
        """Have what came so far written, then acknowledged and acted on. `books`: also those of memory mode, if they are due."""
        self._scheduled = False
        self.commits.settle(force=books and self.commits.books_due)

    def _perform(self, turn: Turn) -> None:
        """The turn is as durable as it must be: tell everybody."""
        self._acknowledge(turn)
        for peer in turn.leaving:
            self.router.forget(peer, "goodbye")
            self.gone(peer)
        for action in turn.actions:
            self._act(action, turn)

    def _acknowledge(self, turn: Turn) -> None:
        """Tell the senders that their messages are taken."""
        if turn.taken:
            for peer, sequence in turn.taken.items():
                self.router.acknowledge(peer, sequence)
            turn.taken.clear()
            self.router.answer()

    def _refuse(self, peer: PeerId, error: ProtocolError) -> None:
        self.commits.turn.taken.pop(peer, None)
        self.router.refuse(peer, "malformed", str(error))

    async def settled(self) -> None:
        """Until everything that came is written and told."""
        self._decide()
        await self.commits.settled()

    def close(self) -> None:
        """Write and close the books."""
        self._decide()
        self.commits.close()

    # ------------------------------------------------------------ messages

    def _handle(self, key: str, delivery: Delivery) -> None:
        body = delivery.body
        match body:
            case schema.Heartbeat():
                self.guests.beats[key] = body
                record = self.core.peers.get(key)
                if record is not None and record.draining != (busy := takes_nothing(record.role, body)):
                    self._tell(ev.Availability(key, busy))
            case schema.Job():
                if self.guests.role(key) in ("actor", "eval") and body.job_id not in self.core.jobs.jobs:
                    self._jobs[body.job_id] = delivery.raw_meta, delivery.frames
                self._tell(ev.Received(key, body, delivery.size))
            case schema.JobDone():
                for action in self._tell(ev.Received(key, body)):
                    if isinstance(action, ev.ForwardVerdict):  # this verdict counts: no other's frames go with it
                        self.commits.turn.verdicts[body.job_id] = delivery.frames
            case schema.Metrics():
                check_metrics(body, self.guests.role(key))
                self.reported.take(key, self.guests.role(key), body)
                self.relay(body)
            case schema.StatusRequest():
                self.router.send(delivery.peer, schema.StatusReport(), [self._status()])
            case schema.Goodbye():
                self.commits.turn.leaving.append(delivery.peer)  # acknowledged with the turn, then forgotten
                self._leave(delivery.peer, f"goodbye ({body.reason})", clean=body.exit_code == 0)
            case schema.Unneeded():
                pass  # the router has heeded it
            case schema.Holding() if body.epoch != self.router.epoch:
                pass  # told to an incarnation that is gone: another one follows
            case _:
                self.commits.steered = True
                self._tell(ev.Received(key, body))

    def _touch(self, key: str, came: Arrival) -> None:
        metas = came.metas if isinstance(came, DeliveryRun) else (came.raw_meta,)
        self._tell(ev.Touched(key, [unpack_meta(meta, schema.Touch) for meta in metas]))

    def _take_samples(self, run: Messages) -> None:
        """Samples in the order in which they came: read, check, decide and keep as many as possible at once."""
        try:
            bodies = intake.read_all(run.metas)
        except ProtocolError:
            run, bodies = self._readable(run)
        uniform = intake.uniform(run, bodies)
        faults = intake.faults(bodies, run.frames) if uniform is None else {}
        if not faults:
            self._keep(run, bodies, uniform)
            return
        begin = 0
        for i in sorted(faults):
            self._keep(run.only(range(begin, i)), bodies[begin:i])
            begin = i + 1
            fault = faults[i]
            if isinstance(fault, BadSamples):
                self._give_back(run.keys[i], bodies[i], fault)
            else:
                self._refuse_key(run.keys[i], fault)
        self._keep(run.only(range(begin, len(bodies))), bodies[begin:])

    def _decide_soon(self) -> None:
        """Decide about the samples that wait: now, or in time if nothing has to be written before their senders are told."""
        pending = self._pending
        if self.commits.at_once:
            self._acknowledge(self.commits.turn)
            left_s = pending.left_s(time.monotonic())
            if left_s or (len(pending) > STEP_MESSAGES and not pending.much):
                if self._step is None:
                    self._step = asyncio.get_running_loop().call_later(left_s, self._decide_some)
                return
        self._decide()

    def _decide_some(self) -> None:
        """Decide about the samples that came first, and about the others in the loop's next turns: who sends meanwhile is
        acknowledged between."""
        self._step = None
        self._advance(STEP_MESSAGES)
        if self._pending:
            self._step = asyncio.get_running_loop().call_soon(self._decide_some)
        self.settle()

    def _decide(self) -> None:
        """Decide about all samples that wait, if any do."""
        if self._pending and not self._deciding:
            if self._step is not None:
                self._step.cancel()
                self._step = None
            self._advance(None)

    def _advance(self, most: int | None) -> None:
        self._deciding = True
        try:
            self._take_samples(self._pending.take(time.monotonic(), most))
        finally:
            self._deciding = False

    def _readable(self, run: Messages) -> tuple[Messages, list[intake.Intake]]:
        """What of a run can be read; who sent the rest is refused."""
        read: dict[int, intake.Intake] = {}
        for i, meta in enumerate(run.metas):
            try:
                read[i] = intake.read(meta)
            except ProtocolError as error:
                self._refuse_key(run.keys[i], error)
        return run.only(list(read)), list(read.values())

    def _refuse_key(self, key: str, error: ProtocolError) -> None:
        peer = self.guests.id(key)
        if peer is not None:
            self._refuse(peer, error)

    def _give_back(self, key: str, body: intake.Intake, fault: BadSamples) -> None:
        """Samples that no learner could use: the attempt is refused, and counts against the task."""
        if key in self.guests.hellos:
            lease_id, attempt = body.lease_id, body.attempt
            self.samples["refused"] += len(body.samples)
            log(f"{self.guests.hellos[key].name}: samples of lease {lease_id} are refused: {fault}")
            self.commits.turn.actions.append(ev.RefuseAttempt(key, lease_id, attempt, str(fault)))
            self.take(ev.Received(key, schema.Return(lease_id, attempt, "task", str(fault))))

    def _keep(
        self,
        run: Messages,
        bodies: list[intake.Intake],
        source: Messages | Uniform | None = None,
        joined: bool = True,
    ) -> None:
        """Tell the core of good samples and store what it accepts; those of one attempt together, if they are `joined`. `source`:
        what gives their content, if not the `run`."""
        if not bodies:
            return
        source = source or run
        places = by_attempt(run.keys, bodies) if joined else [range(i, i + 1) for i in range(len(bodies))]
        arrivals = [source.arrival(bodies, place) for place in places]
        actions = self.core.on(ev.SamplesBatch(arrivals), time.monotonic())
        turn = self.commits.turn
        apart: list[int] = []
        accepted = refused = 0
        for place, arrival, verdict in zip(places, arrivals, actions, strict=False):
            if type(verdict) is ev.Store:
                indices: list[tuple[int, ...]]
                if len(arrival.samples) == len(place):  # one sample a message
                    indices = list(zip(verdict.indices))
                else:
                    indices = [tuple([sample.index for sample in bodies[i].samples]) for i in place]
                messages = source.kept(place)
                stored = self.ledger.store_run(arrival.lease_id, indices, messages, arrival.nbytes, verdict.indices)
                if type(stored) is not Accepted:
                    raise AssertionError(f"ledger and core do not agree about lease {arrival.lease_id}: {stored}")
                accepted += len(arrival.samples)
            elif type(verdict) is ev.Apart:
                apart += place
            elif isinstance(verdict, ev.RefuseAttempt):
                refused += len(arrival.samples)
                turn.actions.append(verdict)
        self.samples["accepted"] += accepted
        self.samples["refused"] += refused
        turn.actions += actions[len(arrivals) :]
        if apart:
            self._keep(run.only(apart), [bodies[i] for i in apart], joined=False)

    def left(self, peer: PeerId, reason: str) -> None:
        """The peer is gone: `gone` is told, its leases and jobs go out again."""
        self._decide()
        if self.guests.key(peer) is not None:
            self._leave(peer, reason, clean=False)
            self.gone(peer)

    def _leave(self, peer: PeerId, reason: str, clean: bool) -> None:
        found = self.guests.remove(peer)
        if found is None:
            return
        key, hello = found
        self.reported.left(key)
        if hello.role != "status":
            log(f"{hello.role} {hello.name} left: {reason}")
            self.take(ev.Left(key, reason, clean))
            self.settle_soon()

    gone: Callable[[PeerId], None]
    """Called for every peer that is gone; for one that said goodbye, once that was written down and acknowledged."""

    def relay(self, body: schema.Metrics) -> None:
        """A daemon's metrics go to the learner, which writes them down."""
        if self.core.learner is not None:
            self._send(self.core.learner, body)

    # ------------------------------------------------------------ actions

    def _act(self, action: ev.Action, turn: Turn) -> None:
        match action:
            case ev.SendLease(peer, lease):
                self._send(peer, lease)
            case ev.Deliver(peer, group_id, void):
                self._deliver(peer, group_id, void)
            case ev.RefuseAttempt(peer, lease_id, attempt, reason):
                self._send(peer, schema.SampleRefused(lease_id, attempt, reason[:1000]))
            case ev.RefusePeer(peer, code, reason):
                routing_id = self.guests.id(peer)
                if routing_id is not None:
                    self.router.refuse(routing_id, code, reason)
            case ev.AssignJob(worker, job_id):
                routing_id = self.guests.id(worker)
                if routing_id is not None:
                    meta, frames = self._jobs[job_id]
                    self.router.forward(routing_id, schema.Job.KIND, meta, frames)
            case ev.CancelJob(worker, job_id):
                self._send(worker, schema.JobCancel(job_id))
            case ev.EndSession(worker, name):
                self._send(worker, schema.JobCancel(name, session=True))
            case ev.ForwardVerdict(requester, done):
                self._send(requester, done, turn.verdicts.get(done.job_id, ()))
            case ev.FailJob(requester, job_id, reason):
                verdict = schema.Verdict("infra", detail=reason)
                self._send(requester, schema.JobDone(job_id, "infra"), pack_frames(verdict))
            case ev.DropJob(job_id):
                if job_id not in self.core.jobs.jobs:  # else it came once more in the meantime
                    self._jobs.pop(job_id, None)
            case ev.Fail(reason, exit_code):
                self._fail(reason, exit_code)
            case ev.Inform(learner, reason):
                self._send(learner, schema.Trouble(reason[:1000]))
            case ev.Finish():
                self._finish(action)
            case ev.Note(text):
                log(text)

    def _send(self, key: str, body: schema.Body, frames: Any = ()) -> None:
        peer = self.guests.id(key)
        if peer is not None:
            self.router.send(peer, body, frames)

    def _deliver(self, key: str, group_id: int, void: str | None) -> None:
        record = self.core.leases.leases.get(group_id)
        if record is None:
            return  # given up in the same turn
        lineage = self.core.lineage or 0
        try:
            body, frames = build_group(record, self.ledger.messages(group_id), lineage, void)
            self._send(key, body, frames)
        except Unsendable as error:
            log(f"group {group_id} fits no message: {error}")
            if record.lane == "eval":
                self._send(key, *build_group(record, [], lineage, f"it fits no message: {error}"))
            else:
                self.take(ev.Unsendable(group_id))
                self.settle_soon()
        except TemperError as error:
            self.commits.fail(error)

    def _fail(self, reason: str, exit_code: int) -> None:
        """The learner ends the run; without one, or if it does not answer, the broker does."""
        learner = self.core.learner
        if learner is not None:
            self._send(learner, schema.RunFailed(reason, exit_code))
        delay_s = self._fail_after_s if learner is not None else 0.0
        asyncio.get_running_loop().call_later(delay_s, self._finish, ev.Finish(reason, exit_code))
