"""The weight codec: exact for every bit pattern and dtype, refuses everything that does not lead where it claims."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.common import coding, delta, rice, sparse
from temper.common.bits import ITEM_BYTES, TensorBits, Weights, seal, unsigned
from temper.common.delta import DeltaError
from temper.common.errors import TemperError
from temper.common.float_bits import classes
from temper.common.weight_format import CHUNK_BYTES, unpack

LINEAGE = 7
SPECIAL_F32 = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45, -1e-45], np.float32)


def bits_equal(a: Weights, b: Weights) -> bool:
    return a.version == b.version and all((a.tensors[n].bits == b.tensors[n].bits).all() for n in b.tensors)


def own(weights: Weights) -> Weights:
    """A copy whose arrays the caller may write to, as an actor holds it."""
    tensors = {n: TensorBits(t.dtype, t.shape, t.bits.copy()) for n, t in weights.tensors.items()}
    return Weights(weights.version, tensors, dict(weights.digests))


def weights(ordinal: int, base: Weights | None = None, **arrays: np.ndarray) -> Weights:
    return seal(ordinal, LINEAGE, {name: TensorBits.of(array) for name, array in arrays.items()}, base)


def through(chunks: list[bytes], base: Weights | None) -> Weights:
    return delta.overwrite(own(base) if base else None, delta.stage(chunks, base))


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Weights, Weights]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new = {}, {}
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        size = draw(st.sampled_from([0, 1, 7, 300, 5000, 70_000]))
        kind = unsigned(dtype)
        before = rng.integers(0, 1 << (8 * kind.itemsize), size, kind)
        after = before.copy()
        where = rng.random(size) < draw(st.sampled_from([0.0, 0.002, 0.05, 0.5, 1.0]))
        if draw(st.booleans()):
            after[where] += rng.choice(np.array([1, -1, 2, -3], np.int64), where.sum()).astype(kind)
        else:
            after[where] = rng.integers(0, 1 << (8 * kind.itemsize), int(where.sum()), kind)
        old[f"t{i}"], new[f"t{i}"] = TensorBits(dtype, (size,), before), TensorBits(dtype, (size,), after)
    base = seal(3, LINEAGE, old)
    return base, seal(5, LINEAGE, new, base)


@settings(max_examples=60, deadline=None)
@given(two_versions())
def test_a_delta_and_a_snapshot_reproduce_every_bit(versions: tuple[Weights, Weights]) -> None:
    base, new = versions
    assert bits_equal(through(list(delta.encode(base, new)), base), new)
    assert bits_equal(through(list(delta.encode(None, new)), None), new)
    assert bits_equal(through(list(delta.encode(None, new)), base), new)


def test_nan_payloads_and_negative_zero_are_exact() -> None:
    base = weights(0, w=np.concatenate([SPECIAL_F32, np.ones(1000, np.float32)]))
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000000, 0x7F800001], np.uint32)
    changed = base.tensors["w"].bits.copy()
    changed[: patterns.size] = patterns
    new = seal(1, LINEAGE, {"w": TensorBits("float32", (1007,), changed)}, base)
    update = delta.stage(list(delta.encode(base, new)), base)
    assert update.changed[0].kind == "sparse"
    assert bits_equal(delta.overwrite(own(base), update), new)


def test_minus_zero_to_zero_is_a_change() -> None:
    base, new = weights(0, w=np.zeros(1000, np.float32)), weights(1, w=np.full(1000, -0.0, np.float32))
    assert base.version.digest != new.version.digest
    assert bits_equal(through(list(delta.encode(base, new)), base), new)


def test_every_bf16_pattern_survives_every_form() -> None:
    old = np.arange(65536, dtype=np.uint16)
    sparse, dense = old.copy(), np.roll(old, 1)
    sparse[::7] ^= 1
    for kind, new in ((coding.SPARSE, sparse), (coding.DENSE, dense)):
        coded = coding.encode(old, new, "bfloat16")
        assert coded is not None and coded.kind == kind
        patch = coding.decode(coded, old, new.size, new.dtype, "bfloat16")
        result = old.copy()
        result[slice(None) if patch.indices is None else patch.indices] = patch.values
        assert (result == new).all()


def test_only_changed_tensors_are_patched_and_an_unchanged_version_is_empty() -> None:
    base = weights(0, a=np.ones(10, np.float32), b=np.ones(10, np.float32))
    new = weights(1, base, a=np.ones(10, np.float32), b=np.zeros(10, np.float32))
    assert [patch.name for patch in delta.stage(list(delta.encode(base, new)), base).changed] == ["b"]
    again = weights(2, base, a=np.ones(10, np.float32), b=np.ones(10, np.float32))
    update = delta.stage(list(delta.encode(base, again)), base)
    assert update.changed == [] and update.digest == base.version.digest


def test_a_chain_leads_from_any_of_its_versions_to_the_last() -> None:
    rng = np.random.default_rng(1)
    versions = [weights(0, w=rng.standard_normal(5000).astype(np.float32))]
    for i in range(1, 5):
        w = versions[-1].tensors["w"].bits.view(np.float32).copy()
        w[rng.integers(0, 5000, 50)] += 1e-3
        versions.append(weights(i, versions[-1], w=w))
    links = [list(delta.encode(a, b)) for a, b in itertools.pairwise(versions)]
    for have in range(4):
        chunks = [chunk for link in links[have:] for chunk in link]
        update = delta.stage(chunks, versions[have])
        assert update.entries == 4 - have and (np.diff(update.changed[0].indices) > 0).all()
        assert bits_equal(through(chunks, versions[have]), versions[4])
    snapshot = list(delta.encode(None, versions[1]))
    assert bits_equal(through(snapshot + links[1] + links[2] + links[3], None), versions[4])


def test_a_composed_snapshot_is_the_learners_own() -> None:
    rng = np.random.default_rng(1)
    base = weights(0, w=rng.standard_normal(100_000).astype(np.float32))
    new = weights(1, base, w=base.tensors["w"].bits.view(np.float32) + np.float32(1e-3))
    chain = list(delta.encode(None, base)) + list(delta.encode(base, new))
    assert list(delta.compose(chain)) == list(delta.encode(None, new))


def three_versions() -> tuple[list[Weights], list[list[bytes]]]:
    versions = [weights(0, w=np.ones(100, np.float32))]
    for i in (1, 2):
        versions.append(weights(i, w=np.full(100, i + 1, np.float32)))
    return versions, [list(delta.encode(a, b)) for a, b in itertools.pairwise(versions)]


def reason(chunks: list[bytes], base: Weights | None) -> str:
    with pytest.raises(DeltaError) as caught:
        delta.stage(chunks, base)
    return str(caught.value.reason)


def test_a_pruned_chain_is_refused() -> None:
    """Field failure: base v0 + deltas 5, 6, 7 with 1-4 gone."""
    versions, links = three_versions()
    assert reason(links[1], versions[0]) == "base"
    third = weights(3, w=np.zeros(100, np.float32))
    assert reason(links[0] + list(delta.encode(versions[2], third)), versions[0]) == "gap"


def test_a_delta_needs_its_base_a_table_needs_its_layout() -> None:
    versions, links = three_versions()
    assert reason(links[0], None) == "base"
    assert reason([], versions[0]) == "truncated"
    other = weights(1, v=np.ones(3, np.float32))
    with pytest.raises(DeltaError, match="does not hold the tensors"):
        delta.encode(versions[0], other)


def large_snapshot() -> tuple[Weights, list[bytes]]:
    new = weights(1, a=np.random.default_rng(0).integers(0, 1 << 32, 10 << 20, np.uint32), b=np.ones(9, np.uint8))
    return new, list(delta.encode(None, new))


def test_large_tensors_travel_in_bounded_chunks_and_any_disorder_is_found() -> None:
    new, chunks = large_snapshot()
    assert len(chunks) == 4 and max(map(len, chunks)) <= CHUNK_BYTES
    assert bits_equal(through(chunks, None), new)
    for broken in (chunks[:-1], chunks[1:], [chunks[0], *chunks[2:]], [chunks[1], chunks[0], *chunks[2:]]):
        assert reason(broken, None) in ("gap", "truncated")
    assert reason([chunks[0], chunks[0], *chunks[1:]], None) == "gap"


def test_a_flipped_bit_never_passes() -> None:
    base = weights(0, w=np.ones(3000, np.float32), v=np.ones(100, np.float32))
    w = np.ones(3000, np.float32)
    w[::40] += 1e-5
    w[7] = -3.0
    new = weights(1, base, w=w, v=np.full(100, 2, np.float32))
    (chunk,) = delta.encode(base, new)
    harmless = 0
    for position in range(len(chunk) * 8):
        damaged = bytearray(chunk)
        damaged[position // 8] ^= 1 << (position % 8)
        try:
            update = delta.stage([bytes(damaged)], base)
        except DeltaError:
            continue
        harmless += 1  # padding bits, or the ordinal and lineage, which the digest does not cover
        result = delta.overwrite(own(base), update)
        assert all((result.tensors[n].bits == new.tensors[n].bits).all() for n in new.tensors)
    assert harmless < 250, harmless


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_noise_is_an_error_with_a_reason(noise: bytes) -> None:
    assert reason([noise], None) in ("malformed", "truncated", "gap")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_forged_piece_is_an_error_not_a_crash(data: st.DataObject) -> None:
    base = np.arange(1000, dtype=np.uint16)
    coded = coding.Coded(
        data.draw(st.integers(0, 5)),
        tuple(data.draw(st.lists(st.integers(-3, 2000), max_size=6))),
        tuple(data.draw(st.lists(st.binary(max_size=60), max_size=8))),
    )
    try:
        patch = coding.decode(coded, base, base.size, base.dtype, "bfloat16")
    except TemperError:
        return
    assert patch.values.dtype == base.dtype
    assert patch.indices is None or (patch.indices[0] >= 0 and patch.indices[-1] < base.size)


def test_overwriting_twice_is_harmless_and_a_foreign_base_is_refused() -> None:
    """Field failure: XOR replayed after a half-failed apply undoes the half that worked."""
    versions, links = three_versions()
    mine, update = own(versions[0]), delta.stage(links[0], versions[0])
    mine.tensors["w"].bits[:50] = update.changed[0].values[:50]  # half of it worked, then the process was interrupted
    once = delta.overwrite(mine, update)
    assert bits_equal(once, versions[1]) and bits_equal(delta.overwrite(once, update), versions[1])
    with pytest.raises(DeltaError, match="another version"):
        delta.overwrite(own(versions[2]), update)


def test_threads_do_not_change_the_bytes() -> None:
    rng = np.random.default_rng(0)
    w = rng.integers(0, 1 << 16, 17 << 20, np.uint16)
    changed = w.copy()
    changed[rng.integers(0, w.size, 50_000)] ^= 1
    base = seal(0, LINEAGE, {"w": TensorBits("bfloat16", (w.size,), w)})
    new = seal(1, LINEAGE, {"w": TensorBits("bfloat16", (w.size,), changed)}, base)
    tally = delta.Tally()
    one, two = list(delta.encode(base, new, tally=tally)), list(delta.encode(base, new, threads=2))
    assert one == two and tally.changed == int((w != changed).sum()) and tally.nbytes == sum(map(len, one))
    assert delta.stage(one, base, threads=2).digest == new.version.digest


def test_bits_refuse_what_they_cannot_stand_for() -> None:
    with pytest.raises(TemperError, match="float64"):
        TensorBits.of(np.ones(3))
    with pytest.raises(TemperError, match="bfloat16"):
        TensorBits.of(np.ones(3, np.float32), "bfloat16")
    with pytest.raises(TemperError, match="for shape"):
        TensorBits("float32", (4,), np.zeros(3, np.uint32))


def test_the_format_names_its_version() -> None:
    (chunk,) = delta.encode(None, weights(1, w=np.ones(3, np.float32)))
    meta, _ = unpack(chunk)
    assert meta.head is not None and (meta.head.format, meta.head.format_version) == ("temper-weights", 1)
    foreign = chunk.replace(b"temper-weights", b"temper-wEights")
    with pytest.raises(DeltaError, match="install the same version"):
        delta.stage([foreign], None)


FLOATS = {"float32": 23, "bfloat16": 7, "float16": 10, "float8_e4m3fn": 3, "float8_e5m2": 2}


def trained(dtype: str, size: int, update: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bits of `dtype` (truncated from fp32) before and after every fp32 master moved by about `update`, as Adam does."""
    rng = np.random.default_rng(seed)
    before = (rng.standard_normal(size) * 0.05).astype(np.float32)
    after = (before + update * rng.standard_normal(size)).astype(np.float32)
    shift = 32 - 8 * unsigned(dtype).itemsize
    if dtype in ("float16", "float8_e4m3fn"):  # not a prefix of fp32: any monotone map of the numbers will do
        return tuple((np.abs(x) * 2**12).astype(np.uint32).astype(unsigned(dtype)) for x in (before, after))
    return tuple((x.view(np.uint32) >> shift).astype(unsigned(dtype)) for x in (before, after))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(FLOATS)),
    st.sampled_from([40, 3000, 100_000]),
    st.floats(1e-8, 1e-2),
    st.integers(0, 99),
    st.sampled_from([1, 2, sparse.CLASSES]),
)
def test_a_training_step_is_exact_in_every_float_dtype_however_many_classes_a_writer_tells_apart(
    dtype: str, size: int, update: float, seed: int, told_apart: int
) -> None:
    old, new = trained(dtype, size, update, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sparse, "WRITTEN_CLASSES", told_apart)
        coded = coding.encode(old, new, dtype)
    if coded is None:
        assert (old == new).all()
        return
    patch = coding.decode(coded, old, size, old.dtype, dtype)
    result = old.copy()
    result[slice(None) if patch.indices is None else patch.indices] = patch.values
    assert (result == new).all()
    if patch.indices is not None:
        assert np.unique(patch.indices).size == patch.indices.size == int((old != new).sum())


