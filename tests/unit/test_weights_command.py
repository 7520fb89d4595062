"""`temper weights`: shows, verifies and exports what a log holds, and says what is wrong with one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from temper.cli.weights import main
from temper.common.errors import ConfigError, EnvironmentFault

GOLDEN = Path(__file__).parent / "golden" / "weights"
DELTA = "000060d1-0000000007.delta"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "weights")
    return tmp_path


def test_show_lists_every_entry_and_its_forms(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run_dir), "--pieces"]) == 0
    out = capsys.readouterr().out
    assert "run       golden" in out and "snapshot  3 of 000060d1" in out and "delta     7 of 000060d1" in out
    assert "sparse" in out and "planes" in out


def test_verify_rebuilds_every_version_and_names_damage(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run_dir)]) == 0
    assert capsys.readouterr().out.count("right, from") == 2
    path = run_dir / "weights" / DELTA
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(EnvironmentFault, match=rf"{DELTA}: chunk 0 is damaged"):
        main(["verify", str(run_dir)])
    assert main(["verify", str(run_dir / "weights" / "000060d1-0000000003.snapshot")]) == 0


def test_export_writes_a_version_that_safetensors_reads(run_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["export", str(run_dir), str(target)]) == 0
    tensors = load_file(target)
    assert tensors["bf16.classes"].dtype == torch.bfloat16 and tensors["fp8.raw"].dtype == torch.float8_e4m3fn
    assert tensors["fp32.special"].view(torch.int32)[0].item() == 0x7F800001
    assert main(["export", str(run_dir), str(target), "--version", "3"]) == 0
    assert not torch.equal(load_file(target)["fp32.dense"], tensors["fp32.dense"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "weights"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "/nowhere"], "not there"),
        (["show", "."], r"no \*\.snapshot or \*\.delta file there"),
        (["export", "weights", "x", "--version", "5"], "no version 5 can be rebuilt; there are: 3, 7"),
    ],
)
def test_what_is_not_there_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    (run_dir / "empty").mkdir()
    monkeypatch.chdir(run_dir / "empty" if arguments[1] == "." else run_dir)
    with pytest.raises(ConfigError, match=message):
        main(arguments)
