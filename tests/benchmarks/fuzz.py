"""Fuzzing of everything that reads what a peer sent: headers, metas, frame counts, orders, array specifications.

    bin/bench fuzz [--json FILE] [--inputs N] [--target NAME] [--shards N] [--onto FILE]      needs: pip install atheris

Each target takes bytes and raises if a promise is broken: the only error that input may cause is a ProtocolError for its
sender; another peer's messages arrive once and in order all the same; what is kept for a peer stays bounded; what
decodes, encodes to the same again. atheris (libFuzzer) drives them by coverage here; ``tests/protocol/test_fuzz.py`` drives
the same targets with plain random mutation.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HELLO, ACK, BLOCKED, UNNEEDED, TOUCH, SAMPLES = 1, 6, 12, 13, 17, 19
EPOCH = 9
GOAL = 10_000_000

closing = contextlib.ExitStack()


class Reader:
    """Takes numbers and pieces from a fuzzer's bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def number(self, size: int) -> int:
        return int.from_bytes(self.piece(size), "little")

    def piece(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece


def value(reader: Reader, kind: Any) -> Any:
    """A value for a field of that type, now and then one that does not fit."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if reader.number(1) > 245:
        return [None, -1, 2**64 - 1, "x", b"x", [], {}, [[]], 1.5, True][reader.number(1) % 10]
    if origin is typing.Literal:
        return inner[reader.number(1) % len(inner)]
    if origin in (typing.Union, types.UnionType):
        return value(reader, inner[reader.number(1) % len(inner)])
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return [value(reader, inner[0]) for _ in range(reader.number(1) % 4)]
    if origin is tuple:
        return [value(reader, part) for part in inner]
    if origin is dict:
        return {value(reader, inner[0]): value(reader, inner[1]) for _ in range(reader.number(1) % 3)}
    if isinstance(kind, type) and hasattr(kind, "__struct_fields__"):
        hints = typing.get_type_hints(kind)
        fields = kind.__struct_fields__[: len(kind.__struct_fields__) + 1 - (reader.number(1) > 200)]
        return [value(reader, hints[name]) for name in fields]
    simple: dict[Any, Callable[[], Any]] = {
        int: lambda: reader.number([1, 2, 4, 8][reader.number(1) & 3]) - 1,
        float: lambda: struct.unpack("<d", reader.piece(8).ljust(8, b"\0"))[0],
        bool: lambda: reader.number(1) & 1 == 1,
        str: lambda: reader.piece(reader.number(1) % 12).decode("latin-1"),
        bytes: lambda: reader.piece(reader.number(1) % 12),
    }
    return simple[kind]() if kind in simple else None


def metas() -> Callable[[bytes], None]:
    """Target: the body of any kind. What decodes must encode and decode to the same value."""
    import msgpack
    from temper.common.errors import ProtocolError
    from temper.common.schema import BODIES
    from temper.common.wire import pack_meta, unpack_meta

    kinds = list(BODIES.values())

    def target(data: bytes) -> None:
        reader = Reader(data)
        kind = kinds[reader.number(1) % len(kinds)]
        if reader.number(1) < 32:
            meta = reader.piece(600)
        else:
            try:
                meta = msgpack.packb(value(reader, kind))
            except (TypeError, OverflowError, ValueError):
                return  # no MessagePack for it: a list as a key, an integer beyond 64 bits
        try:
            body = unpack_meta(meta, kind)
        except ProtocolError:
            return
        again = unpack_meta(pack_meta(body), kind)
        if repr(again) != repr(body):  # repr, because nan is not equal to itself
            raise AssertionError(f"{body!r} came back as {again!r}")

    return target


def arrays() -> Callable[[bytes], None]:
    """Target: array specifications with frames of any size."""
    from temper.common.arrays import DTYPES, unpack_arrays
    from temper.common.errors import ProtocolError
    from temper.common.schema import ArraySpec

    names = [*DTYPES, "object", "float128", ""]

    def target(data: bytes) -> None:
        reader = Reader(data)
        specs, frames = [], []
        for _ in range(reader.number(1) % 4):
            dtype = names[reader.number(1) % len(names)]
            shape = tuple(reader.number(8 if reader.number(1) > 250 else 1) - 2 for _ in range(reader.number(1) % 10))
            specs.append(ArraySpec(str(reader.number(1) % 3), dtype, shape))
            frames.append(reader.piece(reader.number(1)))
        with contextlib.suppress(ProtocolError):
            for spec, array in zip(specs, unpack_arrays(specs, frames).values(), strict=True):
                if array.shape != tuple(spec.shape) or array.dtype.name != spec.dtype:
                    raise AssertionError(f"{spec!r} became {array.dtype}{array.shape}")
                array.sum()

    return target


def intake() -> Callable[[bytes], None]:
    """Target: several Samples messages at once, from an actor that may be wrong in every field and frame: each is judged as
    it would be alone, and those that pass make a group that divides into the same frames again."""
    import numpy as np
    from temper.broker.assembly import build_group
    from temper.broker.intake import faults, read
    from temper.broker.leases import LeaseRecord
    from temper.broker.validate import BadSamples, check
    from temper.common.arrays import divide, pack_arrays
    from temper.common.errors import ProtocolError
    from temper.common.schema import ArraySpec, SampleMeta, Samples
    from temper.common.wire import pack_meta, unpack_meta

    numbers = [0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 0.5, 1e-4]

    def message(reader: Reader) -> tuple[Samples, list[bytes]]:
        n = reader.number(1) % 12
        values = {
            "tokens": np.frombuffer(reader.piece(4 * n).ljust(4 * n, b"\0"), "<i4"),
            "behaviour_logprob": np.full(n, numbers[reader.number(1) % 8 if reader.number(1) > 200 else 2], "<f4"),
            "loss_mask": np.array([0] * (n > 0) + [1] * (n - 1), np.uint8) + (reader.number(1) > 240),
            "cu_seqlens": np.array([0, n - (reader.number(1) > 240)], "<i8"),
        }
        specs, views = pack_arrays(values)
        frames = [bytes(view) for view in views]
        trick = reader.number(1)
        if trick > 240:
            frames = [piece[: reader.number(1)] for piece in frames] * (reader.number(1) % 3)
        elif trick > 220:
            specs[reader.number(1) % 4] = ArraySpec("tokens", "int32", (reader.number(2), reader.number(1) % 3))
        count = n if reader.number(1) < 240 else reader.number(1) - 3
        reward = numbers[reader.number(1) % 8] if reader.number(1) > 200 else 1.0
        steps = [(reader.number(1) - 2, reward)] if reader.number(1) > 240 else []
        meta = SampleMeta(reader.number(1), "stop", reward, None, {"x": reward}, "ok", [(1, 1, count)], steps)
        return Samples(5, 1, 1, [meta] * (1 if reader.number(1) < 250 else reader.number(1) % 3), specs), frames

    def target(data: bytes) -> None:
        reader = Reader(data)
        messages = [message(reader) for _ in range(reader.number(1) % 7)]
        found = faults([read(pack_meta(body)) for body, _ in messages], [frames for _, frames in messages])
        good = []
        for i, (body, frames) in enumerate(messages):
            fault = found.get(i)
            try:
                check(body, frames)
                alone = ""
            except (ProtocolError, BadSamples) as error:
                alone = f"{type(error).__name__} {error}"
            if alone != (f"{type(fault).__name__} {fault}" if fault is not None else ""):
                raise AssertionError(f"{alone!r} alone, {fault!r} together")
            if not alone:
                good.append((pack_meta(body), frames))
        group, joined = build_group(LeaseRecord(5, "train", "a", 0, 1, 4), good, 1, None)
        parts = unpack_meta(pack_meta(group), type(group)).parts
        if [list(map(bytes, own)) for own in divide([part.arrays for part in parts], joined)] != [f for _, f in good]:
            raise AssertionError("a group's frames are not those of its parts")

    return target


def router() -> Callable[[bytes], None]:
    """Target: sequences of messages from two hostile peers to a Router, with an honest one in between."""
    from temper.common import burst
    from temper.common.budget import Budget
    from temper.common.pump import Delivery, Router
    from temper.common.schema import Blocked, Hello, Samples, Touch, Welcome
    from temper.common.wire import HEADER_BYTES, encode, pack_fields, pack_meta

    honest, hostile = b"honest---", (b"hostile-1", b"hostile-2")
    hello = pack_meta(Hello("actor", "a", "s", limit_messages=64, limit_bytes=2**20))
    touch = pack_meta(Touch(1, 1))
    joined = burst.join([(touch, ()), (touch, [touch])])[0]
    bodies = [
        joined,
        touch,
        hello,
        b"",
        b"\x90",
        b"\x94\x00\xcd\x04\x00\xce\x04\x00\x00\x00\xc2",
        b"\xdd\xff\xff\xff\xff",
        pack_meta(Blocked(2**18)),
        pack_meta(Blocked(2**18 + 1, [2**62, 2**19])),
    ]
    budget = Budget(2**21, 2**18)  # of which two peers may want more than there is
    closed: list[bytes] = []
    loop = asyncio.new_event_loop()
    folder = tempfile.mkdtemp(prefix="fuzz")

    async def serve() -> Router:
        return Router(
            f"ipc://{folder}",
            "control",
            lambda deliveries: None,
            lambda peer, reason: closed.append(peer),
            welcome=lambda peer, hello: Welcome("fuzz", "{}", 0, 1.0),
            lazy=frozenset({Samples.KIND}),
            budget_of=lambda hello: budget,
        )

    hub = loop.run_until_complete(serve())
    closing.callback(shutil.rmtree, folder, ignore_errors=True)
    closing.callback(loop.close)
    closing.callback(hub.close, linger_ms=0)
    hub._link.send = lambda *parts: True  # type: ignore[method-assign]  # nobody listens

    def message(reader: Reader) -> list[Any]:
        shape = reader.number(1)
        count = [1, 1, 2, 0, 3, 5, 64, 66][shape & 7]
        parts = [
            bodies[n % len(bodies)] if (n := reader.number(1)) < 200 else reader.piece(n - 199) for _ in range(count)
        ]
        size = sum(map(len, parts))
        kind = [TOUCH, HELLO, ACK, BLOCKED, UNNEEDED, SAMPLES, 0, reader.number(1)][shape >> 3 & 7]
        sequence = [1, 2, 3, 0, 2**64 - 1, 1024, 1025, reader.number(2)][reader.number(1) & 7] if kind != HELLO else 0
        flags = reader.number(1) & 3 if kind in (TOUCH, SAMPLES) else 0
        header = pack_fields(kind, flags, 0, [EPOCH, EPOCH, EPOCH, 7][shape >> 6], sequence, size)
        if shape == 255:
            header = reader.piece(HEADER_BYTES + 1)
        return [header, *parts]

    def target(data: bytes) -> None:
        reader = Reader(data)
        batch: list[Delivery] = []
        hub._take([honest, *encode(HELLO, hello, epoch=EPOCH)], batch, 1.0)
        if reader.number(1) & 1:
            hub._take([hostile[0], *encode(HELLO, hello, epoch=EPOCH)], batch, 1.0)
        sent = 0
        while reader.left > 0 and sent < 16:
            hub._take([hostile[reader.number(1) & 1], *message(reader)], batch, 1.0)
            sent += 1
            hub._take([honest, *encode(TOUCH, touch, epoch=EPOCH, sequence=sent)], batch, 1.0)
        own = [d.sequence for d in batch if d.peer == honest]
        if own != list(range(1, sent + 1)):
            raise AssertionError(f"the honest peer's messages arrived as {own}")
        if honest in closed or len(hub._closed) > 3 or len(hub.peers) > 3:
            raise AssertionError("somebody else was hurt")
        hub._sharing.serve()
        list(hub._sharing.unused())
        if budget.free_bytes < 0:
            raise AssertionError("more may be under way than all may have")
        for peer in (honest, *hostile):
            hub.forget(peer)
        for state in (hub._closed, hub._answered, closed):
            state.clear()
        if budget.waiting or budget.free_bytes != budget.total_bytes * 3 // 4:
            raise AssertionError("somebody who is gone has room")
        loop.call_soon(loop.stop)
        loop.run_forever()  # timers and what was put off

    return target


def close() -> None:
    """Give back what the targets hold."""
    closing.close()


TARGETS: dict[str, Callable[[], Callable[[bytes], None]]] = {
    "metas": metas,
    "arrays": arrays,
    "intake": intake,
    "router": router,
}


def drive(name: str, arguments: list[str]) -> None:
    """Let libFuzzer drive one target; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["temper"]):
        target = TARGETS[name]()
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()


