"""Relays between light clients, each in a process of its own: what ``broker`` measures beside the real broker.

``pump`` is the broker's Router alone, under credit and with acknowledgements both ways: what came together it passes on as the
broker does, in a group that holds it as it came; ``pump, asleep`` is the same without staying awake for what comes soon
(``link.Link``); ``proxy`` is ``zmq.proxy``, which moves the same frames without any of that;
``direct`` is no relay at all. The clients are as light as can be: what they take of two cores, the relay has to do without.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from temper.common import burst
from temper.common.process import keep_freed_memory
from temper.common.schema import Ack, Group, Hello, SampleMeta, Samples, Welcome
from temper.common.sockets import routing_id, use_io_threads
from temper.common.wire import encode, pack_fields, pack_meta, unpack_fields, unpack_meta

sys.path.insert(0, str(Path(__file__).parent))
from _broker_clients import NOBLOCK, PACE_S, UNCOPIED_BYTES, copies, receive, transmit

KIBIBYTE, MEBIBYTE = 1024, 1024 * 1024
PUMPS = ("pump", "pump, asleep")
EPOCH = 9
ACK_EVERY = 64  # as often as a Peer does, about
ACK_BYTES = 4 * MEBIBYTE
TURN = 16  # samples of a lease, about: what an actor has at once
BODY = pack_meta(Samples(5, 1, 7, [SampleMeta(0, "stop", 1.0, True, {"exact": 1.0}, "ok", [(7, 1, 16)])], []))
CREDIT = 2**40
CONSUMER_WINDOW = 4096
CONSUMER_BYTES = 64 * MEBIBYTE


# ---------------------------------------------------------------- the relays, each in its own process


async def pump(folder: str, messages: int) -> dict[str, float]:
    """A broker that forwards. CPU is taken from the first message to the last."""
    import asyncio

    from temper.common.process import settle_garbage
    from temper.common.pump import Arrival, Delivery, DeliveryRun, Router

    over = asyncio.get_running_loop().create_future()
    consumer = b""
    count = 0
    begun = (0.0, 0.0)

    def welcome(peer: bytes, hello: Hello) -> Welcome:
        nonlocal consumer
        if hello.role == "learner":
            consumer = peer
        return Welcome("bench", "{}", 0, 1.0)

    def on_batch(deliveries: list[Arrival]) -> None:
        nonlocal count, begun
        if count == 0:
            begun = (time.process_time(), time.perf_counter())
        last: dict[bytes, int] = {}
        for d in deliveries:
            last[d.peer] = d.sequence
            metas, frames = ([d.raw_meta], d.frames) if isinstance(d, Delivery) else (d.metas, [bytes(d.joined)])
            raws: Any = [msgspec.Raw(meta) for meta in metas]
            group = Group(5, "train", "reverse", 0, 5, 7, raws)
            router.forward(consumer, Group.KIND, pack_meta(group), frames)
            count += len(metas)
        room = router.backlog(consumer)[0] == 0
        if not room:  # the consumer has stopped: so do the producers
            for d in deliveries:
                sizes = d.sizes if isinstance(d, DeliveryRun) else [d.size]
                number, size = held.get(d.peer, (0, 0))
                held[d.peer] = (number + len(sizes), size + sum(sizes))
        for peer, sequence in last.items():
            router.acknowledge(peer, sequence, release=room)
        if count >= messages and not over.done():
            over.set_result((time.process_time() - begun[0], time.perf_counter() - begun[1]))

    def on_room(peer: bytes) -> None:
        while held:
            producer, (number, size) = held.popitem()
            router.release(producer, number, size)

    held: dict[bytes, tuple[int, int]] = {}
    router = Router(
        f"ipc://{folder}/relay",
        "control",
        on_batch,
        lambda peer, reason: print(f"peer closed: {reason}", file=sys.stderr),
        welcome=welcome,
        on_room=on_room,
        lazy=frozenset({Samples.KIND}),
    )
    settle_garbage()
    print("bound", flush=True)
    cpu_s, wall_s = await over
    await asyncio.to_thread(sys.stdin.readline)
    router.close()
    return {"cpu_us": cpu_s / messages * 1e6, "rate": messages / wall_s}


def high_water(size: int) -> int:
    """ZeroMQ's own bound of each queue, less where that would be more than the broker's: else `zmq.proxy` is slowed down by memory
    that it takes for gigabytes of large messages."""
    return min(1000, CONSUMER_BYTES // size)


def proxy(folder: str, size: int) -> dict[str, float]:
    """zmq.proxy between a ROUTER and a DEALER. The parent says on stdin when to start and stop counting."""
    context: Any = zmq.Context.instance()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, name in ((front, "control"), (back, "back")):
        os.makedirs(f"{folder}/relay", exist_ok=True)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(high_water(size))
        socket.bind(f"ipc://{folder}/relay/{name}.sock")
    threading.Thread(target=zmq.proxy, args=(front, back), daemon=True).start()
    print("bound", flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    sys.stdin.readline()
    return {"cpu_s": time.process_time() - cpu}


# ---------------------------------------------------------------- light clients


class _Parts(msgspec.Struct, array_like=True):
    """What a consumer looks at of a Group."""

    group_id: int
    lane: str
    domain: str
    level: int
    task_seed: int
    lineage: int
    parts: list[msgspec.Raw]


_parts = msgspec.msgpack.Decoder(_Parts).decode


def _held(meta: bytes) -> int:
    """How many samples a Group holds."""
    return len(_parts(meta).parts)


class Line:
    """One DEALER with the protocol's credit and acknowledgements, or without when `plain`."""

    def __init__(self, folder: str, role: Any, plain: bool, size: int, name: str = "control") -> None:
        self.plain = plain
        self.sent = self.sent_bytes = 0
        self.limit = self.limit_bytes = CREDIT
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, -1)
        self.socket.set_hwm(high_water(size))
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id())
        self.socket.connect(f"ipc://{folder}/relay/{name}.sock")
        if plain:
            return
        hello = Hello(role, role, "token", limit_messages=CONSUMER_WINDOW, limit_bytes=CONSUMER_BYTES)
        self.socket.send_multipart(encode(Hello.KIND, pack_meta(hello), epoch=EPOCH))
        while self.limit == CREDIT:
            self.take(block=True)

    def take(self, block: bool) -> tuple[int, int, memoryview] | None:
        """(samples, bytes, frame that holds them, uncopied) of the next message; takes note of acknowledgements and the welcome."""
        try:
            parts = receive(self.socket, 0 if block else NOBLOCK)
        except zmq.Again:
            return None
        if self.plain:
            return 1, 0, parts[-1].buffer
        kind, *_, size = unpack_fields(parts[0].bytes)
        if kind in (Ack.KIND, Welcome.KIND):
            body: Any = unpack_meta(parts[1].bytes, Ack if kind == Ack.KIND else Welcome)
            self.limit, self.limit_bytes = body.limit_messages, body.limit_bytes
        return (_held(parts[1].bytes), size, parts[-1].buffer) if kind == Group.KIND else (0, 0, memoryview(b""))

    def send(self, payloads: list[bytes]) -> None:
        """Send messages once there is credit for them: together, as a Peer does, or apart when they are large or `plain`."""
        sizes = [len(BODY) + len(payload) for payload in payloads]
        if len(payloads) > 1 and (self.plain or sum(sizes) > burst.BYTES):
            for payload in payloads:
                self.send([payload])
            return
        while self.sent + len(sizes) > self.limit or self.sent_bytes + sum(sizes) > self.limit_bytes:
            self.take(block=True)
        before = self.sent
        self.sent += len(sizes)
        self.sent_bytes += sum(sizes)
        if len(sizes) > 1:
            meta, frames = burst.join([(BODY, [payload]) for payload in payloads])
            header = pack_fields(Samples.KIND, len(sizes), 0, EPOCH, self.sent, len(meta) + len(frames[0]))
            transmit(self.socket, [header, meta, *frames])
        else:
            header = pack_fields(Samples.KIND, 0, 0, EPOCH, self.sent, sizes[0])
            transmit(self.socket, [header, BODY, payloads[0]], copy=sizes[0] < UNCOPIED_BYTES)
        if self.sent // ACK_EVERY > before // ACK_EVERY and not self.plain:
            while self.take(block=False) is not None:
                pass


