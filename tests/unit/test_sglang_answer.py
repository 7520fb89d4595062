"""An SGLang answer is taken whole or not at all."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from temper.actor.engines.base import EngineCaps, SamplingParams
from temper.actor.engines.factory import check_caps, chosen, make_engine
from temper.actor.engines.sglang_answer import Answer, parse
from temper.actor.engines.sglang_host import ServerShape, SglangHost
from temper.actor.engines.sglang_process import CPU_SHIMS, ServerProcess, served_files
from temper.actor.engines.sglang_request import SUPPORT_LIMIT, TIES, Requests, body_of
from temper.actor.engines.sglang_weights import BUCKET_BYTES, Mirror
from temper.common.bits import TensorBits, seal
from temper.common.config import Engine, Recipe, Run, Sampling
from temper.common.delta import encode, stage
from temper.common.errors import ConfigError, EngineError

BODY: dict[str, Any] = {
    "output_ids": [21, 37, 58],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-3.75, 21, None], [-3.5, 37, None], [-4.0, 58, None]],
        "output_token_sampling_mask": [[7, 21], [37, 56], [58]],
        "output_token_sampling_logprobs": [-0.5, -0.75, 0.0],
        "weight_versions": [{"version": "5:3", "start": 0, "end": 2}, {"version": "5:4", "start": 2, "end": 3}],
    },
}
PLAIN = SamplingParams()
TRUNCATED = SamplingParams(top_k=2, want_support=True)


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    change(body)
    return body


def test_a_complete_answer() -> None:
    answer = parse(BODY, PLAIN)
    assert answer == Answer([21, 37, 58], [-3.75, -3.5, -4.0], [(5, 3, 2), (5, 4, 1)], "length", None)
    truncated = parse(BODY, TRUNCATED)
    assert truncated.logprobs == [-0.5, -0.75, 0.0] and truncated.support == [[7, 21], [37, 56], [58]]
    assert parse(BODY, SamplingParams(temperature=0.0)).logprobs == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "params", "named"),
    [
        (lambda b: b.pop("output_ids"), PLAIN, "KeyError 'output_ids'"),
        (lambda b: b["meta_info"].update(finish_reason=None), PLAIN, "TypeError"),
        (lambda b: b["meta_info"].update(finish_reason={"type": "lost"}), PLAIN, "finish reason 'lost'"),
        (
            lambda b: b["meta_info"].update(finish_reason={"type": "stop", "matched": "NaN happened"}),
            PLAIN,
            "stopped at 'NaN happened'",
        ),
        (lambda b: b["meta_info"]["output_token_logprobs"].pop(), PLAIN, "2 log-probabilities"),
        (lambda b: b["meta_info"]["output_token_logprobs"][1].__setitem__(1, 9), PLAIN, "do not belong"),
        (lambda b: b["meta_info"]["output_token_logprobs"][1].__setitem__(0, None), PLAIN, "TypeError"),
        (lambda b: b["meta_info"]["output_token_logprobs"][1].__setitem__(0, float("nan")), PLAIN, "are none"),
        (lambda b: b["meta_info"]["weight_versions"].pop(), PLAIN, "do not cover 3 tokens"),
        (lambda b: b["meta_info"]["weight_versions"][0].update(version="default"), PLAIN, "ValueError"),
        (lambda b: b["meta_info"].pop("output_token_sampling_mask"), TRUNCATED, "without its mask"),
        (
            lambda b: b["meta_info"]["output_token_sampling_mask"][2].__setitem__(0, 9),
            TRUNCATED,
            "outside its sampling",
        ),
    ],
)
def test_an_incomplete_answer_is_an_error(
    change: Callable[[dict[str, Any]], None], params: SamplingParams, named: str
) -> None:
    """Fewer log-probs than tokens, no mask for a truncated distribution, ... -> rejected with a reason."""
    with pytest.raises(EngineError, match=named):
        parse(changed(change), params)


def test_routed_experts_come_for_every_token_that_was_fed_and_every_layer() -> None:
    asked = SamplingParams(want_experts=True)

    def routed(values: list[int], width: int) -> Any:
        text = base64.b64encode(np.asarray(values, "<i4").tobytes()).decode()
        return parse(
            changed(lambda b: b["meta_info"].update(routed_experts=text)), asked, before=2, width=width
        ).experts

    assert routed(list(range(16)), 4).tolist() == np.arange(16).reshape(4, 4).tolist()
    for values, named in (
        (list(range(8)), "8 routed experts for 4 tokens, expected 4 for each: does it serve this model"),
        (list(range(15)), "15 routed experts for 4 tokens: .* incomplete"),
        ([-1] * 16, "routed experts from -1 to -1"),
        ([40000] * 16, "routed experts from 40000"),
    ):
        with pytest.raises(EngineError, match=named):
            routed(values, 4)
    with pytest.raises(EngineError, match=r"0 routed experts for 4 tokens: .* incomplete"):
        parse(BODY, asked, before=2, width=4)


def test_routing_of_a_dense_model_is_refused_before_a_server_starts() -> None:
    files = {"config.json": json.dumps({"model_type": "llama", "num_hidden_layers": 2}).encode()}
    recipe = Recipe(engine=Engine(kind="sglang", routed_experts=True))
    with pytest.raises(ConfigError, match=r"a 'llama' without num_experts_per_tok: it routes nothing, set engine\."):
        asyncio.run(make_engine(recipe, files, SglangHost(python="/no/such/python")))


def test_only_a_stop_token_of_the_request_ends_a_row() -> None:
    body = changed(lambda b: b["meta_info"].update(finish_reason={"type": "stop", "matched": 58}))
    assert parse(body, SamplingParams(stop_token_ids=(9, 58))).finish_reason == "stop"
    own = parse(body, SamplingParams(stop_token_ids=(9,)))  # an end of the server's model: the row goes on
    assert own.finish_reason == "abort" and own.ids == [21, 37, 58]


def test_a_server_is_told_of_no_end_and_of_positions_enough() -> None:
    config = {"eos_token_id": [2, 3], "max_position_embeddings": 64, "vocab_size": 9}
    files = {"config.json": json.dumps(config).encode(), "generation_config.json": b'{"eos_token_id": 4}', "a": b"x"}
    served = served_files(files, 80)
    assert served.keys() == {"config.json", "a"} and served["a"] == b"x"
    assert json.loads(served["config.json"]) == config | {"eos_token_id": None, "max_position_embeddings": 80}
    assert json.loads(served_files(files, 50)["config.json"])["max_position_embeddings"] == 64


def test_a_continued_answer_joins_runs_and_keeps_its_support() -> None:
    first = Answer([1, 2], [-1.0, -2.0], [(5, 3, 2)], "abort", [[1], [2]])
    whole = first.followed_by(Answer([3], [-3.0], [(5, 3, 1)], "stop", [[3]]))
    assert whole == Answer([1, 2, 3], [-1.0, -2.0, -3.0], [(5, 3, 3)], "stop", [[1], [2], [3]])
    nothing = Answer([], [], [], "abort", None)
    one, two = (
        replace(first, experts=np.full((4, 2), 1, np.int16)),
        np.full((6, 2), 2, np.int16),
    )  # a prompt of 3 tokens
    joined = nothing.followed_by(one).followed_by(nothing).followed_by(replace(whole, experts=two)).experts
    assert (
        joined is not None and joined.tolist() == [[1, 1]] * 4 + [[2, 2]] * 2
    )  # fed again, they keep what sampled them
    body = changed(lambda b: b.update(output_ids=[]) or b["meta_info"].update(finish_reason={"type": "abort"}))
    assert parse(body, SamplingParams(want_experts=True), before=3).experts is None  # stopped before it began
    assert first.generation(2).finish_reason == "length" and first.generation(3).finish_reason == "abort"


def test_what_was_sampled_from_unverified_weights_is_cut_off() -> None:
    answer = parse(changed(lambda b: b["meta_info"]["weight_versions"][1].update(version="5:4:17")), TRUNCATED)
    assert answer.version_runs == [(5, 3, 2), (5, 4, 1)] and answer.labels == ("5:3", "5:4:17")
    assert answer.until_not(lambda label: True) is answer
    cut = answer.until_not(lambda label: label == "5:3")
    assert cut == Answer([21, 37], [-0.5, -0.75], [(5, 3, 2)], "abort", [[7, 21], [37, 56]])
    assert answer.until_not(lambda label: False) == Answer([], [], [], "abort", [])
    routed = replace(answer, experts=np.zeros((6, 4), np.int16))  # of 4 prompt tokens and 2 sampled ones
    assert routed.until_not(lambda label: label == "5:3").experts.shape == (5, 4)  # type: ignore[union-attr]


def sealed(ordinal: int, **tensors: Any) -> Any:
    return seal(ordinal, 5, {name: TensorBits.of(np.asarray(value, np.float32)) for name, value in tensors.items()})


def test_the_mirror_turns_deltas_into_whole_tensors() -> None:
    first = sealed(0, a=np.zeros((4, 3)), b=np.arange(3))
    new = np.zeros((4, 3))
    new[0, 2] = 7.5
    second = sealed(1, a=new, b=np.arange(3))
    mirror = Mirror()
    with pytest.raises(EngineError, match="fetch a full copy"):
        mirror.overwrite(stage(list(encode(first, second)), first))
    assert mirror.overwrite(stage(list(encode(None, first)), None)) == ["a", "b"]
    assert mirror.overwrite(stage(list(encode(first, second)), first)) == ["a"]
    assert mirror.digest == second.version.digest
    [[(name, tensor)]] = list(mirror.buckets(["a"]))
    assert name == "a" and torch.equal(tensor, torch.tensor(new, dtype=torch.float32))
    assert mirror.mismatch("a", [[0.0, 0.0, 7.5]]) == "" and mirror.mismatch("b", [0.0, 1.0]) == ""
    assert "differ" in mirror.mismatch("a", [[0.0, 0.0, 7.0]])
    assert "shape" in mirror.mismatch("a", [[0.0, 0.0]])
    assert "answered None" in mirror.mismatch("a", None)


def test_buckets_are_bounded() -> None:
    size = BUCKET_BYTES // 4 // 2 + 1
    mirror = Mirror()
    mirror.overwrite(stage(list(encode(None, sealed(0, a=np.zeros(size), b=np.zeros(size), c=np.zeros(2)))), None))
    assert [[name for name, _ in bucket] for bucket in mirror.buckets(["a", "b", "c"])] == [["a"], ["b", "c"]]


def test_the_recipe_and_the_host_choose_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SglangHost(python="/x/python")
    assert chosen(Recipe(engine=Engine(kind="embedded")), there) == "embedded"
    assert chosen(Recipe(engine=Engine(kind="sglang")), there) == "sglang"
    with pytest.raises(ConfigError, match=r"\[actor.sglang\] python"):
        chosen(Recipe(engine=Engine(kind="sglang")), SglangHost())
    for gpu, host, want in ((False, there, "embedded"), (True, there, "sglang"), (True, SglangHost(), "embedded")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert chosen(Recipe(engine=Engine(kind="auto")), host) == want


def test_the_recipe_is_checked_against_the_engine() -> None:
    full = EngineCaps(True, True, True, True, 64, 8)
    check_caps(Recipe(run=Run(deterministic=True), sampling=Sampling(top_k=3)), full)
    for recipe, caps, named in (
        (Recipe(sampling=Sampling(top_p=0.9)), replace(full, support_ids=False), "truncation"),
        (Recipe(run=Run(deterministic=True)), replace(full, seeded=False), "not reproducible"),
        (Recipe(), replace(full, in_flight=False), "max_staleness"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_caps(recipe, caps)


def test_the_command_line_comes_from_host_and_recipe() -> None:
    host = SglangHost(python="/x/python", flags=("--mem-fraction-static", "0.5"), cpu=True, tp_size=2, ep_size=2)
    process = ServerProcess(host, ServerShape("bfloat16", 32, 512, True), {"config.json": b"{}"})
    command = process.command()
    assert command[:4] == ["/x/python", "-P", "-m", "sglang.launch_server"] and command[-2:] == [
        "--mem-fraction-static",
        "0.5",
    ]
    pairs = set(itertools.pairwise(command))
    assert {("--host", "127.0.0.1"), ("--dtype", "bfloat16"), ("--context-length", "520")} <= pairs
    assert ("--max-running-requests", "33") in pairs and ("--load-format", "dummy") in pairs
    assert {("--tp-size", "2"), ("--ep-size", "2")} <= pairs and "--dp-size" not in command
    assert "--enable-return-routed-experts" in command and process.admin_key not in " ".join(command)
    assert "trust" not in " ".join(command)
    assert (CPU_SHIMS / "sitecustomize.py").is_file() and (CPU_SHIMS / "sgl_kernel" / "__init__.py").is_file()


def test_truncation_is_asked_for_with_a_top_k_that_the_server_can_name() -> None:
    def asked(vocabulary: int, **params: Any) -> int:
        widest = Requests(vocabulary)._widest
        body = body_of("r", SamplingParams(**params), [1], 4, "5:0", widest)
        assert body["return_sampling_mask"] == SamplingParams(**params).truncates
        return int(body["sampling_params"]["top_k"])

    assert asked(41) == asked(150_000) == -1
    assert asked(41, top_p=0.9) == 41  # all of it: no truncation of its own
    assert asked(150_000, min_p=0.1) == SUPPORT_LIMIT - TIES
    assert asked(150_000, top_p=0.9, top_k=7) == 7
