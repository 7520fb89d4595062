"""`temper check engine`: the embedded engine agrees with the learner's model; one that does not is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from temper.actor.engines.embedded import EmbeddedEngine
from temper.cli import check_engine
from temper.cli.check import main
from temper.common.errors import ConfigError

SMALL = ["--model.hidden_size=32", "--model.layers=1", "--model.intermediate_size=32"]


def test_the_demos_engine_agrees_over_updates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "demo", *SMALL, "--sampling.temperature=0.7", "--sampling.top_k=5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[3].startswith("after 3 updates") and lines[4].startswith("engine: fine")
    means = [float(re.findall(r"mean (\S+),", line)[0]) for line in lines[:4]]
    assert max(means) < 1e-6  # the updates arrived: an engine still at the first version would be 1e-4 apart


def test_an_engine_that_serves_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgets(self: Any, update: Any) -> str:
        if update.version.ordinal < 2:
            return await apply(self, update)
        return str(update.digest)  # claims to hold what it never took

    apply = EmbeddedEngine.apply
    monkeypatch.setattr(EmbeddedEngine, "apply", forgets)
    monkeypatch.setattr(check_engine, "STEP", 0.3)
    with pytest.raises(ConfigError, match="disagree by"):
        main(["engine", "demo", *SMALL])


def test_a_missing_host_file_is_named() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        main(["engine", "demo", *SMALL, "--host", str(Path("/no/such/host.toml"))])
