"""Parameters as the serving tensors of a version, gathered tensor by tensor where a learner's ranks hold shards.

Guarantees: each parameter is cast to the serving dtype once, as a shard, then gathered; at most one gathered tensor lives
on a device at a time; tied parameters appear once. Every rank must call this with the same parameters (gathering is a
collective); only a rank that `keeps` gets tensors. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def serving(
    named: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    keeps: bool = True,
    cast: Callable[[Any], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor in `dtype` on the CPU, memory of its own), in the order of `named`; nothing unless `keeps`.
    `cast` gives a parameter in `dtype`, from a caller that has it."""
    seen: set[int] = set()
    for name, parameter in named.items():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        own = parameter.detach().to(dtype, copy=True) if cast is None else cast(parameter)
        gather = getattr(own, "full_tensor", None)  # of a DTensor
        whole = own if gather is None else gather()
        del own
        if keeps:
            host = whole.cpu()
            del whole
            yield name, host.contiguous()
        else:
            del whole
