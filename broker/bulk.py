"""What comes on the bulk socket: weights (for `WeightDesk`) and the model bundle (for `BundleStore`)."""

from __future__ import annotations

from collections.abc import Callable

from temper.broker.bundle import BundleStore
from temper.broker.guests import Guests
from temper.broker.weight_desk import WeightDesk
from temper.common.errors import ProtocolError, TemperError
from temper.common.pump import Delivery, PeerId, Router
from temper.common.schema import Bundle, Chunk, Fetch, Hello, NeedBundle, Publish, Refused, Welcome


class BulkDesk:
    """Handlers of the bulk Router. `broken(error)` is called when the disk does not play along."""

    def __init__(self, bundle: BundleStore, guests: Guests, broken: Callable[[TemperError], None]) -> None:
        self.bundle = bundle
        self.guests = guests
        self.router: Router
        self.weights: WeightDesk
        self._broken = broken

    def welcome(self, peer: PeerId, hello: Hello) -> Welcome | Refused:
        """The control socket decides who comes in; here only the run is checked."""
        return self.guests.mismatch(hello) or Welcome(self.guests.run_id, "", 0, 1.0)

    def on_batch(self, batch: list[Delivery]) -> None:
        """One loop turn's messages."""
        for delivery in batch:
            try:
                self._handle(delivery)
            except ProtocolError as error:
                self.router.refuse(delivery.peer, "malformed", str(error))
            except TemperError as error:
                self._broken(error)
                return

    def on_room(self, peer: PeerId) -> None:
        """What was queued for the peer has left."""
        self.weights.room(peer)

    def left(self, peer: PeerId) -> None:
        """The peer is gone."""
        self.weights.closed(peer)
        self.bundle.waiting.pop(peer, None)

    def _is_learner(self, peer: PeerId, hello: Hello) -> bool:
        """What a peer was let in as on the control socket counts; one that is not there yet (a learner that comes back to a
        restarted broker) is believed only while there is no learner."""
        key = self.guests.key(peer)
        if key is not None:
            return self.guests.role(key) == "learner"
        return hello.role == "learner" and not any(self.guests.with_role("learner"))

    def _handle(self, delivery: Delivery) -> None:
        peer, body = delivery.peer, delivery.body
        hello = self.router.peers.get(peer)
        if hello is None:
            return  # closed within this batch
        if isinstance(body, Publish | Chunk | Bundle) and not self._is_learner(peer, hello):
            raise ProtocolError(
                f"{type(body).__name__} came from a peer of role {hello.role} that is not the run's learner"
            )
        if isinstance(body, Publish | Chunk | Fetch):
            self.weights.take(peer, body, delivery.frames, delivery.sequence)
            return  # the desk acknowledges
        if isinstance(body, Bundle):
            self.bundle.put(body, delivery.frames)
            waiting, self.bundle.waiting = list(self.bundle.waiting), {}
            for other in waiting:
                self.router.send(other, body, self.bundle.frames)
        elif isinstance(body, NeedBundle):
            if self.bundle.body is not None:
                self.router.send(peer, self.bundle.body, self.bundle.frames)
            else:
                self.bundle.waiting[peer] = None
        else:
            raise ProtocolError(f"{type(body).__name__} is not for the broker")
        self.router.acknowledge(peer, delivery.sequence)
