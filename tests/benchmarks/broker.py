"""What a message costs in the broker, beside ZeroMQ's own `zmq.proxy` over the same sockets and sizes, Redis and NATS.

    bin/bench broker [--json FILE] [--messages N] [--repeat R] [--stopped-s S]

Every row is one process in the middle (a relay), light clients before and behind it, all over ipc. ``broker`` is the real broker
with its ledger: an actor's sample in, acknowledged, and on to the learner in a group. ``pump`` is its Router alone, which
forwards under credit and with acknowledgements both ways; ``proxy`` moves the same frames without any of that; ``direct``
is no relay at all. Redis Streams and NATS JetStream carry the same acknowledged messages over loopback TCP.
`cpu_us` is the relay's processor time a message (of the broker: a sample), all threads: the stable figure on a shared machine.
The best of R repetitions; a rate beside the proxy's is the median over rounds that both take in turns. "acknowledged" is how long a
sender waits at half of the broker's rate, and "a ROUTER that answers" what it would wait for a process that only answers.
`cores` is what all processes of such a row use together: near the machine's, its latency is how long they wait for each other.
"idle" is what an idle broker itself takes, measured while no processor halts; what it is charged on a machine that is
otherwise idle too is shown beside what a process that does nothing is charged there for waking up as often.

A sample is 1 KiB. An actor sends it in one of two ways, and the broker's rows show both (`together`): alone in a message (1), of
which those that wait for the socket leave joined, or with the other samples of its lease that were finished within 0.2 s (16).
The clients of ``pump`` have 16 messages at a time, except where `rate` paces them. `zmq.proxy` gets the same messages apart: it
knows no others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import zmq
from temper.broker.ledger import BYTE_CAP
from temper.common import burst
from temper.common.schema import Ack, Hello, SampleMeta, Samples, Welcome
from temper.common.sockets import routing_id
from temper.common.wire import encode, pack_fields, pack_meta, unpack_fields, unpack_meta

KIBIBYTE, MEBIBYTE = 1024, 1024 * 1024
EPOCH = 9
SAMPLES_PER_GROUP = 16
ACK_EVERY = 64  # as often as a Peer does, about
ACK_BYTES = 4 * MEBIBYTE
TURN = 16  # samples of a lease, about: what an actor has at once
BODY = pack_meta(Samples(5, 1, 7, [SampleMeta(0, "stop", 1.0, True, {"exact": 1.0}, "ok", [(7, 1, 16)])], []))
PACE_S = 0.0001  # what is due goes out so often: a sender that looks all the time keeps one of two cores from what it measures
CREDIT = 2**40
CONSUMER_WINDOW = 4096
CONSUMER_BYTES = 64 * MEBIBYTE


# ---------------------------------------------------------------- the relays, each in its own process


async def pump(folder: str, messages: int) -> dict[str, float]:
    """A broker that forwards. CPU is taken from the first message to the last."""
    import asyncio

    from temper.common.process import keep_freed_memory, settle_garbage
    from temper.common.pump import Arrival, DeliveryRun, Router

    keep_freed_memory()  # as a broker does
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
            if isinstance(d, DeliveryRun):
                for meta, frames in zip(d.metas, d.frames, strict=True):
                    router.forward(consumer, d.kind, meta, frames)
                count += len(d.sizes)
            else:
                router.forward(consumer, d.kind, d.raw_meta, d.frames)
                count += 1
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


def proxy(folder: str) -> dict[str, float]:
    """zmq.proxy between a ROUTER and a DEALER. The parent says on stdin when to start and stop counting."""
    context: Any = zmq.Context.instance()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, name in ((front, "control"), (back, "back")):
        os.makedirs(f"{folder}/relay", exist_ok=True)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{folder}/relay/{name}.sock")
    threading.Thread(target=zmq.proxy, args=(front, back), daemon=True).start()
    print("bound", flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    sys.stdin.readline()
    return {"cpu_s": time.process_time() - cpu}


# ---------------------------------------------------------------- light clients


class Line:
    """One DEALER with the protocol's credit and acknowledgements, or without when `plain`."""

    def __init__(self, folder: str, role: Any, plain: bool, name: str = "control") -> None:
        self.plain = plain
        self.sent = self.sent_bytes = 0
        self.limit = self.limit_bytes = CREDIT
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, -1)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id())
        self.socket.connect(f"ipc://{folder}/relay/{name}.sock")
        if plain:
            return
        hello = Hello(role, role, "token", limit_messages=CONSUMER_WINDOW, limit_bytes=CONSUMER_BYTES)
        self.socket.send_multipart(encode(Hello.KIND, pack_meta(hello), epoch=EPOCH))
        while self.limit == CREDIT:
            self.take(block=True)

    def take(self, block: bool) -> list[bytes] | None:
        """Payloads of the messages that came together; acknowledgements and the welcome are taken note of."""
        try:
            parts: list[bytes] = self.socket.recv_multipart(0 if block else zmq.NOBLOCK)
        except zmq.Again:
            return None
        if self.plain:
            return parts[-1:]
        kind, count, *_ = unpack_fields(parts[0])
        if kind in (Ack.KIND, Welcome.KIND):
            body: Any = unpack_meta(parts[1], Ack if kind == Ack.KIND else Welcome)
            self.limit, self.limit_bytes = body.limit_messages, body.limit_bytes
        if kind != Samples.KIND:
            return []
        return [frames[0] for frames in burst.divide(count, kind, parts[1:])[2]] if count else parts[-1:]

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
            self.socket.send_multipart([header, meta, *frames])
        else:
            self.socket.send(pack_fields(Samples.KIND, 0, 0, EPOCH, self.sent, sizes[0]), zmq.SNDMORE)
            self.socket.send(BODY, zmq.SNDMORE)
            self.socket.send(payloads[0], copy=sizes[0] < 64 * KIBIBYTE)
        if self.sent // ACK_EVERY > before // ACK_EVERY and not self.plain:
            while self.take(block=False) is not None:
                pass


