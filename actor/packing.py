"""Finished samples as `Samples` messages: few messages, none over the protocol's limits. Pure; used by the daemon and by
the in-process loop's tests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from temper.actor.episodes import SampleOut
from temper.common.arrays import pack_arrays
from temper.common.credit import LARGEST_BYTES
from temper.common.errors import TemperError
from temper.common.schema import Lease, Samples
from temper.common.wire import FRAME_LIMIT_BYTES, META_LIMIT_BYTES

META_ROOM_BYTES = META_LIMIT_BYTES - 2048  # the rest is for what surrounds the samples' metas
MESSAGE_BYTES = 4 * 1024 * 1024  # array bytes of one message, unless a single sample has more
SAMPLE_BYTES = LARGEST_BYTES - 2 * META_LIMIT_BYTES  # array bytes of that one


class OversizedSample(TemperError):
    """A sample whose facts or arrays do not fit any message."""


def pack_samples(lease: Lease, samples: Sequence[SampleOut]) -> list[tuple[Samples, list[memoryview]]]:
    """Messages (body, frames) that hold `samples` in order. OversizedSample for one that fits none."""
    batches: list[list[SampleOut]] = []
    meta_bytes = array_bytes = 0
    for sample in samples:
        meta, sizes = len(msgspec.msgpack.encode(sample.meta)), _sizes(sample)
        arrays = sum(sizes)
        if meta > META_ROOM_BYTES:
            raise OversizedSample(f"sample {sample.meta.index}: facts of {meta} bytes, at most {META_ROOM_BYTES}")
        if arrays > SAMPLE_BYTES or max(sizes) > FRAME_LIMIT_BYTES:
            raise OversizedSample(
                f"sample {sample.meta.index} of {len(sample.tokens)} tokens: arrays of {arrays} bytes, the largest "
                f"{max(sizes)}, at most {SAMPLE_BYTES} and {FRAME_LIMIT_BYTES}: sample fewer tokens, or from fewer candidates"
            )
        if not batches or meta_bytes + meta > META_ROOM_BYTES or array_bytes + arrays > MESSAGE_BYTES:
            batches.append([])
            meta_bytes = array_bytes = 0
        batches[-1].append(sample)
        meta_bytes, array_bytes = meta_bytes + meta, array_bytes + arrays
    return [_message(lease, batch) for batch in batches]


def _sizes(sample: SampleOut) -> list[int]:
    """Bytes of each array."""
    arrays = [sample.tokens, sample.logprobs, sample.mask, *(sample.support or ())]
    return [array.nbytes for array in arrays] + ([sample.experts.nbytes] if sample.experts is not None else [])


def _message(lease: Lease, batch: list[SampleOut]) -> tuple[Samples, list[memoryview]]:
    arrays: dict[str, npt.NDArray] = {
        "tokens": np.concatenate([sample.tokens for sample in batch]),
        "behaviour_logprob": np.concatenate([sample.logprobs for sample in batch]),
        "loss_mask": np.concatenate([sample.mask for sample in batch]),
        "cu_seqlens": np.cumsum([0, *(len(sample.tokens) for sample in batch)], dtype=np.int64),
    }
    support = [sample.support for sample in batch if sample.support is not None]
    if support:
        if len(support) != len(batch):
            raise AssertionError("some samples of a lease have a support, some have none")
        arrays["support_ids"] = np.concatenate([ids for ids, _ in support])
        offsets = np.cumsum([0, *(len(ids) for ids, _ in support)], dtype=np.int64)
        parts = [cu[:-1] + offset for (_, cu), offset in zip(support, offsets[:-1], strict=True)]
        arrays["support_cu"] = np.concatenate([*parts, offsets[-1:]])
    experts = [sample.experts for sample in batch if sample.experts is not None]
    if experts:
        if len(experts) != len(batch):
            raise AssertionError("some samples of a lease have routed experts, some have none")
        arrays["routed_experts"] = np.concatenate(experts)
    specs, frames = pack_arrays(arrays)
    body = Samples(lease.lease_id, lease.attempt, lease.lineage, [sample.meta for sample in batch], specs)
    return body, frames
