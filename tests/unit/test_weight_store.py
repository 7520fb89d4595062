"""The weight log on disk: takes only what fits, serves only what is whole, keeps what somebody needs."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from temper.broker.weight_files import PART, Damaged, read
from temper.broker.weights import NOTHING, Route, WeightStore
from temper.common import delta, weight_format
from temper.common.bits import TensorBits, Weights, seal
from temper.common.errors import ConfigError, EnvironmentFault
from temper.common.schema import Chunk, Manifest, Publish, Stored, Version

LINEAGE = 7


def version(ordinal: int, lineage: int = LINEAGE, size: int = 4000) -> Weights:
    """Version n: n values differ from version 0, so that deltas are small and versions distinct."""
    values = np.arange(size, dtype=np.uint32) * 65537
    values[: ordinal + 1] ^= np.uint32(0x10101 + lineage)
    return seal(ordinal, lineage, {"w": TensorBits("float32", (size,), values)})


def messages(base: Weights | None, new: Weights) -> tuple[Publish, list[tuple[Chunk, bytes]]]:
    chunks = list(delta.encode(base, new))
    size = sum(map(len, chunks))
    manifest = Manifest(new.version, base.version if base else None, len(chunks), size, new.nbytes, 0.1)
    bodies = [
        Chunk(new.version.ordinal, base is None, i, hashlib.blake2b(c, digest_size=16).hexdigest())
        for i, c in enumerate(chunks)
    ]
    return Publish(manifest), list(zip(bodies, chunks, strict=True))


def put(store: WeightStore, base: Weights | None, new: Weights) -> Stored | None:
    publish, chunks = messages(base, new)
    answer = store.begin("learner", publish)
    for chunk, frame in chunks:
        answer = store.chunk("learner", chunk, memoryview(frame)) or answer
    return answer


def result(route: Route, base: Weights | None) -> Version:
    assert not route.chain.reason, route.chain.reason
    frames = [frame for _, frame in route.messages()]
    update = delta.stage(frames, None if route.chain.entries[0].base is None else base)
    assert update.version == route.chain.version
    return update.version


def kinds(route: Route) -> list[tuple[str, int]]:
    return [("snapshot" if e.base is None else "delta", e.version.ordinal) for e in route.chain.entries]


def filled(directory: Path, versions: int = 5) -> tuple[WeightStore, list[Weights]]:
    store = WeightStore(directory, "run-a", sync=False)
    all_versions = [version(i) for i in range(versions)]
    put(store, None, all_versions[0])
    for a, b in itertools.pairwise(all_versions):
        assert put(store, a, b) == Stored(b.version, b.version.ordinal)
    return store, all_versions


def test_serves_the_way_from_every_version_and_from_nothing(tmp_path: Path) -> None:
    store, versions = filled(tmp_path)
    for have in versions[:-1]:
        route = store.route(have.version, None)
        assert kinds(route) == [("delta", i) for i in range(have.version.ordinal + 1, 5)]
        assert result(route, have) == versions[-1].version
    route = store.route(None, None)
    assert kinds(route) == [("snapshot", 0), *(("delta", i) for i in range(1, 5))]
    assert result(route, None) == versions[-1].version


def test_a_pinned_version_is_reached_from_behind_and_from_ahead(tmp_path: Path) -> None:
    store, versions = filled(tmp_path)
    assert kinds(store.route(versions[1].version, 3)) == [("delta", 2), ("delta", 3)]
    assert kinds(store.route(versions[4].version, 2)) == [("snapshot", 0), ("delta", 1), ("delta", 2)]


def test_who_is_there_already_gets_nothing_and_who_asks_too_early_gets_the_reason(tmp_path: Path) -> None:
    store, versions = filled(tmp_path)
    route = store.route(versions[4].version, None)
    assert (route.chain.entries, route.chain.reason, route.chain.version) == ([], "", versions[4].version)
    assert "the log ends at 4" in store.route(None, 9).chain.reason
    assert "is empty" in WeightStore(tmp_path / "other", "run-a", sync=False).route(None, None).chain.reason


def test_a_foreign_or_orphaned_version_gets_a_snapshot(tmp_path: Path) -> None:
    store, versions = filled(tmp_path)
    orphan = version(3, lineage=99)
    assert kinds(store.route(orphan.version, None))[0] == ("snapshot", 0)
    assert result(store.route(orphan.version, None), orphan) == versions[-1].version


def test_a_delta_on_a_version_that_is_not_here_is_refused_with_what_is(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 3)
    assert put(store, version(7), version(8)) == Stored(versions[2].version, 8)
    assert store.newest() == versions[2].version
    empty = WeightStore(tmp_path / "other", "run-a", sync=False)
    assert put(empty, versions[0], versions[1]) == Stored(NOTHING, 1)


def test_another_version_under_the_same_ordinal_is_refused_and_a_repeat_is_taken(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 3)
    other = seal(2, LINEAGE, version(77).tensors)
    assert put(store, versions[1], other) == Stored(versions[2].version, 2)
    assert put(store, versions[1], versions[2]) == Stored(versions[2].version, 2)
    assert put(store, None, versions[2]) == Stored(versions[2].version, 2)
    assert kinds(store.route(None, None)) == [("snapshot", 2)]


def test_ordinals_may_jump_but_not_fall(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 3)
    assert put(store, versions[2], version(9)) == Stored(version(9).version, 9)
    assert put(store, versions[2], version(5)) == Stored(version(9).version, 5)


@pytest.mark.parametrize("fault", ["dropped", "repeated", "reordered", "damaged", "foreign head"])
def test_chunks_that_arrive_wrong_never_make_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(weight_format, "CHUNK_BYTES", 20_000)
    store, versions = filled(tmp_path, 1)
    big = seal(1, LINEAGE, {f"w{i}": version(i).tensors["w"] for i in range(6)})
    publish, chunks = messages(None, big)
    assert len(chunks) > 3 and store.begin("learner", publish) is None
    if fault == "dropped":
        del chunks[1]
    elif fault == "repeated":
        chunks.insert(1, chunks[0])
    elif fault == "reordered":
        chunks[1], chunks[2] = chunks[2], chunks[1]
    elif fault == "damaged":
        chunks[1] = (chunks[1][0], chunks[1][1][:-1] + b"?")
    else:
        chunks[0] = (chunks[0][0], messages(None, version(1))[1][0][1])
    answers = [store.chunk("learner", chunk, memoryview(frame)) for chunk, frame in chunks]
    stored = [answer for answer in answers if answer is not None]
    if fault == "repeated":
        assert stored == [Stored(big.version, 1)] and result(store.route(None, None), None) == big.version
    else:
        assert stored == [Stored(versions[0].version, 1)] and store.newest() == versions[0].version
        assert not list(tmp_path.glob(f"*{PART}"))


def test_chunks_of_another_peer_or_entry_are_ignored(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 1)
    publish, chunks = messages(versions[0], version(1))
    store.begin("learner", publish)
    assert store.chunk("actor", *with_view(chunks[0])) is None
    assert store.chunk("learner", *with_view(messages(None, version(5))[1][0])) is None
    assert store.chunk("learner", *with_view(chunks[0])) == Stored(version(1).version, 1)


def with_view(message: tuple[Chunk, bytes]) -> tuple[Chunk, memoryview]:
    return message[0], memoryview(message[1])


def test_a_new_lineage_starts_with_a_snapshot_and_orphans_the_old_one(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 4)
    resumed = version(2, lineage=8)
    assert put(store, versions[2], resumed) == Stored(versions[3].version, 2)  # a delta across lineages is not taken
    assert put(store, None, resumed) == Stored(resumed.version, 2)
    assert kinds(store.route(versions[3].version, None)) == [("snapshot", 2)]
    assert "not here" in store.route(None, 3).chain.reason
    assert [p.name for p in tmp_path.iterdir()] == ["00000008-0000000002.snapshot"]
    same_bits = seal(2, 9, resumed.tensors)
    assert put(store, None, same_bits) == Stored(same_bits.version, 2)
    route = store.route(resumed.version, None)  # a version is a digest: who has those bits needs none
    assert (route.chain.entries, route.chain.version) == ([], same_bits.version)


def test_a_restart_serves_the_same_log(tmp_path: Path) -> None:
    store, versions = filled(tmp_path)
    again = WeightStore(tmp_path, "run-a", sync=False)
    assert again.newest() == store.newest() and again.log.lineage == LINEAGE
    assert kinds(again.route(versions[2].version, None)) == [("delta", 3), ("delta", 4)]
    assert put(again, versions[4], version(5)) == Stored(version(5).version, 5)


def test_what_a_crash_left_is_removed_and_never_served(tmp_path: Path) -> None:
    store, versions = filled(tmp_path)
    publish, _chunks = messages(None, version(5))
    store.begin("learner", publish)  # killed in the middle of a publish
    torn = tmp_path / "00000007-0000000004.delta"
    torn.write_bytes(torn.read_bytes()[:-20])
    damaged = tmp_path / "00000007-0000000003.delta"
    data = bytearray(damaged.read_bytes())
    data[12] ^= 1
    damaged.write_bytes(data)
    for path in (torn, damaged):
        with pytest.raises(Damaged):
            read(path)
    again = WeightStore(tmp_path, "run-a", sync=False)
    assert again.newest() == versions[2].version
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00000007-0000000000.snapshot",
        "00000007-0000000001.delta",
        "00000007-0000000002.delta",
    ]


def test_a_hole_in_the_log_is_not_bridged(tmp_path: Path) -> None:
    """Field failure: base v0 + deltas 5, 6, 7 with 1-4 gone."""
    _, versions = filled(tmp_path)
    (tmp_path / "00000007-0000000002.delta").unlink()
    again = WeightStore(tmp_path, "run-a", sync=False)
    assert "no snapshot leads" in again.route(versions[0].version, None).chain.reason
    assert kinds(again.route(versions[2].version, None)) == [("delta", 3), ("delta", 4)]
    assert put(again, None, version(5)) == Stored(version(5).version, 5)
    assert kinds(again.route(versions[0].version, None)) == [("snapshot", 5)]


def test_weights_of_another_run_are_refused(tmp_path: Path) -> None:
    """Field failure: left-over weights of run A are read by run B in the same folder."""
    filled(tmp_path)
    with pytest.raises(ConfigError, match=r"run run-a, this is run run-b"):
        WeightStore(tmp_path, "run-b", sync=False)


def test_retires_what_nobody_needs_and_nothing_else(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 6)
    put(store, None, versions[5])
    assert store.retain([versions[4].version], [2]) > 0
    assert sorted(p.name[9:] for p in tmp_path.iterdir()) == [
        "0000000000.snapshot",
        "0000000001.delta",
        "0000000002.delta",
        "0000000005.delta",
        "0000000005.snapshot",
    ]
    assert kinds(store.route(versions[4].version, None)) == [("delta", 5)]
    assert kinds(store.route(None, 2)) == [("snapshot", 0), ("delta", 1), ("delta", 2)]
    assert kinds(store.route(versions[3].version, None)) == [("snapshot", 5)]
    store.retain()
    assert [p.name[9:] for p in tmp_path.iterdir()] == ["0000000005.snapshot"]
    assert put(store, versions[5], version(6)) == Stored(version(6).version, 6)


def test_a_peer_that_was_just_served_keeps_its_way_until_it_leaves(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 3)
    store.route(None, None, "actor")
    put(store, versions[2], version(3))
    put(store, None, version(3))
    store.retain()
    assert kinds(store.route(versions[2].version, None)) == [("delta", 3)]
    store.forget("actor")
    store.retain()
    assert kinds(store.route(versions[2].version, None)) == [("snapshot", 3)]


def test_what_is_being_served_survives_its_retirement(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 3)
    route = store.route(None, None)
    put(store, None, version(3))
    store.retain()
    assert result(route, None) == versions[2].version


def test_composes_a_snapshot_when_the_chain_outgrows_half_of_one(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "run-a", sync=False)
    base = version(0)
    put(store, None, base)
    composed_after = None
    for ordinal in range(1, 60):
        values = base.tensors["w"].bits.copy()
        values[ordinal::9] += np.uint32(ordinal * 1000)
        new = seal(ordinal, LINEAGE, {"w": TensorBits("float32", values.shape, values)})
        put(store, base, new)
        base = new
        work = store.compose()
        if work is not None:
            composed_after = composed_after or ordinal
            store.adopt(work())
            assert kinds(store.route(None, None)) == [("snapshot", ordinal)]
            assert store.compose() is None
    assert composed_after is not None and 3 <= composed_after <= 30
    assert result(store.route(None, None), None) == base.version
    assert WeightStore(tmp_path, "run-a", sync=False).newest() == base.version


def test_a_snapshot_composed_for_an_orphaned_version_is_dropped(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "run-a", sync=False)
    base, new = version(0), seal(1, LINEAGE, {"w": TensorBits("float32", (4000,), np.arange(4000, dtype=np.uint32))})
    put(store, None, base)
    put(store, base, new)
    work = store.compose()
    assert work is not None
    put(store, None, version(1, lineage=8))
    store.adopt(work())
    assert [p.name for p in tmp_path.iterdir()] == ["00000008-0000000001.snapshot"]


def test_a_full_disk_is_an_environment_fault_and_leaves_nothing(tmp_path: Path) -> None:
    store, versions = filled(tmp_path, 1)
    publish, chunks = messages(versions[0], version(1))
    store.begin("learner", publish)
    assert store._incoming is not None
    full = open("/dev/full", "wb")  # noqa: SIM115
    store._incoming.writer._fd = full.fileno()
    with pytest.raises(EnvironmentFault, match="free space"):
        store.chunk("learner", *with_view(chunks[0]))
    assert not list(tmp_path.glob(f"*{PART}"))
    with pytest.raises(OSError):
        full.close()