def produce(folder: str, plain: bool, messages: int, size: int, peers: int, rate: float) -> None:
    """Send `messages` of `size` bytes over `peers` connections: what is due at `rate` a second, or (0) as fast as possible;
    at most `TURN` at a time on each connection."""
    lines = [Line(folder, "actor", plain) for _ in range(peers)]
    filler = os.urandom(max(size - 8, 0))
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    number = turn = 0
    while number < messages:
        due = messages
        while rate and (due := int((time.perf_counter() - started) * rate)) <= number:
            time.sleep(max(1 / rate, PACE_S))
        count = min(TURN, due - number, messages - number)
        payload = time.monotonic_ns().to_bytes(8, "little") + filler
        lines[turn % peers].send([payload] * count)
        number += count
        turn += 1
    print("sent", flush=True)
    sys.stdin.readline()
    os._exit(0)


def consume(folder: str, plain: bool, name: str, messages: int) -> dict[str, float]:
    """Take `messages`, acknowledging; rate and latency percentiles."""
    line = Line(folder, "learner", plain, name)
    print("ready", flush=True)
    latencies: list[int] = []
    first = count = size = acknowledged = acknowledged_bytes = 0
    while count < messages:
        payloads = line.take(block=True)
        if not payloads:
            continue
        now = time.monotonic_ns()
        first = first or now
        for payload in payloads:
            count += 1
            size += len(BODY) + len(payload)
            latencies.append(now - int.from_bytes(payload[:8], "little"))
        if not plain and (count - acknowledged >= ACK_EVERY or size - acknowledged_bytes >= ACK_BYTES):
            acknowledged, acknowledged_bytes = count, size
            ack = pack_meta(Ack(count, count + CONSUMER_WINDOW, size + CONSUMER_BYTES))
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
        parts = socket.recv_multipart()
        latencies.append(time.monotonic_ns() - int.from_bytes(parts[-1][:8], "little"))
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


