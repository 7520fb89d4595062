"""Which worker holds which session of which requester: a part of the book of jobs.

A pin begins with the first job that names the session and ends with the job that closes it, with its requester, with its
worker, or as the least recently used of too many. Pure; called by `JobBook` only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from temper.broker.events import PeerKey

SESSIONS_OF_A_PEER = 1024


@dataclass(slots=True)
class Pin:
    """`worker` is empty until some job of the session has started, `requester` after a restart until one is named."""

    requester: PeerKey
    worker: PeerKey = ""
    jobs: set[str] = field(default_factory=set)


class SessionBook:
    """All sessions that some worker holds or some unfinished job names."""

    def __init__(self) -> None:
        self._pins: OrderedDict[str, Pin] = OrderedDict()  # least recently used first
        self._count: Counter[PeerKey] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    def owner(self, name: str) -> PeerKey | None:
        """Whose session it is; None for one that nobody has named."""
        pin = self._pins.get(name)
        return pin.requester or None if pin is not None else None

    def worker(self, name: str | None) -> PeerKey:
        """Where the session lives, "" for nowhere yet."""
        pin = self._pins.get(name or "")
        return pin.worker if pin is not None else ""

    def admit(self, name: str, requester: PeerKey, job_id: str) -> None:
        """A job of the session is waiting."""
        pin = self._pins.setdefault(name, Pin(""))
        if not pin.requester:
            pin.requester = requester
            self._count[requester] += 1
        pin.jobs.add(job_id)
        self._pins.move_to_end(name)

    def surplus(self, requester: PeerKey) -> tuple[str, PeerKey] | None:
        """An idle session, and its worker, that the requester has too many; it is forgotten."""
        if self._count[requester] <= SESSIONS_OF_A_PEER:
            return None
        for name, pin in self._pins.items():
            if pin.requester == requester and not pin.jobs:
                self._drop(name)
                return name, pin.worker
        return None

    def start(self, name: str, worker: PeerKey) -> None:
        """A job of the session goes to `worker`."""
        pin = self._pins[name]
        pin.worker = pin.worker or worker

    def finish(self, name: str, job_id: str, over: bool) -> None:
        """A job of the session is finished; `over`: so is the session."""
        pin = self._pins.get(name)
        if pin is None:
            return
        pin.jobs.discard(job_id)
        if over:
            pin.worker = ""
        if not pin.worker and not pin.jobs:
            self._drop(name)

    def adopt(self, worker: PeerKey, names: Iterable[str]) -> None:
        """A worker that knew an earlier incarnation of this broker holds these."""
        for name in names:
            pin = self._pins.setdefault(name, Pin(""))
            pin.worker = pin.worker or worker

    def take(self, name: str, requester: PeerKey) -> Pin | None:
        """Forget a session of this requester; None if it has none of this name."""
        pin = self._pins.get(name)
        return self._drop(name) if pin is not None and pin.requester == requester else None

    def take_all(self, requester: PeerKey) -> list[tuple[str, Pin]]:
        """Forget every session of this requester."""
        names = [name for name, pin in self._pins.items() if pin.requester == requester]
        return [(name, self._drop(name)) for name in names]

    def take_worker(self, worker: PeerKey) -> list[Pin]:
        """Forget every session that lives on this worker."""
        return [self._drop(name) for name in [n for n, pin in self._pins.items() if pin.worker == worker]]

    def _drop(self, name: str) -> Pin:
        pin = self._pins.pop(name)
        if pin.requester:
            self._count[pin.requester] -= 1
            if not self._count[pin.requester]:
                del self._count[pin.requester]
        return pin
