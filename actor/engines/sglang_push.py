"""Bringing weights to one SGLang server: in place while requests run, with them retracted, or from disk; then reading back.

Whatever happens, generation goes on afterwards. Called by `sglang`, one push at a time a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from safetensors.torch import save_file
from temper.actor.engines.sglang_http import Client, ServerBusy, ServerDown
from temper.actor.engines.sglang_weights import Mirror, packed
from temper.common.errors import EngineError, EnvironmentFault
from temper.common.log import log
from temper.common.schema import Version

PauseMode = Literal["in_place", "retract", "abort"]

COMMAND_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 600.0
_PUSHES = itertools.count()


def name_of(version: Version) -> str:
    """What prefix-cache entries are named after; servers call the weights so too, with the number of the push."""
    return f"{version.lineage}:{version.ordinal}"


class Folder:
    """Weights as files, for servers that load them from disk. The newest copy only."""

    def __init__(self, path: str, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._own = not path
        try:
            self.path = Path(path) if path else Path(tempfile.mkdtemp(prefix="temper-weights-"))
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"[actor.sglang] disk_dir {path}: {error.strerror or error}") from error

    def write(self, mirror: Mirror, version: Version) -> Path:
        """The model folder of a version; the one before goes."""
        folder = self.path / f"{version.lineage}-{version.ordinal}"
        try:
            folder.mkdir(exist_ok=True)
            for name, data in self._files.items():
                (folder / name).write_bytes(data)
            save_file({name: mirror.tensor(name).clone() for name in mirror.names}, folder / "model.safetensors")
            for other in self.path.iterdir():
                if other != folder and other.is_dir() and (other / "model.safetensors").is_file():
                    shutil.rmtree(other, ignore_errors=True)
        except OSError as error:
            raise EngineError(f"weights cannot be written to {folder}: {error.strerror or error}") from error
        return folder

    def close(self) -> None:
        """Remove what this process made."""
        if self._own:
            shutil.rmtree(self.path, ignore_errors=True)


class Pusher:
    """Pushes the mirror to one server. `folder`: from disk; else tensors, one payload for each of `ranks`."""

    def __init__(
        self, mirror: Mirror, mode: PauseMode, *, ranks: int = 1, folder: Folder | None = None, verified: int = 3
    ) -> None:
        """`mode`: what becomes of running requests; `verified`: tensors read back after each push, another choice each time."""
        self._mirror, self._mode, self._ranks, self._folder = mirror, mode, ranks, folder
        self._verified = verified
        self._turn = 0
        self._readable = True  # the model can be asked for its tensors by name
        self._checksum = ""
        self.label = ""  # of the last push: no two have the same, so that a failed one is told from its repetition

    def forget(self) -> None:
        """The server is a new one: what it held is unknown."""
        self._checksum = ""

    async def push(self, client: Client, names: Sequence[str], version: Version) -> float:
        """Bring the tensors `names` (from disk: all) as `version`; seconds of the pause. EngineError if they were not taken."""
        folder = None
        if self._folder is not None and names:
            folder = await asyncio.to_thread(self._folder.write, self._mirror, version)
        self.label = f"{name_of(version)}:{next(_PUSHES)}"
        begun = time.perf_counter()
        await client.command("/pause_generation", {"mode": self._mode}, timeout_s=COMMAND_TIMEOUT_S)
        try:
            if self._mode == "retract":
                await client.post("/flush_cache", {}, timeout_s=COMMAND_TIMEOUT_S)
            if not names:  # the same bits under a new name
                await self._rename(client)
            elif folder is not None:
                await self._from_disk(client, folder)
            else:
                await self._tensors(client, names)
            await self._verify(client, names)
        except EngineError:
            with contextlib.suppress(EngineError):
                await self._rename(client)  # whatever part of it was taken: it is not the version before any more
            raise
        finally:
            await client.command("/continue_generation", {}, timeout_s=COMMAND_TIMEOUT_S)
        return time.perf_counter() - begun

    async def _rename(self, client: Client) -> None:
        body = {"new_version": self.label, "abort_all_requests": False}
        await client.command("/update_weight_version", body, timeout_s=COMMAND_TIMEOUT_S)

    async def _tensors(self, client: Client, names: Sequence[str]) -> None:
        await client.command("/begin_weight_update", {}, timeout_s=COMMAND_TIMEOUT_S)
        try:
            for bucket in self._mirror.buckets(names):
                payload = await asyncio.to_thread(packed, bucket, shared=self._mirror.shared, ranks=self._ranks)
                body = {
                    "serialized_named_tensors": payload,
                    "weight_version": self.label,
                    "flush_cache": False,
                }
                await client.command("/update_weights_from_tensor", body, timeout_s=UPDATE_TIMEOUT_S)
        finally:
            await client.command("/end_weight_update", {}, timeout_s=COMMAND_TIMEOUT_S)

    async def _from_disk(self, client: Client, folder: Path) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": self.label,
            "flush_cache": False,
        }
        await client.command("/update_weights_from_disk", body, timeout_s=UPDATE_TIMEOUT_S)

    async def _verify(self, client: Client, names: Sequence[str]) -> None:
        """Some changed tensors read back must be the mirror's; where the model can't be read, its checksum must be another
        one than before."""
        if not names:
            return
        if self._readable:
            for _ in range(min(self._verified, len(names))):
                name = names[self._turn % len(names)]
                self._turn += 1
                body = {"name": name, "truncate_size": 2}
                try:
                    found = await client.post("/get_weights_by_name", body, timeout_s=COMMAND_TIMEOUT_S)
                except (ServerBusy, ServerDown):
                    raise
                except EngineError as error:
                    log(f"sglang: this model's weights can't be read back ({error}); comparing checksums instead")
                    self._readable = False
                    break
                problem = self._mirror.mismatch(name, found)
                if problem:
                    raise EngineError(f"sglang did not take the update: {problem}")
        if not self._readable:
            before, self._checksum = self._checksum, await _checksums(client)
            if before == self._checksum:
                raise EngineError(
                    f"sglang did not take the update: its checksum is still that of before {list(names[:3])} changed"
                )


async def _checksums(client: Client) -> str:
    answer = await client.post("/weights_checker", {"action": "checksum"}, timeout_s=UPDATE_TIMEOUT_S)
    try:
        return json.dumps([sorted(rank["checksums"].items()) for rank in answer["ranks"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"sglang: no checksum of its weights: {str(answer)[:200]}") from error
