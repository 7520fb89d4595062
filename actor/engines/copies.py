"""The embedded engine's two copies of the weights: one is served, the spare is written beside sampling.

A swap exchanges them between two decode steps: the pause is the same for a few values, a long chain and a full copy.
Afterwards the spare is brought along; from then on it is the host copy that the next delta is verified against, so an
actor holds two copies in all, not three. Guarantees: the served copy is never written; what doesn't fit is refused before
a byte is written; a spare that was left half-way is made whole from the served copy. Owned by `decoder`; `prepare` and
`settle` may run in any one thread at a time, `swap` between two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from temper.actor.engines.llama import Weights
from temper.actor.engines.overwrite import bits, planned, write
from temper.common.errors import EngineError

if TYPE_CHECKING:
    from temper.common.delta import StagedUpdate


class Copy:
    """One set of weights, its flat bits by name, and the digest of the version it holds (None: none, or half of one)."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.bits: dict[str, np.ndarray] = {name: bits(tensor) for name, tensor in weights.named.items()}
        self.digest: str | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(int(flat.nbytes) for flat in self.bits.values())


class Copies:
    """See the module."""

    def __init__(self, served: Weights, spare: Weights) -> None:
        self.served, self.spare = Copy(served), Copy(spare)

    def prepare(self, update: StagedUpdate) -> None:
        """Bring the spare to `update.version`. EngineError, with nothing written, if the update doesn't fit."""
        served, spare = self.served, self.spare
        starts = (update.base_digest, update.digest)
        if update.base_digest is not None and served.digest not in starts:
            raise EngineError(
                f"delta based on {update.base_digest}, the engine serves {served.digest}: fetch a full copy"
            )
        absent = spare.bits.keys() - {patch.name for patch in update.changed}
        if update.base_digest is None and absent:
            raise EngineError(
                f"full copy without {sorted(absent)[0]} ({len(absent)} tensors absent): wrong model or bundle"
            )
        plan = planned(spare.bits, update.changed)
        if update.base_digest is not None and spare.digest not in starts:
            self._copy()
        spare.digest = None  # until all of it is written
        write(plan)
        spare.digest = update.digest

    def swap(self) -> Weights:
        """Serve what was prepared; the weights to use from now on."""
        self.served, self.spare = self.spare, self.served
        return self.served.weights

    def settle(self, update: StagedUpdate) -> None:
        """After the swap: bring the spare to the version served, which `update` led to."""
        served, spare = self.served, self.spare
        if spare.digest == served.digest:
            return
        follows = update.digest == served.digest and update.base_digest in (None, spare.digest)
        if not follows:
            self._copy()
            return
        spare.digest = None
        write(planned(spare.bits, update.changed))
        spare.digest = served.digest

    def _copy(self) -> None:
        self.spare.digest = None
        for name, flat in self.spare.bits.items():
            np.copyto(flat, self.served.bits[name])
        self.spare.digest = self.served.digest
