"""Answers like an SGLang server as far as Temper asks it, and misbehaves on request: for what a real one does too rarely.

`/generate` yields the number of tensor values held, modulo the vocabulary, one token every `STUB_STEP_S`. `/misbehave`
sets what goes wrong next: {"status": n} answers the next n generations with 500, {"die": true} exits, {"deaf": true} never
answers again, {"lose": true} ignores updates, {"refuse": true} fails them, {"stale": n} starts n requests under "0:0",
{"hung": true} is a scheduler that stands still, {"retract": n} takes n rows back. STUB_VERSION is the version it claims,
STUB_LENGTH its context, STUB_STARTING how many health checks it answers with 503; STUB_DIES and STUB_SHORT end it at its start
and soon after, STUB_LACKS takes most of its interface away.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import pickle
from array import array
from pathlib import Path
from typing import Any

from aiohttp import web

PATHS = (
    "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/begin_weight_update",
    "/end_weight_update", "/update_weights_from_tensor", "/update_weights_from_disk", "/update_weight_version",
    "/get_weights_by_name", "/weights_checker", "/health", "/model_info",
)  # fmt: skip
STEP_S = float(os.environ.get("STUB_STEP_S", "0.002"))


class Server:
    """The state of the stub."""

    def __init__(self, admin_key: str) -> None:
        self.admin_key = admin_key
        self.tensors: dict[str, Any] = {}
        self.version = "default"
        self.running = asyncio.Event()
        self.running.set()
        self.aborted: set[str] = set()
        self.wrong: dict[str, Any] = {}
        self.calls: list[str] = []
        self.starting = int(os.environ.get("STUB_STARTING", "0"))
        self.bodies: list[Any] = []

    def take(self, key: str) -> bool:
        """Whether the next thing goes wrong in this way."""
        if self.wrong.get(key, 0) > 0:
            self.wrong[key] -= 1
            return True
        return False

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        if self.wrong.get("deaf"):
            await asyncio.get_running_loop().create_future()
        if request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def health(self, request: web.Request) -> web.Response:
        self.starting -= 1
        return web.Response(status=503 if self.starting >= 0 or self.wrong.get("hung") else 200)

    async def about(self, request: web.Request) -> web.Response:
        if os.environ.get("STUB_SHORT"):
            asyncio.get_running_loop().call_later(0.1, os._exit, 1)
        length = int(os.environ.get("STUB_LENGTH", "512"))
        return web.json_response(
            {"version": os.environ.get("STUB_VERSION", "0.5.23"), "context_length": length, "max_running_requests": 99}
        )

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def interface(self, request: web.Request) -> web.Response:
        paths = ("/generate", "/health") if os.environ.get("STUB_LACKS") else PATHS
        return web.json_response({"paths": {path: {} for path in paths}, "components": {"schemas": {}}})

    async def misbehave(self, request: web.Request) -> web.Response:
        self.wrong |= await request.json()
        if self.wrong.get("die"):
            os._exit(9)
        return web.json_response({"calls": self.calls, "bodies": self.bodies, "pid": os.getpid()})

    async def from_disk(self, request: web.Request) -> web.Response:
        from safetensors.torch import load_file  # brings torch along, which takes seconds

        body = await request.json()
        self.tensors = dict(load_file(Path(body["model_path"]) / "model.safetensors"))
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append({key: body[key] for key in ("rid", "extra_key") if key in body})
        if self.wrong.get("hung"):
            await asyncio.get_running_loop().create_future()
        if self.take("status"):
            return web.json_response({"error": {"message": "odd"}}, status=500)
        params = body["sampling_params"]
        spans: list[dict[str, Any]] = []
        ids: list[int] = []
        reason: dict[str, Any] = {"type": "length"}
        stale = self.take("stale")
        while len(ids) < params["max_new_tokens"]:
            if body["rid"] not in self.aborted:
                await self.running.wait()
                await asyncio.sleep(STEP_S)
            if body["rid"] in self.aborted or self.take("abort"):
                reason = {"type": "abort", "message": "asked"}
                break
            version = "0:0" if stale else self.version
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": len(ids), "end": len(ids)})
            ids.append(sum(tensor.numel() for tensor in self.tensors.values()) % 60 + len(ids) % 2)
            spans[-1]["end"] = len(ids)
            if ids[-1] in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": ids[-1]}
                break
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            "weight_versions": spans,
            "num_retractions": int(self.take("retract")),
        }
        if body.get("return_routed_experts"):
            flat = [
                expert % 4 for expert in range(2 * 2 * (len(body["input_ids"]) + len(ids) - 1))
            ]  # 2 layers, 2 experts
            meta["routed_experts"] = base64.b64encode(array("i", flat).tobytes()).decode()
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        asked = await request.json()
        prefix = "" if asked.get("abort_all") else asked["rid"]
        self.aborted |= {body["rid"] for body in self.bodies if body.get("rid", "").startswith(prefix)}
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        if (await request.json())["mode"] == "abort":
            self.aborted |= {body["rid"] for body in self.bodies if "rid" in body}
            self.running.set()
        self.running.clear()
        return web.json_response({"status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "ok"})

    async def fine(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": ""})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.take("refuse"):
            return web.json_response({"success": False, "message": "out of memory"})
        if not self.take("lose"):
            for packed in body["serialized_named_tensors"]:
                held = pickle.loads(base64.b64decode(packed))  # made by the test's own process
                self.tensors |= {name: tensor.clone() for name, tensor in held}
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def rename(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "message": ""})

    async def read(self, request: web.Request) -> web.Response:
        if self.wrong.get("unreadable"):
            return web.json_response({"error": {"message": "Get parameter by name failed"}}, status=400)
        body = await request.json()
        tensor = self.tensors.get(body["name"])
        return web.json_response(None if tensor is None else tensor[: body["truncate_size"]].tolist())

    async def checksum(self, request: web.Request) -> web.Response:
        sums = {name: str(tensor.tolist()) for name, tensor in self.tensors.items()}
        return web.json_response({"success": True, "message": "", "ranks": [{"checksums": sums}]})


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--config", type=Path)
    options, _ = parser.parse_known_args()
    if os.environ.get("STUB_DIES"):
        raise SystemExit("no such device")
    server = Server(options.config.read_text().split(": ")[1].strip())
    application = web.Application(middlewares=[server.guard], client_max_size=1 << 28)
    application.router.add_get("/health", server.health)
    application.router.add_get("/server_info", server.about)
    application.router.add_get("/model_info", server.model)
    application.router.add_get("/openapi.json", server.interface)
    for path, handler in {
        "misbehave": server.misbehave,
        "generate": server.generate,
        "abort_request": server.abort,
        "pause_generation": server.pause,
        "continue_generation": server.resume,
        "flush_cache": server.fine,
        "begin_weight_update": server.fine,
        "end_weight_update": server.fine,
        "update_weights_from_tensor": server.update,
        "update_weights_from_disk": server.from_disk,
        "update_weight_version": server.rename,
        "get_weights_by_name": server.read,
        "weights_checker": server.checksum,
    }.items():
        application.router.add_post(f"/{path}", handler)
    web.run_app(application, host="127.0.0.1", port=options.port, print=None, keepalive_timeout=1.0)


if __name__ == "__main__":
    main()
