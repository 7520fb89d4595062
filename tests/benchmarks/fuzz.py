"""Fuzzing of everything that reads what a peer sent: headers, metas, frame counts, orders, array specifications.

    bin/bench fuzz [--json FILE] [--inputs N] [--target NAME]      needs: pip install atheris

Each target takes bytes and raises if a promise is broken: the only error that input may cause is a ProtocolError for its
sender; another peer's messages arrive once and in order all the same; what is kept for a peer stays bounded; what
decodes, encodes to the same again. atheris (libFuzzer) drives them by coverage here; ``tests/protocol/test_fuzz.py`` drives
the same targets with plain random mutation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
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
from typing import Any

HELLO, SAMPLES, TOUCH = 1, 19, 17
EPOCH = 9

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


def router() -> Callable[[bytes], None]:
    """Target: sequences of messages from two hostile peers to a Router, with an honest one in between."""
    from temper.common.pump import Delivery, Router
    from temper.common.schema import Hello, Samples, Touch, Welcome
    from temper.common.wire import HEADER_BYTES, encode, pack_fields, pack_meta

    honest, hostile = b"honest---", (b"hostile-1", b"hostile-2")
    hello = pack_meta(Hello("actor", "a", "s", limit_messages=64, limit_bytes=2**20))
    touch = pack_meta(Touch(1, 1))
    bodies = [touch, hello, b"", b"\x90", b"\x94\x00\xcd\x04\x00\xce\x04\x00\x00\x00\xc2", b"\xdd\xff\xff\xff\xff"]
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
        kind = [TOUCH, HELLO, 6, 4, 5, SAMPLES, 0, reader.number(1)][shape >> 3 & 7]
        sequence = [1, 2, 3, 0, 2**64 - 1, 1024, 1025, reader.number(2)][reader.number(1) & 7] if kind != HELLO else 0
        header = pack_fields(kind, 0, 0, [EPOCH, EPOCH, EPOCH, 7][shape >> 6], sequence, size)
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
        for peer in (honest, *hostile):
            hub.forget(peer)
        for state in (hub._closed, hub._answered, closed):
            state.clear()
        loop.call_soon(loop.stop)
        loop.run_forever()  # timers and what was put off

    return target


def close() -> None:
    """Give back what the targets hold."""
    closing.close()


TARGETS: dict[str, Callable[[], Callable[[bytes], None]]] = {"metas": metas, "arrays": arrays, "router": router}


def drive(name: str, arguments: list[str]) -> None:
    """Let libFuzzer drive one target; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["temper"]):
        target = TARGETS[name]()
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()


def fuzz(name: str, inputs: int) -> dict[str, Any]:
    """Run one target over `inputs` inputs in a process of its own; what became of it."""
    started = time.perf_counter()
    child = subprocess.run(
        [
            sys.executable,
            "-P",
            __file__,
            name,
            f"-runs={inputs}",
            "-rss_limit_mb=1024",
            f"-artifact_prefix={tempfile.gettempdir()}/",
            "-timeout=10",
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
    if child.returncode or not done:
        row["end"] = child.stdout[-1500:] + child.stderr[-1500:]
    return row


def main(argv: Sequence[str]) -> dict[str, Any]:
    """Fuzz every target; a goal each: all inputs taken without a crash, a hang or growth."""
    parser = argparse.ArgumentParser(prog="bin/bench fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="over all targets")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only this one")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("atheris") is None:
        from temper.common.errors import ConfigError

        raise ConfigError("atheris is not installed here: pip install 'temper-rl[fuzz]'")
    names = arguments.target or list(TARGETS)
    rows = [fuzz(name, arguments.inputs // len(names)) for name in names]
    goals = [
        {
            "name": f"{row['target']}: inputs without crash, hang or growth",
            "goal": f">= {arguments.inputs // len(names)}, growth < 20 MiB",
            "value": row["inputs"],
            "met": row["exit_code"] == 0 and row["inputs"] > 0 and row["rss_growth_mib"] < 20,
        }
        for row in rows
    ]
    return {"rows": rows, "goals": goals}


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2:])
