"""What an inference engine is to the rest of the actor: token ids in, token ids with their evidence out.

Every engine guarantees: `Generation.logprobs` are of the distribution that was *actually sampled* (temperature applied
to the logits, top-k/top-p/min-p renormalised); each token carries the version that sampled it; an aborted request
returns what it had; a new request never meets cached keys and values of older weights. Called by `episodes` (and the
in-process loop) for generation and by `weights` for commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from temper.actor.engines.lines import TokenLines
from temper.common.errors import EngineError
from temper.common.schema import Version

if TYPE_CHECKING:
    import numpy.typing as npt
    from temper.common.delta import StagedUpdate


OnSwap = Literal["in_flight", "drain", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one row.

    `temperature` divides the logits; 0 is greedy (log-probability 0 of a point mass). `top_k` 0 and `top_p` 1 and
    `min_p` 0 are off. The random number of the token at absolute position p is a pure function of (`seed`, p), so a
    rerun, or a continuation after an abort, draws the same ones.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    want_support: bool = False  # return the ids that truncation left, per token
    want_experts: bool = False  # return the experts that each token was routed to
    lines: TokenLines | None = (
        None  # end, as by a stop token, where a line begins in column 0; engines may go on instead
    )

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p can remove tokens."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`ids`: everything before the first new token (at least one id)."""

    ids: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled, the stop token included.

    `logprobs[i]` (nats) belongs to `ids[i]`. `version_runs`: (lineage, ordinal, count) over `ids`, in order.
    `finish_reason`: stop (a stop token was sampled), length (budget or context used up), abort (cancelled or drained;
    the partial result is valid). `support[i]`: ids that truncation left at position i, None unless asked for. `experts`:
    int16[prompt + ids - 1, layers * experts per token], layer by layer, None unless asked for.
    """

    ids: list[int]
    logprobs: list[float]
    version_runs: list[tuple[int, int, int]]
    finish_reason: Literal["stop", "length", "abort"]
    support: list[list[int]] | None = None
    experts: npt.NDArray[np.int16] | None = None


def longer_record(
    experts: npt.NDArray[np.int16] | None, later: npt.NDArray[np.int16] | None
) -> npt.NDArray[np.int16] | None:
    """The routed experts of a sequence that went on: what a token went to first stays, even if a later request fed it again
    (its log-probability is of then), and `later`, of the whole sequence, says it of the rest."""
    if experts is None or later is None:
        return later if experts is None else experts
    return np.concatenate([experts, later[len(experts) :]])


@dataclass(frozen=True, slots=True)
class EngineCaps:
    """What the recipe is checked against.

    `support_ids`: can return the truncated support. `in_flight`: commits weights between steps of running requests.
    `seeded`: the same seed draws the same tokens. `batch_invariant`: results don't depend on batch neighbours.
    `routed_experts`: can say which experts each token was routed to.
    """

    support_ids: bool
    in_flight: bool
    seeded: bool
    batch_invariant: bool
    max_length_tokens: int
    max_rows: int
    routed_experts: bool = False


@dataclass(slots=True)
class Cancel:
    """A one-way switch: set once, it runs what was attached. Not thread-safe: used on the event loop only."""

    is_set: bool = False
    _attached: list[Callable[[], None]] = field(default_factory=list)

    def set(self) -> None:
        """Cancel; a second call does nothing."""
        if not self.is_set:
            self.is_set = True
            attached, self._attached = self._attached, []
            for call in attached:
                call()

    def attach(self, call: Callable[[], None]) -> None:
        """Run `call` when cancelled (at once if that has happened)."""
        if self.is_set:
            call()
        else:
            self._attached.append(call)

    def detach(self, call: Callable[[], None]) -> None:
        """Forget `call`; unknown ones are ignored."""
        if call in self._attached:
            self._attached.remove(call)


@dataclass(slots=True)
class Counts:
    """What an engine has done: monotone counts and last gauge values, for anybody to read."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    steps: int = 0
    rows: int = 0
    idle_s: float = 0.0
    swaps: int = 0
    last_pause_s: float = 0.0
    restarts: int = 0
    retractions: int = 0


class Engine(Protocol):
    """An inference engine. All methods are called on the actor's event loop.

    `failure` is set when the engine is beyond repair; every request fails with it from then on. `trouble` says why it
    can't sample just now (its server is coming back); empty when it can.
    """

    counts: Counts

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def trouble(self) -> str: ...

    @property
    def caps(self) -> EngineCaps: ...

    @property
    def version(self) -> Version | None:
        """The committed version; None before the first `apply`."""
        ...

    def resident(self, name: str) -> np.ndarray | None:
        """The flat bits that are served of a tensor, not copied, only to be read; None if the engine can't say."""
        ...

    def host_copy(self, name: str) -> np.ndarray | None:
        """The flat bits of a tensor as last applied, where the engine keeps a copy in host memory; only to be read, valid
        until the next `apply`. None where it keeps none."""
        ...

    async def generate(self, request: GenerateRequest, cancel: Cancel | None = None) -> Generation:
        """Sample one continuation. EngineError if the request can't be run (too long, no weights yet, engine dead)."""
        ...

    async def apply(self, update: StagedUpdate) -> str:
        """Overwrite the changed tensors between two steps; returns the digest now served. EngineError if
        `update.base_digest` is not what is served: nothing was changed then."""
        ...

    async def close(self) -> None:
        """Abort what runs (partial results are returned) and free the engine."""
        ...


def check_request(request: GenerateRequest, caps: EngineCaps, vocabulary: int) -> None:
    """EngineError if no engine of these `caps` over `vocabulary` tokens could run the request."""
    params, size = request.sampling, len(request.ids)
    if not 1 <= size < caps.max_length_tokens:
        raise EngineError(f"prompt of {size} tokens, the engine takes 1 to {caps.max_length_tokens - 1}")
    if not all(0 <= token < vocabulary for token in request.ids):
        raise EngineError(f"prompt with a token outside 0..{vocabulary - 1}: wrong tokenizer for this model?")
    if params.max_new_tokens < 1 or params.top_k < 0 or not 0 <= params.seed < 1 << 64:
        raise EngineError(f"impossible sampling parameters {params}: max_new_tokens >= 1, top_k >= 0, seed a u64")
    if not (0 <= params.temperature < float("inf") and 0 < params.top_p <= 1 and 0 <= params.min_p < 1):
        raise EngineError(
            f"impossible sampling parameters {params}: temperature >= 0, top_p in (0, 1], min_p in [0, 1)"
        )
