"""The slow background scrub: tensor by tensor, what is resident is hashed again and compared with the version's digests.

It finds what no update would: a bit that memory lost, an engine that wrote elsewhere. Found twice in a row at the same
version (once may be a commit under way), it ends in a full copy, counted as ``scrub``. Called by `daemon`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from temper.actor.weights import WeightClient
from temper.common.bits import digest_of
from temper.common.log import log
from temper.common.schema import Version

INTERVAL_S = 5.0  # between two tensors

Resident = Callable[[str], "np.ndarray | None"]


class Scrub:
    """Looks at one tensor a time. `resident` gives the flat bits that the engine holds, None where it can't say."""

    def __init__(self, client: WeightClient, resident: Resident) -> None:
        self._client = client
        self._resident = resident
        self._at = 0
        self._suspect: tuple[Version, str] | None = None

    async def run(self) -> None:
        """One tensor every `INTERVAL_S`, for ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Hash the next tensor, in a thread; ask for a full copy if it was wrong before and still is."""
        weights = self._client.weights
        if weights is None or not weights.digests or self._client.moving:
            return
        names = sorted(weights.digests)
        name = names[self._at % len(names)]
        for where, bits in (("host copy", weights.tensors[name].bits), ("engine", self._resident(name))):
            if bits is None:
                continue
            digest = await asyncio.to_thread(digest_of, bits)
            if self._client.weights is not weights or self._client.moving:
                return  # a commit came between: the same tensor is looked at again
            if digest == weights.digests[name]:
                continue
            if self._suspect == (weights.version, name):
                log(f"weights: {name} of the {where} is no longer that of version {weights.version.ordinal}")
                self._suspect = None
                self._client.reseed("scrub")
            else:
                self._suspect = (weights.version, name)
            return
        self._at += 1
