"""After a commit: does the server compute what the verified weights say?

A fixed prompt's log-probabilities, as the server gives them and as a small forward over the mirror's own tensors gives
them. It finds what reading tensors back can't: a fused layout filled wrongly, a head that was not retied, a loader that
skipped a name. For the architectures that the embedded engine knows; others are read back only, and the log says so.
Called by `sglang`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from temper.actor.engines.llama import Layer, Llama, Weights
from temper.actor.engines.sglang_http import Client
from temper.actor.engines.sglang_push import name_of
from temper.actor.engines.sglang_weights import Mirror
from temper.actor.engines.shape import ModelShape, from_config
from temper.common.errors import ConfigError, EngineError
from temper.common.log import log
from temper.common.schema import Version
from torch import Tensor

TOKENS = 12
TIMEOUT_S = 60.0
LIMIT_NATS = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Of the mean gap, by dtype: several times what two right implementations show on a prompt as improbable as this one."""


class _Layers:
    """The layers of a model over the mirror, each made when it is reached: fused tensors exist one layer at a time."""

    def __init__(self, shape: ModelShape, mirror: Mirror) -> None:
        self._shape, self._mirror = shape, mirror

    def __len__(self) -> int:
        return self._shape.layers

    def __iter__(self) -> Iterator[Layer]:
        s, get = self._shape, self._mirror.tensor
        for index in range(s.layers):
            at = f"model.layers.{index}"

            def whole(prefix: str, parts: tuple[str, ...], kind: str, at: str = at) -> Tensor:
                return torch.cat([get(f"{at}.{prefix}.{part}.{kind}") for part in parts])

            qkv, gates = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
            yield Layer(
                input_norm=get(f"{at}.input_layernorm.weight"),
                qkv=whole("self_attn", qkv, "weight"),
                qkv_bias=whole("self_attn", qkv, "bias") if s.qkv_bias else None,
                q_norm=get(f"{at}.self_attn.q_norm.weight") if s.qk_norm else None,
                k_norm=get(f"{at}.self_attn.k_norm.weight") if s.qk_norm else None,
                out=get(f"{at}.self_attn.o_proj.weight"),
                out_bias=get(f"{at}.self_attn.o_proj.bias") if s.out_bias else None,
                post_norm=get(f"{at}.post_attention_layernorm.weight"),
                gate_up=whole("mlp", gates, "weight"),
                gate_up_bias=whole("mlp", gates, "bias") if s.mlp_bias else None,
                down=get(f"{at}.mlp.down_proj.weight"),
                down_bias=get(f"{at}.mlp.down_proj.bias") if s.mlp_bias else None,
            )


class Probe:
    """The prompt and what the mirror says about it."""

    def __init__(self, shape: ModelShape, mirror: Mirror, dtype: str, length: int) -> None:
        self._shape, self._mirror, self._limit = shape, mirror, LIMIT_NATS[dtype]
        draw = random.Random(5)
        self.ids = [draw.randrange(shape.vocab_size) for _ in range(max(min(TOKENS, length - 1), 2))]
        self._numbers = itertools.count()
        self._of = ""
        self._work: asyncio.Future[Tensor] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], mirror: Mirror, dtype: str, length: int) -> Probe | None:
        """A probe for a model's config.json; None for an architecture that can't be computed here."""
        try:
            return cls(from_config(config), mirror, dtype, length)
        except ConfigError as error:
            log(f"sglang: commits are verified by reading tensors back only ({error})")
            return None

    async def expect(self) -> Tensor:
        """f32[TOKENS - 1], what the mirror's present weights say of each prompt token but the first: computed in a thread,
        once a version. EngineError if the weights are not this model's."""
        return await asyncio.shield(self.begin())

    def begin(self) -> asyncio.Future[Tensor]:
        """Have it computed meanwhile."""
        digest = self._mirror.digest or ""
        if self._work is None or self._of != digest:
            self._of, self._work = digest, asyncio.ensure_future(asyncio.to_thread(self._computed))
            self._work.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waits gets it
        return self._work

    def _computed(self) -> Tensor:
        get, s = self._mirror.tensor, self._shape
        try:
            embed = get("model.embed_tokens.weight")
            head = embed if s.tied else get("lm_head.weight")
            weights = Weights(embed, _Layers(s, self._mirror), get("model.norm.weight"), head, {})  # type: ignore[arg-type]
            ids = torch.tensor([self.ids])
            with torch.inference_mode():
                table = torch.log_softmax(Llama(s, weights, len(self.ids)).logits(ids)[0, :-1], -1)
                return table.gather(1, ids[0, 1:, None])[:, 0]
        except (KeyError, IndexError, RuntimeError) as error:
            raise EngineError(f"the weights are not those of this model: {type(error).__name__} {error}") from error

    async def check(self, client: Client, version: Version) -> float:
        """The mean gap in nats; EngineError if the server computes something else, or under another version."""
        expected = await self.expect()
        body = {
            "input_ids": self.ids,
            "extra_key": f"probe:{name_of(version)}:{next(self._numbers)}",
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "skip_special_tokens": False},
        }
        answer = await client.post("/generate", body, timeout_s=TIMEOUT_S)
        try:
            meta = answer["meta_info"]
            served = str(meta["weight_versions"][0]["version"])
            pairs = [(float(entry[0]), int(entry[1])) for entry in meta["input_token_logprobs"][1:]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"sglang: a probe without {type(error).__name__} {error}: {str(answer)[:300]}") from error
        if served != name_of(version):
            raise EngineError(f"sglang serves version {served} after the update to {name_of(version)}")
        if [token for _, token in pairs] != self.ids[1:]:
            raise EngineError(
                f"sglang: a probe of {len(self.ids)} tokens came back with {len(pairs)} log-probabilities"
            )
        gap = float((torch.tensor([value for value, _ in pairs]) - expected).abs().mean())
        if not gap <= self._limit:
            raise EngineError(
                f"sglang computes other log-probabilities than version {name_of(version)}: {gap:.2e} nats a token apart, at"
                f" most {self._limit:g} is fine"
            )
        return gap
