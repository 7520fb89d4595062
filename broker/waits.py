"""Who waits for whom: the chain from the learner on, as the broker sees it, link by link and in words. Pure.

The run goes at the pace of the last link. What a daemon waits for comes from its heartbeat; why the broker holds leases
back, and where groups and jobs are, from its own books. Used by ``stats``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from temper.broker.core import BrokerCore
from temper.broker.events import PeerKey
from temper.common.reports import WaitStatus
from temper.common.schema import Heartbeat, Role

NAMED = 4  # so many peers are named, the others counted


def waits(core: BrokerCore) -> list[str]:
    """What the run waits for, as seen from the broker: one line each, nothing when all goes on."""
    roles = Counter(peer.role for peer in core.peers.values())
    found = []
    if core.over is not None:
        return ["the end: peers are draining"]
    if core.learner is None:
        found.append("the learner: it has not come" if core.owner is None else "the learner: it is gone")
    elif core.phase is None or core.learner != core.owner:
        found.append("the learner: it prepares")
    lane = core.lane
    if lane is not None:
        if not roles["actor"]:
            found.append("an actor: none is connected")
        elif core.demand[lane] and core.groups.ready(lane) is None:
            found.append(f"actors: the learner has asked for {core.demand[lane]} more groups")
        elif not core.demand[lane] and core.groups.counts[lane]["queued"]:
            found.append("the learner: groups are ready")
    if core.groups.active["eval"] and not roles["eval"]:
        found.append("an evaluator: none is connected")
    if core.jobs.waiting and not roles["sandbox"]:
        found.append(f"a sandbox worker: {core.jobs.waiting} jobs and none is connected")
    return found


def chain(core: BrokerCore, beats: Mapping[PeerKey, Heartbeat]) -> list[WaitStatus]:
    """The links, from the learner on; the last one works, or says who is missing."""
    return list(_links(core, beats))


def sentence(links: list[WaitStatus]) -> str:
    """The chain as one line."""
    return "; ".join(
        f"{link.who} {'wait' if _many(link.who) else 'waits'} for {link.whom}: {link.what}"
        if link.whom
        else f"{link.who}: {link.what}"
        for link in links
    )


def _many(who: str) -> bool:
    return who.startswith(("actors", "evaluators")) or ", " in who or " and " in who


def _links(core: BrokerCore, beats: Mapping[PeerKey, Heartbeat]) -> Iterator[WaitStatus]:
    if core.over is not None:
        draining = [peer.name for peer in core.peers.values() if peer.role != "broker"]
        yield WaitStatus("the broker", _some(draining) or "nobody", "goodbye, the run is over")
        return
    if core.learner is None:
        missing = "it has not come yet" if core.owner is None else "it is gone; its restart goes on with this run"
        yield WaitStatus("everybody", "the learner", missing)
        return
    beat = beats.get(core.learner)
    whom, what = _first_wait(beat)
    if not whom:
        yield WaitStatus(
            "the learner", "", f"at work ({beat.progress or beat.state.lower()})" if beat else "it has just come"
        )
        lane = core.lane
        if lane is not None and core.demand[lane] and core.groups.ready(lane) is None:
            yield WaitStatus("its next step", "actors", f"{core.demand[lane]} more groups")
            yield from _working(core, beats, "actor")
        elif lane is not None:
            yield from _held_back(core)
        return
    yield WaitStatus("the learner", whom, what)
    if whom.startswith("evaluator"):
        yield from _working(core, beats, "eval")
    elif whom.startswith("actor"):
        yield from _working(core, beats, "actor")


def _working(core: BrokerCore, beats: Mapping[PeerKey, Heartbeat], role: Role) -> Iterator[WaitStatus]:
    """What those do who sample: wait for leases, weights, verdicts, or sample."""
    noun = "evaluators" if role == "eval" else "actors"
    peers = {key: peer for key, peer in core.peers.items() if peer.role == role}
    if not peers:
        yield WaitStatus("the broker", f"an {noun[:-1]}", "none is connected")
        return
    holding = [key for key in peers if core.leases.held.get(key)]
    if not holding:
        states = {beats[key].state if key in beats else "STARTING" for key in peers}
        if "READY" not in states:
            waiting = [wait for key in peers if (wait := _first_wait(beats.get(key)))[0]]
            whom, what = waiting[0] if waiting else ("", f"{', '.join(sorted(states)).lower()}")
            yield WaitStatus(f"{noun} {_some([peer.name for peer in peers.values()])}", whom, what)
            return
        yield WaitStatus(noun, "the broker", "a lease")
        yield from _held_back(core)
        return
    leases = sum(len(core.leases.held[key]) for key in holding)
    if core.jobs.jobs:
        waiting_jobs, running = core.jobs.waiting, len(core.jobs.jobs) - core.jobs.waiting
        yield WaitStatus(noun, "sandbox workers", f"{len(core.jobs.jobs)} verdicts for {leases} leases")
        workers = [peer.name for peer in core.peers.values() if peer.role == "sandbox"]
        if not workers:
            yield WaitStatus("the broker", "a sandbox worker", "none is connected")
        else:
            slots = sum(core.jobs.slots.values())
            yield WaitStatus(_some(workers), "", f"{running} jobs run in {slots} slots, {waiting_jobs} wait")
        return
    names = [peers[key].name for key in holding]
    for key in holding:
        whom, what = _first_wait(beats.get(key))
        if whom:
            yield WaitStatus(peers[key].name, whom, what)
            return
    yield WaitStatus(_some(names), "", f"sampling {leases} leases")


def _held_back(core: BrokerCore) -> Iterator[WaitStatus]:
    """Why the broker gives no new lease, if it does not."""
    lane, phase = core.lane, core.phase
    if lane is None or phase is None:
        yield WaitStatus("the broker", "the learner", "a phase in which something is leased")
        return
    counts = core.groups.counts[lane]
    active = len(core.groups.active[lane])
    ahead = (core.pacing.max_staleness + 1) * phase.groups_per_step
    if active < ahead:
        return
    inside = ", ".join(f"{counts[state]} {state}" for state in ("assembling", "queued", "leased") if counts[state])
    allowed = f"{active} groups are begun ({inside}), max_staleness {core.pacing.max_staleness} allows {ahead}"
    yield WaitStatus("the broker", "the learner" if counts["queued"] or counts["leased"] else "actors", allowed)


def _first_wait(beat: Heartbeat | None) -> tuple[str, str]:
    """(whom, for what) of a heartbeat; empty when it waits for nobody."""
    if beat is None or not beat.waiting_for:
        return "", ""
    whom, colon, what = beat.waiting_for.split("; ", 1)[0].partition(": ")
    return (whom, what) if colon else ("", "")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown
