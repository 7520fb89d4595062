"""The writes and syncs of a real broker process, recorded with strace, replayed to every prefix as after a power cut.

At each point three disks are made: one with everything written so far, one with only what had been synced, one with
the last write torn. The ledger must open on each of them, hold every sample that had been acknowledged by then and every
group that the learner had got, give out no lease again as a new one, name no payload that is not there, and its books must
add up.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broker_stage import play, samples, stage
from temper.broker.core import BrokerCore
from temper.broker.ledger import Ledger
from temper.common import schema
from temper.common.arrays import unpack_arrays
from temper.common.config import Recipe

CALLS = "pwrite64,pwritev,write,writev,fsync,fdatasync,ftruncate,unlink,unlinkat,openat"
LINE = re.compile(r"^(\d+\.\d+) (\w+)\((.*)\)\s+= (-?\d+)")
FILE = re.compile(r"\d+<((?:\\x[0-9a-f]{2})+)>")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Call:
    """One recorded system call on a file of the ledger. `offset` None appends."""

    at: float
    kind: str
    path: str
    offset: int | None = None
    data: bytes = b""
    size: int = 0


def unhex(text: str) -> bytes:
    """What strace -xx wrote as hexadecimal."""
    return bytes.fromhex(text.replace("\\x", ""))


def record(folder: Path, base: Path) -> list[Call]:
    """The calls that strace wrote for all threads, in the order of time."""
    calls = []
    for trace in folder.glob("trace*"):
        for line in trace.read_text().splitlines():
            match = LINE.match(line)
            if match is None or int(match[4]) < 0:
                continue
            at, kind, rest, result = float(match[1]), match[2], match[3], int(match[4])
            data = b"".join(unhex(text) for text in STRING.findall(rest))
            if kind in ("unlink", "unlinkat"):
                path = data.decode()
            elif kind == "openat":
                if "O_CREAT" not in rest:
                    continue
                path = data.decode()
            else:
                found = FILE.search(rest)
                path = unhex(found[1]).decode() if found else ""
            if not path.startswith(str(base)) or path.endswith("-shm"):
                continue
            offset, size = None, 0
            if kind == "pwrite64":
                offset = int(rest.rsplit(",", 1)[1])
            elif kind == "ftruncate":
                size = int(rest.rsplit(",", 1)[1])
            if kind in ("pwrite64", "writev", "write"):
                assert len(data) == result, (kind, len(data), result)
            calls.append(Call(at, kind, path.removeprefix(str(base) + "/"), offset, data, size))
    return sorted(calls, key=lambda call: call.at)


class Disk:
    """What lies on it: with everything written, and with what was synced only."""

    def __init__(self) -> None:
        self.written: dict[str, bytearray] = {}
        self.synced: dict[str, bytearray] = {}

    def apply(self, call: Call) -> None:
        if call.kind in ("unlink", "unlinkat"):
            self.written.pop(call.path, None)
            self.synced.pop(call.path, None)
        elif call.kind == "openat":
            self.written.setdefault(call.path, bytearray())
            self.synced.setdefault(call.path, bytearray())
        elif call.kind in ("fsync", "fdatasync"):
            if call.path in self.written:
                self.synced[call.path] = bytearray(self.written[call.path])
        elif call.kind == "ftruncate":
            self._resize(self.written[call.path], call.size)
        else:
            self.write(self.written.setdefault(call.path, bytearray()), call, len(call.data))

    @classmethod
    def write(cls, file: bytearray, call: Call, length: int) -> None:
        offset = len(file) if call.offset is None else call.offset
        if len(file) < offset:
            cls._resize(file, offset)
        file[offset : offset + length] = call.data[:length]

    @staticmethod
    def _resize(file: bytearray, size: int) -> None:
        del file[size:]
        file.extend(bytes(size - len(file)))


def lay_out(folder: Path, files: dict[str, bytearray]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "segments").mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


@dataclass(frozen=True)
class Told:
    """What peers had been told: samples acknowledged, ids of leases and of groups."""

    samples: frozenset[tuple[int, int]]
    leases: frozenset[int]
    groups: frozenset[int]


def recovers(folder: Path, told: Told) -> None:
    """Open the ledger as the next broker would."""
    ledger = Ledger(folder, None, "memory")
    there = set()
    for lease_id, shelf in ledger.payloads.shelves.items():
        payloads = ledger.read(lease_id)
        assert len(payloads) == len(shelf.indices)
        for part, frames in payloads:
            tokens = unpack_arrays(part.arrays, frames)["tokens"].reshape(-1, 4)
            assert tokens.tolist() == [[lease_id, meta.index, 7, 8] for meta in part.samples]
            there |= {(lease_id, meta.index) for meta in part.samples}
    assert told.samples <= there
    restored = ledger.restore()
    assert restored is not None or not (told.leases or told.groups)
    if restored is not None:
        core = BrokerCore(Recipe())
        core.load(restored.state, restored.leases, restored.groups, 0.0)
        counts, states = core.leases.counts["train"], core.groups.counts["train"]
        assert counts["created"] == counts["in flight"] + counts["accepted"] == sum(states.values())
        assert max(told.leases, default=-1) < core.schedule.fresh("train", 1).start
        complete = {group.group_id for group in restored.groups if group.state in ("queued", "leased", "trained")}
        assert told.groups <= complete
        for lease in restored.leases:
            assert lease.state != "accepted" or len(lease.have) == lease.size
        have = {(lease.lease_id, index) for lease in restored.leases for index in lease.have}
        assert have == there
    ledger.segments.close()
    ledger._db.close()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: nothing can be recorded")
def test_the_ledger_recovers_from_every_prefix_of_its_writes(tmp_path: Path) -> None:
    acknowledged: list[tuple[float, tuple[int, int]]] = []
    leased: list[tuple[float, int]] = []
    delivered: list[tuple[float, int]] = []

    async def scene() -> None:
        strace = ["strace", "-ff", "-ttt", "-y", "-xx", "-s", "1000000", "-e", f"trace={CALLS}"]
        async with stage(tmp_path, prefix=[*strace, "-o", str(tmp_path / "trace")]) as s:
            learner = await s.learner()
            actor = await s.guest("actor", "actor", 4)
            for step in range(2):
                leases = []
                for _ in range(4 if step == 0 else 2):
                    leases.append((await actor.next(schema.Lease))[0])
                    leased.append((time.time(), leases[-1].lease_id))
                for lease in leases[:2] if step == 0 else leases:
                    for index in lease.indices:
                        await actor.peer.send(*samples(lease, [index]))
                        await actor.peer.flush(30.0)
                        acknowledged.append((time.time(), (lease.lease_id, index)))
                await learner.peer.send(schema.Demand("train", 2))
                groups = []
                for _ in range(2):
                    groups.append((await learner.next(schema.Group))[0].group_id)
                    delivered.append((time.time(), groups[-1]))
                await learner.peer.send(schema.Done(step, groups, {}, True))
            await asyncio.gather(learner.peer.flush(30.0), actor.peer.flush(30.0))

    play(scene, 100.0)
    base = tmp_path / "run" / "ledger"
    calls = record(tmp_path, base)
    kinds: defaultdict[tuple[str, str], int] = defaultdict(int)
    for call in calls:
        kinds[call.kind, Path(call.path).suffix] += 1
    assert kinds["fdatasync", ".seg"] >= 8, kinds  # one a message at least: the recording is whole
    assert kinds["fdatasync", ".sqlite-wal"] + kinds["fsync", ".sqlite-wal"] >= 8, kinds
    disk, folder = Disk(), tmp_path / "after"
    tables = next(i for i, call in enumerate(calls) if call.path.endswith(".seg"))  # from the first sample on
    for i, call in enumerate(calls):
        before = {name: bytearray(data) for name, data in disk.written.items()}
        disk.apply(call)
        if i < tables:
            continue
        told = Told(
            *(frozenset(what for at, what in all_ if at < call.at) for all_ in (acknowledged, leased, delivered))
        )
        for files in (disk.written, disk.synced):
            lay_out(folder, files)
            recovers(folder, told)
        if len(call.data) > 1 and call.path in before:
            Disk.write(before[call.path], call, len(call.data) // 2)
            lay_out(folder, before)
            recovers(folder, told)
    assert {sample for _, sample in acknowledged} == {(lease, index) for lease in (0, 1, 4, 5) for index in (0, 1)}