def produce(folder: str, plain: bool, messages: int, size: int, peers: int, rate: float) -> None:
    """Send `messages` of `size` bytes over `peers` connections: what is due at `rate` a second, each telling when it was sent, or
    (0) as fast as possible; at most `TURN` at a time on each connection."""
    lines = [Line(folder, "actor", plain, size) for _ in range(peers)]
    fillers = itertools.cycle([os.urandom(size) for _ in range(copies(size))])
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    number = turn = 0
    while number < messages:
        due = messages
        while rate and (due := int((time.perf_counter() - started) * rate)) <= number:
            time.sleep(max(1 / rate, PACE_S))
        count = min(TURN, due - number, messages - number)
        payloads = list(itertools.islice(fillers, count))
        if rate:
            payloads = [time.monotonic_ns().to_bytes(8, "little") + payloads[0][8:]] * count
        lines[turn % peers].send(payloads)
        number += count
        turn += 1
    print("sent", flush=True)
    sys.stdin.readline()
    os._exit(0)


def consume(folder: str, plain: bool, name: str, messages: int, size: int) -> dict[str, float]:
    """Take `messages`, acknowledging; rate and latency percentiles."""
    line = Line(folder, "learner", plain, size, name)
    print("ready", flush=True)
    latencies: list[int] = []
    first = count = taken = came = told = told_bytes = 0
    while count < messages:
        held, nbytes, frame = line.take(block=True) or (0, 0, memoryview(b""))
        if not held:
            continue
        now = time.monotonic_ns()
        first = first or now
        each = len(frame) // held
        latencies += [now - int.from_bytes(frame[at : at + 8], "little") for at in range(0, each * held, each)]
        count, taken, came = count + held, taken + 1, came + nbytes
        if not plain and (taken - told >= ACK_EVERY or came - told_bytes >= ACK_BYTES):
            told, told_bytes = taken, came
            ack = pack_meta(Ack(told, told + CONSUMER_WINDOW, told_bytes + CONSUMER_BYTES))
            line.socket.send_multipart(encode(Ack.KIND, ack, epoch=EPOCH), zmq.NOBLOCK)
    latencies.sort()
    seconds = (time.monotonic_ns() - first) / 1e9
    return {
        "rate": count / seconds,
        "p50_us": latencies[count // 2] / 1000,
        "p99_us": latencies[count * 99 // 100] / 1000,
    }


def direct(folder: str, messages: int) -> dict[str, float]:
    """A consumer that producers reach without a relay."""
    socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
    os.makedirs(f"{folder}/relay", exist_ok=True)
    socket.bind(f"ipc://{folder}/relay/control.sock")
    print("ready", flush=True)
    latencies = []
    for _ in range(messages):
        frame = receive(socket)[-1].buffer
        latencies.append(time.monotonic_ns() - int.from_bytes(frame[:8], "little"))
    latencies.sort()
    return {"p50_us": latencies[messages // 2] / 1000, "p99_us": latencies[messages * 99 // 100] / 1000}


# ---------------------------------------------------------------- one measurement


class Child:
    """A process of this file in one role."""

    def __init__(self, *arguments: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        return text.strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.line())
        return found


def cpu_s(children: Sequence[Child]) -> float:
    """Processor time of all of them so far."""
    return float(sum(sum(psutil.Process(child.process.pid).cpu_times()[:2]) for child in children))


def measure(
    relay: str, size: int, messages: int, peers: int = 1, rate: float = 0.0, io_threads: int = 1
) -> dict[str, float]:
    """One row: `messages` of `size` bytes from `peers` connections through `relay`, in which ZeroMQ has `io_threads`."""
    plain = relay not in PUMPS
    children: list[Child] = []

    def start(*arguments: Any) -> Child:
        children.append(Child(*arguments))
        return children[-1]

    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        try:
            middle = None
            if relay == "direct":
                consumer = start("direct", folder, messages)
            else:
                middle = start(relay, folder, messages, size, io_threads)
                middle.line()
                consumer = start("consume", folder, int(plain), "back" if plain else "control", messages, size)
            consumer.line()
            producer = start("produce", folder, int(plain), messages, size, peers, rate)
            producer.line()
            if relay == "proxy" and middle is not None:
                middle.go()
            before = cpu_s(children)
            producer.go()
            measured = consumer.result()
            if not rate:  # then it is how long the queue is
                measured.pop("p50_us")
                measured.pop("p99_us")
            else:
                measured["cores"] = (cpu_s(children) - before) * rate / messages
            if middle is not None:
                middle.go()
                relayed = middle.result()
                measured["cpu_us"] = relayed.get("cpu_us", relayed.get("cpu_s", 0.0) / messages * 1e6)
            producer.go()
        finally:
            for child in children:
                child.process.kill()
                child.process.communicate()
    return measured


def best(relay: str, size: int, messages: int, repeat: int, **options: Any) -> dict[str, Any]:
    """The best of `repeat` measurements: highest rate, lowest CPU and latency."""
    return merged(relay, size, messages, [measure(relay, size, messages, **options) for _ in range(repeat)], **options)


def merged(relay: str, size: int, messages: int, rounds: Sequence[dict[str, float]], **options: Any) -> dict[str, Any]:
    """A row of the best of `rounds`."""
    row: dict[str, Any] = {"relay": relay, "bytes": size, "messages": messages, **options}
    for key in rounds[0]:
        values = [measured[key] for measured in rounds]
        row[key] = round(max(values) if key == "rate" else min(values), 2)
    if "rate" in row and relay != "direct":
        row["mib_per_s"] = round(row["rate"] * size / MEBIBYTE, 1)
    return row


def _role(role: str, rest: list[str]) -> None:
    if role != "proxy":
        keep_freed_memory()  # as a broker does; and clients are as light as can be
    if role in (*PUMPS, "proxy"):
        use_io_threads(int(rest[3]))
    if role in PUMPS:
        import uvloop
        from temper.common import pump as router

        if role != "pump":
            router.AWAKE_S = 0.0
        print(json.dumps(uvloop.run(pump(rest[0], int(rest[1])))), flush=True)
    elif role == "proxy":
        print(json.dumps(proxy(rest[0], int(rest[2]))), flush=True)
        os._exit(0)
    elif role == "produce":
        produce(rest[0], rest[1] == "1", int(rest[2]), int(rest[3]), int(rest[4]), float(rest[5]))
    elif role == "consume":
        print(json.dumps(consume(rest[0], rest[1] == "1", rest[2], int(rest[3]), int(rest[4]))), flush=True)
    else:
        print(json.dumps(direct(rest[0], int(rest[1]))), flush=True)


if __name__ == "__main__":
    _role(sys.argv[1], sys.argv[2:])
