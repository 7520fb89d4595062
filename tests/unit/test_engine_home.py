"""SGLang's own environment: found when complete, never half, and installed with a clear end."""

from __future__ import annotations

import fcntl
import re
import sys
from pathlib import Path

import pytest
from temper.actor.engines.sglang_home import MARK, VERSION, Installed, completed, home, installed, python_of
from temper.actor.engines.sglang_host import SglangHost
from temper.cli import engine
from temper.common.errors import EnvironmentFault


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEMPER_ENGINE_HOME", str(tmp_path / "engine"))
    return home()


def finish(folder: Path, flavour: str = "cpu") -> None:
    python_of(folder).parent.mkdir(parents=True, exist_ok=True)
    python_of(folder).write_text("")
    (folder / MARK).write_text(f'{{"version": "0.5.23", "flavour": "{flavour}"}}')


def test_only_a_finished_installation_is_found(folder: Path) -> None:
    assert installed() is None and completed(SglangHost()) == SglangHost()
    finish(folder)
    assert installed() == Installed("0.5.23", "cpu")
    python_of(folder).unlink()
    assert installed() is None
    python_of(folder).write_text("")
    (folder / MARK).write_text('{"version": 5')
    assert installed() is None


def test_it_is_used_where_the_host_names_none(folder: Path) -> None:
    finish(folder)
    filled = completed(SglangHost(flags=("--tp-size", "2")))
    assert (filled.python, filled.cpu, filled.flags) == (str(python_of(folder)), True, ("--tp-size", "2"))
    named = SglangHost(python="/mine")
    assert completed(named) is named
    finish(folder, "cuda")
    assert not completed(SglangHost()).cpu


def test_show_and_install_say_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main(["show"]) == 0
    assert "not installed" in capsys.readouterr().out
    finish(folder)
    assert engine.main(["install", "--cpu"]) == 0
    assert "0.5.23 (cpu) is installed" in capsys.readouterr().out


@pytest.fixture
def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose pip finds nothing."""
    finish(folder)
    python_of(folder).unlink()
    python_of(folder).symlink_to(sys.executable)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(engine, "CPU", ("torch==99.0", "no-such-package-of-a-test==1"))
    return folder


def test_a_failed_step_names_its_log_and_leaves_no_mark(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match=r"installing torch==99.0 failed"):
        engine.make(broken, "cpu", "0.5.23")
    assert installed() is None and "torch==99.0" in (broken / "install.log").read_text()
    monkeypatch.setitem(engine.NEEDED_BYTES, "cpu", 1 << 62)
    with pytest.raises(EnvironmentFault, match="are free"):
        engine.make(broken, "cpu", "0.5.23")


def test_an_unreachable_index_is_said_so(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(EnvironmentFault, match="the package index can't be reached"):
        engine.make(broken, "cpu", "0.5.23")


def test_every_package_is_pinned() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9A-Za-z.]+", pin) for pin in engine.CPU)
    assert {f"sglang=={VERSION}", "torch==2.13.0"} <= set(engine.CPU)


def test_two_installations_wait_for_each_other(folder: Path) -> None:
    with engine.alone(folder), (folder / "install.lock").open("w") as second, pytest.raises(BlockingIOError):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
