"""The policy being trained: a transformers causal LM whose attention follows a micro-batch's prefix tree and whose
head never holds [tokens, vocabulary].

Guarantees: log-probabilities are of the tempered logits of exactly the trained tokens; fp32 masters stay fp32 whatever
the compute dtype; the model's own `generate` and `save_pretrained` keep working. Called by `step`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from temper.common.errors import ConfigError
from temper.kernels.linear_logprob import LogprobOut, linear_logprob
from temper.learner.batching import Bucket, Microbatch
from transformers import AttentionInterface, PreTrainedModel

Entropy = Literal["none", "value", "grad"]
Support = tuple[torch.Tensor, torch.Tensor]

ATTENTION = "temper_tree"
MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceBucket:
    queries: torch.Tensor | None  # i64[B*Q]; None: the range that begins at start
    keys: torch.Tensor | None  # i64[B*K]; None: the same range as the queries
    mask: torch.Tensor | None  # bool[B, 1, Q, K]; None: causal
    start: int
    shape: tuple[int, int, int]  # B, Q, K


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A micro-batch's attention plan on the model's device."""

    buckets: tuple[_DeviceBucket, ...]
    restore: torch.Tensor | None


def _device_bucket(bucket: Bucket, device: torch.device) -> _DeviceBucket:
    (size, width), length = bucket.queries.shape, bucket.keys.shape[1]
    queries = None if bucket.start is not None else torch.from_numpy(bucket.queries.reshape(-1)).to(device)
    if bucket.keys is bucket.queries:
        keys = queries
    else:
        keys = torch.from_numpy(bucket.keys.reshape(-1)).to(device)
    mask = None if bucket.mask is None else torch.from_numpy(bucket.mask)[:, None].to(device)
    return _DeviceBucket(queries, keys, mask, bucket.start or 0, (size, width, length))


def tree_of(batch: Microbatch, device: torch.device) -> Tree:
    """The plan of `batch` as tensors on `device`."""
    restore = None if batch.restore is None else torch.from_numpy(batch.restore).to(device)
    return Tree(tuple(_device_bucket(bucket, device) for bucket in batch.buckets), restore)


def _take(x: torch.Tensor, index: torch.Tensor | None, start: int, rows: int, width: int) -> torch.Tensor:
    """[rows, heads, width, D] from x [T, heads, D]: gathered by `index`, or the range from `start`."""
    taken = x.narrow(0, start, rows * width) if index is None else x.index_select(0, index)
    return taken.view(rows, width, *x.shape[1:]).transpose(1, 2)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    tree: Tree,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    outputs = []
    for bucket in tree.buckets:
        size, width, length = bucket.shape
        out = F.scaled_dot_product_attention(
            _take(q, bucket.queries, bucket.start, size, width),
            _take(k, bucket.keys, bucket.start, size, length),
            _take(v, bucket.keys, bucket.start, size, length),
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(out.transpose(1, 2).reshape(size * width, *q.shape[1:]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if tree.restore is not None:
        packed = packed.index_select(0, tree.restore)
    return packed[None], None


AttentionInterface.register(ATTENTION, tree_attention)


class Policy:
    """Forward of micro-batches through `model`, whose masters are fp32.

    `compute_dtype` bfloat16 runs forward and backward under autocast; gradients arrive in the masters' fp32.
    `checkpointing` recomputes each layer in backward instead of keeping its activations.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
    ) -> None:
        config: Any = model.config
        if config.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model.path is a model of type {config.model_type!r}; this release trains {', '.join(MODEL_TYPES)}"
            )
        self.model = model
        self.device = next(model.parameters()).device
        self.compute_dtype = compute_dtype
        config._attn_implementation = ATTENTION
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})

    @property
    def head(self) -> torch.Tensor:
        """The output embedding [V, H] (the input embedding where they are tied)."""
        model: Any = self.model
        weight: torch.Tensor = model.get_output_embeddings().weight
        return weight

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def hidden(self, batch: Microbatch) -> torch.Tensor:
        """[T, H] last hidden states of the packed tokens."""
        backbone: Any = self.model.base_model
        with self._autocast():
            out = backbone(
                input_ids=torch.from_numpy(batch.input_ids).to(self.device)[None],
                position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
                use_cache=False,
                tree=tree_of(batch, self.device),
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logprobs(
        self, batch: Microbatch, *, temperature: float, entropy: Entropy = "none", support: Support | None = None
    ) -> LogprobOut:
        """Log-probability (nats, f32[M]) of each trained token at `temperature`, over its `support` (ids, cu) where one
        is given; the entropy too where asked."""
        hidden = self.hidden(batch)
        predict = torch.from_numpy(batch.predict).to(self.device)
        target = torch.from_numpy(batch.target).to(self.device)
        if support is not None:
            support = (support[0].to(self.device), support[1].to(self.device))
        return linear_logprob(
            hidden.index_select(0, predict),
            self.head,
            target,
            temperature=temperature,
            entropy=entropy,
            support=support,
        )

    def named_masters(self) -> dict[str, torch.nn.Parameter]:
        """Every trained parameter once by its canonical Hugging Face name (tied ones under their first name)."""
        return dict(self.model.named_parameters())


_BITS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}


def bit_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bits as u16 (bf16, fp16) or u32 (fp32), same shape, no copy on CPU."""
    dense = tensor.detach().cpu().contiguous()
    signed = torch.int32 if dense.dtype == torch.float32 else torch.int16
    return dense.view(signed).numpy().view(_BITS[dense.dtype])
