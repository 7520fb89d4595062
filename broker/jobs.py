"""The book of sandbox jobs: fair over domains and requesters, the oldest lease first, bounded by workers' free slots.

A job is waiting, running on one worker, or finished; the first verdict counts, later ones are ignored. A worker's
death puts its jobs back; a job that was running at the death of `DEATHS_ALLOWED` workers is answered with `infra`
instead of killing more. Jobs of a session run on the worker that ran its first one; with that worker the session dies
(`infra`); a session belongs to the requester that named it first. Pure; called by `BrokerCore` only.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from temper.broker.events import (
    Action,
    AssignJob,
    CancelJob,
    DropJob,
    EndSession,
    FailJob,
    ForwardVerdict,
    Note,
    PeerKey,
    RefusePeer,
)
from temper.broker.sessions import SessionBook
from temper.common.schema import Job, JobDone

DEATHS_ALLOWED = 3
WAITING_JOBS = 4096
WAITING_BYTES = 256 * 1024 * 1024
"""What one requester may have unfinished; more is answered with `infra` at once."""

__all__ = ["DEATHS_ALLOWED", "JobBook", "JobRecord"]


@dataclass(slots=True)
class JobRecord:
    """One job that is waiting (`worker` empty) or running."""

    job_id: str
    requester: PeerKey
    lease_id: int
    domain: str
    session_id: str | None
    sequence: int
    nbytes: int = 0
    closes: bool = False  # its session ends with it
    worker: PeerKey = ""
    deaths: int = 0

    @property
    def bucket(self) -> tuple[str, PeerKey]:
        """Whose turn it is is decided between these."""
        return self.domain, self.requester

    @property
    def place(self) -> tuple[int, int, str]:
        """Order within a bucket: the oldest lease first, then as they came."""
        return self.lease_id, self.sequence, self.job_id


class JobBook:
    """All unfinished jobs and the workers that may run them."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.slots: dict[PeerKey, int] = {}
        self.running: dict[PeerKey, set[str]] = {}
        self.outcomes: Counter[str] = Counter()
        self.finished = 0
        self.requeued = 0
        self._waiting: dict[tuple[str, PeerKey], list[tuple[int, int, str]]] = {}
        self._pinned: dict[PeerKey, list[tuple[int, int, str]]] = {}
        self.sessions = SessionBook()
        self._busy_domain: Counter[str] = Counter()
        self._busy_bucket: Counter[tuple[str, PeerKey]] = Counter()
        self._sequence = 0
        self._held: dict[PeerKey, tuple[int, int]] = {}  # requester -> unfinished jobs, their bytes
        self._ghosts: dict[str, PeerKey] = {}  # jobs that a worker runs, and that no requester has named yet

    @property
    def waiting(self) -> int:
        """Jobs that no worker runs yet."""
        return sum(not job.worker for job in self.jobs.values())

    def by_domain(self) -> dict[str, dict[str, int]]:
        """domain -> how many of its jobs wait and run."""
        found: dict[str, dict[str, int]] = {}
        for job in self.jobs.values():
            found.setdefault(job.domain, {"waiting": 0, "running": 0})["running" if job.worker else "waiting"] += 1
        return found

    def add_worker(self, worker: PeerKey, slots: int) -> None:
        """A sandbox worker with that many free slots."""
        self.slots[worker] = slots
        self.running[worker] = set()
        self._pinned[worker] = []

    def adopt(self, worker: PeerKey, slots: int, job_ids: list[str], sessions: list[str]) -> None:
        """A worker that knew an earlier incarnation of this broker runs these jobs and holds these sessions. A requester
        that names one of them again gets this worker's verdict."""
        self.slots[worker] = slots
        self.sessions.adopt(worker, sessions)
        for job_id in job_ids:
            if job_id not in self.jobs:
                self._ghosts[job_id] = worker
                self.running[worker].add(job_id)

    def set_slots(self, worker: PeerKey, slots: int) -> None:
        """The worker takes that many jobs from now on."""
        self.slots[worker] = slots

    def submit(self, requester: PeerKey, body: Job, nbytes: int = 0) -> list[Action]:
        """A new job. A repeated id of the same requester is the same job; another requester's id or session is an offence."""
        known = self.jobs.get(body.job_id)
        if known is not None:
            if known.requester != requester:
                return [RefusePeer(requester, "malformed", f"job id {body.job_id!r} belongs to another peer")]
            return []
        session = body.session_id
        if session is not None and self.sessions.owner(session) not in (None, requester):
            return [RefusePeer(requester, "malformed", f"session {session!r} belongs to another peer")]
        count, held = self._held.get(requester, (0, 0))
        if count >= WAITING_JOBS or (held and held + nbytes > WAITING_BYTES):
            self.outcomes["infra"] += 1
            reason = (
                f"{count} jobs ({held} bytes) of this peer are unfinished: {WAITING_JOBS} or {WAITING_BYTES} may be"
            )
            return [FailJob(requester, body.job_id, reason), DropJob(body.job_id)]
        self._held[requester] = (count + 1, held + nbytes)
        self._sequence += 1
        job = JobRecord(
            body.job_id, requester, body.lease_id, body.domain, session, self._sequence, nbytes, body.close_session
        )
        self.jobs[job.job_id] = job
        actions: list[Action] = []
        if session is not None:
            self.sessions.admit(session, requester, job.job_id)
            if surplus := self.sessions.surplus(requester):
                actions = [EndSession(surplus[1], surplus[0]), Note(f"session {surplus[0]}: one of too many, ended")]
        worker = self._ghosts.pop(job.job_id, None)
        if worker is not None:
            self._start(job, worker)
        else:
            self._queue(job)
        return actions

    def done(self, worker: PeerKey, body: JobDone) -> list[Action]:
        """A verdict. The first one finishes the job, whoever sends it; others are ignored."""
        job = self.jobs.get(body.job_id)
        if job is None or worker not in self.running:
            if self._ghosts.get(body.job_id) == worker:
                del self._ghosts[body.job_id]
                self.running[worker].discard(body.job_id)
            return []
        actions: list[Action] = []
        if job.worker not in ("", worker):
            actions.append(CancelJob(job.worker, job.job_id))
        self._finish(job)
        self.outcomes[body.outcome] += 1
        return [*actions, ForwardVerdict(job.requester, body), DropJob(job.job_id)]

    def cancel(self, requester: PeerKey, job_id: str) -> list[Action]:
        """The requester does not want the verdict any more. A session's job that runs takes its session along."""
        job = self.jobs.get(job_id)
        if job is None or job.requester != requester:
            return []
        actions: list[Action] = [CancelJob(job.worker, job_id)] if job.worker else []
        job.closes = bool(job.worker)
        self._finish(job)
        self.outcomes["cancelled"] += 1
        return [*actions, DropJob(job_id)]

    def end_session(self, requester: PeerKey, name: str) -> list[Action]:
        """The episode of a session is over."""
        pin = self.sessions.take(name, requester)
        if pin is None:
            return []
        actions = [action for job_id in sorted(pin.jobs) for action in self.cancel(requester, job_id)]
        return [*actions, EndSession(pin.worker, name)] if pin.worker else actions

    def requester_left(self, requester: PeerKey) -> list[Action]:
        """Nobody waits for these jobs any more."""
        actions: list[Action] = []
        for job in [job for job in self.jobs.values() if job.requester == requester]:
            actions += self.cancel(requester, job.job_id)
        return actions + [EndSession(pin.worker, name) for name, pin in self.sessions.take_all(requester) if pin.worker]

    def worker_left(self, worker: PeerKey, reason: str, clean: bool = False) -> list[Action]:
        """The worker is gone: its jobs go out again, its sessions are over. A `clean` end is no job's fault."""
        if worker not in self.running:
            return []
        actions: list[Action] = []
        lost = sorted(self.running.pop(worker) | {job_id for _, _, job_id in self._pinned.pop(worker)})
        del self.slots[worker]
        self._ghosts = {job_id: runner for job_id, runner in self._ghosts.items() if runner != worker}
        for job_id in sorted(job_id for pin in self.sessions.take_worker(worker) for job_id in pin.jobs):
            actions += self._fail(self.jobs[job_id], f"the sandbox worker of its session is gone: {reason}")
        for job in (self.jobs[job_id] for job_id in lost if job_id in self.jobs):
            if job.worker:
                job.deaths += not clean
                self._stop(job)
            if job.deaths >= DEATHS_ALLOWED:
                actions += self._fail(job, f"{job.deaths} sandbox workers died while they ran it, last: {reason}")
            else:
                self.requeued += 1
                self._queue(job)
        return actions

    def assign(self) -> list[Action]:
        """Hand waiting jobs to free slots."""
        actions: list[Action] = []
        while (free := self._freest()) is not None:
            job = self._next(free)
            if job is None:
                break
            actions.append(AssignJob(job.worker, job.job_id))
        return actions

    def _free(self, worker: PeerKey) -> int:
        return self.slots[worker] - len(self.running[worker])

    def _freest(self) -> PeerKey | None:
        worker = max(self.slots, key=self._free, default=None)
        return worker if worker is not None and self._free(worker) > 0 else None

    def _next(self, freest: PeerKey) -> JobRecord | None:
        for worker, pinned in self._pinned.items():
            while pinned and self._free(worker) > 0:
                job = self.jobs.get(heapq.heappop(pinned)[2])
                if job is not None and not job.worker:
                    return self._start(job, worker)
        while self._waiting:
            bucket = min(self._waiting, key=self._turn)
            queue = self._waiting[bucket]
            place = heapq.heappop(queue)
            if not queue:
                del self._waiting[bucket]
            job = self.jobs.get(place[2])
            if job is None or job.worker:
                continue
            home = self.sessions.worker(job.session_id)
            if not home:
                return self._start(job, freest)
            if self._free(home) > 0:
                return self._start(job, home)
            heapq.heappush(self._pinned[home], place)
        return None

    def _turn(self, bucket: tuple[str, PeerKey]) -> tuple[int, int, tuple[int, int, str]]:
        return self._busy_domain[bucket[0]], self._busy_bucket[bucket], self._waiting[bucket][0]

    def _queue(self, job: JobRecord) -> None:
        heapq.heappush(self._waiting.setdefault(job.bucket, []), job.place)

    def _start(self, job: JobRecord, worker: PeerKey) -> JobRecord:
        job.worker = worker
        self.running[worker].add(job.job_id)
        self._busy_domain[job.domain] += 1
        self._busy_bucket[job.bucket] += 1
        if job.session_id is not None:
            self.sessions.start(job.session_id, worker)
        return job

    def _stop(self, job: JobRecord) -> None:
        self.running.get(job.worker, set()).discard(job.job_id)
        job.worker = ""
        self._busy_domain[job.domain] -= 1
        self._busy_bucket[job.bucket] -= 1
        if not self._busy_bucket[job.bucket]:
            del self._busy_bucket[job.bucket]

    def _finish(self, job: JobRecord) -> None:
        if job.worker:
            self._stop(job)
        del self.jobs[job.job_id]
        if job.session_id is not None:
            self.sessions.finish(job.session_id, job.job_id, job.closes)
        count, held = self._held.pop(job.requester)
        if count > 1:
            self._held[job.requester] = (count - 1, held - job.nbytes)
        self.finished += 1

    def _fail(self, job: JobRecord, reason: str) -> list[Action]:
        self._finish(job)
        self.outcomes["infra"] += 1
        text = f"job {job.job_id}: {reason}"
        return [FailJob(job.requester, job.job_id, reason), DropJob(job.job_id), Note(text)]
