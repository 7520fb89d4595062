"""What a message costs in the broker, beside ZeroMQ's own `zmq.proxy` over the same sockets and sizes, Redis and NATS.

    bin/bench broker [--json FILE] [--messages N] [--repeat R] [--stopped-s S]

Every row is one process in the middle (a relay), light clients before and behind it, all over ipc. ``broker`` is the real broker
with its ledger: an actor's sample in, acknowledged, and on to the learner in a group. ``pump`` is its Router alone, under credit
and with acknowledgements both ways: what came together it passes on as the broker does, in a group that holds it as it came;
``proxy`` moves the same frames without any of that; ``direct`` is no relay at all (``_broker_relays``). Redis Streams and NATS
JetStream carry the same acknowledged messages over loopback TCP.
`cpu_us` is the relay's processor time a message (of the broker: a sample), all threads: the stable figure on a shared machine.
The best of R repetitions, or of 2 R + 1 rounds that rows take in turns (a rate beside the proxy's is their median). "acknowledged"
is how long a sender waits at half of the broker's rate, and "a ROUTER that answers" what it would wait for a process that only
answers.
`cores` is what all processes of such a row use together: near the machine's, its latency is how long they wait for each other.
"idle" is what an idle broker itself takes, measured while no processor halts; what it is charged on a machine that is
otherwise idle too is shown beside what a process that does nothing is charged there for waking up as often.

A rate is compared with that of a `zmq.proxy` that has as many connections, and one I/O thread, as ZeroMQ comes. The broker gives
itself three where samples are large; `zmq.proxy` with three, and with one connection, stand beside it. Clients send large
messages from 64 MiB of different memory, as samples are: one again and again would be read from the processor's cache.

A sample is 1 KiB. An actor sends it in one of two ways, and the broker's rows show both (`together`): alone in a message (1), of
which those that wait for the socket leave joined, or with the other samples of its lease that were finished within 0.2 s (16).
The clients of ``pump`` have 16 messages at a time, except where `rate` paces them. `zmq.proxy` gets the same messages apart: it
knows no others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from temper.broker.ledger import BYTE_CAP
from temper.common.recipe_derived import LARGE_SAMPLE_BYTES

KIBIBYTE, MEBIBYTE = 1024, 1024 * 1024
SAMPLES_PER_GROUP = 16
PEERS = 4


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
    from _broker_relays import best, measure, merged

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
    proxies, single, pumps, *brokers = in_turns(
        2 * repeat + 1,
        partial(measure, "proxy", KIBIBYTE, n, peers=PEERS),
        partial(measure, "proxy", KIBIBYTE, n),
        partial(measure, "pump", KIBIBYTE, n, peers=PEERS),
        *(partial(real.measure, durability, n, KIBIBYTE, PEERS, together) for durability, together in kinds),
    )
    plain, ours = (
        add(merged(name, KIBIBYTE, n, rounds, peers=PEERS)) for name, rounds in (("proxy", proxies), ("pump", pumps))
    )
    add(merged("proxy", KIBIBYTE, n, single))
    half, half_taken = min(ours["rate"], plain["rate"]) / 2, max(row["rate"] for row in brokers[0]) / 2
    for (durability, together), rounds in zip(kinds, brokers, strict=True):
        ratio = beside(rounds, proxies)
        row = add({**real.merged(rounds), "beside_proxy": round(ratio, 2)})
        most, least = (8, 0.8) if durability == "memory" else (16, 0.5)
        unit = "a message of one sample" if together == 1 else "a sample, 16 a message"
        name = f"broker, 1 KiB acknowledged, durability {durability}, {unit}"
        goal(f"{name}: CPU, us", f"<= {most}", row["cpu_us"], row["cpu_us"] <= most)
        goal(f"{name}: rate beside zmq.proxy", f">= {least}", ratio, ratio >= least)
    for size, share, peers, groups, staleness in ((64 * KIBIBYTE, 8, PEERS, 8, 1), (MEBIBYTE, 30, 2, 1, 2)):
        messages, threads = n // share, 3 if size >= LARGE_SAMPLE_BYTES else 1
        ways: Sequence[dict[str, int]] = ({"peers": peers}, {"peers": 1}, {"peers": peers, "io_threads": 3})
        pumped = {"peers": peers, "io_threads": threads}
        pumps, brokers, *plains = in_turns(
            2 * repeat + 1,
            partial(measure, "pump", size, messages, **pumped),
            partial(real.measure, "memory", messages, size, peers, staleness=staleness, groups=groups, steps=1),
            *(partial(measure, "proxy", size, messages, **way) for way in ways),
        )
        for way, rounds in zip(ways, plains, strict=True):
            add(merged("proxy", size, messages, rounds, **way))
        proxies = plains[0]
        for name, row, rounds in (
            ("pump", merged("pump", size, messages, pumps, **pumped), pumps),
            ("broker, memory, samples that it has room for", real.merged(brokers), brokers),
        ):
            ratio = beside(rounds, proxies)
            add({**row, "beside_proxy": round(ratio, 2)})
            goal(f"{name}, {size // KIBIBYTE} KiB: bytes/s beside zmq.proxy", ">= 0.9", ratio, ratio >= 0.9)
        if size < MEBIBYTE:  # more than it has room for: all goes to the disk and much of it comes back
            add(real.best("memory", messages, size, 1))
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
    paths = ("direct", "pump", "pump, asleep", "proxy")
    rounds = in_turns(2 * repeat + 1, *(partial(measure, path, KIBIBYTE, n // 2, rate=round(half)) for path in paths))
    alone, relayed, *_ = (
        add(merged(path, KIBIBYTE, n // 2, found, rate=round(half))) for path, found in zip(paths, rounds, strict=True)
    )
    added = relayed["p50_us"] - alone["p50_us"]
    goal("added latency at half load, p50, us", "< 150", added, added < 150)
    answers = in_turns(
        2 * repeat + 1,
        *(partial(real.acknowledged, durability, n // 2, KIBIBYTE, half_taken) for durability in ("none", "memory")),
    )
    bare, answered = (add(min(found, key=p50_us)) for found in answers)
    added = answered["p50_us"] - bare["p50_us"]
    name = "a sample acknowledged at half load, durability memory, beside a ROUTER that answers: p50, us"
    goal(name, "< 150", added, added < 150)
    bound = BYTE_CAP * 1.1 / MEBIBYTE + 100
    for peers, size, seconds in ((4, 256 * KIBIBYTE, arguments.stopped_s), (64, MEBIBYTE, arguments.stopped_s / 5)):
        stopped = add(real.stopped(seconds, size, peers))
        name = f"RSS before a stopped learner, {peers} actors, {size // KIBIBYTE} KiB samples, MiB"
        goal(name, f"<= {bound:.0f}", stopped["rss_mib"], stopped["rss_mib"] <= bound)
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
