"""Low-rank adapters through the real daemons: published as adapters, followed bit for bit across a learner's death, exported
as a plain model."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from temper.broker.weight_files import scan
from temper.broker.weight_log import WeightLog
from temper.cli import export
from temper.common import delta
from temper.common import recipe as recipes
from temper.common.lora import DOWN, UP, adapted, lora_of
from temper.common.weight_format import table_of, unpack
from temper.learner.adapters import merged
from temper.learner.models import micro
from transformers import AutoModelForCausalLM

STEPS = 20
DEADLINE_S = 240.0
RECIPE = f"""
[run]
name = "lora"
max_steps = {STEPS}
checkpoint_every_steps = 2
[model]
path = "micro"
vocabulary = "abcdefghijklmnopqrstuvwxyz>"
max_length_tokens = 12
lora_rank = 2
lora_alpha = 8.0
lora_targets = ["q_proj", "down_proj"]
[pacing]
groups_per_step = 2
samples_per_group = 4
[sampling]
max_new_tokens = 6
[objective]
entropy_coefficient = 0.01
[eval]
tasks_per_domain = 1
samples_per_task = 1
[engine]
kind = "embedded"
max_rows = 16
[daemons]
sandboxes = 0
[[domains]]
name = "reverse"
module = "temper.actor.domains.reverse"
"""


def _sibling(name: str) -> Any:
    spec = spec_from_file_location(f"of_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.system
@pytest.mark.timeout(900)
def test_adapters_are_published_alone_followed_across_a_resume_and_exported_merged(
    fleet: Any, audit: Any, tmp_path: Path
) -> None:
    recipe_file = tmp_path / "lora.toml"
    recipe_file.write_text(RECIPE)
    model = recipes.load(str(recipe_file)).model
    witness = _sibling("test_weight_kill").Witness(fleet)
    fleet.broker(str(recipe_file))
    fleet.learner()
    fleet.peer("actor-1", "temper.actor")
    checkpoints = fleet.run_dir / "checkpoints"
    witness.until(lambda: checkpoints.is_dir() and any(checkpoints.glob("version-*")), "a checkpoint")
    fleet.daemons["learner"].kill()
    fleet.learner("--resume", str(fleet.run_dir))
    fleet.wait_log("learner", "resumed from the checkpoint of version", DEADLINE_S)
    witness.followed("actor-1", STEPS - 1)  # the last version: no evaluator is there yet, so the run waits
    fleet.evaluator()
    for name in ("learner", "broker", "actor-1", "eval-1"):
        assert fleet.wait_exit(name, DEADLINE_S) == 0, fleet.logs()
    assert fleet.summary().steps == STEPS and audit(fleet.run_dir)["trained"] == STEPS * 2

    files, damaged = scan(witness.folder)
    assert not damaged
    way = WeightLog.of(files)[0].way(None)
    assert way and way[0].footer.manifest.base is None and len(way) > 1
    snapshot = delta.stage(way[0].chunks(), None)
    names = [row[0] for row in table_of(delta.overwrite(None, snapshot))]
    for entry in way[1:]:
        touched = {names[record.tensor] for chunk in entry.chunks() for record in unpack(chunk)[0].records}
        assert touched and all(adapted(name) for name in touched)
        assert entry.footer.manifest.size < entry.footer.manifest.full_size / 20

    last = delta.stage([chunk for entry in way for chunk in entry.chunks()], None)
    assert last.version.ordinal == STEPS
    tensors = {p.name: torch.from_numpy(p.values.view("f4").copy()).view(p.shape) for p in last.changed}
    assert any(name.endswith(UP) and tensors[name].abs().sum() > 0 for name in tensors)
    assert any(name.endswith(DOWN) for name in tensors)
    out = tmp_path / "model"
    assert export.main([str(fleet.run_dir), str(out)]) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    lora = lora_of(model)
    assert lora is not None
    want = merged(tensors, lora.scale)
    got = dict(loaded.named_parameters())
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    plain = dict(micro(model, 0).model.named_parameters())
    assert any(not torch.equal(got[name], plain[name]) for name in plain)
