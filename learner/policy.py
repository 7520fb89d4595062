"""The policy being trained: a transformers causal LM whose attention follows a micro-batch's prefix tree and whose
head never holds [tokens, vocabulary].

Guarantees: log-probabilities are of the tempered logits of exactly the trained tokens; fp32 masters stay fp32 whatever
the compute dtype; the model's own `generate` and `save_pretrained` keep working. Called by `step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from temper.common.errors import ConfigError
from temper.common.lora import adapted
from temper.kernels.linear_logprob import LogprobOut, linear_logprob
from temper.learner.attention import ATTENTION, tree_of
from temper.learner.batching import Microbatch
from temper.learner.linears import Rounded, fuse_linears
from temper.learner.mixtures import group_experts
from temper.learner.norms import fuse_norms
from temper.learner.rotary import fuse_rotary
from temper.learner.routing_replay import Replay, install
from transformers import PreTrainedModel

Entropy = Literal["none", "value", "grad"]
Support = tuple[torch.Tensor, torch.Tensor]

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Policy:
    """Forward of micro-batches through `model`, whose masters are fp32.

    `compute_dtype` bfloat16 runs forward and backward under autocast; gradients arrive in the masters' fp32. On CPU
    `rounded` then holds the weights in that dtype, and the embeddings' gradients are added where they belong at once.
    `checkpointing` recomputes each layer in backward instead of keeping its activations. `check` is called between layers,
    forward and backward, and may raise. With `routed_experts` the layers of a mixture use the experts that a micro-batch has
    on record; `replay` is what the last forward did with them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute_dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
        check: Callable[[], None] | None = None,
        routed_experts: bool = False,
    ) -> None:
        config: Any = model.config
        if config.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model.path is a model of type {config.model_type!r}; this release trains {', '.join(MODEL_TYPES)}"
            )
        if getattr(config, "sliding_window", None) and (
            config.model_type == "mixtral" or "sliding_attention" in (getattr(config, "layer_types", None) or ())
        ):
            raise ConfigError(
                f"model.path has sliding-window attention over {config.sliding_window} tokens; this release trains full attention"
            )
        if getattr(config, "router_jitter_noise", 0.0):
            raise ConfigError(
                f"model.path has router_jitter_noise = {config.router_jitter_noise}, expected 0: no engine samples with it"
            )
        self.model = model
        self.device = next(model.parameters()).device
        self.compute_dtype = compute_dtype
        master = next(model.parameters()).dtype
        self._attention_dtype = master if compute_dtype == torch.float32 else compute_dtype
        config._attn_implementation = ATTENTION
        fuse_norms(model)
        fuse_rotary(model)
        group_experts(model)
        self.routing = install(model) if routed_experts else None
        self.replay: Replay | None = None
        self.rounded: Rounded | None = None
        if self.device.type == "cpu" and compute_dtype != torch.float32 and master == torch.float32:
            self.rounded = Rounded(compute_dtype)
            fuse_linears(model, self.rounded)
            self._embedding.sparse = True  # its gradient has the rows of the tokens alone
        if check is not None:
            _call_at_layers(model, check)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})

    @property
    def head(self) -> torch.Tensor:
        """The output embedding [V, H] (the input embedding where they are tied)."""
        model: Any = self.model
        weight: torch.Tensor = model.get_output_embeddings().weight
        return weight

    @property
    def _embedding(self) -> torch.nn.Embedding:
        model: Any = self.model
        found: torch.nn.Embedding = model.get_input_embeddings()
        return found

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def hidden(self, batch: Microbatch) -> torch.Tensor:
        """[T, H] last hidden states of the packed tokens."""
        backbone: Any = self.model.base_model
        recorded = batch.experts if self.routing is not None else None
        self.replay = None if recorded is None else Replay(recorded, self.device)
        if self.rounded is not None and torch.is_grad_enabled():
            _give_gradient(self._embedding.weight)  # which sparse ones are added to
        with self._autocast():
            out = backbone(
                input_ids=torch.from_numpy(batch.input_ids).to(self.device)[None],
                position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
                use_cache=False,
                tree=tree_of(batch, self.device, self._attention_dtype),
                replay=self.replay,
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def chosen(self, batch: Microbatch) -> torch.Tensor:
        """[M, H] hidden states that predict each trained token, in the compute dtype."""
        predict = torch.from_numpy(batch.predict).to(self.device)
        hidden = self.hidden(batch).index_select(0, predict)
        return hidden if self.compute_dtype == torch.float32 else hidden.to(self.compute_dtype)

    def logprobs(
        self,
        batch: Microbatch,
        *,
        temperature: float,
        entropy: Entropy = "none",
        support: Support | None = None,
        chosen: torch.Tensor | None = None,
    ) -> LogprobOut:
        """Log-probability (nats, f32[M]) of each trained token at `temperature`, over its `support` (ids, cu) where one
        is given; the entropy too where asked. `chosen`: what `chosen` gave for the same batch, if it was asked."""
        if support is not None:
            support = (support[0].to(self.device), support[1].to(self.device))
        head: Any = self.head
        trains = self.rounded is not None and head.requires_grad and torch.is_grad_enabled()
        return linear_logprob(  # products of values in the compute dtype, summed in fp32, as in the engine
            self.chosen(batch) if chosen is None else chosen,
            head,
            torch.from_numpy(batch.target).to(self.device),
            temperature=temperature,
            entropy=entropy,
            support=support,
            rounded=None if self.rounded is None else self.rounded.of(head),
            weight_gradient=_give_gradient(head) if trains else None,
        )

    def named_masters(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter once by its canonical Hugging Face name (tied ones under their first name)."""
        return dict(self.model.named_parameters())

    def trained_masters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained: all of them, or the adapters where there are any."""
        named = self.named_masters()
        return {name: p for name, p in named.items() if adapted(name)} or named


def _give_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The dense gradient that is added to; None for a parameter that is not trained."""
    if parameter.requires_grad and parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _call_at_layers(model: PreTrainedModel, check: Callable[[], None]) -> None:
    """Call `check` before each layer, in forward and in backward: what it raises ends the pass within a layer's time."""
    backbone: Any = model.base_model

    def before(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        check()
        if arguments[0].requires_grad:
            arguments[0].register_hook(lambda gradient: check())

    for layer in backbone.layers:
        layer.register_forward_pre_hook(before)


_BITS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}


def bit_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bits as u16 (bf16, fp16) or u32 (fp32), same shape, no copy on CPU."""
    dense = tensor.detach().cpu().contiguous()
    signed = torch.int32 if dense.dtype == torch.float32 else torch.int16
    return dense.view(signed).numpy().view(_BITS[dense.dtype])
