"""Samples are checked before they are taken, and groups become messages within the protocol's limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from temper.broker import assembly, intake
from temper.broker.assembly import Unsendable, build_group
from temper.broker.bulk import BulkDesk
from temper.broker.bundle import BUNDLE_LIMIT_BYTES, BundleStore, digest
from temper.broker.guests import Guests
from temper.broker.leases import LeaseRecord
from temper.broker.messages import Messages
from temper.broker.packed import apart as apart_again
from temper.broker.validate import BadSamples, check, check_metrics
from temper.common import arrays as arrays_module
from temper.common import burst, schema
from temper.common.arrays import divide, pack_arrays, unpack_arrays
from temper.common.delivery import Delivery, DeliveryRun
from temper.common.errors import ProtocolError
from temper.common.link import KEEP_FROM_BYTES
from temper.common.metrics import Meter
from temper.common.peer_daemon import metrics_of
from temper.common.wire import FRAME_LIMIT_BYTES, pack_meta, unpack_meta

LENGTHS = (5, 3)


def arrays(**changed: Any) -> dict[str, np.ndarray]:
    total = sum(LENGTHS)
    given = {
        "tokens": np.arange(total, dtype=np.int32),
        "behaviour_logprob": np.array([0, 0, -1, -2, -0.5, 0, 0, -3], np.float32),
        "loss_mask": np.array([0, 0, 1, 1, 1, 0, 0, 1], np.uint8),
        "cu_seqlens": np.array([0, 5, 8], np.int64),
        **changed,
    }
    return {name: array for name, array in given.items() if array is not None}


def metas(**changed: Any) -> list[schema.SampleMeta]:
    first = schema.SampleMeta(0, "stop", 1.0, True, {"outcome": 1.0}, "ok", [(1, 4, 3), (1, 5, 2)], [(4, 0.5)], "key")
    second = schema.SampleMeta(1, "length", None, None, {}, "infra", [(1, 4, 3)])
    return [msgspec.structs.replace(first, **changed), second]


def verify(samples: list[schema.SampleMeta] | None = None, **changed: Any) -> None:
    specs, frames = pack_arrays(arrays(**changed))
    check(schema.Samples(0, 1, 1, metas() if samples is None else samples, specs), frames)


def test_honest_samples_pass() -> None:
    verify()
    support = {"support_ids": np.arange(16, dtype=np.int32), "support_cu": np.arange(9, dtype=np.int64) * 2}
    verify(**support)
    experts = np.arange(48, dtype=np.int16).reshape(8, 6) - 1
    verify(routed_experts=experts)
    verify(routed_experts=experts, **support)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"behaviour_logprob": np.zeros(7, np.float32)}, "7 values of behaviour_logprob for 8 tokens"),
        ({"loss_mask": np.zeros(9, np.uint8)}, "9 values of loss_mask for 8 tokens"),
        ({"cu_seqlens": np.array([0, 5, 9], np.int64)}, r"cu_seqlens \[0, 5, 9\]... does not divide 8 tokens"),
        ({"cu_seqlens": np.array([0, 9, 8], np.int64)}, "does not divide"),
        ({"cu_seqlens": np.array([0, 8], np.int64)}, "among 2 samples"),
        ({"cu_seqlens": np.array([1, 5, 8], np.int64)}, "does not divide"),
        ({"cu_seqlens": np.array([0, 7, 8], np.int64)}, "expected a prompt and a completion"),
        ({"behaviour_logprob": np.full(8, np.nan, np.float32)}, "not finite"),
        ({"behaviour_logprob": np.full(8, -np.inf, np.float32)}, "not finite"),
        ({"behaviour_logprob": np.full(8, 0.5, np.float32)}, "log-probability is 0.5, expected at most 0"),
        ({"loss_mask": np.full(8, 1, np.uint8)}, "no prompt"),
        ({"loss_mask": np.array([0, 2, 1, 1, 1, 0, 0, 1], np.uint8)}, "loss_mask holds 2"),
        ({"tokens": np.full(8, -1, np.int32)}, "token id -1"),
        (
            {"support_ids": np.zeros(3, np.int32), "support_cu": np.arange(9, dtype=np.int64)},
            "support_cu .* does not divide 3 support_ids among 8 tokens",
        ),
        ({"routed_experts": np.zeros((7, 4), np.int16)}, r"routed_experts of shape \[7, 4\] for 8 tokens"),
        ({"routed_experts": np.zeros((8, 0), np.int16)}, r"routed_experts of shape \[8, 0\] for 8 tokens"),
        ({"routed_experts": np.full((8, 4), -2, np.int16)}, "routed_experts holds -2, expected experts or -1"),
    ],
)
def test_values_that_cannot_be_trained_on_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSamples, match=message):
        verify(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": math.nan}, "has the reward nan"),
        ({"reward": math.inf}, "has the reward inf"),
        ({"components": {"style": math.nan}}, "reward components"),
        ({"step_rewards": [(5, 1.0)]}, "step reward of 1.0 at token 5 of 5"),
        ({"step_rewards": [(0, math.nan)]}, "step reward of nan"),
        ({"version_runs": [(1, 4, 4)]}, "version runs over 4 tokens, it has 5"),
        ({"version_runs": [(1, 4, 6), (1, 5, -1)]}, "version runs"),
    ],
)
def test_facts_that_make_no_sense_are_refused_with_the_reason(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSamples, match=message):
        verify(metas(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": None}, "without the array 'tokens'"),
        ({"tokens": np.zeros(8, np.int64)}, r"'tokens' is int64\[8\], expected int32"),
        ({"tokens": np.zeros((2, 4), np.int32)}, r"int32\[2, 4\]"),
        ({"support_ids": np.zeros(3, np.int32)}, "without the array 'support_cu'"),
        ({"support_ids": np.zeros(3, np.int32), "tokens": None}, "without the array 'tokens'"),
        ({"routed_experts": np.zeros((8, 4), np.int16), "tokens": None}, "without the array 'tokens'"),
        ({"routed_experts": np.zeros(8, np.int16)}, r"int16\[8\], expected int16 in two dimensions"),
        ({"routed_experts": np.zeros((8, 4), np.int32)}, r"int32\[8, 4\], expected int16"),
        ({"routed_experts": np.full((8, 4), np.nan, np.float32)}, r"float32\[8, 4\], expected int16"),
    ],
)
def test_wrong_arrays_are_an_offence(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        verify(**changed)


def test_no_samples_and_missing_frames_are_offences() -> None:
    with pytest.raises(ProtocolError, match="without a sample"):
        verify([])
    specs, frames = pack_arrays(arrays())
    with pytest.raises(ProtocolError, match="4 arrays in 0 frames"):
        check(schema.Samples(0, 1, 1, metas(), specs), frames[:-1])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tokens", "behaviour_logprob", "loss_mask", "cu_seqlens", "routed_experts", "x"]),
            st.sampled_from(["int32", "float32", "uint8", "int64", "int16", "complex128"]),
            st.lists(st.integers(-3, 40), max_size=3),
            st.binary(max_size=64),
        ),
        max_size=6,
    )
)
def test_no_array_description_does_more_than_be_refused(parts: list[tuple[str, str, list[int], bytes]]) -> None:
    specs = [schema.ArraySpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in parts]
    try:
        check(schema.Samples(0, 1, 1, metas(), specs), [data for *_, data in parts])
    except (ProtocolError, BadSamples):
        return


def record(size: int = 64) -> LeaseRecord:
    return LeaseRecord(7, "train", "a", 0, 1, size)


def message(samples: list[schema.SampleMeta], values: dict[str, np.ndarray]) -> tuple[bytes, list[Any]]:
    """A Samples message as the broker keeps it."""
    specs, frames = pack_arrays(values)
    return pack_meta(schema.Samples(7, 1, 1, samples, specs)), frames


def arrived(body: schema.Group, frames: list[Any]) -> list[tuple[schema.Samples, list[Any]]]:
    """The parts of a Group after its way over the wire, each with its own frames."""
    body = unpack_meta(pack_meta(body), schema.Group)
    parts = body.parts
    if body.facts:
        parts, frames = schema.unpack_frames(frames[: body.facts], list[schema.Samples]), frames[body.facts :]
    return list(zip(parts, divide([part.arrays for part in parts], frames), strict=True))


def test_a_group_of_large_messages_passes_its_frames_through_untouched() -> None:
    part = message(*one(4000))
    body, out = build_group(record(), [part, part], 3, None)
    assert [id(frame) for frame in out] == [id(frame) for frame in [*part[1], *part[1]]]
    assert (body.group_id, body.lineage, len(body.parts)) == (7, 3, 2)


def test_small_messages_share_frames_in_a_group_around_the_large_ones() -> None:
    small, large = message(metas(), arrays()), message(*one(4000))
    body, out = build_group(record(), [small, large, small], 3, None)
    assert len(out) == 3 and out[1] is large[1][0]
    parts = arrived(body, out)
    assert [len(part.samples) for part, _ in parts] == [2, 1, 2]
    for part, own in parts:
        check(part, own)


@pytest.mark.parametrize(
    ("limit", "count", "expected"),
    [
        pytest.param(FRAME_LIMIT_BYTES, 40, 40, id="each-alone"),
        pytest.param(FRAME_LIMIT_BYTES, 60, 1, id="all-joined"),
        pytest.param(80_000, 20, 7 * 9, id="arrays-merged"),
    ],
)
def test_a_group_of_many_messages_is_joined_without_changing_a_sample(
    limit: int, count: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays_module, "FRAME_LIMIT_BYTES", limit)
    monkeypatch.setattr(assembly, "FRAME_LIMIT_BYTES", limit)
    parts = []
    rows = []
    for i in range(count):
        row = arrays(
            tokens=np.arange(8, dtype=np.int32) + 100 * i,
            support_ids=np.arange(6000, dtype=np.int32) * i,
            support_cu=np.arange(9, dtype=np.int64) * 750,
            **{f"extra{n}": np.full(6000, n + i, np.int32) for n in range(3)},
        )
        parts.append(message([msgspec.structs.replace(m, index=2 * i + m.index) for m in metas()], row))
        rows.append(row)
    body, frames = build_group(record(2 * count), parts, 3, None)
    assert len(frames) == expected
    index = 0
    for part, own in arrived(body, frames):
        joined = unpack_arrays(part.arrays, own)
        for position, meta in enumerate(part.samples):
            assert meta.index == index
            row = rows[index // 2]
            start, stop = row["cu_seqlens"][index % 2], row["cu_seqlens"][index % 2 + 1]
            at, end = joined["cu_seqlens"][position], joined["cu_seqlens"][position + 1]
            for name in ("tokens", "behaviour_logprob", "loss_mask"):
                assert joined[name][at:end].tolist() == row[name][start:stop].tolist()
            cu = joined["support_cu"]
            assert (
                joined["support_ids"][cu[at] : cu[end]].tolist()
                == row["support_ids"][750 * start : 750 * stop].tolist()
            )
            index += 1
    assert index == 2 * count


def test_facts_that_fit_no_meta_travel_in_frames() -> None:
    """A group of many samples with long keys has more than 64 KiB of facts: it is sent all the same."""
    parts = [
        message([msgspec.structs.replace(m, index=2 * i + m.index, task_key="x" * 1000) for m in metas()], arrays())
        for i in range(100)
    ]
    body, frames = build_group(record(200), parts, 3, None)
    assert body.facts == 1 and body.parts == [] and len(pack_meta(body)) < 1000
    found = arrived(body, frames)
    assert [meta.index for part, _ in found for meta in part.samples] == list(range(200))
    for part, own in found:
        check(part, own)


def test_a_group_that_fits_no_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arrays_module, assembly):
        monkeypatch.setattr(module, "FRAME_LIMIT_BYTES", 50_000)  # each array has its own
    different = [message(metas()[:1], one(4000)[1] | {f"extra{i}": np.zeros(5000, np.int32)}) for i in range(20)]
    with pytest.raises(Unsendable, match="100 frames, at most 64"):
        build_group(record(), different, 1, None)


def read(samples: list[schema.SampleMeta], values: dict[str, np.ndarray]) -> tuple[intake.Intake, list[bytes]]:
    meta, frames = message(samples, values)
    return intake.read(meta), [bytes(frame) for frame in frames]


def one(tokens: int, changed: dict[str, Any] | None = None) -> tuple[list[schema.SampleMeta], dict[str, np.ndarray]]:
    """A message of one sample, the usual shape; `changed` values of its arrays or facts."""
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    values = {
        "tokens": np.arange(tokens, dtype=np.int32),
        "behaviour_logprob": np.full(tokens, -1, np.float32),
        "loss_mask": mask,
        "cu_seqlens": np.array([0, tokens], np.int64),
    }
    meta = schema.SampleMeta(0, "stop", 1.0, True, {"outcome": 1.0}, "ok", [(1, 4, tokens)])
    changed = changed or {}
    facts = {name: value for name, value in changed.items() if name not in values}
    return [msgspec.structs.replace(meta, **facts)], values | {n: v for n, v in changed.items() if n in values}


WRONG: list[dict[str, Any]] = [
    {"tokens": np.full(6, -1, np.int32)},
    {"behaviour_logprob": np.array([0, 0, 0, np.nan, 0, 0], np.float32)},
    {"behaviour_logprob": np.full(6, -np.inf, np.float32)},
    {"behaviour_logprob": np.full(6, 0.1, np.float32)},
    {"loss_mask": np.ones(6, np.uint8)},
    {"loss_mask": np.array([0, 2, 1, 1, 1, 1], np.uint8)},
    {"cu_seqlens": np.array([0, 5], np.int64)},
    {"cu_seqlens": np.array([0, 6, 6], np.int64)},
    {"tokens": np.zeros(6, np.int64)},
    {"loss_mask": np.ones(5, np.uint8)},
    {"reward": math.inf},
    {"components": {"style": math.nan}},
    {"version_runs": [(1, 4, 5)]},
    {"version_runs": [(1, 4, 9), (1, 4, -3)]},
    {"step_rewards": [(6, 1.0)]},
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.just(6), st.integers(2, 40), st.sampled_from(WRONG)), max_size=16))
def test_many_messages_at_once_are_judged_as_each_alone(kinds: list[Any]) -> None:
    made = [one(kind) if isinstance(kind, int) else one(6, kind) for kind in kinds]
    messages = [read(*each) for each in made]
    found = intake.faults([body for body, _ in messages], [frames for _, frames in messages])
    for i, (kind, (samples, values)) in enumerate(zip(kinds, made, strict=True)):
        fault = found.get(i)
        specs, frames = pack_arrays(values)
        body = schema.Samples(7, 1, 1, samples, specs)
        if isinstance(kind, int):
            assert fault is None
            check(body, frames)
        else:
            with pytest.raises((BadSamples, ProtocolError)) as alone:
                check(body, frames)
            assert type(fault) is alone.type and str(fault) == str(alone.value)


@settings(deadline=None)
@given(
    st.integers(intake.FEW, 12),
    st.integers(0, 11),
    st.one_of(st.none(), st.just(7), st.sampled_from(WRONG)),
    st.booleans(),
)
def test_a_run_is_one_table_if_nothing_is_wrong_with_any_of_its_messages(
    rows: int, at: int, odd: Any, apart: bool
) -> None:
    """`odd` is in the place of one of them: none, one of another length, or one with something wrong."""
    made = [one(6) for _ in range(rows)]
    if odd is not None:
        made[at % rows] = one(odd) if isinstance(odd, int) else one(6, odd)
    messages = [read(*each) for each in made]
    metas = [pack_meta(schema.Samples(7, 1, 1, samples, pack_arrays(values)[0])) for samples, values in made]
    frames = [tuple(map(bytes, own)) for _, own in messages]
    run = Messages()
    if apart or max(map(len, frames)) > 1:
        for meta, own in zip(metas, frames, strict=True):
            size = len(meta) + sum(map(len, own))
            run.add("actor", Delivery(b"actor", schema.Samples, (), schema.Samples.KIND, 1, size, meta, own))  # type: ignore[arg-type]
    else:
        meta, joined = burst.join(list(zip(metas, frames, strict=True)))
        outline = burst.outline(rows, schema.Samples.KIND, [meta, *joined])
        run.add("actor", DeliveryRun(b"actor", schema.Samples.KIND, rows, *outline))
    table = intake.uniform(run, [body for body, _ in messages])
    assert (table is None) == (odd is not None)
    if table is not None:
        assert table.joined == b"".join(own[0] for own in frames) and table.size == len(frames[0][0])
        for places in (range(rows), [*range(0, rows, 2)], [*range(0, rows - 2), rows - 1]):  # attempts in turns
            kept = [(meta, *map(bytes, own)) for meta, own in apart_again(table.kept(places))]
            assert kept == [(metas[i], *frames[i]) for i in places]
            arrival = table.arrival([body for body, _ in messages], places)
            assert arrival.nbytes == sum(len(frames[i][0]) for i in places)
            assert list(arrival.samples) == [sample for i in places for sample in made[i][0]]
    assert [tuple(map(bytes, own)) for own in run.frames] == frames


@pytest.mark.parametrize("limit", [FRAME_LIMIT_BYTES, 150_000])
@pytest.mark.parametrize("small", [0, 1, 6])
@pytest.mark.parametrize("wrong", [None, "tokens", "behaviour_logprob", "loss_mask"])
def test_frames_that_were_not_copied_are_judged_as_bytes_are(
    small: int, wrong: str | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last value of a large array is wrong, alone and beside small messages; arrays share a frame or each has its own."""
    monkeypatch.setattr(arrays_module, "FRAME_LIMIT_BYTES", limit)
    monkeypatch.setattr(intake, "_layouts", {})
    samples, values = one(20_000)
    if wrong is not None:
        values[wrong][-1] = {"tokens": -1, "behaviour_logprob": np.nan, "loss_mask": 2}[wrong]
    large, frames = read(samples, values)
    assert len(frames) == (1 if limit == FRAME_LIMIT_BYTES else 4)
    assert min(len(frame) for frame in frames[:3]) >= KEEP_FROM_BYTES
    messages = [read(*one(6)) for _ in range(small)] + [(large, [zmq.Frame(frame) for frame in frames])]
    found = intake.faults([body for body, _ in messages], [own for _, own in messages])
    expected = [str(fault) for fault in intake.faults([large], [frames]).values()]
    assert len(expected) == (wrong is not None)
    assert [(i, str(fault)) for i, fault in found.items()] == [(small, text) for text in expected]


