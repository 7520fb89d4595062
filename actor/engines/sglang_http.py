"""SGLang's HTTP API as far as Temper uses it, with every answer checked. Bodies are JSON; errors are `EngineError`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from temper.common.errors import EngineError

ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
JSON = {"Content-Type": "application/json"}
UNLIMITED = aiohttp.ClientTimeout(total=None)


class ServerDown(EngineError):
    """The server does not answer: it has ended or hangs."""


class ServerBusy(EngineError):
    """The server answered with a status of 500 or above: the request may be tried again."""


class Client:
    """One server. Made inside a running loop; `close` it."""

    def __init__(self, url: str, admin_key: str, connections: int) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, force_close=False),
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=UNLIMITED,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """The parsed JSON answer (None for an empty one)."""
        return await self._ask("POST", path, body, timeout_s)

    async def get(self, path: str, *, timeout_s: float = 10.0) -> Any:
        """The parsed JSON answer (None for an empty one)."""
        return await self._ask("GET", path, None, timeout_s)

    async def command(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> None:
        """A command that answers {"success": bool, "message"} or {"status": "ok"}: EngineError unless it worked."""
        answer = await self.post(path, body, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success", answer.get("status") == "ok"):
            return
        raise EngineError(f"sglang {path}: {answer}")

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=JSON,
                timeout=UNLIMITED if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                data = (
                    await answer.content.read(ANSWER_LIMIT_BYTES + 1) if answer.status >= 400 else await answer.read()
                )
                if answer.status >= 500:
                    raise ServerBusy(f"sglang {path}: status {answer.status}: {data[:300].decode(errors='replace')}")
                if answer.status >= 400:
                    raise EngineError(f"sglang {path}: {data[:500].decode(errors='replace')}")
                if not data or answer.content_type != "application/json":
                    return None
                return msgspec.json.decode(data)
        except TimeoutError as error:
            raise ServerDown(f"sglang {path}: no answer within {timeout_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerDown(f"sglang {path}: {type(error).__name__}: {error}") from error
        except (ValueError, msgspec.DecodeError) as error:
            raise EngineError(f"sglang {path}: the answer is not JSON: {error}") from error
