"""The acknowledged workload through Redis Streams and NATS JetStream: what each server's process costs a message.

A producer that waits for the server's acknowledgement of every message (in windows), a consumer in a group that acknowledges what
it took, one server, all on this machine. Redis: XADD, XREADGROUP, XACK; durable is an append-only file synced before every
reply. JetStream: publish with acknowledgement, pull consumer, explicit acks; durable is file storage, which version 2.9 syncs
by time and not before it acknowledges. Needs Debian's redis-server and nats-server, and `pip install redis nats-py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

WINDOW = 256
STREAM = "samples"
NEEDS = {"redis": ("redis-server", "redis"), "nats": ("nats-server", "nats")}
PACKAGES = {"redis": "redis", "nats": "nats-py"}


def missing(system: str) -> str:
    """What would have to be installed for this row; empty if nothing."""
    server, module = NEEDS[system]
    lacks = [] if shutil.which(server) else [f"apt-get install {server}"]
    return " && ".join([*lacks, *([] if importlib.util.find_spec(module) else [f"pip install {PACKAGES[system]}"])])


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _server(system: str, durable: bool, folder: Path, port: int) -> subprocess.Popen[bytes]:
    if system == "redis":
        disk = ["--appendonly", "yes", "--appendfsync", "always"] if durable else ["--appendonly", "no"]
        command = [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
            *disk,
        ]
    else:
        command = ["nats-server", "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _reachable(port: int, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


# ---------------------------------------------------------------- clients


def redis_produce(port: int, messages: int, size: int) -> None:
    import redis

    client = redis.Redis(port=port)
    payload = os.urandom(size)
    for start in range(0, messages, WINDOW):
        pipe = client.pipeline(transaction=False)
        for _ in range(min(WINDOW, messages - start)):
            pipe.xadd(STREAM, {"s": payload})
        pipe.execute()


def redis_consume(port: int, messages: int) -> None:
    import redis

    client = redis.Redis(port=port)
    taken = 0
    while taken < messages:
        found: Any = client.xreadgroup("learner", "learner", {STREAM: ">"}, count=WINDOW, block=1000)
        for _, entries in found:
            client.xack(STREAM, "learner", *[key for key, _ in entries])
            client.xdel(STREAM, *[key for key, _ in entries])
            taken += len(entries)


async def nats_produce(port: int, messages: int, size: int) -> None:
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    stream, payload = client.jetstream(), os.urandom(size)
    for start in range(0, messages, WINDOW):
        count = min(WINDOW, messages - start)
        await asyncio.gather(*(stream.publish(STREAM, payload, timeout=30.0) for _ in range(count)))
    await client.close()


async def nats_consume(port: int, messages: int) -> None:
    import nats
    from nats.errors import TimeoutError as Late

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    consumer = await client.jetstream().pull_subscribe(STREAM, "learner")
    taken = 0
    while taken < messages:
        try:
            found = await consumer.fetch(WINDOW, timeout=5.0)
        except Late:
            continue
        for message in found:
            await message.ack()
        taken += len(found)
    await client.flush()
    await client.close()


def _prepare(system: str, port: int, durable: bool) -> None:
    if system == "redis":
        import redis

        redis.Redis(port=port).xgroup_create(STREAM, "learner", id="0", mkstream=True)
        return

    async def make() -> None:
        import nats
        from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

        client = await nats.connect(f"nats://127.0.0.1:{port}")
        storage = StorageType.FILE if durable else StorageType.MEMORY
        stream = client.jetstream()
        config = StreamConfig(STREAM, subjects=[STREAM], storage=storage, retention=RetentionPolicy.WORK_QUEUE)
        await stream.add_stream(config)
        pending = ConsumerConfig(durable_name="learner", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=4 * WINDOW)
        await stream.add_consumer(STREAM, pending)
        await client.close()

    asyncio.run(make())


def measure(system: str, durable: bool, messages: int, size: int) -> dict[str, Any]:
    """One row, or why there is none."""
    name = {"redis": "Redis Streams", "nats": "NATS JetStream"}[system] + (", durable" if durable else ", memory")
    row: dict[str, Any] = {"relay": name, "bytes": size}
    lacks = missing(system)
    if lacks:
        return {**row, "not measured": f"needs: {lacks}"}
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        port = _port()
        server = _server(system, durable, Path(folder), port)
        children: list[subprocess.Popen[bytes]] = []
        try:
            _reachable(port)
            _prepare(system, port, durable)
            facts = psutil.Process(server.pid)
            before, begun = sum(facts.cpu_times()[:2]), time.perf_counter()
            for role in ("consume", "produce"):
                command = [sys.executable, "-P", __file__, f"{system}_{role}", str(port), str(messages), str(size)]
                children.append(subprocess.Popen(command))
            for child in reversed(children):
                if child.wait(300.0):
                    raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
            seconds, cpu_s = time.perf_counter() - begun, sum(facts.cpu_times()[:2]) - before
        finally:
            for child in [*children, server]:
                if child.poll() is None:
                    child.kill()
                child.wait()
    return {**row, "samples": messages, "cpu_us": round(cpu_s / messages * 1e6, 2), "rate": round(messages / seconds)}


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    port, messages, size = map(int, numbers)
    if role == "redis_produce":
        redis_produce(port, messages, size)
    elif role == "redis_consume":
        redis_consume(port, messages)
    elif role == "nats_produce":
        asyncio.run(nats_produce(port, messages, size))
    else:
        asyncio.run(nats_consume(port, messages))