def measure(relay: str, size: int, messages: int, peers: int = 1, rate: float = 0.0) -> dict[str, float]:
    """One row: `messages` of `size` bytes from `peers` connections through `relay`."""
    plain = relay != "pump"
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
                middle = start(relay, folder, messages)
                middle.line()
                consumer = start("consume", folder, int(plain), "back" if plain else "control", messages)
            consumer.line()
            producer = start("produce", folder, int(plain), messages, size, peers, rate)
            producer.line()
            if relay == "proxy" and middle is not None:
                middle.go()
            before = cpu_s(children)
            producer.go()
            measured = consumer.result()
            if rate:
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


def in_turns(rounds: int, *makers: Callable[[], dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each of `makers` gives in `rounds` rounds, in turns whose order alternates: what the machine does meanwhile falls on
    all of them."""
    found: list[list[dict[str, Any]]] = [[] for _ in makers]
    for turn in range(rounds):
        places = range(len(makers))
        for place in places if turn % 2 else reversed(places):
            found[place].append(makers[place]())
    return found


def beside(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> float:
    """The median over the rounds of our rate to theirs."""
    return statistics.median(own["rate"] / other["rate"] for own, other in zip(ours, theirs, strict=True))


def p50_us(row: dict[str, Any]) -> float:
    """The median latency of a row."""
    return float(row["p50_us"])


def main(argv: Sequence[str]) -> dict[str, Any]:
    """All rows and goals."""
    sys.path.insert(0, str(Path(__file__).parent))
    import _broker_others as others
    import _broker_real as real
    import _broker_restart as again

    parser = argparse.ArgumentParser(prog="bin/bench broker", description=__doc__)
    parser.add_argument("--messages", type=int, default=60_000, help="of 1 KiB; larger ones in proportion fewer")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each row")
    parser.add_argument(
        "--stopped-s", type=float, default=300.0, help="how long producers push against a stopped consumer"
    )
    arguments = parser.parse_args(argv)
    n, repeat = arguments.messages, arguments.repeat
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> dict[str, Any]:
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr, flush=True)
        return row

    def goal(name: str, text: str, value: float, met: bool) -> None:
        goals.append({"name": name, "goal": text, "value": round(value, 2), "met": met})

    kinds = [(durability, together) for durability in ("memory", "full") for together in (1, SAMPLES_PER_GROUP)]
    proxies, pumps, *brokers = in_turns(
        repeat,
        partial(measure, "proxy", KIBIBYTE, n),
        partial(measure, "pump", KIBIBYTE, n),
        *(partial(real.measure, durability, n, KIBIBYTE, together=together) for durability, together in kinds),
    )
    plain, ours = add(merged("proxy", KIBIBYTE, n, proxies)), add(merged("pump", KIBIBYTE, n, pumps))
    half, half_taken = min(ours["rate"], plain["rate"]) / 2, max(row["rate"] for row in brokers[0]) / 2
    for (durability, together), rounds in zip(kinds, brokers, strict=True):
        ratio = beside(rounds, proxies)
        row = add({**real.merged(rounds), "beside_proxy": round(ratio, 2)})
        most, least = (8, 0.8) if durability == "memory" else (16, 0.5)
        unit = "a message of one sample" if together == 1 else "a sample, 16 a message"
        name = f"broker, 1 KiB acknowledged, durability {durability}, {unit}"
        goal(f"{name}: CPU, us", f"<= {most}", row["cpu_us"], row["cpu_us"] <= most)
        goal(f"{name}: rate beside zmq.proxy", f">= {least}", ratio, ratio >= least)
    for size, share in ((64 * KIBIBYTE, 8), (MEBIBYTE, 60)):
        messages = n // share
        proxies, pumps = in_turns(
            2 * repeat + 1, partial(measure, "proxy", size, messages), partial(measure, "pump", size, messages)
        )
        ratio = beside(pumps, proxies)
        add(merged("proxy", size, messages, proxies))
        add({**merged("pump", size, messages, pumps), "beside_proxy": round(ratio, 2)})
        if size < MEBIBYTE:
            add(real.best("memory", messages, size, 1))
        goal(f"pump, {size // KIBIBYTE} KiB: bytes/s beside zmq.proxy", ">= 0.9", ratio, ratio >= 0.9)
    for relay in ("pump", "proxy"):
        few, many = (add(best(relay, KIBIBYTE, n, repeat, peers=peers)) for peers in (8, 512))
        more = many["cpu_us"] / few["cpu_us"] - 1
        if relay == "pump":
            goal("pump, CPU of 512 peers over 8 (compare the same of zmq.proxy)", "<= 0.2", more, more <= 0.2)
    few, many = (
        add(real.best("memory", n, KIBIBYTE, repeat, peers=peers, together=SAMPLES_PER_GROUP, staleness=15))
        for peers in (8, 512)
    )
    more = many["cpu_us"] / few["cpu_us"] - 1
    goal("broker, CPU a sample, 16 a message, of 512 peers over 8", "<= 0.2", more, more <= 0.2)
    alone = add(best("direct", KIBIBYTE, n // 2, repeat, rate=round(half)))
    relayed = add(best("pump", KIBIBYTE, n // 2, repeat, rate=round(half)))
    add(best("proxy", KIBIBYTE, n // 2, repeat, rate=round(half)))
    added = relayed["p50_us"] - alone["p50_us"]
    goal("added latency at half load, p50, us", "< 150", added, added < 150)
    bare, answered = (
        add(min((real.acknowledged(durability, n // 2, KIBIBYTE, half_taken) for _ in range(repeat)), key=p50_us))
        for durability in ("none", "memory")
    )
    added = answered["p50_us"] - bare["p50_us"]
    name = "a sample acknowledged at half load, durability memory, beside a ROUTER that answers: p50, us"
    goal(name, "< 150", added, added < 150)
    stopped = add(real.stopped(arguments.stopped_s, 256 * KIBIBYTE))
    bound = BYTE_CAP * 1.1 / MEBIBYTE + 100
    goal("RSS before a stopped learner, MiB", f"<= {bound:.0f}", stopped["rss_mib"], stopped["rss_mib"] <= bound)
    with real.awake():
        idle = add({**real.idle(20.0), "processors": "kept awake"})
    goal("idle, processors kept awake: percent of a core", "< 0.5", idle["core_percent"], idle["core_percent"] < 0.5)
    halted = add({**real.idle(20.0), "processors": "free to halt"})
    add({**real.sleeper(20.0, halted["wakeups_per_s"]), "processors": "free to halt"})
    back = add(again.restart(10_000, 256, 1 + repeat))
    seconds = back["serving_again_s"]
    goal("serving again after kill -9 with 10,000 queued groups, s", "< 2", seconds, seconds < 2)
    for system in ("redis", "nats"):
        for durable in (False, True):
            add(others.measure(system, durable, n // 2, KIBIBYTE))
    return {"rows": rows, "goals": goals}


def _role(role: str, rest: list[str]) -> None:
    if role == "pump":
        import uvloop

        print(json.dumps(uvloop.run(pump(rest[0], int(rest[1])))), flush=True)
    elif role == "proxy":
        print(json.dumps(proxy(rest[0])), flush=True)
        os._exit(0)
    elif role == "produce":
        produce(rest[0], rest[1] == "1", int(rest[2]), int(rest[3]), int(rest[4]), float(rest[5]))
    elif role == "consume":
        print(json.dumps(consume(rest[0], rest[1] == "1", rest[2], int(rest[3]))), flush=True)
    else:
        print(json.dumps(direct(rest[0], int(rest[1]))), flush=True)


if __name__ == "__main__":
    _role(sys.argv[1], sys.argv[2:])
