"""Light clients of a real broker, for its benchmarks: they speak the protocol and do nothing else, each in a process of its own.

`actors` answers every lease at once, `learner` takes groups as they come and reports steps. Both keep credit and acknowledge;
nothing is decoded beyond what that takes. Samples go out in one of the two ways in which an actor's do: those of a lease that
are finished together in one message (``actor.packing``), or each in a message of its own, and then the messages that wait
for the socket leave joined, as ``session`` joins them.
"""

from __future__ import annotations

import itertools
import os
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from temper.common import burst
from temper.common.arrays import pack_arrays
from temper.common.process import keep_freed_memory
from temper.common.recipe_derived import TOKEN_BYTES
from temper.common.schema import (
    Ack,
    Blocked,
    Covered,
    Demand,
    Done,
    Group,
    Heartbeat,
    Hello,
    LearnerReady,
    Lease,
    Phase,
    SampleMeta,
    Samples,
    Touch,
    Welcome,
)
from temper.common.session import ASK_BYTES
from temper.common.sockets import routing_id
from temper.common.wire import pack_fields, pack_meta, unpack_fields, unpack_meta
from zmq.backend import Socket as BackendSocket

GROUPS_PER_STEP, SAMPLES_PER_GROUP = 32, 16
LINEAGE = 7
EPOCH = 9
BEAT_S = 1.0
ACK_EVERY, ACK_BYTES = 16, 4 * 1024 * 1024
MESSAGES_A_TURN = 64
UNCOPIED_BYTES = 64 * 1024  # messages from here on leave from where they are
OWN_BYTES = 64 * 1024 * 1024
PACE_S = 0.0001  # what is due goes out so often: a sender that looks all the time keeps one of two cores from what it measures
WINDOW_MESSAGES, WINDOW_BYTES = 4096, 64 * 1024 * 1024
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
MORE, NOBLOCK = int(zmq.SNDMORE), int(zmq.NOBLOCK)


def transmit(socket: Any, parts: Sequence[Any], copy: bool = True) -> None:
    """`send_multipart` without pyzmq's layer in Python: what clients take of two cores, the broker has to do without."""
    last = len(parts) - 1
    for i, part in enumerate(parts):
        BackendSocket.send(socket, part, MORE if i < last else 0, copy)


def receive(socket: Any, flags: int = 0) -> list[Any]:
    """`recv_multipart` without that layer, uncopied. zmq.Again as there."""
    parts = [BackendSocket.recv(socket, flags, False)]
    while parts[-1].more:
        parts.append(BackendSocket.recv(socket, 0, False))
    return parts


