"""Who is connected: peers' routing ids and names, what they said in HELLO and in their last heartbeat; who is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from temper.common.pump import PeerId
from temper.common.schema import Heartbeat, Hello, Refused, Role


class Guests:
    """The broker's guest list. A peer's key in the core is its routing id in hex: random, the same on both sockets."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.hellos: dict[str, Hello] = {}
        self.beats: dict[str, Heartbeat] = {}
        self._keys: dict[PeerId, str] = {}
        self._ids: dict[str, PeerId] = {}
        self._domains: dict[str, Counter[str]] = {}  # module -> digest (one, as a rule) -> how many peers have it

    def __len__(self) -> int:
        return len(self.hellos)

    def add(self, peer: PeerId, hello: Hello) -> str:
        """A welcomed peer's key."""
        key = peer.hex()
        if key in self.hellos:
            self._discount(self.hellos[key])
        self._keys[peer], self._ids[key], self.hellos[key] = key, peer, hello
        for module, digest in hello.domains.items():
            self._domains.setdefault(module, Counter())[digest] += 1
        return key

    def remove(self, peer: PeerId) -> tuple[str, Hello] | None:
        """Forget a peer; what it was, or None if it was not here."""
        key = self._keys.pop(peer, None)
        if key is None:
            return None
        del self._ids[key]
        self.beats.pop(key, None)
        hello = self.hellos.pop(key)
        self._discount(hello)
        return key, hello

    def _discount(self, hello: Hello) -> None:
        for module, digest in hello.domains.items():
            digests = self._domains[module]
            digests[digest] -= 1
            if not digests[digest]:
                del digests[digest]
            if not digests:
                del self._domains[module]

    def key(self, peer: PeerId) -> str | None:
        """The key of a connected peer."""
        return self._keys.get(peer)

    def id(self, key: str) -> PeerId | None:
        """The routing id of a connected peer."""
        return self._ids.get(key)

    def role(self, key: str) -> Role:
        """The role of a connected peer."""
        return self.hellos[key].role

    def with_role(self, *roles: Role) -> Iterator[PeerId]:
        """Routing ids of connected peers of these roles."""
        return (self._ids[key] for key, hello in list(self.hellos.items()) if hello.role in roles)

    def working(self) -> dict[PeerId, str]:
        """Everybody but status clients, by name."""
        return {self._ids[key]: hello.name for key, hello in self.hellos.items() if hello.role != "status"}

    def name(self, peer: PeerId) -> str:
        """The name of a connected peer."""
        return self.hellos[self._keys[peer]].name

    def is_other(self, peer: PeerId, hello: Hello) -> bool:
        """Whether `hello` comes from another process than a connected peer."""
        return self.hellos[self._keys[peer]].session != hello.session

    def refusal(self, hello: Hello) -> Refused | None:
        """Why a peer may not come in; whether the learner's place is free is `Succession`'s to say."""
        mismatch = self.mismatch(hello)
        if mismatch is not None:
            return mismatch
        if all(self._domains.get(module, {}).keys() <= {digest} for module, digest in hello.domains.items()):
            return None
        for other in self.hellos.values():  # who is here now: an upgraded peer is judged by its present company
            if other.name == hello.name:
                continue
            for module in sorted(hello.domains.keys() & other.domains.keys()):
                digest, known = hello.domains[module], other.domains[module]
                if digest != known:
                    text = f"domain module {module} has digest {digest} at {hello.name}, {known} at {other.name}"
                    return Refused("domain", f"{text}: install the same version on both")
        return None

    def mismatch(self, hello: Hello) -> Refused | None:
        """A peer of another run."""
        if hello.run_id in (None, self.run_id):
            return None
        return Refused("run_mismatch", f"this is run {self.run_id}, the peer belongs to run {hello.run_id}")
