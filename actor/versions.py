"""Which weights the engine serves: the newest ones for an actor, exactly the pinned ones for an evaluator.

Fetching and staging run beside sampling; the engine commits between two steps; the host copy follows only when the
engine reports the right digest. An engine or a delta that fails is met with a full copy, a few times in a row. Called
by `daemon`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temper.actor.engines.base import Engine
from temper.actor.weights import WeightClient
from temper.common.delta import DeltaError, StagedUpdate
from temper.common.errors import EngineError, PeerLost
from temper.common.log import log
from temper.common.process import give_memory_back
from temper.common.schema import Lease, Version

FAILURES_IN_A_ROW = 3
LARGE_BYTES = 64 << 20  # an update of this size leaves enough behind to be worth the time that giving it back takes


class Versions:
    """Lives on the daemon's event loop. `on_commit` hears of every committed version."""

    def __init__(self, client: WeightClient, engine: Engine, on_commit: Callable[[Version], None]) -> None:
        self._client, self._engine, self._on_commit = client, engine, on_commit
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()
        self._pinning = asyncio.Lock()
        self._failures = 0
        client.on_new_version = lambda version: self._news.set()

    @property
    def version(self) -> Version | None:
        """The committed version."""
        return self._client.version

    async def follow(self, deadline_s: float) -> None:
        """Commit every new version for ever (an actor's). PeerLost if an announced one does not come in time."""
        while True:
            self._news.clear()
            if self._client.version is not None and not self._client.behind:
                await self._news.wait()
            await self._commit(await self._client.fetch(deadline_s=deadline_s))

    async def at_least(self, lease: Lease, deadline_s: float) -> None:
        """Wait until the weights are of the lease's lineage and not older than its min_version."""

        def fits() -> bool:
            version = self._client.version
            return version is not None and version.lineage == lease.lineage and version.ordinal >= lease.min_version

        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(fits)
        except TimeoutError:
            raise PeerLost(
                f"no weights from version {lease.min_version} of lineage {lease.lineage} on within {deadline_s:.0f} s;"
                f" committed is {self._client.version}"
            ) from None

    async def exactly(self, ordinal: int, deadline_s: float) -> None:
        """Commit exactly `ordinal` (an evaluator's). PeerLost when it does not come in time."""
        async with self._pinning:
            while self._client.version is None or self._client.version.ordinal != ordinal:
                await self._commit(await self._client.fetch(ordinal, deadline_s=deadline_s))

    async def _commit(self, update: StagedUpdate) -> None:
        try:
            digest = await self._engine.apply(update)
            await self._client.commit(update, digest, self._engine.host_copy)
        except (EngineError, DeltaError) as error:
            self._failures += 1
            log(f"weights: version {update.version.ordinal} was not committed: {error}")
            if self._failures >= FAILURES_IN_A_ROW:
                raise
            if isinstance(error, EngineError):
                self._client.reseed("engine")
            return
        self._failures = 0
        self._on_commit(update.version)
        if update.nbytes >= LARGE_BYTES:
            await asyncio.to_thread(give_memory_back)  # of the chunks, and what was made of them
        async with self._changed:
            self._changed.notify_all()
