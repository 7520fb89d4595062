"""One request to one SGLang server: its body, sending it, aborting it. Called by `sglang`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from temper.actor.engines.base import Cancel, SamplingParams
from temper.actor.engines.sglang_answer import Answer, parse
from temper.actor.engines.sglang_http import Client
from temper.common.errors import EngineError

SUPPORT_LIMIT = 4096  # ids of a truncated distribution that a server names (its --sampling-mask-max-tokens)
TIES = 64  # room for ids that tie at the edge
ABORT_EVERY_S = 0.2
ABORTS = 50
CLOSE_ABORT_S = 1.0


class Requests:
    """Sends requests, aborts them when told to, and knows those under way. Lives on the engine's event loop."""

    def __init__(self, vocabulary: int, width: int = 0) -> None:
        """`vocabulary`: ids of the model; `width`: routed experts of each token, 0 if unknown."""
        self._width = width
        # With top-p or min-p alone the server wants a top-k whose ids it can name; the whole vocabulary where that fits.
        self._widest = vocabulary if vocabulary <= SUPPORT_LIMIT else SUPPORT_LIMIT - TIES
        # All ids have one length: the server aborts every request whose id *begins* with the one named.
        self._prefix = f"temper-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, Callable[[], None]] = {}  # how to abort each

    async def ask(
        self,
        client: Client,
        params: SamplingParams,
        ids: Sequence[int],
        budget: int,
        key: str,
        cancel: Cancel | None,
        *,
        aborts_to: Sequence[Client] = (),
    ) -> Answer:
        """The checked answer to `ids`, at most `budget` tokens. `key` names prefix-cache entries.

        `aborts_to`: where an abort goes if not to `client` (behind a router nobody knows which server it is).
        """
        rid = f"{self._prefix}-{next(self._numbers):012d}"
        done = asyncio.Event()

        def abort() -> None:
            task = asyncio.create_task(_abort(aborts_to or (client,), rid, done))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

        self._under_way[rid] = abort
        if cancel is not None:
            cancel.attach(abort)
        try:
            body = body_of(rid, params, ids, budget, key, self._widest)
            return parse(await client.post("/generate", body), params, len(ids), self._width)
        except asyncio.CancelledError:
            abort()
            raise
        finally:
            done.set()
            del self._under_way[rid]
            if cancel is not None:
                cancel.detach(abort)

    async def close(self) -> None:
        """Abort what is under way, and give the servers a moment to answer with what there is of it."""
        for abort in list(self._under_way.values()):
            abort()
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=CLOSE_ABORT_S)
        for task in self._aborts:
            task.cancel()


async def _abort(clients: Sequence[Client], rid: str, done: asyncio.Event) -> None:
    """Abort a request; again until it has ended, since an abort may overtake its request."""
    for _ in range(ABORTS):
        for client in clients:
            with contextlib.suppress(EngineError):
                await client.post("/abort_request", {"rid": rid}, timeout_s=10.0)
        if done.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_EVERY_S):
                await done.wait()


def body_of(
    rid: str, params: SamplingParams, ids: Sequence[int], budget: int, key: str, widest: int = -1
) -> dict[str, Any]:
    """The JSON of a request. `top_k` 0 is -1 there, or `widest` where truncation has to be named; the seed keeps its lower
    31 bits."""
    top_k = params.top_k or (widest if params.truncates else -1)
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(ids),
        "extra_key": key,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_sampling_mask": params.truncates,
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": top_k,
            "min_p": params.min_p,
            "max_new_tokens": budget,
            "stop_token_ids": list(params.stop_token_ids),
            "sampling_seed": params.seed % (1 << 31),
            "skip_special_tokens": False,
        },
    }
    if params.want_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": 0}
    return body
