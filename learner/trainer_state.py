"""What a trainer gives to checkpoints and to the serving side, and takes back.

Guarantees: `load` of what `state` gave continues with the same bits; a state of another model is refused by name. Called
by `step.Trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from temper.common.bits import TensorBits
from temper.common.errors import ConfigError
from temper.learner.checkpoint import TENSORS
from temper.learner.gather import serving
from temper.learner.mixtures import divided
from temper.learner.policy import DTYPES, bit_view

if TYPE_CHECKING:
    from temper.learner.step import Trainer


def serving_tensors(trainer: Trainer) -> dict[str, TensorBits]:
    """The weights in the serving dtype, cast once (the next step computes with the same tensors where that is its dtype),
    as bits by their names in a checkpoint, tied ones once; copies that the next step does not touch. What is not trained
    is cast when first asked for and is the same object ever after."""
    dtype = trainer.recipe.model.serving_dtype
    named, trained = trainer.policy.named_masters(), trainer.policy.trained_masters()
    wanted = {name: p for name, p in named.items() if name in trained or name not in trainer.frozen}
    rounded = trainer.policy.rounded
    cast = rounded.of if rounded is not None and rounded.dtype == DTYPES[dtype] else None
    kind = str(trainer.policy.model.config.model_type)
    fresh = {
        name: {part: TensorBits.of(bit_view(t), dtype) for part, t in divided(name, whole, kind)}
        for name, whole in serving(wanted, DTYPES[dtype], cast=cast)
    }
    trainer.frozen |= {name: tensors for name, tensors in fresh.items() if name not in trained}
    return {part: bits for name in named for part, bits in (fresh.get(name) or trainer.frozen[name]).items()}


def state(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, scalars): masters, optimiser, reference, critic and RNG; counters and baselines. Views, not copies."""
    tensors = {f"model.{name}": p.detach() for name, p in trainer.policy.named_masters().items()}
    tensors |= {f"optimizer.{name}": value for name, value in trainer.optimizer.state().items()}
    reference, coefficient = trainer.reference.state()
    tensors |= {f"reference.{name}": value for name, value in reference.items()}
    if trainer.critic is not None:
        tensors |= {f"critic.{name}": value for name, value in trainer.critic.state().items()}
    tensors["rng.torch"] = torch.get_rng_state()
    scalars = {
        "steps_done": trainer.steps_done,
        "warm_steps_done": trainer.warm_steps_done,
        "baselines": dict(trainer.baselines),
        "warm_likelihood": dict(trainer.warm_likelihood),
        "kl_coefficient": coefficient,
        "best_accuracy": trainer.reference.best,
        "lora_scale": trainer.lora.scale if trainer.lora is not None else 0.0,
    }
    return tensors, scalars


def load(trainer: Trainer, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
    """Restore what `state` gave; ConfigError when it belongs to another model."""
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in TENSORS}
    for name, value in tensors.items():
        head, rest = name.split(".", 1)
        parts[head][rest] = value
    _copy_into(trainer.policy.named_masters(), parts["model"])
    trainer.frozen.clear()
    trainer.optimizer.load(parts["optimizer"])
    coefficient = float(scalars.get("kl_coefficient", trainer.recipe.objective.kl_coefficient))
    _copy_into(trainer.reference.load(parts["reference"], coefficient, trainer.policy), parts["reference"])
    best = scalars.get("best_accuracy")
    trainer.reference.best = None if best is None else float(best)
    if trainer.critic is not None:
        trainer.critic.load(parts["critic"])
    torch.set_rng_state(parts["rng"]["torch"])
    trainer.steps_done = int(scalars["steps_done"])
    trainer.warm_steps_done = int(scalars["warm_steps_done"])
    trainer.baselines = {str(k): float(v) for k, v in scalars["baselines"].items()}
    trainer.warm_likelihood = {str(k): float(v) for k, v in scalars.get("warm_likelihood", {}).items()}


def _copy_into(named: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]) -> None:
    if named.keys() != values.keys():
        different = sorted(named.keys() ^ values.keys())
        raise ConfigError(f"the checkpoint is of another model: parameters differ ({', '.join(different[:3])})")
    with torch.no_grad():
        for name, parameter in named.items():
            if parameter.shape != values[name].shape:
                raise ConfigError(
                    f"the checkpoint is of another model: {name} is {tuple(values[name].shape)}, "
                    f"expected {tuple(parameter.shape)}"
                )
            parameter.copy_(values[name])
