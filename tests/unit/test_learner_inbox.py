"""A Group message becomes checked arrays; demand is never doubled."""

import msgspec
import numpy as np
import pytest
from temper.common.arrays import pack_arrays
from temper.common.errors import ProtocolError
from temper.common.schema import Group, SampleMeta, Samples
from temper.learner.inbox import GroupData, Inbox, parse_group, void_reason
from temper.learner.routing_replay import Routing


def message(lengths=((3, 2), (3, 1)), **changes):
    """A Group of one part: each sample has a prompt and a completion of the given lengths."""
    tokens, mask, logprob, cu, metas = [], [], [], [0], []
    for index, (prompt, completion) in enumerate(lengths):
        n = prompt + completion
        tokens += range(n)
        mask += [0] * prompt + [1] * completion
        logprob += [0.0] * prompt + [-0.5] * completion
        cu.append(cu[-1] + n)
        metas.append(
            SampleMeta(
                index, "stop", float(index % 2), bool(index % 2), {"exact": 1.0}, "ok", [(7, 2, n - 1), (7, 3, 1)]
            )
        )
    arrays = {
        "tokens": np.asarray(tokens, np.int32),
        "behaviour_logprob": np.asarray(logprob, np.float32),
        "loss_mask": np.asarray(mask, np.uint8),
        "cu_seqlens": np.asarray(cu, np.int64),
    } | changes.pop("arrays", {})
    metas = changes.pop("metas", metas)
    specs, frames = pack_arrays(arrays)
    return Group(5, "train", "reverse", 0, 11, 7, [Samples(5, 1, 7, metas, specs)], **changes), frames


def test_a_group_is_divided_into_its_samples():
    group = parse_group(*message())
    assert [sample.tokens.tolist() for sample in group.samples] == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]
    assert group.samples[0].mask.tolist() == [False, False, False, True, True]
    assert group.samples[1].ordinal.tolist() == [2, 2, 2, 3]
    assert group.samples[0].lag(6).tolist() == [4, 4, 4, 4, 3]
    assert group.samples[0].lag(1).tolist() == [0] * 5  # an orphaned newer version counts as 0, never below
    assert group.mixed and group.scored == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arrays": {"tokens": np.zeros(9, np.int64)}}, "dtype int64"),
        ({"arrays": {"loss_mask": np.zeros(4, np.uint8)}}, "4 values of loss_mask for 9 tokens"),
        ({"arrays": {"cu_seqlens": np.asarray([0, 5, 8])}}, "cu_seqlens"),
        ({"arrays": {"cu_seqlens": np.asarray([0, 9])}}, "cu_seqlens"),
        ({"arrays": {"behaviour_logprob": np.full(9, np.nan, np.float32)}}, "not finite"),
        ({"arrays": {"loss_mask": np.ones(9, np.uint8)}}, "no prompt"),
        ({"arrays": {"support_cu": np.zeros(10, np.int64)}}, "support_cu"),
        ({"metas": [SampleMeta(0, "stop", 1.0, True, {}, "ok", [(7, 2, 5)])] * 2}, "twice"),
        ({"metas": [SampleMeta(i, "stop", 1.0, True, {}, "ok", [(7, 2, 3)]) for i in range(2)]}, "version runs"),
    ],
)
def test_inconsistent_groups_are_refused_by_name(changes, says):
    with pytest.raises(ProtocolError, match=says):
        parse_group(*message(**changes))


SUPPORT = {"support_ids": np.asarray([3, 9, 4, 3], np.int32), "support_cu": np.asarray([0, 0, 0, 0, 2, 3, 3, 3, 3, 4])}


