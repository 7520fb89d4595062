"""The actor's copy of what its SGLang servers should hold, and the changed tensors as they take them.

A delta names only changed values, SGLang overwrites whole tensors: the mirror (bit views, host memory) turns the one
into the other. With `shared` its bytes lie in this machine's shared memory and servers here read them where they are: one
host copy for all servers of an actor, and only names and places cross. It also says what a tensor's first values must read
as, which verifies a transfer bit by bit. Low-rank adapters are merged here, in fp32 and before the pause, into the weights
that servers get, rounded to their dtype. Called by `sglang_fleet` and `sglang_push`.
"""

from __future__ import annotations

import base64
import io
import pickle
import shutil
from collections.abc import Iterator, Sequence
from math import prod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.typing as npt
import torch
from temper.common.bits import ITEM_BYTES, unsigned
from temper.common.errors import EngineError
from temper.common.log import log
from temper.common.lora import Lora, adapted, parts
from torch import Tensor

if TYPE_CHECKING:
    from temper.common.delta import StagedUpdate, TensorPatch

BUCKET_BYTES = 48 * 1024 * 1024  # of tensors copied into one request
ALIGNMENT = 64
SHARED_MEMORY = Path("/dev/shm")
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Mirror:
    """Named tensors as bits. Empty until the first full copy. `lora`: what the adapters among them mean."""

    def __init__(self, lora: Lora | None = None, *, shared: bool = False) -> None:
        self.digest: str | None = None
        self.shared = shared
        self._lora = lora
        self._tensors: dict[str, Tensor] = {}  # all views of one flat buffer
        self._merged: dict[str, Tensor] = {}  # so are these: what servers get for weights with an adapter
        self._bits: dict[str, npt.NDArray] = {}

    def overwrite(self, update: StagedUpdate) -> list[str]:
        """Apply; the names of the servers' tensors that changed. EngineError if the update starts from another version."""
        if update.base_digest is not None and self.digest not in (update.base_digest, update.digest):
            raise EngineError(f"delta based on {update.base_digest}, the server holds {self.digest}: fetch a full copy")
        self.digest = None  # until all of it is written
        if update.base_digest is None and not self._fits(update.changed):
            self._allocate(update.changed)
        for patch in update.changed:
            bits = self._bits[patch.name]
            bits[slice(None) if patch.indices is None else patch.indices] = patch.values
        names = list(dict.fromkeys(adapted(patch.name) or patch.name for patch in update.changed))
        for name in names:
            self._merge(name)
        self.digest = update.digest
        return names

    def _merge(self, name: str) -> None:
        """Compute what servers get for a weight with an adapter."""
        if self._lora is None or name not in self._merged:
            return
        down, up = parts(name)
        extra = self._tensors[up].float() @ self._tensors[down].float()
        self._merged[name].copy_(torch.add(self._tensors[name].float(), extra, alpha=self._lora.scale))

    def _fits(self, patches: Sequence[TensorPatch]) -> bool:
        """Whether a full copy has the layout that is there."""
        return len(patches) == len(self._tensors) and all(
            patch.name in self._tensors
            and self._tensors[patch.name].dtype == TORCH.get(patch.dtype)
            and tuple(self._tensors[patch.name].shape) == tuple(patch.shape)
            for patch in patches
        )

    def _allocate(self, patches: Sequence[TensorPatch]) -> None:
        """Room for a full copy: one buffer, one view a tensor."""
        names = {patch.name for patch in patches}
        with_adapter = [patch for patch in patches if self._lora is not None and parts(patch.name)[1] in names]
        wanted = [*patches, *with_adapter]
        starts, size = [], 0
        for patch in wanted:
            if patch.dtype not in TORCH:
                raise EngineError(f"{patch.name}: dtype {patch.dtype} is not one that SGLang is given")
            starts.append(size)
            size += -(-prod(patch.shape) * ITEM_BYTES[patch.dtype] // ALIGNMENT) * ALIGNMENT
        self._tensors.clear()
        self._merged.clear()
        self._bits.clear()
        flat = self._buffer(max(size, ALIGNMENT))
        for number, (patch, start) in enumerate(zip(wanted, starts, strict=True)):
            part = flat[start : start + prod(patch.shape) * ITEM_BYTES[patch.dtype]]
            table = self._tensors if number < len(patches) else self._merged
            table[patch.name] = part.view(TORCH[patch.dtype]).view(tuple(patch.shape))
            if table is self._tensors:
                self._bits[patch.name] = part.numpy().view(unsigned(patch.dtype))

    def _buffer(self, nbytes: int) -> Tensor:
        flat = torch.zeros(nbytes, dtype=torch.uint8)
        if self.shared:
            free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
            if free < nbytes + (16 << 20):
                log(
                    f"sglang: {free >> 20} MiB of shared memory are free in {SHARED_MEMORY}, {nbytes >> 20} are needed:"
                    " weights are copied into the requests instead"
                )
                self.shared = False
                return flat
            # by name, not by file descriptor: the servers are no children of this process
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            flat.share_memory_()  # type: ignore[no-untyped-call]
        return flat

    @property
    def names(self) -> list[str]:
        """All tensors of the servers."""
        return [name for name in self._tensors if adapted(name) is None]

    def bits(self, name: str) -> npt.NDArray | None:
        """The flat bits of a tensor, None for one that is not there."""
        return self._bits.get(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the servers as torch sees it, sharing the mirror's memory."""
        return self._merged[name] if name in self._merged else self._tensors[name]

    def buckets(self, names: Sequence[str]) -> Iterator[list[tuple[str, Tensor]]]:
        """(name, tensor) lists: all at once where memory is shared, else of at most `BUCKET_BYTES`, a larger one alone."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name in names:
            nbytes = self.tensor(name).nbytes
            if bucket and not self.shared and size + nbytes > BUCKET_BYTES:
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
            return f"{name}: the server answered {str(found)[:100]}: does it serve this model?"
        held = self.tensor(name)
        if rows.dim() != held.dim() or rows.shape[0] > held.shape[0] or rows.shape[1:] != held.shape[1:]:
            return f"{name}: the server holds shape {list(rows.shape)}, expected rows of {list(held.shape)}: another model?"
        if not torch.equal(rows, held[: rows.shape[0]].to(torch.float64)):
            return f"{name}: the server's first {rows.shape[0]} rows differ"
        return ""


def packed(tensors: Sequence[tuple[str, Tensor]], *, shared: bool, ranks: int = 1) -> list[str]:
    """(name, tensor) pairs as `update_weights_from_tensor` takes them, once a rank: base64 of a pickle.

    `shared`: of places in shared memory, a pickle of its own for each rank (each one counts as a reader); else of the
    values. The only pickles that Temper makes, for its own servers; none is ever read.
    """
    if shared:
        return [base64.b64encode(ForkingPickler.dumps(list(tensors))).decode() for _ in range(ranks)]
    plain = [(name, tensor.clone()) for name, tensor in tensors]  # a view would be pickled with the whole buffer
    buffer = io.BytesIO()
    pickle.dump(plain, buffer, protocol=4)
    return [base64.b64encode(buffer.getbuffer()).decode()] * ranks
