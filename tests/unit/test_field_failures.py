"""Failures that users of comparable systems reported: where each is tested, and the ones that fit nowhere else.

Lines about hangs, messaging, staleness and buffers that need neither SGLang nor a grader. A test that is renamed or removed has to
be replaced here.
"""

from __future__ import annotations

import ast
import contextlib
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from temper.common import schema
from temper.common.domains import derive_seed
from temper.common.errors import ProtocolError
from temper.common.wire import META_LIMIT_BYTES, unpack_meta
from temper.learner.inbox import SampleData

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

WHERE = {
    # hangs and silent deaths
    "producers die, the consumer waits for hours": (
        "protocol/test_learner_daemon.py::test_a_malformed_group_is_replaced_and_silence_ends_the_run"
    ),
    "an exception travels as end of data": (
        "protocol/test_learner_daemon.py::test_what_the_broker_gives_up_ends_the_run_with_its_reason"
    ),
    "raise in a fire-and-forget task": "protocol/test_daemon.py::test_a_bug_anywhere_ends_the_daemon_with_its_traceback",
    "one task always fails": (
        "unit/test_broker_simulation.py::test_one_bad_task_in_a_batch_of_four_is_quarantined_and_replaced"
    ),
    "the last step waits for a version nobody publishes": (
        "protocol/test_broker.py::test_a_run_of_three_steps_from_lease_to_exit_code_0"
    ),
    "after a resume learner and actors wait for each other": (
        "protocol/test_learner_daemon.py::test_an_interrupted_run_resumes_to_the_same_weights"
    ),
    "a slow consumer blocks its producer's loop": (
        "protocol/test_round_trip.py::test_send_waits_while_the_broker_holds_its_credit_and_heartbeats_keep_coming"
    ),
    "a child exits during launch": (
        "system/test_supervisor.py::test_exit_before_ready_ends_the_run_with_the_last_lines"
    ),
    "kill -9 on an actor with 8 rollouts": (
        "unit/test_broker_simulation.py::test_killing_an_actor_with_8_rollouts_in_flight_leases_all_8_again"
    ),
    "fork after threads": "unit/test_field_failures.py::test_nothing_forks_a_process_that_has_threads",
    # messaging
    "ROUTER without MANDATORY": (
        "protocol/test_field_failures_messaging.py::test_two_thousand_sends_to_a_stalled_peer_all_arrive_once_it_goes_on"
    ),
    "a high-water mark is not flow control": (
        "protocol/test_round_trip.py::test_five_thousand_sends_both_ways_before_anybody_reads_do_not_deadlock"
    ),
    "a cancelled recv loses messages": (
        "protocol/test_field_failures_messaging.py::test_waiting_that_is_cancelled_again_and_again_loses_no_message"
    ),
    "one full peer queues everything for others": (
        "protocol/test_field_failures_messaging.py::test_a_full_peer_holds_nothing_up_for_the_others"
    ),
    "broker killed, queued sends lost": (
        "protocol/test_broker.py::test_what_was_lost_on_its_way_when_the_broker_died_goes_out_again"
    ),
    "MAXMSGSIZE is per frame": (
        "protocol/test_hostile_peers.py::test_a_frame_beyond_the_limit_ends_its_connection_alone"
    ),
    "a second bind steals the path": (
        "protocol/test_broker.py::test_a_folder_with_a_run_wants_resume_and_a_place_has_one_broker"
    ),
    "a reused routing id": "unit/test_addresses.py::test_routing_ids_are_never_used_twice",
    "zero-copy sends, pinned buffers": (
        "protocol/test_round_trip.py::test_large_frames_are_forwarded_as_they_came_and_small_ones_pin_nothing"
    ),
    "untyped MessagePack": "unit/test_field_failures.py::test_a_hostile_meta_builds_nothing_large",
    # staleness and buffers
    "capacity jumps after a resume": "unit/test_broker_simulation.py::test_capacity_after_a_resume_is_96_not_3296",
    "half of all groups void at staleness 0": (
        "unit/test_broker_simulation.py::test_half_of_all_groups_void_at_staleness_0_reaches_max_steps"
    ),
    "all groups void": ("unit/test_broker_simulation.py::test_all_groups_void_ends_the_run_with_domain_and_reason"),
    "expired leases fill the capacity": (
        "unit/test_broker_simulation.py::test_expired_leases_that_fill_the_capacity_at_staleness_0_go_out_again"
    ),
    "discarding stale groups starves slow tasks": (
        "unit/test_broker_simulation.py::test_fast_and_slow_classes_are_trained_as_often_as_sampled"
    ),
    "task ids collide across domains": (
        "unit/test_field_failures.py::test_the_same_task_number_in_two_domains_is_two_tasks"
    ),
    "a group with one infra error": "unit/test_learner_step.py::test_unscored_samples_are_outside_baseline_and_loss",
    "a fixed seed gives identical samples": (
        "unit/test_field_failures.py::test_the_samples_of_a_lease_have_seeds_of_their_own_that_a_rerun_repeats"
    ),
    "lag is counted from dequeue": "unit/test_field_failures.py::test_lag_counts_from_sampling",
    # memory
    "3,800 buffered rollouts": (
        "unit/test_broker_memory.py::test_a_learner_that_takes_nothing_stops_the_actors_and_the_rest_lies_on_disk"
    ),
    "2 GB a step leak": "unit/test_broker_memory.py::test_a_thousand_steps_of_a_mebibyte_leave_nothing_behind",
}


