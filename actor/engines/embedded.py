"""The embedded torch engine: the decoder in a thread of its own, so that the event loop never waits for a step.

Commands go in through one queue and are applied between two steps; results come out once a step, through one
`call_soon_threadsafe` per event loop. New weights of a large model are written beside sampling, into the spare copy
(`copies`), and only exchanged between two steps. A failure of the thread fails every request with its cause and is kept in
`failure`; nothing waits for a dead engine. Called by the actor's daemon and by the in-process loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import torch
from temper.actor.engines.base import Cancel, Counts, EngineCaps, GenerateRequest, Generation, OnSwap, check_request
from temper.actor.engines.decoder import Decoder, Finished
from temper.actor.engines.prefixes import KEPT
from temper.actor.engines.shape import ModelShape, from_config
from temper.common.errors import ConfigError, EngineError
from temper.common.log import log
from temper.common.lora import Lora
from temper.common.process import give_memory_back
from temper.common.schema import Version

if TYPE_CHECKING:
    from temper.common.delta import StagedUpdate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLOSE_TIMEOUT_S = 10.0
REST_S = 5.0  # an engine without work for this long keeps no caches
MEMORY_SHARE = 0.7  # of the host's memory that the cache may take
INLINE_BYTES = 4 << 20  # smaller models are written between two steps: a thread costs more


Waiter = asyncio.Future[Generation]


class EmbeddedEngine:
    """Implements `base.Engine` on CPU with torch."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        max_rows: int,
        max_length_tokens: int,
        on_swap: OnSwap = "in_flight",
        kv_on_swap: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        threads: int = 1,
        lora: Lora | None = None,
    ) -> None:
        """`config`: parsed config.json. ConfigError for a model or length that can't be run.

        `on_swap`: what new weights mean for running rows. in_flight: they go on under them; abort: they stop, and resume
        from their tokens, prefilled anew; drain: the weights wait until they have ended, and new rows for the weights.
        """
        shape = from_config(config)
        if dtype not in DTYPES:
            raise ConfigError(f"model.serving_dtype {dtype!r}, the embedded engine knows {', '.join(DTYPES)}")
        if not 2 <= max_length_tokens <= shape.max_position:
            raise ConfigError(
                f"model.max_length_tokens {max_length_tokens} is outside 2..{shape.max_position} of the model"
            )
        if max_rows < 1 or threads < 1:
            raise ConfigError(f"engine.max_rows {max_rows} and threads {threads} must be at least 1")
        check_memory(shape, max_rows, max_length_tokens)
        self._vocabulary = shape.vocab_size
        self._caps = EngineCaps(True, True, True, deterministic, max_length_tokens, max_rows)
        self._decoder = Decoder(
            shape,
            DTYPES[dtype],
            max_rows=max_rows,
            length=max_length_tokens,
            on_swap=on_swap,
            kv_on_swap=kv_on_swap,
            deterministic=deterministic,
            lora=lora,
        )
        self._threads = 1 if deterministic else threads
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._draining: list[Callable[[], None]] = []  # commits that wait for the running rows to end
        self._waiting: set[Waiter] = set()
        self._updates: set[asyncio.Future[str]] = set()
        self._applying = asyncio.Lock()
        self._beside = self._decoder.copies.served.nbytes >= INLINE_BYTES
        self._writer = ThreadPoolExecutor(
            1, "weights"
        )  # one: a write that nobody waits for any more ends before the next
        self._closing = False
        self._ended = False
        self.counts = Counts()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def host_copy(self, name: str) -> np.ndarray | None:
        """The flat bits of the spare copy, which is that of the committed version whenever `apply` has returned."""
        return self._decoder.copies.spare.bits.get(name)

    @property
    def trouble(self) -> str:
        """Empty: it samples as long as it has not failed."""
        return ""

    @property
    def caps(self) -> EngineCaps:
        return self._caps

    @property
    def version(self) -> Version | None:
        return self._decoder.version

    def resident(self, name: str) -> np.ndarray | None:
        """The flat bits that are served of a tensor, not copied; None if there is none of that name."""
        return self._decoder.copies.served.bits.get(name)

    async def generate(self, request: GenerateRequest, cancel: Cancel | None = None) -> Generation:
        """See `base.Engine.generate`. A cancelled caller cancels the row too."""
        self._alive()
        check_request(request, self._caps, self._vocabulary)
        future: Waiter = asyncio.get_running_loop().create_future()

        def abort() -> None:
            self._commands.put(lambda: self._decoder.cancel(future))

        self._waiting.add(future)
        self._still_runs()
        self._commands.put(lambda: self._decoder.submit(future, request))
        if cancel is not None:
            cancel.attach(abort)
        try:
            return await future
        except asyncio.CancelledError:
            abort()
            raise
        finally:
            self._waiting.discard(future)
            if cancel is not None:
                cancel.detach(abort)

    async def apply(self, update: StagedUpdate) -> str:
        """See `base.Engine.apply`; takes effect between two steps (with `on_swap` drain: once no row runs; the pause counts
        from when no new one was begun). The pause doesn't hang on the size of the update."""
        self._alive()
        decoder, loop = self._decoder, asyncio.get_running_loop()
        async with self._applying:
            if not self._beside:
                return await self._between_steps(lambda: decoder.commit(update))
            await loop.run_in_executor(self._writer, decoder.copies.prepare, update)
            digest = await self._between_steps(lambda: decoder.swap(update))
            await loop.run_in_executor(self._writer, decoder.copies.settle, update)
            return digest

    async def _between_steps(self, swap: Callable[[], str]) -> str:
        """Run `swap` in the engine's thread; the digest that it returns."""
        self._alive()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()

        started: list[float] = []

        def commit() -> None:
            started.append(time.perf_counter())
            if self._decoder.on_swap == "drain" and self._decoder.running:
                self._decoder.admitting = False
                self._draining.append(commit)
                return
            try:
                digest = swap()
            except EngineError as error:
                loop.call_soon_threadsafe(_fail, done, error)
                return
            self.counts.swaps += 1
            self.counts.last_pause_s = time.perf_counter() - started[0]
            loop.call_soon_threadsafe(_succeed, done, digest)

        self._updates.add(done)
        self._still_runs()
        self._commands.put(commit)
        try:
            return await done
        finally:
            self._updates.discard(done)

    async def close(self) -> None:
        """See `base.Engine.close`. Returns once the thread has ended (or 10 s later, with a warning)."""
        self._closing = True
        self._commands.put(lambda: None)
        self._writer.shutdown(wait=False)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log(f"the engine's thread is still busy {CLOSE_TIMEOUT_S:.0f} s after its close")

    # ------------------------------------------------------------ event loop side

    def _alive(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {type(self.failure).__name__}: {self.failure}")
        if self._closing:
            raise EngineError("the engine is closed")

    def _still_runs(self) -> None:
        """Called after registering a future: the thread marks its end before it fails the registered ones, so that
        either it sees the future or the caller sees the end."""
        if self._ended:
            self._alive()
            raise EngineError("the engine has ended")

    # ------------------------------------------------------------ engine thread

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while not self._closing:
                    self._obey()
                    ended = self._decoder.step()
                    self._count()
                    self._deliver(ended)
                    if self._draining and not self._decoder.running:
                        self._drained()
                while not self._commands.empty():
                    self._commands.get()()
                self._deliver(self._decoder.abort_all())
        except BaseException as error:
            self.failure = error
            log(f"the engine's thread has failed: {type(error).__name__}: {error}")
        self._ended = True
        self._fail_rest()

    def _obey(self) -> None:
        """Run all waiting commands; with nothing to decode, wait for one."""
        decoder = self._decoder
        if not decoder.running and (decoder.version is None or not decoder.pending):
            start = time.perf_counter()
            command = self._next()
            self.counts.idle_s += time.perf_counter() - start
            command()
        while not self._commands.empty():
            self._commands.get()()

    def _next(self) -> Callable[[], None]:
        """The next command; while there is none for a while the memory of the caches is given back."""
        try:
            return self._commands.get(timeout=REST_S)
        except Empty:
            self._decoder.caches.rest()
            give_memory_back()
            return self._commands.get()

    def _drained(self) -> None:
        """The rows that ran under the old weights have ended: commit, and let the next ones begin."""
        commits, self._draining = self._draining, []
        for commit in commits:
            commit()
        self._decoder.admitting = True

    def _deliver(self, ended: list[Finished]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Finished]] = {}
        for finished in ended:
            by_loop.setdefault(finished.key.get_loop(), []).append(finished)
        for loop, group in by_loop.items():
            _call(loop, _settle, group)

    def _count(self) -> None:
        decoder, counts = self._decoder, self.counts
        counts.sampled_tokens, counts.prefilled_tokens = decoder.sampled_tokens, decoder.caches.prefilled_tokens
        counts.steps, counts.rows = decoder.steps, len(decoder.running)

    def _fail_rest(self) -> None:
        reason = f"{type(self.failure).__name__}: {self.failure}" if self.failure else "closed"
        waiting: list[asyncio.Future[Any]] = [*self._waiting, *self._updates]
        for future in waiting:
            _call(future.get_loop(), _fail, future, EngineError(f"the engine has ended: {reason}"))


def check_memory(shape: ModelShape, max_rows: int, max_length_tokens: int) -> None:
    """ConfigError if the caches of keys and values (f32), of rows and of the prefixes that they share, would not fit into
    this host's memory when all of them have been written."""
    values = 2 * shape.layers * shape.kv_heads * shape.head_dim * (2 * max_rows + KEPT) * max_length_tokens
    total = psutil.virtual_memory().total
    if 4 * values > MEMORY_SHARE * total:
        raise ConfigError(
            f"engine.max_rows = {max_rows} of model.max_length_tokens = {max_length_tokens} need a cache of"
            f" {4 * values / 2**30:.1f} GiB; this host has {total / 2**30:.1f} GiB: lower one of them"
        )


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    """Hand results over; a loop that has been closed meanwhile has nobody left who waits for them."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)


def _settle(group: list[Finished]) -> None:
    for finished in group:
        if finished.generation is None:
            _fail(finished.key, EngineError(finished.error))
        else:
            _succeed(finished.key, finished.generation)


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
