"""Applying a staged update to weights in memory: overwrite, so that a retry is harmless.

Everything is checked before the first byte is written; after that nothing can fail. Called by `copies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from temper.common.errors import EngineError
from torch import Tensor

if TYPE_CHECKING:
    from temper.common.delta import TensorPatch

_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}

Plan = list[tuple[Any, Any, Any]]  # (flat bits, where, values)


def bits(tensor: Tensor) -> Any:
    """A flat numpy bit view (u8, u16 or u32) of a contiguous tensor's own memory."""
    if not tensor.is_contiguous():
        raise AssertionError("a bit view needs a contiguous tensor")
    same, unsigned = _BITS[tensor.element_size()]
    return tensor.detach().view(-1).view(same).numpy().view(unsigned)


def planned(named: Mapping[str, np.ndarray], changed: Sequence[TensorPatch]) -> Plan:
    """What to write where, by the flat bits of each name. EngineError if a patch doesn't fit."""
    plan: Plan = []
    for patch in changed:
        target = named.get(patch.name)
        if target is None:
            raise EngineError(f"update of {patch.name!r}, which this model does not have: wrong model or bundle")
        values = np.asarray(patch.values).reshape(-1)
        if values.dtype != target.dtype:
            raise EngineError(
                f"{patch.name}: values of {values.dtype}, the weights hold {target.dtype}: wrong serving dtype"
            )
        if patch.indices is None:
            if values.size != target.size:
                raise EngineError(f"{patch.name}: {values.size} values, the tensor has {target.size}")
            plan.append((target, slice(None), values))
            continue
        indices = np.asarray(patch.indices).reshape(-1)
        if indices.size != values.size or (
            indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < target.size
        ):
            raise EngineError(f"{patch.name}: {indices.size} indices for {values.size} values of {target.size}")
        plan.append((target, indices, values))
    return plan


def write(plan: Plan) -> None:
    """Write what was planned."""
    for target, where, values in plan:
        target[where] = values
