"""A run of Samples messages: as they came, or, where all are as they should be, as one table.

`Messages` and `Uniform` give the same of those at some places of a run: what the core is told of them, and what the ledger keeps.
Frames that came in one burst are not cut up on the way, unless something is wrong with one of them. Filled by ``pending``, looked
at by ``intake``, called by ``control``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from temper.broker import packed
from temper.broker.events import PeerKey, SamplesArrived
from temper.broker.segments import Message
from temper.common.delivery import Arrival, DeliveryRun
from temper.common.schema import SampleMeta

if TYPE_CHECKING:
    from temper.broker.intake import Intake

T = TypeVar("T")


class Messages:
    """A run of Samples messages in the order in which they came: whose each is, its meta, its frames, the bytes of both."""

    __slots__ = ("_came", "_frames", "keys", "metas", "sizes")

    def __init__(
        self,
        keys: Sequence[PeerKey] = (),
        metas: Sequence[bytes] = (),
        frames: Sequence[Sequence[Any]] | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.keys, self.metas, self.sizes = list(keys), list(metas), list(sizes)
        self._frames = frames
        self._came: list[Arrival] = []

    def add(self, key: PeerKey, came: Arrival) -> None:
        """One more delivery, of one or of several."""
        self._came.append(came)
        if isinstance(came, DeliveryRun):
            self.keys += [key] * len(came.sizes)
            self.metas += came.metas
            self.sizes += came.sizes
        else:
            self.keys.append(key)
            self.metas.append(came.raw_meta)
            self.sizes.append(came.size)

    @property
    def frames(self) -> Sequence[Sequence[Any]]:
        """Each message's own."""
        if self._frames is None:
            self._frames = found = list[Sequence[Any]]()
            for came in self._came:
                if isinstance(came, DeliveryRun):
                    found += came.frames
                else:
                    found.append(came.frames)
        return self._frames

    def joined(self, size: int) -> bytes | None:
        """The frames of all of them, one after another, if each has exactly one, of `size` bytes, that came in a burst or as
        bytes (a large one that was not copied stays where it is); else None."""
        if self._frames is not None:
            return None
        pieces: list[Any] = []
        for came in self._came:
            if isinstance(came, DeliveryRun):
                if came.lengths.count(size) != len(came.lengths):
                    return None
                pieces.append(came.joined)
            elif len(came.frames) == 1 and type(came.frames[0]) is bytes and len(came.frames[0]) == size:
                pieces.append(came.frames[0])
            else:
                return None
        return b"".join(pieces)

    def arrival(self, bodies: Sequence[Intake], places: Sequence[int]) -> SamplesArrived:
        """What the core is told of those at `places`, all of one attempt."""
        at = places[0]
        first, nbytes = bodies[at], self.sizes[at] - len(self.metas[at])
        samples: Sequence[SampleMeta] = first.samples
        if len(places) > 1:
            samples = [sample for body in taken(bodies, places) for sample in body.samples]
            nbytes = sum(taken(self.sizes, places)) - sum(map(len, taken(self.metas, places)))
        return SamplesArrived(self.keys[at], first.lease_id, first.attempt, samples, nbytes, joined=len(places) > 1)

    def kept(self, places: Sequence[int]) -> list[Message]:
        """Those at `places`, as the ledger keeps them."""
        return list(zip(taken(self.metas, places), taken(self.frames, places), strict=True))

    def only(self, places: Sequence[int]) -> Messages:
        """Those at `places`."""
        keys, metas, frames, sizes = [
            [found[i] for i in places] for found in (self.keys, self.metas, self.frames, self.sizes)
        ]
        return Messages(keys, metas, frames, sizes)  # type: ignore[arg-type]


class Uniform(msgspec.Struct, frozen=True, gc=False):
    """A run of messages of one sample that are all as they should be: their samples, their frames of `size` bytes, one after
    another. It gives what `Messages` does without cutting the frames up."""

    run: Messages
    samples: list[SampleMeta]
    size: int
    joined: bytes

    def arrival(self, bodies: Sequence[Intake], places: Sequence[int]) -> SamplesArrived:
        """``Messages.arrival``."""
        first, count = bodies[places[0]], len(places)
        samples, key = taken(self.samples, places), self.run.keys[places[0]]
        return SamplesArrived(key, first.lease_id, first.attempt, samples, count * self.size, joined=count > 1)

    def kept(self, places: Sequence[int]) -> list[Message]:
        """``Messages.kept``: those that came one after another in one piece."""
        metas, joined, size = self.run.metas, self.joined, self.size
        found: list[Message] = []
        for row in ranges(places):
            begin, end = row.start, row.stop
            found += packed.together(metas[begin:end], joined[begin * size : end * size])
        return found


def taken(found: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """What lies at `places`, which ascend: mostly one after another."""
    begin, end = places[0], places[-1] + 1
    return found[begin:end] if end - begin == len(places) else [found[i] for i in places]


def ranges(places: Sequence[int]) -> list[range]:
    """Ascending `places` as ranges: mostly one."""
    first, last = places[0], places[-1]
    if last - first == len(places) - 1:
        return [range(first, last + 1)]
    ends = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return [range(places[begin], places[end - 1] + 1) for begin, end in pairwise([0, *ends, len(places)])]


def by_attempt(keys: Sequence[PeerKey], bodies: Sequence[Intake]) -> list[Sequence[int]]:
    """The places of the messages of each attempt, attempts in the order of their first message."""
    found: dict[tuple[PeerKey, int, int], Sequence[int]] = {}
    end = 0
    for mark, group in groupby(
        zip(keys, [body.lease_id for body in bodies], [body.attempt for body in bodies], strict=True)
    ):
        begin, end = end, end + len(list(group))
        places = range(begin, end)
        found[mark] = [*found[mark], *places] if mark in found else places
    return list(found.values())
