"""Parameters as the serving tensors of a version, gathered tensor by tensor where a learner's ranks hold shards.

Guarantees: each parameter is cast to the serving dtype once, as a shard, then gathered; at most one gathered tensor lives
on a device at a time; tied parameters appear once. Every rank must call this with the same parameters (gathering is a
collective); only a rank that `keeps` gets tensors. Called by `step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def serving(named: Mapping[str, Tensor], dtype: torch.dtype, *, keeps: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor in `dtype` on the CPU, memory of its own), in the order of `named`; nothing unless `keeps`."""
    from torch.distributed.tensor import DTensor

    seen: set[int] = set()
    for name, parameter in named.items():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        cast = parameter.detach().to(dtype, copy=True)
        whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
        del cast
        if keeps:
            host = whole.cpu()
            del whole
            yield name, host.contiguous()
        else:
            del whole
