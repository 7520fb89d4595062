"""The weight log on the broker's disk: takes versions in, serves the way from any of them to any later one.

A log is a list of versions of one lineage. Each is reachable by a snapshot, by a delta from an earlier version, or both.
Guarantees: an entry is served only when all of it is on disk and has its digests; a delta is taken only on a version
that is here; a version of another lineage is never mixed in (a learner that resumes starts with a snapshot); what a
live actor, a pinned evaluation or a newcomer needs is not retired. Snapshots are composed here, from the last one and
its chain, when the chain outgrows half of one: the learner's time and uplink are the scarcest, its own digest proves
the result, and it works while no learner is there.

Called from one thread (`weight_desk` owns it); `compose` alone may run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from temper.broker.weight_files import PART, Damaged, Footer, LogFile, Writer, chunk_digest, read
from temper.common import delta
from temper.common.delta import DeltaError
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.log import log
from temper.common.schema import Chain, Chunk, Manifest, Publish, Stored, Version
from temper.common.weight_format import unpack

SNAPSHOT_WHEN_CHAIN_EXCEEDS = 0.5  # share of a snapshot's bytes
KEPT = 4  # so many versions published with `keep` are held until their evaluations are known
NOTHING = Version(0, 0, "")


@dataclass(slots=True)
class _Place:
    """A version of the log: the files that lead to it."""

    version: Version
    snapshot: LogFile | None = None
    delta: LogFile | None = None

    def files(self) -> list[LogFile]:
        """Those that are there."""
        return [log_file for log_file in (self.snapshot, self.delta) if log_file is not None]


@dataclass(slots=True)
class _Incoming:
    """An entry whose chunks are arriving from `peer`."""

    peer: Hashable
    manifest: Manifest
    writer: Writer


@dataclass(frozen=True, slots=True)
class Route:
    """An answer to a Fetch: the message, then what follows it."""

    chain: Chain
    entries: tuple[tuple[Footer, list[memoryview]], ...] = ()

    def messages(self) -> Iterator[tuple[Chunk, memoryview]]:
        """Every chunk of the route with its frame, uncopied; mapped already, so retiring files does not hurt it."""
        for footer, frames in self.entries:
            ordinal, snapshot = footer.manifest.version.ordinal, footer.manifest.base is None
            for i, frame in enumerate(frames):
                yield Chunk(ordinal, snapshot, i, footer.digests[i], i == len(frames) - 1), frame


@dataclass(slots=True)
class WeightStore:
    """The log in `directory` (made if missing). `sync` False trusts the operating system's cache (tests, memory runs).

    ConfigError if the directory holds weights of another run.
    """

    directory: Path
    run_id: str
    sync: bool = True
    lineage: int | None = None
    _log: dict[int, _Place] = field(default_factory=dict)  # the current lineage, by ordinal, in order
    _incoming: _Incoming | None = None
    _sequence: int = 0
    _bound_for: dict[Hashable, Version] = field(default_factory=dict)  # where each peer was last sent

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._recover()

    # ------------------------------------------------------------ in

    def newest(self) -> Version | None:
        """The version that the log ends with."""
        return next(reversed(self._log.values())).version if self._log else None

    def begin(self, peer: Hashable, publish: Publish) -> Stored | None:
        """Chunks of this entry follow from `peer`. A `Stored` at once says why not (see `Stored`); they are ignored then."""
        self.abort()
        manifest = publish.manifest
        refusal = self._refusal(manifest)
        if refusal:
            log(f"weights: version {manifest.version.ordinal} is not taken: {refusal}")
            return self._stored(manifest)
        self._incoming = _Incoming(peer, manifest, Writer(self.path_of(manifest), sync=self.sync))
        return None

    def chunk(self, peer: Hashable, chunk: Chunk, frame: memoryview) -> Stored | None:
        """Take one chunk; `Stored` when it completes the entry (on disk then) or spoils it.

        A repeated chunk is ignored, like chunks of an entry that was not taken. EnvironmentFault when the disk is full.
        """
        incoming = self._incoming
        if incoming is None or incoming.peer != peer:
            return None
        manifest, at = incoming.manifest, len(incoming.writer.sizes)
        if (chunk.ordinal, chunk.snapshot) != (manifest.version.ordinal, manifest.base is None) or chunk.index < at:
            return None
        try:
            self._check(manifest, chunk, frame, at)
        except DeltaError as error:
            log(f"weights: version {manifest.version.ordinal} is not taken: {error}")
            self.abort()
            return self._stored(manifest)
        incoming.writer.add(frame, chunk.digest)
        if not chunk.last and at + 1 != manifest.chunks:
            return None
        self._commit(incoming)
        return self._stored(manifest)

    def abort(self, peer: Hashable | None = None) -> None:
        """Give up the entry that is arriving (from `peer`, or whoever)."""
        if self._incoming is not None and peer in (None, self._incoming.peer):
            self._incoming.writer.discard()
            self._incoming = None

    def _refusal(self, manifest: Manifest) -> str:
        version, base = manifest.version, manifest.base
        known = self._log.get(version.ordinal) if version.lineage == self.lineage else None
        newest = self.newest()
        if known is not None and known.version != version:
            return f"the log holds {known.version.digest} under that ordinal"
        if known is None and version.lineage == self.lineage and newest and version.ordinal < newest.ordinal:
            return f"the log has gone on to {newest.ordinal}"
        if base is None:
            return ""
        place = self._log.get(base.ordinal)
        if place is None or place.version != base:
            return f"its base, version {base.ordinal} of lineage {base.lineage:08x}, is not here"
        if base.lineage != version.lineage or base.ordinal >= version.ordinal:
            return "its base does not come before it in its own lineage"
        return ""

    @staticmethod
    def _check(manifest: Manifest, chunk: Chunk, frame: memoryview, expected: int) -> None:
        if chunk.index != expected:
            raise DeltaError("gap", f"chunk {chunk.index} came where {expected} was expected")
        if chunk_digest(frame) != chunk.digest:
            raise DeltaError("digest", f"chunk {chunk.index} is damaged")
        if expected == 0:
            head = unpack(frame)[0].head
            if head is None or (head.version, head.base) != (manifest.version, manifest.base):
                raise DeltaError("malformed", "its first chunk belongs to another version than announced")

    def _commit(self, incoming: _Incoming) -> None:
        writer = incoming.writer
        manifest = msgspec.structs.replace(incoming.manifest, chunks=len(writer.sizes), size=sum(writer.sizes))
        self._incoming = None
        self._sequence += 1
        self._adopt(writer.commit(self.run_id, self._sequence, manifest))

    def _adopt(self, log_file: LogFile) -> None:
        manifest = log_file.footer.manifest
        if manifest.version.lineage != self.lineage:
            self._drop(self._files())
            self._log.clear()
            self.lineage = manifest.version.lineage
        place = self._log.setdefault(manifest.version.ordinal, _Place(manifest.version))
        if manifest.base is None:
            place.snapshot = log_file
        else:
            place.delta = log_file

    def _stored(self, manifest: Manifest) -> Stored:
        return Stored(self.newest() or NOTHING, manifest.version.ordinal)

    # ------------------------------------------------------------ out

    def route(self, have: Version | None, want: int | None, peer: Hashable = None) -> Route:
        """The shortest way (in bytes) from `have` (None: from nothing) to the ordinal `want` (None: the newest).

        A chain without entries says why there is none. `peer`'s place in the log is kept until it has moved on.
        """
        target = self._log.get(want) if want is not None else next(reversed(self._log.values()), None)
        if target is None:
            newest = self.newest()
            state = f"the log ends at {newest.ordinal}" if newest else "the log is empty"
            return Route(Chain([], f"version {'any' if want is None else want} is not here: {state}", newest))
        files = self._way(have.digest if have else None, target)
        if files is None:
            return Route(Chain([], f"no snapshot leads to version {target.version.ordinal}", self.newest()))
        if peer is not None:
            self._bound_for[peer] = target.version
        entries = tuple((log_file.footer, log_file.chunks()) for log_file in files)
        return Route(Chain([footer.manifest for footer, _ in entries], "", target.version), entries)

    def forget(self, peer: Hashable) -> None:
        """`peer` is gone."""
        self.abort(peer)
        self._bound_for.pop(peer, None)

    def _way(self, have: str | None, target: _Place) -> list[LogFile] | None:
        """Files from the digest `have` or a snapshot to `target`, whichever are fewer bytes; None if there are none."""
        best: tuple[int, list[LogFile]] | None = None
        way: list[LogFile] = []
        cost, place = 0, target
        if have == target.version.digest:
            return way
        while True:
            if place.snapshot is not None:
                whole = cost + place.snapshot.footer.manifest.size
                if best is None or whole < best[0]:
                    best = (whole, [place.snapshot, *way])
            step = place.delta
            base = step.footer.manifest.base if step else None
            if step is None or base is None:
                break
            way, cost = [step, *way], cost + step.footer.manifest.size
            if best is not None and best[0] <= cost:
                break
            if base.digest == have:
                return way
            before = self._log.get(base.ordinal)
            if before is None or before.version != base:
                break
            place = before
        return best[1] if best else None

    # ------------------------------------------------------------ upkeep

    def retain(self, live: Iterable[Version] = (), pinned: Iterable[int] = ()) -> int:
        """Retire what nobody needs: keep the ways from `live` versions (and wherever peers were last sent) to the newest,
        a newcomer's way to it, and a newcomer's way to each `pinned` ordinal and to the last `KEPT` versions published with
        `keep`. Returns the bytes freed."""
        if not self._log:
            return 0
        newest = next(reversed(self._log.values()))
        digests = {version.digest for version in (*live, *self._bound_for.values())}
        ways = [self._way(digest, newest) for digest in (None, *digests)]
        kept = [ordinal for ordinal, place in self._log.items() if any(f.footer.manifest.keep for f in place.files())]
        ways += [self._way(None, self._log[n]) for n in {*pinned, *kept[-KEPT:]} if n in self._log]
        needed = {log_file.path for way in ways if way for log_file in way}
        unneeded = [log_file for log_file in self._files() if log_file.path not in needed]
        self._drop(unneeded)
        gone = {log_file.path for log_file in unneeded}
        for ordinal, place in list(self._log.items()):
            place.snapshot = None if place.snapshot and place.snapshot.path in gone else place.snapshot
            place.delta = None if place.delta and place.delta.path in gone else place.delta
            if not place.files():
                del self._log[ordinal]
        return sum(log_file.footer.manifest.size for log_file in unneeded)

    def compose(self) -> Callable[[], LogFile] | None:
        """If the chain from the last snapshot has outgrown half of it: the work that makes a snapshot of the newest
        version. It only reads complete files, so it may run in another thread; give its result to `adopt`."""
        newest = next(reversed(self._log.values()), None)
        way = self._way(None, newest) if newest else None
        if newest is None or not way or len(way) == 1:
            return None
        first, *chain = way
        if sum(f.footer.manifest.size for f in chain) <= SNAPSHOT_WHEN_CHAIN_EXCEEDS * first.footer.manifest.size:
            return None
        self._sequence += 1
        frames = [frame for log_file in way for frame in log_file.chunks()]
        return _Composition(self, chain[-1].footer.manifest, frames, self._sequence)

    def adopt(self, log_file: LogFile) -> None:
        """Take a composed snapshot in, unless its version has been retired or orphaned meanwhile."""
        version = log_file.footer.manifest.version
        place = self._log.get(version.ordinal)
        if place is None or place.version != version:
            self._drop([log_file])
        else:
            place.snapshot = log_file

    def _files(self) -> list[LogFile]:
        return [log_file for place in self._log.values() for log_file in place.files()]

    @staticmethod
    def _drop(files: Iterable[LogFile]) -> None:
        for log_file in files:
            log_file.path.unlink(missing_ok=True)

    def path_of(self, manifest: Manifest) -> Path:
        """Where the entry of `manifest` lies."""
        kind = "snapshot" if manifest.base is None else "delta"
        return self.directory / f"{manifest.version.lineage:08x}-{manifest.version.ordinal:010d}.{kind}"

    def _recover(self) -> None:
        """Read the directory after a start: torn files are removed, the lineage last written to is the current one."""
        found = []
        for path in sorted(self.directory.iterdir()):
            if path.name.endswith(PART):
                path.unlink()
                continue
            if path.suffix not in (".snapshot", ".delta"):
                continue
            try:
                log_file = read(path)
            except Damaged as error:
                log(f"weights: {path.name} is not complete ({error}): removed")
                path.unlink()
                continue
            except OSError as error:
                raise EnvironmentFault(f"cannot read {path}: {error.strerror}") from error
            if log_file.footer.run_id != self.run_id:
                raise ConfigError(
                    f"{self.directory} holds weights of run {log_file.footer.run_id}, this is run {self.run_id}:"
                    " use a run directory of its own, or resume that run"
                )
            found.append(log_file)
        found.sort(key=lambda f: f.footer.sequence)
        if not found:
            return
        self._sequence = found[-1].footer.sequence
        self.lineage = found[-1].footer.manifest.version.lineage
        for log_file in sorted(found, key=lambda f: f.footer.manifest.version.ordinal):
            if log_file.footer.manifest.version.lineage == self.lineage:
                self._adopt(log_file)
            else:
                self._drop([log_file])


@dataclass(frozen=True, slots=True)
class _Composition:
    store: WeightStore
    last: Manifest
    frames: list[memoryview]
    sequence: int

    def __call__(self) -> LogFile:
        """Write the snapshot. DeltaError if the chain does not lead to its version, EnvironmentFault if the disk is full."""
        manifest = msgspec.structs.replace(self.last, base=None, density=1.0)
        writer = Writer(self.store.path_of(manifest), sync=self.store.sync)
        try:
            for chunk in delta.compose(self.frames):
                writer.add(chunk, chunk_digest(chunk))
        except BaseException:
            writer.discard()
            raise
        manifest = msgspec.structs.replace(manifest, chunks=len(writer.sizes), size=sum(writer.sizes))
        return writer.commit(self.store.run_id, self.sequence, manifest)
