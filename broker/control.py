"""What comes on the control socket: messages become events, one loop turn becomes one transaction.

The order is the guarantee: the core decides, the ledger commits, and only then are messages acknowledged and actions
carried out. Nothing that a peer was told can be lost by killing this process. A broken message closes its sender and
nobody else; a ledger that cannot be written stops everything before anything is acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from temper.broker import events as ev
from temper.broker.assembly import Unsendable, build_group
from temper.broker.core import BrokerCore
from temper.broker.guests import Guests
from temper.broker.ledger import Accepted, Ledger
from temper.broker.validate import BadSamples, check
from temper.common import metrics, schema
from temper.common.errors import ProtocolError, TemperError
from temper.common.log import log
from temper.common.metrics import Meter
from temper.common.pump import Delivery, PeerId, Router
from temper.common.schema import pack_frames


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
        broken: Callable[[TemperError], None],
        status: Callable[[], bytes],
        fail_after_s: float,
    ) -> None:
        self.core = core
        self.ledger = ledger
        self.guests = guests
        self.meter = meter
        self.router: Router
        self.samples: Counter[str] = Counter()
        self.sampled_tokens = 0.0
        self._finish, self._status, self._fail_after_s = finish, status, fail_after_s
        self._break = broken
        self._is_broken = False
        self._actions: list[ev.Action] = []
        self._steered = False  # something beside records has changed
        self._scheduled = False
        self._jobs: dict[str, tuple[bytes, list[Any]]] = {}  # job id -> its message, until its verdict is there
        self._verdicts: dict[str, list[Any]] = {}
        self._leaving: list[PeerId] = []

    # ------------------------------------------------------------ a turn

    def on_batch(self, batch: list[Delivery]) -> None:
        """One loop turn's messages."""
        if self._is_broken:
            return
        taken: dict[PeerId, int] = {}
        for delivery in batch:
            peer = delivery.peer
            key = self.guests.key(peer)
            if key is None:
                continue  # closed within this batch
            try:
                self._handle(key, delivery)
            except ProtocolError as error:
                self.router.refuse(peer, "malformed", str(error))
                taken.pop(peer, None)
                continue
            if delivery.sequence:
                taken[peer] = delivery.sequence
        self.settle(taken)

    def take(self, event: ev.Event) -> list[ev.Action]:
        """Tell the core; its actions are carried out with the next `settle`, which is on its way."""
        actions = self.core.on(event, time.monotonic())
        self._actions += actions
        return actions

    def _take_one(self, event: ev.SamplesArrived) -> ev.Store | ev.Ignore | ev.RefuseAttempt:
        """Tell the core of samples: the first action says what becomes of them, the others follow with `settle`."""
        first, *others = self.core.on(event, time.monotonic())
        assert isinstance(first, ev.Store | ev.Ignore | ev.RefuseAttempt)
        self._actions += others
        return first

    def settle_soon(self) -> None:
        """Have `settle` called in the next loop turn."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self, taken: dict[PeerId, int] | None = None, force: bool = False) -> None:
        """Write what this turn brought, then acknowledge it and carry its actions out. `force`: also in memory mode."""
        self._scheduled = False
        if self._is_broken:
            return
        actions, self._actions = self._actions, []
        try:
            self._write(actions, force)
        except TemperError as error:
            self._is_broken = True
            self._break(error)
            return
        if taken:
            for peer, sequence in taken.items():
                self.router.acknowledge(peer, sequence)
        for peer in self._leaving:
            self.router.forget(peer, "goodbye")
        self._leaving.clear()
        for action in actions:
            self._act(action)
        self._verdicts.clear()

    def _write(self, actions: list[ev.Action], force: bool) -> None:
        ledger = self.ledger
        for action in actions:
            if isinstance(action, ev.Release):
                ledger.release(action.group_ids)
        if not ledger.durable and not force:
            ledger.commit(force=False)
        elif self._steered or self.core.dirty:
            begun = time.perf_counter()
            ledger.record(self.core.changes())
            ledger.commit()
            self._steered = False
            self.meter.add(metrics.BROKER_COMMIT, time.perf_counter() - begun)
            self.meter.add(metrics.BROKER_COMMITS)

    def close(self) -> None:
        """Write and close the books."""
        if not self._is_broken:
            self.ledger.record(self.core.changes())
            self.ledger.close()

    # ------------------------------------------------------------ messages

    def _handle(self, key: str, delivery: Delivery) -> None:
        body = delivery.body
        match body:
            case schema.Samples():
                self._take_samples(key, body, delivery)
            case schema.Heartbeat():
                self.guests.beats[key] = body
                record = self.core.peers.get(key)
                if record is not None and record.draining != (body.state == "DRAINING"):
                    self.take(ev.Availability(key, body.state == "DRAINING"))
            case schema.Job():
                if self.guests.role(key) in ("actor", "eval"):
                    self._jobs.setdefault(body.job_id, (delivery.raw_meta, delivery.frames))
                self.take(ev.Received(key, body, delivery.size))
            case schema.JobDone():
                self._verdicts[body.job_id] = delivery.frames
                self.take(ev.Received(key, body))
            case schema.Metrics():
                self.relay(body)
            case schema.StatusRequest():
                self.router.send(delivery.peer, schema.StatusReport(), [self._status()])
            case schema.Goodbye():
                self._leaving.append(delivery.peer)  # acknowledged with the turn, then forgotten
                self.left(delivery.peer, f"goodbye ({body.reason})", clean=body.exit_code == 0)
            case schema.Holding() if body.epoch != self.router.epoch:
                pass  # told to an incarnation that is gone: another one follows
            case _:
                self._steered = True
                self.take(ev.Received(key, body))

    def _take_samples(self, key: str, body: schema.Samples, delivery: Delivery) -> None:
        lease_id, attempt, count = body.lease_id, body.attempt, len(body.samples)
        try:
            check(body, delivery.frames)
        except BadSamples as error:
            self.samples["refused"] += count
            log(f"{self.guests.hellos[key].name}: samples of lease {lease_id} are refused: {error}")
            self._actions.append(ev.RefuseAttempt(key, lease_id, attempt, str(error)))
            self.take(ev.Received(key, schema.Return(lease_id, attempt, "task", str(error))))
            return
        nbytes = delivery.size - len(delivery.raw_meta)
        verdict = self._take_one(ev.SamplesArrived(key, lease_id, attempt, tuple(body.samples), nbytes))
        if isinstance(verdict, ev.Store):
            stored = self.ledger.accept(body, delivery.frames, nbytes)
            if not isinstance(stored, Accepted):
                raise AssertionError(f"the ledger does not agree with the core about lease {lease_id}: {stored}")
            self.samples["accepted"] += count
        elif isinstance(verdict, ev.RefuseAttempt):
            self.samples["refused"] += count
            self._actions.append(verdict)

    def left(self, peer: PeerId, reason: str, clean: bool = False) -> None:
        """The peer is gone: `gone` is told, its leases and jobs go out again."""
        found = self.guests.remove(peer)
        if found is None:
            return
        self.gone(peer)
        key, hello = found
        if hello.role != "status":
            log(f"{hello.role} {hello.name} left: {reason}")
            self.take(ev.Left(key, reason, clean))
            self.settle_soon()

    gone: Callable[[PeerId], None]
    """Called for every peer that is gone, before the core hears of it."""

    def relay(self, body: schema.Metrics) -> None:
        """A daemon's metrics go to the learner, which writes them down."""
        self.sampled_tokens += body.counters.get(metrics.ACTOR_TOKENS, 0.0)
        if self.core.learner is not None:
            self._send(self.core.learner, body)

    # ------------------------------------------------------------ actions

    def _act(self, action: ev.Action) -> None:
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
            case ev.ForwardVerdict(requester, done):
                self._send(requester, done, self._verdicts.get(done.job_id, ()))
            case ev.FailJob(requester, job_id, reason):
                verdict = schema.Verdict("infra", detail=reason)
                self._send(requester, schema.JobDone(job_id, "infra"), pack_frames(verdict))
            case ev.DropJob(job_id):
                self._jobs.pop(job_id, None)
            case ev.Fail(reason, exit_code):
                self._fail(reason, exit_code)
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
            body, frames = build_group(record, self.ledger.read(group_id), lineage, void)
            self._send(key, body, frames)
        except Unsendable as error:
            log(f"group {group_id} fits no message: {error}")
            if record.lane == "eval":
                self._send(key, *build_group(record, [], lineage, f"it fits no message: {error}"))
            else:
                self.take(ev.Unsendable(group_id))
                self.settle_soon()
        except TemperError as error:
            self._is_broken = True
            self._break(error)

    def _fail(self, reason: str, exit_code: int) -> None:
        """The learner ends the run; without one, or if it does not answer, the broker does."""
        learner = self.core.learner
        if learner is not None:
            self._send(learner, schema.RunFailed(reason, exit_code))
        delay_s = self._fail_after_s if learner is not None else 0.0
        asyncio.get_running_loop().call_later(delay_s, self._finish, ev.Finish(reason, exit_code))