@pytest.mark.parametrize(
    ("arrays", "vocabulary", "says"),
    [
        ({}, 4, r"tokens holds ids 0\.\.4, expected 0\.\.3"),
        (SUPPORT, 9, r"support_ids holds ids 3\.\.9, expected 0\.\.8"),
        (SUPPORT | {"support_ids": np.asarray([3, 9, 5, 3], np.int32)}, 10, "token 4 at 4 is not in the support"),
        (SUPPORT | {"support_ids": np.asarray([3, 3, 4, 3], np.int32)}, 10, "an id twice"),
        (
            {"support_ids": np.zeros(5000, np.int32), "support_cu": np.asarray([0] * 9 + [5000])},
            10,
            "a support of 5000 ids, expected at most 4096",
        ),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(arrays, vocabulary, says):
    assert parse_group(*message(arrays=SUPPORT), vocabulary=10).samples[0].support_ids is not None
    with pytest.raises(ProtocolError, match=says):
        parse_group(*message(arrays=arrays), vocabulary=vocabulary)


ROUTING = Routing(layers=2, routed=(0, 1), top_k=2, experts=4)
EXPERTS = np.tile(np.asarray([0, 1, 3, 2], np.int16), (9, 1))


def test_routed_experts_are_divided_among_the_samples_and_needed_for_training():
    experts = EXPERTS.copy()
    experts[8] = -1
    group = parse_group(*message(arrays={"routed_experts": experts}), routing=ROUTING)
    assert [sample.experts.shape for sample in group.samples] == [(5, 2, 2), (4, 2, 2)]
    assert group.samples[0].experts[4].tolist() == [[0, 1], [3, 2]]
    assert group.samples[1].experts[3].tolist() == [[-1, -1], [-1, -1]]
    # nobody who does not ask for them looks at them
    assert parse_group(*message(arrays={"routed_experts": EXPERTS})).samples[0].experts is None
    with pytest.raises(ProtocolError, match=r"samples without routed_experts, which engine\.routed_experts asks for"):
        parse_group(*message(), routing=ROUTING)
    body, frames = message()
    demonstrations = msgspec.structs.replace(body, lane="demo")
    assert parse_group(demonstrations, frames, routing=ROUTING).samples[0].experts is None


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (EXPERTS[:, :2], r"routed_experts is int16\[9, 2\], expected int16\[9, 4\]: 2 layers, 2 experts per token"),
        (EXPERTS[:8], r"routed_experts is int16\[8, 4\], expected int16\[9, 4\]"),
        (EXPERTS.astype(np.float32), "routed_experts is float32"),
        (EXPERTS + np.int16(1), r"of token 0, layer 1, are \[4, 3\]: expected 0\.\.3"),
        (np.zeros((9, 4), np.int16), "an expert twice"),
    ],
)
def test_records_of_another_model_are_refused(experts, says):
    with pytest.raises(ProtocolError, match=says):
        parse_group(*message(arrays={"routed_experts": experts}), routing=ROUTING)


def test_a_record_of_a_shape_that_does_not_fit_its_bytes_is_refused():
    body, frames = message(arrays={"routed_experts": EXPERTS})
    part = body.parts[0]
    specs = [
        msgspec.structs.replace(spec, shape=(4, 9)) if spec.name == "routed_experts" else spec for spec in part.arrays
    ]
    wrong = msgspec.structs.replace(body, parts=[msgspec.structs.replace(part, arrays=specs)])
    with pytest.raises(ProtocolError, match=r"is int16\[4, 9\], expected int16\[9, 4\]"):
        parse_group(wrong, frames, routing=ROUTING)


def test_a_frame_too_few_is_refused():
    body, frames = message()
    with pytest.raises(ProtocolError, match="0 array frames, expected 1"):
        parse_group(body, frames[:-1])


def test_a_reward_that_is_not_a_number_is_no_reward():
    metas = [SampleMeta(i, "stop", float("nan"), None, {}, "ok", [(7, 2, n)]) for i, n in enumerate((5, 4))]
    group = parse_group(*message(metas=metas))
    assert group.scored == 0 and void_reason(group, 2, False) == "infra"


def held(group_id: int) -> GroupData:
    return GroupData(group_id, "train", "reverse", 0, 0, ())


def test_demand_is_what_is_missing_to_the_batch():
    inbox = Inbox()
    assert inbox.ask("train", 4) == 4
    assert inbox.ask("train", 4) == 0
    assert inbox.put(held(9)) and inbox.put(held(3)) and not inbox.put(held(3))
    assert (inbox.held("train"), inbox.outstanding("train")) == (2, 2)
    assert inbox.ask("train", 5) == 1
    assert [g.group_id for g in inbox.take("train", 1, ordered=False)] == [9]
    assert inbox.put(held(4))
    assert [g.group_id for g in inbox.take("train", 2, ordered=True)] == [3, 4]
    assert inbox.clear("train") == [] and inbox.outstanding("train") == 0


def test_dynamic_sampling_looks_at_raw_correctness_alone():
    body, frames = message()
    mixed = parse_group(body, frames)
    same = parse_group(
        *message(
            metas=[
                SampleMeta(i, "stop", r, True, {}, "ok", [(7, 2, n)]) for i, (n, r) in enumerate([(5, 0.2), (4, 0.9)])
            ]
        )
    )
    assert void_reason(mixed, 2, True) is None
    assert void_reason(same, 2, True) == "no contrast" and void_reason(same, 2, False) is None
