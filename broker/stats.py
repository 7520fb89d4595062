"""The broker's picture of the run: `RunStatus` for `temper status`, who waits for whom, metrics. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from temper.broker.core import BrokerCore
from temper.broker.events import PeerKey
from temper.broker.ledger import Ledger
from temper.broker.weight_desk import WeightDesk
from temper.common import metrics
from temper.common.metrics import Meter
from temper.common.reports import PeerStatus, RunStatus
from temper.common.schema import Heartbeat


@dataclass(frozen=True, slots=True)
class Facts:
    """What the core does not know: the run's names, clocks, and counts of messages."""

    run_id: str
    name: str
    uptime_s: float
    samples: Mapping[str, int]
    sampled_tokens: int


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


def run_status(
    core: BrokerCore, facts: Facts, beats: Mapping[PeerKey, Heartbeat], peers: Mapping[PeerKey, PeerStatus]
) -> RunStatus:
    """The whole picture. `peers` gives each peer's fixed facts and silence; heartbeats fill in the rest."""
    lanes = ("train", "demo")
    groups = core.groups.counts
    fates = {"trained": groups["train"]["trained"]}
    fates |= {f"void ({reason})": n for reason, n in sorted(core.groups.voids["train"].items())}
    fates |= {"warm start": groups["demo"]["trained"], "evaluated": groups["eval"]["reported"]}
    phase = core.phase.phase if core.phase is not None else "waiting"
    return RunStatus(
        run_id=facts.run_id,
        name=facts.name,
        phase="over" if core.over is not None else phase,
        reason=core.over.reason if core.over is not None else "; ".join(f"waiting for {what}" for what in waits(core)),
        uptime_s=round(facts.uptime_s, 3),
        steps_done=core.steps_done,
        max_steps=core.max_steps,
        version=core.version,
        lineage=core.lineage or 0,
        queued_groups=sum(groups[lane]["queued"] for lane in lanes),
        queued_bytes=core.groups.nbytes()["queued"],
        leased_groups=sum(groups[lane]["leased"] for lane in lanes),
        leases_in_flight=sum(core.leases.counts[lane]["in flight"] for lane in core.leases.counts),
        jobs_queued=core.jobs.waiting,
        jobs_running=len(core.jobs.jobs) - core.jobs.waiting,
        groups={fate: n for fate, n in fates.items() if n},
        samples=dict(facts.samples),
        jobs=dict(core.jobs.outcomes),
        sampled_tokens=facts.sampled_tokens,
        peers=[_peer(core, key, peer, beats.get(key)) for key, peer in peers.items()],
        paused_domains=dict(core.paused),
        letters=[_letter(letter) for letter in list(core.letters)[-20:]],
    )


def _peer(core: BrokerCore, key: PeerKey, peer: PeerStatus, beat: Heartbeat | None) -> PeerStatus:
    beat = beat or Heartbeat("STARTING")
    held = len(core.leases.held.get(key, ())) + len(core.jobs.running.get(key, ()))
    return PeerStatus(
        name=peer.name,
        role=peer.role,
        state=beat.state,
        host=peer.host,
        pid=peer.pid,
        progress=beat.progress,
        progress_age_s=beat.progress_age_s,
        waiting_for=beat.waiting_for,
        silent_s=peer.silent_s,
        version=beat.version.ordinal if beat.version is not None else None,
        digest=beat.version.digest if beat.version is not None else "",
        in_flight=held,
    )


def _letter(letter: Mapping[str, object]) -> str:
    return (
        f"lease {letter['lease_id']} ({letter['lane']}, {letter['domain']}): {letter['reason']} after "
        f"{letter['attempts']} attempts: {letter['error']}"
    )


def count(core: BrokerCore, samples: Mapping[str, int], ledger: Ledger, weights: WeightDesk) -> dict[str, float]:
    """Totals since this process began, by the name of their metric."""
    totals: dict[str, float] = {
        metrics.BROKER_EXPIRED: core.leases.attempts["expired"],
        metrics.BROKER_RETURNED: core.leases.attempts["returned"],
        metrics.BROKER_ACCEPTED: samples.get("accepted", 0),
        metrics.BROKER_REFUSED: samples.get("refused", 0),
        metrics.BROKER_SEGMENT_BYTES: ledger.segments.written_bytes,
        metrics.BROKER_WEIGHTS_STORED: weights.stored_nbytes,
        metrics.BROKER_WEIGHTS_SERVED: weights.served_nbytes,
    }
    return totals | {metrics.BROKER_OUTCOMES.replace("*", name): n for name, n in core.jobs.outcomes.items()}


def gauge(meter: Meter, core: BrokerCore, peers: int) -> None:
    """Set the gauges of this moment."""
    counts = core.groups.counts["train"]
    meter.set(metrics.BROKER_QUEUED, counts["queued"])
    meter.set(metrics.BROKER_QUEUED_BYTES, core.groups.nbytes()["queued"])
    meter.set(metrics.BROKER_LEASED, counts["leased"])
    meter.set(metrics.BROKER_TRAINED, counts["trained"])
    meter.set(metrics.BROKER_IN_FLIGHT, core.leases.counts["train"]["in flight"])
    meter.set(metrics.BROKER_JOBS_WAITING, core.jobs.waiting)
    meter.set(metrics.BROKER_JOBS_RUNNING, len(core.jobs.jobs) - core.jobs.waiting)
    meter.set(metrics.BROKER_PEERS, peers)
    for reason, n in core.groups.voids["train"].items():
        meter.set(metrics.BROKER_VOID.replace("*", reason.replace("/", "-")), n)
