"""Checkpoints are complete or absent: whatever call the process dies at, the newest whole one is k or k + 1."""

import json
import os
import shutil

import pytest
import torch
from temper.common.errors import EnvironmentFault
from temper.learner import checkpoint
from temper.learner.checkpoint import Checkpoint, Damaged, load, load_newest, versions, write


def made(version: int) -> Checkpoint:
    tensors = {
        "model.weight": torch.full((3, 2), float(version)),
        "optimizer.weight.exp_avg": torch.full((3, 2), version / 7),
        "optimizer.weight.step": torch.tensor(float(version)),
        "rng.torch": torch.arange(5, dtype=torch.uint8),
    }
    return Checkpoint(version, tensors, {"step": version, "trainer": {"steps_done": version}, "accuracy": float("nan")})


def assert_whole(found: Checkpoint) -> None:
    """Every part of a loaded checkpoint is of the same version."""
    want = made(found.version)
    assert found.state["step"] == found.version == found.state["trainer"]["steps_done"]
    assert found.tensors.keys() == want.tensors.keys()
    assert all(torch.equal(found.tensors[name], want.tensors[name]) for name in want.tensors)


def test_what_is_written_is_read_back_exactly(tmp_path):
    folder, oldest = write(tmp_path, made(4), kept=2)
    assert oldest == 4 and folder.name == "version-0000000004"
    assert_whole(load(folder))
    assert_whole(load_newest(tmp_path))
    assert_whole(load_newest(folder))


def test_the_newest_are_kept(tmp_path):
    oldest = [write(tmp_path, made(version), kept=2)[1] for version in (1, 5, 12, 13)]
    assert oldest == [1, 1, 5, 12]
    assert versions(tmp_path) == [12, 13] and len(list(tmp_path.iterdir())) == 2


class Killed(BaseException):
    """The process dies here: nothing after it runs."""


def crash_at(monkeypatch: pytest.MonkeyPatch, point: int, *, after: bool) -> list[str]:
    """Let the `point`-th file system call of a write be the last one (not done, or done and then dead)."""
    calls: list[str] = []

    def watch(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            if len(calls) > point:
                raise Killed  # dead: clean-up does not run either
            calls.append(name)
            if len(calls) > point and not after:
                raise Killed
            result = real(*args, **kwargs)
            if len(calls) > point:
                raise Killed
            return result

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (os, "rename"),
        (os, "fsync"),
        (os, "mkdir"),
        (shutil, "rmtree"),
        (checkpoint, "save_file"),
        (checkpoint, "_write_json"),
        (checkpoint, "_sync_file"),
        (checkpoint, "_sync_folder"),
        (checkpoint, "_fill"),
    ):
        watch(owner, name)
    return calls


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_point_the_newest_whole_one_is_k_or_k_plus_1(tmp_path, after):
    seen = set()
    for point in range(200):
        root = tmp_path / str(point)
        for version in (1, 2):
            write(root, made(version), kept=2)
        with pytest.MonkeyPatch.context() as patch:
            calls = crash_at(patch, point, after=after)
            try:
                write(root, made(3), kept=2)
            except Killed:
                pass
            else:
                assert len(calls) <= point
                break
        found = load_newest(root)
        assert found.version in (2, 3)
        assert_whole(found)
        seen.add(found.version)
        write(root, made(4), kept=2)  # the next one cleans up whatever the dead one left
        assert len(list(root.iterdir())) == 2 and 4 in versions(root)
    else:
        pytest.fail("the write never got through")
    assert seen == {2, 3} and point > 10


@pytest.mark.parametrize("after", [False, True])
def test_rewriting_the_same_version_never_loses_every_copy(tmp_path, after):
    for point in range(200):
        root = tmp_path / str(point)
        for version in (1, 2):
            write(root, made(version), kept=2)
        with pytest.MonkeyPatch.context() as patch:
            calls = crash_at(patch, point, after=after)
            try:
                write(root, made(2), kept=2)
            except Killed:
                pass
            else:
                assert len(calls) <= point
                return
        found = load_newest(root)
        assert found.version in (1, 2)
        assert_whole(found)
    pytest.fail("the write never got through")


@pytest.mark.parametrize("victim", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_one_is_named_and_the_older_taken(tmp_path, victim, how, capsys):
    write(tmp_path, made(1), kept=2)
    folder, _ = write(tmp_path, made(2), kept=2)
    path = folder / victim
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data if how == "flip" else data[: len(data) // 2])
    with pytest.raises(Damaged, match="version-0000000002"):
        load(folder)
    found = load_newest(tmp_path)
    assert found.version == 1 and "version-0000000002" in capsys.readouterr().err
    assert_whole(found)


def test_none_left_says_so(tmp_path):
    with pytest.raises(EnvironmentFault, match="there is none"):
        load_newest(tmp_path)
    folder, _ = write(tmp_path, made(2), kept=1)
    (folder / "state.json").write_text("{}")
    with pytest.raises(EnvironmentFault, match=r"state\.json is not what its manifest says"):
        load_newest(tmp_path)


def test_a_format_from_the_future_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    folder, _ = write(tmp_path, made(2), kept=1)
    monkeypatch.undo()
    assert json.loads((folder / "manifest.json").read_text())["format"] == 2
    with pytest.raises(Damaged, match="format 2, this release reads 1"):
        load(folder)


def test_a_full_disk_is_a_clear_error_and_leaves_the_older_untouched(tmp_path, monkeypatch):
    write(tmp_path, made(1), kept=2)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(EnvironmentFault, match=r"version 2 below .*No space left on device.*free space"):
        write(tmp_path, made(2), kept=2)
    assert [path.name for path in tmp_path.iterdir()] == ["version-0000000001"]
    assert_whole(load_newest(tmp_path))


def test_a_run_directory_without_checkpoints_is_a_run_that_has_none_yet(tmp_path):
    assert checkpoint.below(tmp_path) is None
    folder, _ = write(tmp_path / "checkpoints", made(1), kept=1)
    assert checkpoint.below(tmp_path) == checkpoint.below(tmp_path / "checkpoints") == tmp_path / "checkpoints"
    assert checkpoint.below(folder) == folder
    assert checkpoint.below(tmp_path / "mistyped") == tmp_path / "mistyped"
    with pytest.raises(EnvironmentFault, match="mistyped"):
        load_newest(tmp_path / "mistyped")
