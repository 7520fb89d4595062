"""After a commit: does the server compute what the verified weights say?

A fixed prompt's log-probabilities, as the server gives them and as a small forward over the mirror's own tensors gives
them. It finds what reading tensors back can't: a fused layout filled wrongly, a head that was not retied, a loader that
skipped a name. For the architectures that the embedded engine knows; others are read back only, and the log says so.

Two right implementations differ by rounding alone. How much that is, depends on the weights' dtype and on the model, so it
is measured, not guessed: the same forward in fp32 and in the weights' own dtype differ by the `noise` of one implementation,
and a server may be `TIMES_NOISE` as far from ours. Called by `sglang_fleet`.
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

TOKENS = 24
TIMEOUT_S = 60.0
LEAST_LIMIT_NATS = 1e-4  # hundreds of times what fp32 sums in another order differ by
TIMES_NOISE = 6.0
"""Two independent implementations are sqrt(2) times one's rounding error apart, one that also rounds the residual stream and
the attention's probabilities to the serving dtype about twice that; the mean over a dozen tokens scatters by another half.
Measured by `bin/bench engine` on the real server: see the rows ``probe``."""


class _Layers:
    """The layers of a model over the mirror, each made when it is reached: fused tensors exist one layer at a time."""

    def __init__(self, shape: ModelShape, mirror: Mirror, dtype: torch.dtype | None) -> None:
        self._shape, self._mirror, self._dtype = shape, mirror, dtype

    def __len__(self) -> int:
        return self._shape.layers

    def __iter__(self) -> Iterator[Layer]:
        s = self._shape

        def get(name: str) -> Tensor:
            found = self._mirror.tensor(name)
            return found if self._dtype is None else found.to(self._dtype)

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
        self._shape, self._mirror = shape, mirror
        self._exact = dtype == "float32"
        self.limit = LEAST_LIMIT_NATS if self._exact else 0.0  # nats, of the mean gap; 0: not measured yet
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

    def _computed(self, dtype: torch.dtype | None = None) -> Tensor:
        """In the weights' own dtype, or in another one."""
        s = self._shape

        def get(name: str) -> Tensor:
            found = self._mirror.tensor(name)
            return found if dtype is None else found.to(dtype)

        try:
            ids = torch.tensor([self.ids])
            embed = self._mirror.tensor("model.embed_tokens.weight")
            head = get("model.embed_tokens.weight" if s.tied else "lm_head.weight")
            used = embed[ids[0]].to(head.dtype)  # the rows that are looked up
            layers: Any = _Layers(s, self._mirror, dtype)
            weights = Weights(used, layers, get("model.norm.weight"), head, {})
            with torch.inference_mode():
                places = torch.arange(len(self.ids))[None]
                table = torch.log_softmax(Llama(s, weights, len(self.ids)).logits(places)[0, :-1], -1)
                return table.gather(1, ids[0, 1:, None])[:, 0]
        except (KeyError, IndexError, RuntimeError) as error:
            raise EngineError(f"the weights are not those of this model: {type(error).__name__} {error}") from error

    async def _measure_noise(self, expected: Tensor) -> None:
        """Set the limit by what rounding does to these weights."""
        exact = await asyncio.to_thread(self._computed, torch.float32)
        noise = float((exact - expected).abs().mean())
        self.limit = max(LEAST_LIMIT_NATS, TIMES_NOISE * noise)
        log(f"sglang: rounding moves log-probabilities by {noise:.2e} nats, a server may be {self.limit:.2e} apart")

    async def check(self, client: Client, version: Version) -> float:
        """The mean gap in nats; EngineError if the server computes something else, or under another version."""
        found, expected = await self._ask(client, version), await self.expect()
        gap = float((found - expected).abs().mean())
        if not self._exact and not gap <= self.limit:  # never measured, or for weights that have long changed
            await self._measure_noise(expected)
        if not gap <= self.limit:
            raise EngineError(
                f"sglang computes other log-probabilities than version {name_of(version)}: {gap:.2e} nats a token apart, at"
                f" most {self.limit:.2e} is fine"
            )
        return gap

    async def _ask(self, client: Client, version: Version) -> Tensor:
        """f32[TOKENS - 1], what the server says of them."""
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
        if not f"{served}:".startswith(f"{name_of(version)}:"):
            raise EngineError(f"sglang serves version {served} after the update to {name_of(version)}")
        if [token for _, token in pairs] != self.ids[1:]:
            raise EngineError(
                f"sglang: a probe of {len(self.ids)} tokens came back with {len(pairs)} log-probabilities"
            )
        return torch.tensor([value for value, _ in pairs])
