"""The index of a weight log: which files lead to which version, the shortest way to one, and what nobody needs.

Pure: it holds what the files say of themselves and never touches them. A log is a list of versions of one lineage; each is
reached by a snapshot, by a delta from an earlier version, or both. Used by ``weights`` and by `temper weights`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from temper.broker.weight_files import LogFile
from temper.common.schema import Manifest, Version

KEPT = 4  # so many versions published with `keep` are held until their evaluations are known


@dataclass(slots=True)
class Place:
    """A version of the log and the files that lead to it."""

    version: Version
    snapshot: LogFile | None = None
    delta: LogFile | None = None

    def files(self) -> list[LogFile]:
        """Those that are there."""
        return [log_file for log_file in (self.snapshot, self.delta) if log_file is not None]


@dataclass(slots=True)
class WeightLog:
    """Versions of `lineage`, by ordinal, in order."""

    lineage: int | None = None
    places: dict[int, Place] = field(default_factory=dict)
    backfill: bool = False  # a relay's log: versions older than the newest are taken in, too

    @classmethod
    def of(cls, files: Iterable[LogFile], *, backfill: bool = False) -> tuple[WeightLog, list[LogFile]]:
        """(the log that these files are, files of lineages that it has left behind): the file that was begun last
        decides which lineage is the current one."""
        found = list(files)
        log = cls(backfill=backfill)
        if found:
            log.lineage = max(found, key=lambda f: f.footer.sequence).footer.manifest.version.lineage
        mine = [f for f in found if f.footer.manifest.version.lineage == log.lineage]
        for log_file in sorted(mine, key=lambda f: f.footer.manifest.version.ordinal):
            log.add(log_file)
        return log, [f for f in found if f not in mine]

    def add(self, log_file: LogFile) -> list[LogFile]:
        """Take a file in; one of another lineage makes that the current one. Returns the files that this orphans."""
        manifest = log_file.footer.manifest
        orphans: list[LogFile] = []
        if manifest.version.lineage != self.lineage:
            orphans = self.files()
            self.places.clear()
            self.lineage = manifest.version.lineage
        newest = self.newest()
        place = self.places.setdefault(manifest.version.ordinal, Place(manifest.version))
        if newest is not None and manifest.version.ordinal < newest.ordinal:
            self.places = dict(sorted(self.places.items()))
        if manifest.base is None:
            place.snapshot = log_file
        else:
            place.delta = log_file
        return orphans

    def newest(self) -> Version | None:
        """The version that the log ends with."""
        return next(reversed(self.places.values())).version if self.places else None

    def files(self) -> list[LogFile]:
        """All of them, in order."""
        return [log_file for place in self.places.values() for log_file in place.files()]

    def holds(self, version: Version) -> bool:
        """Whether this very version is in the log."""
        place = self.places.get(version.ordinal)
        return place is not None and place.version == version

    def refusal(self, manifest: Manifest) -> str:
        """Why an entry can't be appended; empty if it can (a repeated one too)."""
        version, base, newest = manifest.version, manifest.base, self.newest()
        if version.lineage == self.lineage and newest is not None and not self.holds(version):
            if version.ordinal in self.places:
                return f"the log holds {self.places[version.ordinal].version.digest} under that ordinal"
            if version.ordinal < newest.ordinal and not self.backfill:
                return f"the log has gone on to {newest.ordinal}"
        if base is None:
            return ""
        if not self.holds(base):
            return f"its base, version {base.ordinal} of lineage {base.lineage:08x}, is not here"
        if base.lineage != version.lineage or base.ordinal >= version.ordinal:
            return "its base does not come before it in its own lineage"
        return ""

    def way(self, have: str | None, want: int | None = None) -> list[LogFile] | None:
        """Files from the digest `have`, or from a snapshot, to the ordinal `want` (None: the newest), whichever are fewer
        bytes. Empty if `have` is there already, None if no way leads there."""
        newest = self.newest()
        place = self.places.get(newest.ordinal if want is None and newest else -1 if want is None else want)
        if place is None:
            return None
        best: tuple[int, list[LogFile]] | None = None
        way: list[LogFile] = []
        cost = 0
        if have == place.version.digest:
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
            if not self.holds(base):
                break
            place = self.places[base.ordinal]
        return best[1] if best else None

    def retire(self, live: Iterable[Version], pinned: Iterable[int]) -> list[LogFile]:
        """Drop from the log, and return, the files that are on nobody's way: from the `live` versions and from nothing to
        the newest; from nothing to each `pinned` ordinal and to the last `KEPT` versions published with `keep`."""
        kept = [ordinal for ordinal, place in self.places.items() if any(f.footer.manifest.keep for f in place.files())]
        ways = [self.way(digest) for digest in {None, *(version.digest for version in live)}]
        ways += [self.way(None, ordinal) for ordinal in {*pinned, *kept[-KEPT:]}]
        needed = {log_file.path for way in ways if way for log_file in way}
        unneeded = [log_file for log_file in self.files() if log_file.path not in needed]
        for ordinal, place in list(self.places.items()):
            place.snapshot = place.snapshot if place.snapshot and place.snapshot.path in needed else None
            place.delta = place.delta if place.delta and place.delta.path in needed else None
            if not place.files():
                del self.places[ordinal]
        return unneeded