def copies(nbytes: int) -> int:
    """How often a client has its payload of `nbytes`, to send another one each time. A sample is sent once, from memory of its own;
    the same large one again and again would come from the processor's cache."""
    return max(1, OWN_BYTES // nbytes) if nbytes >= UNCOPIED_BYTES else 1


class Line:
    """One DEALER after its handshake, within the broker's credit."""

    def __init__(self, folder: str, role: Any, name: str, slots: int) -> None:
        self.sent = self.sent_bytes = self.acked = 0
        self.limit = self.limit_bytes = self.asked = 0
        self.received = self.received_bytes = self.told = self.told_bytes = 0
        self._came: deque[tuple[int, bytes]] = deque()
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id())
        self.socket.connect(f"ipc://{folder}/control.sock")
        hello = Hello(role, name, name, slots=slots, limit_messages=WINDOW_MESSAGES, limit_bytes=WINDOW_BYTES)
        self.transient(hello)
        while not self.limit:
            self.take(block=True)
        self.transient(Heartbeat("READY"))
        self.beat_at = _next_beat()

    def transient(self, body: Any) -> None:
        meta = pack_meta(body)
        transmit(self.socket, [pack_fields(body.KIND, 0, 0, EPOCH, 0, len(meta)), meta])

    def send(self, kind: int, meta: bytes, frames: Sequence[Any] = ()) -> None:
        """Send a reliable message; the caller has seen to the credit."""
        size = len(meta) + sum(map(len, frames))
        self.sent += 1
        self.sent_bytes += size
        header = pack_fields(kind, 0, 0, EPOCH, self.sent, size)
        transmit(self.socket, [header, meta, *frames], copy=size < UNCOPIED_BYTES)

    def send_joined(self, kind: int, messages: Sequence[tuple[bytes, Sequence[Any]]]) -> None:
        """`send` for several small ones, as few as can be."""
        run: list[tuple[bytes, Sequence[Any]]] = []
        nbytes = 0
        for message in messages:
            size = len(message[0]) + sum(map(len, message[1]))
            if nbytes + size > burst.BYTES or len(run) == burst.MESSAGES:
                self._send_burst(kind, run, nbytes)
                run, nbytes = [], 0
            run.append(message)
            nbytes += size
        self._send_burst(kind, run, nbytes)

    def _send_burst(self, kind: int, run: list[tuple[bytes, Sequence[Any]]], nbytes: int) -> None:
        if len(run) < 2:
            for meta, frames in run:
                self.send(kind, meta, frames)
            return
        meta, joined = burst.join(run)
        self.sent += len(run)
        self.sent_bytes += nbytes
        header = pack_fields(kind, len(run), 0, EPOCH, self.sent, len(meta) + sum(map(len, joined)))
        transmit(self.socket, [header, meta, *joined])

    def room(self, messages: int, size: int) -> bool:
        return self.sent + messages <= self.limit and self.sent_bytes + size <= self.limit_bytes

    def want(self, messages: int, size: int) -> None:
        """Ask, once, for what so many messages of `size` bytes need beyond the credit, as a ``session`` does."""
        limit, whole = self.limit_bytes, self.sent_bytes + messages * size
        if whole > limit >= self.asked:
            self.asked = limit + size
            most = min(whole, limit + ASK_BYTES)
            ends = [end for n in range(1, 16) if (end := limit + size * 2**n) < most]
            self.transient(Blocked(limit + size, [*ends, most] if most > limit + size else []))

    def waiting(self) -> bool:
        """Whether `take` has something."""
        return bool(self._came or BackendSocket.get(self.socket, EVENTS) & POLLIN)

    def take(self, block: bool) -> tuple[int, bytes] | None:
        """(kind, meta) of the next message; (0, b"") for what concerns the line only. Acknowledges."""
        if self._came:
            return self._came.popleft()
        try:
            parts = receive(self.socket, 0 if block else NOBLOCK)
        except zmq.Again:
            return None
        kind, flags, _, _, sequence, size = unpack_fields(parts[0].bytes)
        if 0 < sequence <= self.received:
            return 0, b""  # sent again, because its acknowledgement was late
        meta = parts[1].bytes
        if flags:
            sizes, metas, _ = burst.divide(flags, kind, [part.bytes for part in parts[1:]])
            self.received += flags - 1
            size, meta = sum(sizes), metas[0]
            self._came.extend((kind, other) for other in metas[1:])
        if kind in (Ack.KIND, Welcome.KIND):
            body: Any = unpack_meta(meta, Ack if kind == Ack.KIND else Welcome)
            self.limit, self.limit_bytes, self.acked = body.limit_messages, body.limit_bytes, body.received
            return 0, b""
        if sequence:
            self.received += 1
            self.received_bytes += size
            if self.received - self.told >= ACK_EVERY or self.received_bytes - self.told_bytes >= ACK_BYTES:
                self.acknowledge()
        return kind, meta

    def acknowledge(self) -> None:
        if self.received > self.told:
            self.told, self.told_bytes = self.received, self.received_bytes
            limits = self.told + WINDOW_MESSAGES, self.told_bytes + WINDOW_BYTES
            self.transient(Ack(self.received, *limits))

    def beat(self) -> None:
        if time.monotonic() > self.beat_at:
            self.beat_at, self.asked = _next_beat(), 0
            self.acknowledge()
            self.transient(Heartbeat("READY"))


