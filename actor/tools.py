"""The sandbox session of one sample: a Python or a shell that lives across the turns of its episode.

Opened by the first step, ended with the episode, whatever ends that: `close` brings the workspace's files, `abandon` does not
wait. A session that is lost on the way is `ToolLost`, which costs the attempt and never becomes a score. Made by `episodes`.
"""

from __future__ import annotations

import secrets
from typing import Protocol, runtime_checkable

from temper.common.domains import Grader
from temper.common.schema import SandboxJob, TestCase, Verdict

LONGEST_S = 86_400.0


class ToolLost(Exception):
    """The sandbox could not run a step, or has lost the session."""


@runtime_checkable
class EndsSessions(Protocol):
    """A grader that can tell the sandbox that a session is over."""

    def end_session(self, name: str) -> None: ...


class ToolSession:
    """`live_s`: how long it may live. Steps are one after the other."""

    def __init__(self, grader: Grader, seed: int, live_s: float) -> None:
        self._grader, self._seed = grader, seed
        self._live_s = min(max(live_s, 0.1), LONGEST_S)
        self._name = ""
        self._language = ""

    async def step(self, code: str, language: str) -> Verdict:
        """Run `code` in the session; what it does wrong is in the verdict. ToolLost for an infra verdict."""
        begun = bool(self._name)
        if not begun:
            self._name, self._language = f"episode-{secrets.token_hex(8)}", language
        elif language != self._language:
            raise ValueError(f"a step in {language}: the session of this episode is one in {self._language}")
        verdict = await self._run([TestCase(code.encode(errors="replace"))], resume=begun)
        if verdict.outcome == "infra":
            raise ToolLost(f"a tool's session: {verdict.detail}")
        return verdict

    async def close(self) -> dict[str, bytes]:
        """End the session, if there is one; the regular files of its workspace."""
        if not self._name:
            return {}
        verdict = await self._run([], resume=True, close=True)
        if verdict.outcome == "infra":
            raise ToolLost(f"the end of a tool's session: {verdict.detail}")
        self._name = ""
        return verdict.files

    def abandon(self) -> None:
        """End the session without waiting. Idempotent."""
        name, self._name = self._name, ""
        if name and isinstance(self._grader, EndsSessions):
            self._grader.end_session(name)

    async def _run(self, steps: list[TestCase], *, resume: bool, close: bool = False) -> Verdict:
        job = SandboxJob(
            "", self._language, {}, steps, seed=self._seed, session_id=self._name, session_s=self._live_s,
            close_session=close, resume=resume,
        )  # fmt: skip
        return await self._grader.run(job)
