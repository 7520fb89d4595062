"""TensorBoard: registered names alone, counters as rates, one folder a daemon whatever it calls itself."""

from pathlib import Path

import pytest
from temper.common import metrics as names
from temper.common.errors import EnvironmentFault
from temper.common.schema import Metrics
from temper.learner.boards import Board, _folder_name
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, pytest.approx(event.value)) for event in board.Scalars(tag)]


def tags(folder: Path) -> set[str]:
    board = EventAccumulator(str(folder))
    board.Reload()
    return set(board.Tags()["scalars"])


def test_steps_are_means_of_sums_and_counts(tmp_path):
    board = Board(tmp_path, "learner")
    board.step({names.LEARNER_ENTROPY: (6.0, 4.0), names.LEARNER_SKIPPED: (2.0, 1.0), "unknown/x": (1.0, 1.0)}, 7)
    board.step({"learner/reward/code": (3.0, 4.0), names.LEARNER_GAP: (0.0, 0.0)}, 8)
    board.step({names.LEARNER_LIKELIHOOD: (0.5, 1.0)}, 1, warm=True)
    board.scalars({"learner/eval/code": 0.9}, 8)
    board.close()
    assert scalars(tmp_path, names.LEARNER_ENTROPY) == [(7, 1.5)]
    assert scalars(tmp_path, names.LEARNER_SKIPPED) == [(7, 2.0)]
    assert tags(tmp_path) == {names.LEARNER_ENTROPY, names.LEARNER_SKIPPED, "learner/reward/code", "learner/eval/code"}
    assert scalars(tmp_path / "warm", names.LEARNER_LIKELIHOOD) == [(1, 0.5)]


def test_ticks_become_rates_per_second_and_last_values(tmp_path):
    board = Board(tmp_path, "learner", started=1000.0)
    for second in range(6):
        board.ticks(
            Metrics("actor-1", {names.ACTOR_TOKENS: 30.0, "made/up": 1.0}, {names.ACTOR_ROWS: float(second)}),
            1000.0 + second,
        )
    board.ticks(Metrics("learner", {names.LEARNER_TOKENS: 1.0}, {}), 1006.0)  # its own come with the steps
    board.close()
    assert scalars(tmp_path / "actor-1", f"{names.ACTOR_TOKENS}_per_second") == [(5, 36.0)]
    assert scalars(tmp_path / "actor-1", names.ACTOR_ROWS) == [(5, 5.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor-1"]
    assert tags(tmp_path / "actor-1") == {f"{names.ACTOR_TOKENS}_per_second", names.ACTOR_ROWS}


def test_flaky_programs_of_the_sampled_share_are_seen(tmp_path):
    board = Board(tmp_path, "learner", started=1000.0)
    for second in range(6):
        board.ticks(
            Metrics(
                "sandbox-1", {names.SANDBOX_RERUNS: 10.0, names.SANDBOX_FLAKY: 1.0, "sandbox/outcomes/error": 2.0}, {}
            ),
            1000.0 + second,
        )
    board.close()
    assert scalars(tmp_path / "sandbox-1", f"{names.SANDBOX_RERUNS}_per_second") == [(5, 12.0)]
    assert scalars(tmp_path / "sandbox-1", f"{names.SANDBOX_FLAKY}_per_second") == [(5, 1.2)]
    assert scalars(tmp_path / "sandbox-1", "sandbox/outcomes/error_per_second") == [(5, 2.4)]


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "a/b", "..", "\x00", "x" * 500])
def test_a_peer_s_name_cannot_leave_the_folder(name):
    folder = _folder_name(name)
    assert "/" not in folder and folder != ".." and len(folder) <= 64 and "\x00" not in folder


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    board = Board(tmp_path / "file", "learner")
    with pytest.raises(EnvironmentFault, match="cannot write TensorBoard files below"):
        board.scalars({"learner/eval/code": 0.9}, 1)