def _next_beat() -> float:
    """As a peer's: all on the host beat together (``waiting.on_the_beat``)."""
    return (time.monotonic() // BEAT_S + 1) * BEAT_S


class Payload:
    """Messages of `together` samples with `nbytes` of arrays each."""

    def __init__(self, nbytes: int, together: int = 1) -> None:
        self.tokens = max(nbytes // TOKEN_BYTES, 2)
        mask = np.ones((together, self.tokens), dtype=np.uint8)
        mask[:, 0] = 0
        total = together * self.tokens
        specs, frames = pack_arrays(
            {
                "tokens": np.arange(total, dtype=np.int32),
                "behaviour_logprob": np.zeros(total, dtype=np.float32),
                "loss_mask": mask.reshape(-1),
                "cu_seqlens": np.arange(together + 1, dtype=np.int64) * self.tokens,
            }
        )
        self._frames = itertools.cycle([[bytes(bytearray(frame)) for frame in frames] for _ in range(copies(nbytes))])
        self.size = sum(map(len, frames))
        self.together = together
        self._specs = msgspec.Raw(msgspec.msgpack.encode(specs))

    def frames(self) -> list[bytes]:
        """Those of one more message."""
        return next(self._frames)

    def meta(self, lease: Lease, indices: Sequence[int]) -> bytes:
        run = (LINEAGE, lease.min_version, self.tokens)
        samples = [
            SampleMeta(i, "stop", float(i & 1), i & 1 == 1, {"exact": float(i & 1)}, "ok", [run]) for i in indices
        ]
        specs: Any = self._specs
        return pack_meta(Samples(lease.lease_id, lease.attempt, lease.lineage, samples, specs))


def actors(folder: str, peers: int, slots: int, nbytes: int, together: int, report: Any) -> None:
    """`peers` actors in this process, as fast as they can, `together` samples a message (a lease's samples are a multiple). All
    have joined when it says "ready"; it waits for a line then."""
    payload = Payload(nbytes, together)
    lines = [Line(folder, "actor", f"actor-{os.getpid()}-{i}", slots) for i in range(peers)]
    poller = zmq.Poller()
    for line in lines:
        poller.register(line.socket, zmq.POLLIN)
    waiting: dict[Line, deque[bytes]] = {line: deque() for line in lines}
    size = payload.size + 256 * together
    single = burst.joinable(Samples.KIND, size, payload.frames())
    report("ready")
    sys.stdin.readline()
    stuck = True  # nothing can be sent until something comes
    while True:
        if stuck:
            poller.poll(20)
        for line in lines:
            if not line.waiting():
                continue
            touches = []
            while (message := line.take(block=False)) is not None:
                if message[0] == Lease.KIND:
                    lease = unpack_meta(message[1], Lease)
                    touches.append((pack_meta(Touch(lease.lease_id, lease.attempt)), ()))
                    for at in range(0, len(lease.indices), together):
                        waiting[line].append(payload.meta(lease, lease.indices[at : at + together]))
            line.send_joined(Touch.KIND, touches)
        stuck = True
        for line, due in waiting.items():
            line.want(len(due), size)
            messages = []
            while due and len(messages) < MESSAGES_A_TURN and line.room(len(messages) + 1, (len(messages) + 1) * size):
                messages.append((due.popleft(), payload.frames()))
            stuck = stuck and (not due or not messages)
            if single:
                line.send_joined(Samples.KIND, messages)
            else:
                for meta, frames in messages:
                    line.send(Samples.KIND, meta, frames)
            line.beat()


def timed(folder: str, peers: int, slots: int, nbytes: int, rate: float, messages: int, report: Any) -> None:
    """`peers` actors that send, one sample a message, what is due at `rate` a second, every `PACE_S` (what is due together leaves
    joined), and how long each of `messages` took to be acknowledged."""
    payload = Payload(nbytes)
    lines = [Line(folder, "actor", f"actor-{i}", slots) for i in range(peers)]
    descriptors = [line.socket.getsockopt(zmq.FD) for line in lines]
    waiting: deque[tuple[Line, Lease, int]] = deque()
    under_way: dict[Line, deque[tuple[int, int, int]]] = {line: deque() for line in lines}  # last sequence, count, when
    size = payload.size + 256
    took: list[int] = []
    begun = next_at = 0.0
    number = 0
    while len(took) < messages:
        for line in lines:
            if not line.waiting():
                continue
            touches = []
            while (message := line.take(block=False)) is not None:
                if message[0] == Lease.KIND:
                    lease = unpack_meta(message[1], Lease)
                    touches.append((pack_meta(Touch(lease.lease_id, lease.attempt)), ()))
                    waiting += [(line, lease, index) for index in lease.indices]
            now, sent = time.monotonic_ns(), under_way[line]
            while sent and (count := min(sent[0][1], line.acked - sent[0][0] + sent[0][1])) > 0:
                last, together, at = sent.popleft()
                took += [now - at] * count
                if count < together:
                    sent.appendleft((last, together - count, at))
            line.send_joined(Touch.KIND, touches)
            line.beat()
        clock = time.perf_counter()
        if waiting and not begun:
            begun = clock
            report("begin")
        due = int((clock - begun) * rate) - number
        if due <= 0 or not waiting or clock < next_at:
            if not any([line.waiting() for line in lines]):  # what comes from here on, a descriptor tells of
                select.select(descriptors, [], [], max(next_at - clock, 1 / rate))
            continue
        next_at = clock + PACE_S
        ready: dict[Line, list[tuple[bytes, Sequence[Any]]]] = {}
        for _ in range(min(due, len(waiting), MESSAGES_A_TURN)):
            line, lease, index = waiting[0]
            batch = ready.setdefault(line, [])
            if not line.room(len(batch) + 1, (len(batch) + 1) * size):
                line.want(MESSAGES_A_TURN, size)
                break
            waiting.popleft()
            batch.append((payload.meta(lease, [index]), payload.frames()))
        now = time.monotonic_ns()
        for line, batch in ready.items():
            if batch:
                line.send_joined(Samples.KIND, batch)
                under_way[line].append((line.sent, len(batch), now))
                number += len(batch)
    took = sorted(took[messages // 10 :])
    seconds = time.perf_counter() - begun
    report(f"{number / seconds} {took[len(took) // 2] / 1000} {took[len(took) * 99 // 100] / 1000}")
    sys.stdin.readline()


def bare(folder: str, slots: int) -> None:
    """In place of a broker, for `timed`: a ROUTER that answers each message as soon as it has read it, and does nothing with it."""
    socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
    os.makedirs(folder, exist_ok=True)
    socket.bind(f"ipc://{folder}/control.sock")
    leases: dict[bytes, int] = {}
    taken: dict[bytes, int] = {}

    def send(peer: bytes, body: Any, sequence: int = 0) -> None:
        meta = pack_meta(body)
        transmit(socket, [peer, pack_fields(body.KIND, 0, 0, EPOCH, sequence, len(meta)), meta])

    while True:
        peer, header = [part.bytes for part in receive(socket)[:2]]
        kind, flags, _, _, sequence, _ = unpack_fields(header)
        if kind == Hello.KIND:
            send(peer, Welcome("bare", "", 0, 1.0, limit_messages=2**40, limit_bytes=2**50))
            leases[peer] = taken[peer] = 0
        elif sequence:
            send(peer, Ack(sequence, 2**40, 2**50))
            taken[peer] += (flags or 1) * (kind == Samples.KIND)
        while leases[peer] - taken[peer] // SAMPLES_PER_GROUP < slots:
            leases[peer] += 1
            indices = list(range(SAMPLES_PER_GROUP))
            lease = Lease(leases[peer], 1, LINEAGE, "train", "reverse", 0, leases[peer], indices, 0, None, 60.0)
            send(peer, lease, leases[peer])


def learner(folder: str, samples: int, groups: int, steps: int, report: Any) -> None:
    """Takes groups, `groups` a step, until `samples` have come after a tenth of them; tells when it begins and ends to count. After
    every `steps` it says that a checkpoint covers them: the broker keeps samples until then."""
    line = Line(folder, "learner", "learner", 0)
    line.send(LearnerReady.KIND, pack_meta(LearnerReady(LINEAGE, None, 0, 0)))
    phase = Phase("train", {"reverse": (0, 1.0)}, groups, SAMPLES_PER_GROUP)
    line.send(Phase.KIND, pack_meta(phase))
    line.send(Demand.KIND, pack_meta(Demand("train", 2 * groups)))
    batch: list[int] = []
    version = came = 0
    warm, begun = max(samples // 10, groups * SAMPLES_PER_GROUP), 0.0
    while True:
        message = line.take(block=True)
        assert message is not None
        line.beat()
        if message[0] != Group.KIND:
            continue
        came += SAMPLES_PER_GROUP
        if not begun and came >= warm:
            begun, first = time.perf_counter(), came
            report("begin")
        elif begun and came - first >= samples:
            report(f"end {came - first} {time.perf_counter() - begun}")
            sys.stdin.readline()
            return
        batch.append(_id(message[1]))
        if len(batch) == groups:
            line.send(Done.KIND, pack_meta(Done(version, batch, {}, True)))
            version, batch = version + 1, []
            line.send(Demand.KIND, pack_meta(Demand("train", groups)))
            if version % steps == 0:
                line.send(Covered.KIND, pack_meta(Covered(version, version, "", version)))


def stopped(folder: str) -> None:
    """A learner that begins a phase and never asks for a group."""
    line = Line(folder, "learner", "learner", 0)
    line.send(LearnerReady.KIND, pack_meta(LearnerReady(LINEAGE, None, 0, 0)))
    phase = Phase("train", {"reverse": (0, 1.0)}, GROUPS_PER_STEP, SAMPLES_PER_GROUP)
    line.send(Phase.KIND, pack_meta(phase))
    while True:
        line.socket.poll(200)
        while line.take(block=False) is not None:
            pass
        line.beat()


class _Head(msgspec.Struct, array_like=True):
    group_id: int


_head = msgspec.msgpack.Decoder(_Head).decode


def _id(meta: bytes) -> int:
    return _head(meta).group_id


if __name__ == "__main__":
    keep_freed_memory()  # as light as can be
    role, folder, *rest = sys.argv[1:]
    to_parent = lambda text: print(text, flush=True)  # noqa: E731
    if role == "actors":
        peers, slots, nbytes, together = map(int, rest)
        actors(folder, peers, slots, nbytes, together, to_parent)
    elif role == "timed":
        timed(folder, int(rest[0]), int(rest[1]), int(rest[2]), float(rest[3]), int(rest[4]), to_parent)
    elif role == "bare":
        bare(folder, int(rest[0]))
    elif role == "stopped":
        stopped(folder)
    else:
        learner(folder, int(rest[0]), int(rest[1]), int(rest[2]), to_parent)