def bundle(**files: bytes) -> tuple[schema.Bundle, list[bytes]]:
    entries = [schema.BundleFile(name, digest([data]), 1) for name, data in files.items()]
    return schema.Bundle(entries, "micro"), list(files.values())


def test_a_bundle_survives_the_process(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundle")
    body, frames = bundle(config=b"{}", empty=b"", tokenizer=b"t" * 1000)
    store.put(body, frames)
    again = BundleStore(tmp_path / "bundle")
    assert again.body == body
    assert [bytes(frame) for frame in again.frames] == frames
    (tmp_path / "bundle/config").write_bytes(b"{ }")
    assert BundleStore(tmp_path / "bundle").body is None


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "", ".hidden", "a/b", "..", "a\0b", "x" * 300, "a\nb", "bundle.json"]
)
def test_a_bundle_writes_only_plain_names(tmp_path: Path, name: str) -> None:
    body = schema.Bundle([schema.BundleFile(name, digest([b"x"]), 1)])
    with pytest.raises(ProtocolError, match="plain file name"):
        BundleStore(tmp_path / "bundle").put(body, [b"x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("role", "counters", "gauges", "reason"),
    [
        ("actor", {"actor/engine/sampled_tokens": math.nan}, {}, "is nan, expected a finite number"),
        ("actor", {}, {"actor/engine/rows_count": math.inf}, "is inf, expected a finite number"),
        ("actor", {}, {"broker/void/no contrast": 3.0}, "no gauge that a daemon of role actor reports"),
        ("sandbox", {"sandbox/made/up": 1.0}, {}, "no counter that a daemon of role sandbox reports"),
        ("eval", {"actor/engine/rows_count": 1.0}, {}, "no counter that a daemon of role eval reports"),
    ],
)
def test_metrics_that_nobody_can_add_up_are_an_offence(
    role: Any, counters: dict[str, float], gauges: dict[str, float], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        check_metrics(schema.Metrics("x", counters, gauges), role)


@pytest.mark.parametrize(
    ("role", "metrics"),
    [("actor", "actor"), ("eval", "actor"), ("sandbox", "sandbox"), ("learner", "learner"), ("broker", "relay")],
)
def test_every_metric_of_a_daemon_is_taken(role: Any, metrics: str) -> None:
    for message in metrics_of("x", Meter(metrics)):
        check_metrics(message, role)
    check_metrics(schema.Metrics("x", {"actor/weights/reseeds_by_reason_count/gap": 1.0}, {}), "actor")


def test_only_the_runs_learner_publishes_weights_and_the_bundle(tmp_path: Path) -> None:
    """Whatever role a peer names on the bulk socket."""
    guests = Guests("run")
    desk = BulkDesk(BundleStore(tmp_path / "bundle"), guests, pytest.fail)
    actor, learner = (schema.Hello(role, role, "s") for role in ("actor", "learner"))
    assert desk._is_learner(b"not let in yet", learner) and not desk._is_learner(b"not let in yet", actor)
    guests.add(b"a", actor)
    guests.add(b"l", learner)
    assert desk._is_learner(b"l", learner)
    assert not desk._is_learner(b"a", learner), "an actor that calls itself the learner on the bulk socket"
    assert not desk._is_learner(b"never let in", learner), "there is a learner"


def test_a_bundle_must_be_what_it_says(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundle")
    body, frames = bundle(config=b"{}")
    with pytest.raises(ProtocolError, match="digest"):
        store.put(body, [b"{!}"])
    with pytest.raises(ProtocolError, match="2 frames, its files name 1"):
        store.put(body, [*frames, b"more"])
    with pytest.raises(ProtocolError, match=f"at most {BUNDLE_LIMIT_BYTES}"):
        store.put(body, [bytes(BUNDLE_LIMIT_BYTES + 1)])


def test_domain_modules_are_compared_with_those_of_the_peers_that_are_here() -> None:
    """One version of a domain a run, but a departed peer's version binds nobody: a fleet can be upgraded."""
    guests = Guests("run")
    old, new = (schema.Hello("actor", name, "s", domains={"mine": name[:3]}) for name in ("old-1", "new-1"))
    guests.add(b"a", old)
    refused = guests.refusal(new)
    assert refused is not None and refused.code == "domain"
    assert (
        refused.reason == "domain module mine has digest new at new-1, old at old-1: install the same version on both"
    )
    assert guests.refusal(schema.Hello("actor", "old-1", "t", domains={"mine": "new"})) is None  # restarted
    guests.add(b"b", schema.Hello("actor", "old-2", "s", domains={"mine": "old", "other": "x"}))
    guests.remove(b"a")
    assert guests.refusal(new) is not None, "one of them is still here"
    assert guests.refusal(schema.Hello("actor", "old-3", "s", domains={"mine": "old", "third": "y"})) is None
    guests.remove(b"b")
    assert guests.refusal(new) is None