def fuzz(name: str, inputs: int, seed: int = 0) -> dict[str, Any]:
    """Run one target over `inputs` inputs in a process of its own; what became of it. `seed` 0: another one each time."""
    started = time.perf_counter()
    child = subprocess.run(
        [
            sys.executable,
            "-P",
            __file__,
            name,
            f"-runs={inputs}",
            f"-seed={seed}",
            "-rss_limit_mb=1024",
            f"-artifact_prefix={tempfile.gettempdir()}/",
            "-timeout=120",  # of wall time, on a machine that may be busy
            "-max_len=600",
        ],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    done = re.search(r"Done (\d+) runs", child.stderr)
    memory = re.findall(r"rss: (\d+)Mb", child.stderr)
    row: dict[str, Any] = {
        "target": name,
        "inputs": int(done.group(1)) if done else 0,
        "seconds": round(time.perf_counter() - started, 1),
        "rss_mib": int(memory[-1]) if memory else 0,
        "rss_growth_mib": int(memory[-1]) - int(memory[len(memory) // 2]) if memory else 0,
        "exit_code": child.returncode,
    }
    if "libFuzzer: run interrupted" in child.stderr:  # by hand: what was done by then counts
        row |= {
            "inputs": int(re.findall(r"^#(\d+)", child.stderr, re.MULTILINE)[-1]),
            "interrupted": True,
            "exit_code": 0,
        }
    elif child.returncode or not done:
        row["end"] = child.stdout[-1500:] + child.stderr[-1500:]
    return row


def shards(name: str, inputs: int, count: int) -> list[dict[str, Any]]:
    """`inputs` of one target over `count` processes at once."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(
            pool.map(lambda shard: fuzz(name, -(-inputs // count), shard), range(1, count + 1) if count > 1 else [0])
        )


def main(argv: Sequence[str]) -> dict[str, Any]:
    """Fuzz every target; goals: all inputs taken without a crash, a hang or growth, and their number."""
    parser = argparse.ArgumentParser(prog="bin/bench fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=GOAL, help="over all targets")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only this one")
    parser.add_argument("--shards", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--onto",
        type=Path,
        metavar="FILE",
        help="an earlier report: its rows are kept and counted, each with the commit that it was made on",
    )
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("atheris") is None:
        from temper.common.errors import ConfigError

        raise ConfigError("atheris is not installed here: pip install 'temper-rl[fuzz]'")
    from temper.cli.bench import commit

    rows: list[dict[str, Any]] = []
    if arguments.onto is not None:
        earlier = json.loads(arguments.onto.read_text(encoding="utf-8"))
        rows = [{"commit": earlier["commit"], **row} for row in earlier["rows"]]
    names = arguments.target or list(TARGETS)
    for name in names:
        found = shards(name, arguments.inputs // len(names), arguments.shards)
        rows += [{**row, "commit": commit()} for row in found]
        print(f"{name}: {sum(row['inputs'] for row in found)} inputs", file=sys.stderr, flush=True)
    total = sum(row["inputs"] for row in rows)
    bad = [row["target"] for row in rows if row["exit_code"] or not row["inputs"] or row["rss_growth_mib"] >= 20]
    goals = [
        {"name": "crashes, hangs and growth over 20 MiB", "goal": "none", "value": bad, "met": not bad},
        {"name": "inputs over all targets", "goal": f">= {GOAL}", "value": total, "met": total >= GOAL},
    ]
    return {"rows": rows, "goals": goals}


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2:])
