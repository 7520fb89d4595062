"""`SiteRouter`: the bulk socket of a relay's site. It serves everybody, but a learner's messages pass to the parent as they
are: it publishes weights, which the run's broker takes in."""

from __future__ import annotations

from typing import Any

from temper.broker.pipe import Pipe
from temper.common.errors import ProtocolError
from temper.common.keys import PeerKeys
from temper.common.pump import Arrival, PeerId, Router
from temper.common.schema import Ack, Hello
from temper.common.session import check, check_kind, decode
from temper.common.sockets import Address

LEARNERS = 8  # connections of one at a time are normal, and those of its predecessors until they are found silent


class SiteRouter(Router):
    """A `Router` with `pass_to(parent, keys)`; `end(peer)` when a learner's control line has ended."""

    _parent: Address
    _parent_keys: PeerKeys | None

    def pass_to(self, parent: Address, keys: PeerKeys | None) -> None:
        """Whom learners' messages go to. Call it before anything arrives."""
        self._parent, self._parent_keys = parent, keys
        self._pipes: dict[PeerId, Pipe] = {}

    def end(self, peer: PeerId) -> None:
        """That learner is gone."""
        pipe = self._pipes.pop(peer, None)
        if pipe is not None:
            pipe.close()

    def close(self, linger_ms: int = 200) -> None:
        """Stop; what was sent gets `linger_ms` to leave."""
        for peer in list(self._pipes):
            self.end(peer)
        super().close(linger_ms)

    def _take(self, parts: list[Any], batch: list[Arrival], now: float) -> int:
        passed = self._pass(parts)
        return super()._take(parts, batch, now) if passed is None else passed

    def _pass(self, parts: list[Any]) -> int | None:
        """The bytes of a learner's message that was passed on; None for everybody else's, and for what is malformed."""
        peer: PeerId = parts[0]
        pipe = self._pipes.get(peer)
        try:
            number, _, _, _, sequence, size = check(parts, 1)
            kind = check_kind(number, sequence, True)
            if pipe is None:
                if (
                    kind is not Hello
                    or decode(Hello, bytes(parts[2])).role != "learner"
                    or len(self._pipes) >= LEARNERS
                ):
                    return None
                pipe = self._pipes[peer] = Pipe(self._parent, "bulk", peer, self._parent_keys, site=self._link.send)
            elif kind is Ack:
                pipe.acknowledged(decode(Ack, bytes(parts[2])).received)
        except ProtocolError:
            self.end(peer)
            return None  # the Router shuts it out
        pipe.send(parts[1], parts[2], parts[3:], sequence, size)
        return size