def test_telling_small_values_apart_comes_near_the_entropy_of_that_and_beats_that_of_the_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = trained("bfloat16", 1 << 20, 2e-6)
    monkeypatch.setattr(sparse, "PASS_BITS", 0.0)
    coded = coding.encode(old, new, "bfloat16")
    assert coded is not None and coded.kind == coding.SPARSE
    kinds, differ = classes(old, "bfloat16"), old != new

    def entropy(among: np.ndarray) -> float:
        share = differ[among].mean() if among.any() else 0.0
        return -among.sum() * sum(p * np.log2(p) for p in (share, 1 - share) if p)

    positions = entropy(np.ones(old.size, bool)) + coded.changed
    told_apart = min(entropy(kinds < bound) + entropy(kinds >= bound) for bound in np.unique(kinds)) + coded.changed
    assert 0.002 < coded.changed / old.size < 0.05
    assert 8 * sum(map(len, coded.streams[:3])) < 1.05 * told_apart < 0.9 * positions
    assert 8 * coded.nbytes < 0.98 * positions


@pytest.mark.parametrize("update", [1e-7, 5e-7, 1e-5, 3e-5])  # far enough from the price: what is saved is estimated
def test_values_are_told_apart_where_that_saves_more_than_the_time_of_the_pass_is_worth(
    update: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = trained("bfloat16", 1 << 20, update)
    price, sizes = sparse.PASS_BITS, {}
    for asked in (0.0, price, 100.0):
        monkeypatch.setattr(sparse, "PASS_BITS", asked)
        coded = coding.encode(old, new, "bfloat16")
        assert coded is not None and coded.kind == coding.SPARSE
        sizes[asked] = 8 * coded.nbytes / old.size, coded.parameters[0] > 0  # bits a value, any class
    (least, told), (usual, chosen), (most, _) = sizes.values()
    assert told and most > least  # it would save something in each case
    assert chosen == (usual < most)
    assert chosen == (most - least > price) == (update > 1e-6)


@pytest.mark.parametrize("mean", [0.0, 0.01, 0.4, 1.0, 7.0, 300.0, 1e7])
def test_rice_runs_come_back_and_are_near_the_entropy(mean: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.geometric(1 / (mean + 1), 5000).astype(np.int64) - 1
    k = rice.best_shift(float(values.mean()))
    assert rice.cost_bits(values, k) == min(rice.cost_bits(values, other) for other in range(40)) or mean == 0.01
    unary, low = rice.encode([(values, k), (values[:7], 3), (values[:0], 0)])
    reader = rice.Reader(memoryview(unary), memoryview(low))
    assert (reader.take(5000, k) == values).all() and (reader.take(7, 3) == values[:7]).all()
    assert reader.take(0, 0).size == 0
    reader.finish()
    if mean >= 1.0:
        p = 1 / (mean + 1)
        entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) / p * values.size
        assert rice.cost_bits(values, k) < 1.06 * entropy


@pytest.mark.parametrize("k", [1, 3, 7, 8, 13, 30])
def test_low_bits_lie_whole_bytes_first_then_one_value_after_the_other(k: int) -> None:
    rng = np.random.default_rng(k)
    for n in (1, 7, 8, 9, 1001):
        values = rng.integers(0, 1 << k, n)
        unary, low = rice.encode([(values, k)])
        numbers = [int(value) for value in values]
        planes = b"".join(bytes(number >> shift & 255 for number in numbers) for shift in range(0, k - 7, 8))
        rest, width = [number >> (k - k % 8) for number in numbers], k % 8
        packed = sum(number << (i * width) for i, number in enumerate(rest))
        assert low == planes + packed.to_bytes((n * width + 7) // 8, "little")
        assert (rice.Reader(memoryview(unary), memoryview(low)).take(n, k) == values).all()