@pytest.mark.parametrize("failure", WHERE)
def test_the_failure_has_its_test(failure: str) -> None:
    path, name = WHERE[failure].split("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (
        f"{failure}: {name} is gone"
    )


def test_lag_counts_from_sampling() -> None:
    """Sampled at 1, trained by the step 5 -> 6, however long it was queued or leased meanwhile: lag 4."""
    ones = np.ones(3, np.int64)
    sample = SampleData(0, np.zeros(3, np.int32), np.ones(3, bool), np.zeros(3, np.float32), ones, 1.0)
    assert sample.lag(5).tolist() == [4, 4, 4]


def test_the_samples_of_a_lease_have_seeds_of_their_own_that_a_rerun_repeats() -> None:
    seeds = [derive_seed(7, "sample", lease, index) for lease in range(50) for index in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [derive_seed(7, "sample", lease, index) for lease in range(50) for index in range(16)]


def test_the_same_task_number_in_two_domains_is_two_tasks() -> None:
    """Groups are known by their lease, which names domain, level and seed; seeds of evaluations are drawn per domain."""
    assert derive_seed(7, "eval", "sums", 3, 0) != derive_seed(7, "eval", "words", 3, 0)


@pytest.mark.parametrize(
    "kind", sorted(schema.BODIES.values(), key=lambda kind: kind.KIND), ids=lambda kind: kind.__name__
)
def test_a_hostile_meta_builds_nothing_large(kind: type[schema.Body]) -> None:
    """64 KiB of MessagePack, the most that is read, as empty lists, deep nesting or a huge promised length."""
    fields = msgspec.structs.fields(kind)
    for meta in (
        b"\xdd" + (META_LIMIT_BYTES - 5).to_bytes(4, "big") + b"\x90" * (META_LIMIT_BYTES - 5),
        b"\x91" * META_LIMIT_BYTES,
        b"\xdd\xff\xff\xff\xff",
    ):
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError) if fields or meta[:1] != b"\xdd" else contextlib.suppress(ProtocolError):
                unpack_meta(meta, kind)  # a body without fields skips what follows, and keeps nothing of it
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()


def test_nothing_forks_a_process_that_has_threads() -> None:
    """No fork of a daemon: children are started anew, and the jail's init is single-threaded."""
    found = []
    for folder in ("actor", "broker", "common", "learner", "bin", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"):
                    found.append(f"{path}:{node.lineno}")
                if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                    "ProcessPoolExecutor",
                    "Pool",
                ):
                    found += (
                        [] if any(word.arg == "mp_context" for word in node.keywords) else [f"{path}:{node.lineno}"]
                    )
    assert found == []
