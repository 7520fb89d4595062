"""The weight log on the broker's disk: takes versions in, serves the way from any of them to any later one.

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
from temper.broker.weight_files import PART, Footer, LogFile, Writer, chunk_digest, scan
from temper.broker.weight_log import WeightLog
from temper.common import delta
from temper.common.delta import DeltaError
from temper.common.errors import ConfigError
from temper.common.log import log as say
from temper.common.schema import Chain, Chunk, Manifest, Publish, Stored, Version
from temper.common.weight_format import unpack

SNAPSHOT_WHEN_CHAIN_EXCEEDS = 0.5  # share of a snapshot's bytes
NOTHING = Version(0, 0, "")


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
    backfill: bool = False  # of a relay: versions older than the newest are taken in, too
    log: WeightLog = field(default_factory=WeightLog)
    _incoming: _Incoming | None = None
    _sequence: int = 0
    _bound_for: dict[Hashable, Version] = field(default_factory=dict)  # where each peer was last sent

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._recover()

    # ------------------------------------------------------------ in

    def newest(self) -> Version | None:
        """The version that the log ends with."""
        return self.log.newest()

    def begin(self, peer: Hashable, publish: Publish) -> Stored | None:
        """Chunks of this entry follow from `peer`. A `Stored` at once says why not (see `Stored`); they are ignored then."""
        self.abort()
        manifest = publish.manifest
        refusal = self.log.refusal(manifest)
        if refusal:
            say(f"weights: version {manifest.version.ordinal} is not taken: {refusal}")
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
            say(f"weights: version {manifest.version.ordinal} is not taken: {error}")
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
        self._drop(self.log.add(writer.commit(self.run_id, self._sequence, manifest)))

    def _stored(self, manifest: Manifest) -> Stored:
        return Stored(self.newest() or NOTHING, manifest.version.ordinal)

    # ------------------------------------------------------------ out

    def route(self, have: Version | None, want: int | None, peer: Hashable = None) -> Route:
        """The shortest way (in bytes) from `have` (None: from nothing) to the ordinal `want` (None: the newest).

        A chain without entries says why there is none. `peer`'s place in the log is kept until it has moved on.
        """
        newest = self.newest()
        if newest is None or (want is not None and want not in self.log.places):
            state = f"the log ends at {newest.ordinal}" if newest else "the log is empty"
            return Route(Chain([], f"version {'any' if want is None else want} is not here: {state}", newest))
        target = newest if want is None else self.log.places[want].version
        files = self.log.way(have.digest if have else None, target.ordinal)
        if files is None:
            return Route(Chain([], f"no snapshot leads to version {target.ordinal}", newest))
        if peer is not None:
            self._bound_for[peer] = target
        entries = tuple((log_file.footer, log_file.chunks()) for log_file in files)
        return Route(Chain([footer.manifest for footer, _ in entries], "", target), entries)

    def forget(self, peer: Hashable) -> None:
        """`peer` is gone."""
        self.abort(peer)
        self._bound_for.pop(peer, None)

    # ------------------------------------------------------------ upkeep

    def retain(self, live: Iterable[Version] = (), pinned: Iterable[int] = ()) -> int:
        """Remove what nobody needs (see `WeightLog.retire`; wherever peers were last sent counts as live). Returns the
        bytes freed."""
        unneeded = self.log.retire([*live, *self._bound_for.values()], pinned)
        self._drop(unneeded)
        return sum(log_file.footer.manifest.size for log_file in unneeded)

    def compose(self) -> Callable[[], LogFile] | None:
        """If the chain from the last snapshot has outgrown half of it: the work that makes a snapshot of the newest
        version. It only reads complete files, so it may run in another thread; give its result to `adopt`."""
        way = self.log.way(None)
        if not way or len(way) == 1:
            return None
        first, *chain = way
        if sum(f.footer.manifest.size for f in chain) <= SNAPSHOT_WHEN_CHAIN_EXCEEDS * first.footer.manifest.size:
            return None
        self._sequence += 1
        frames = [frame for log_file in way for frame in log_file.chunks()]
        return _Composition(self, chain[-1].footer.manifest, frames, self._sequence)

    def adopt(self, log_file: LogFile) -> None:
        """Take a composed snapshot in, unless its version has been retired or orphaned meanwhile."""
        self._drop(self.log.add(log_file) if self.log.holds(log_file.footer.manifest.version) else [log_file])

    @staticmethod
    def _drop(files: Iterable[LogFile]) -> None:
        for log_file in files:
            log_file.path.unlink(missing_ok=True)

    def path_of(self, manifest: Manifest) -> Path:
        """Where the entry of `manifest` lies."""
        kind = "snapshot" if manifest.base is None else "delta"
        return self.directory / f"{manifest.version.lineage:08x}-{manifest.version.ordinal:010d}.{kind}"

    def _recover(self) -> None:
        """Read the directory after a start: what a crash left is removed, and what an orphaned lineage left."""
        for path in self.directory.glob(f"*{PART}"):
            path.unlink()
        found, damaged = scan(self.directory)
        for path, reason in damaged:
            say(f"weights: {path.name} is not complete ({reason}): removed")
            path.unlink()
        for log_file in found:
            if log_file.footer.run_id != self.run_id:
                raise ConfigError(
                    f"{self.directory} holds weights of run {log_file.footer.run_id}, this is run {self.run_id}:"
                    " use a run directory of its own, or resume that run"
                )
        self.log, orphans = WeightLog.of(found, backfill=self.backfill)
        self._drop(orphans)
        self._sequence = max((log_file.footer.sequence for log_file in found), default=0)


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
