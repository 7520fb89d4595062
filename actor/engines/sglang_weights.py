"""The actor's copy of what an SGLang server should hold, and the changed tensors as it takes them.

A delta names only changed values, SGLang overwrites whole tensors: the mirror (bit views, host memory) turns the one
into the other. Low-rank adapters are merged here, in fp32 and before the pause, into the weights that the server gets,
rounded to their dtype. It also says what a tensor's first values must read as, which verifies a transfer bit by bit. Called by
`sglang`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from temper.common.bits import ITEM_BYTES, unsigned
from temper.common.errors import EngineError
from temper.common.lora import Lora, adapted, parts
from torch import Tensor

if TYPE_CHECKING:
    from temper.common.delta import StagedUpdate, TensorPatch

BUCKET_BYTES = 48 * 1024 * 1024  # of tensors in one request
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


class Mirror:
    """Named tensors as bits. Empty until the first full copy. `lora`: what the adapters among them mean."""

    def __init__(self, lora: Lora | None = None) -> None:
        self.digest: str | None = None
        self._lora = lora
        self._merged: dict[str, Tensor] = {}
        self._bits: dict[str, npt.NDArray] = {}
        self._table: dict[str, tuple[str, tuple[int, ...]]] = {}

    def overwrite(self, update: StagedUpdate) -> list[str]:
        """Apply; the names of the server's tensors that changed. EngineError if the update starts from another version."""
        if update.base_digest is not None and self.digest not in (update.base_digest, update.digest):
            raise EngineError(f"delta based on {update.base_digest}, the server holds {self.digest}: fetch a full copy")
        if update.base_digest is None:
            self._bits.clear()
            self._table.clear()
            self._merged.clear()
        self.digest = None  # until all of it is written
        for patch in update.changed:
            self._write(patch)
        names = list(dict.fromkeys(adapted(patch.name) or patch.name for patch in update.changed))
        for name in names:
            self._merge(name)
        self.digest = update.digest
        return names

    def _merge(self, name: str) -> None:
        """The tensor that the server gets for a weight with an adapter."""
        down, up = parts(name)
        if self._lora is None or up not in self._bits:
            return
        extra = self._own(up).float() @ self._own(down).float()
        weight = self._own(name)
        self._merged[name] = torch.add(weight.float(), extra, alpha=self._lora.scale).to(weight.dtype)

    def _write(self, patch: TensorPatch) -> None:
        if patch.dtype not in ITEM_BYTES:
            raise EngineError(f"{patch.name}: dtype {patch.dtype} is not one that SGLang is given")
        if patch.indices is None:
            self._bits[patch.name] = np.array(patch.values, dtype=unsigned(patch.dtype)).reshape(-1)
            self._table[patch.name] = (patch.dtype, patch.shape)
        else:
            self._bits[patch.name][patch.indices] = patch.values

    @property
    def names(self) -> list[str]:
        """All tensors of the server."""
        return [name for name in self._bits if adapted(name) is None]

    def tensor(self, name: str) -> Tensor:
        """A tensor of the server as torch sees it, sharing the mirror's memory."""
        return self._merged[name] if name in self._merged else self._own(name)

    def _own(self, name: str) -> Tensor:
        dtype, shape = self._table[name]
        bits = self._bits[name]
        return torch.from_numpy(bits.view(_SIGNED[bits.itemsize])).view(TORCH[dtype]).view(shape)

    def buckets(self, names: Sequence[str]) -> Iterator[list[tuple[str, Tensor]]]:
        """(name, tensor) lists of at most `BUCKET_BYTES`, a larger tensor alone."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name in names:
            nbytes = self._bits[name].nbytes
            if bucket and size + nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, self.tensor(name)))
            size += nbytes
        if bucket:
            yield bucket

    def mismatch(self, name: str, found: object) -> str:
        """What is wrong with `found`, the first rows of `name` as nested lists of floats; empty if they are the mirror's."""
        try:
            rows = torch.tensor(found, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            return f"{name}: the server answered {str(found)[:100]}"
        held = self.tensor(name).to(torch.float64)
        if rows.dim() != held.dim() or rows.shape[0] > held.shape[0] or rows.shape[1:] != held.shape[1:]:
            return f"{name}: the server holds shape {list(rows.shape)}, expected rows of {list(held.shape)}"
        if not torch.equal(rows, held[: rows.shape[0]]):
            return f"{name}: the server's first {rows.shape[0]} rows differ"
        return ""
