"""The broker's picture of the run: `RunStatus` for `temper status`, who waits for whom, metrics. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from temper.broker.core import BrokerCore
from temper.broker.events import PeerKey
from temper.broker.groups import ACTIVE
from temper.broker.ledger import Ledger
from temper.broker.waits import chain, sentence, waits
from temper.broker.weight_desk import WeightDesk
from temper.common import metrics
from temper.common.metrics import Meter
from temper.common.reports import LagStatus, LetterStatus, PeerStatus, RunStatus, WeightsStatus
from temper.common.schema import Heartbeat, Lane

__all__ = ["Facts", "count", "gauge", "lag_of", "run_status", "waits"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the core does not know: the run's names, clocks, and counts of messages."""

    run_id: str
    name: str
    uptime_s: float
    samples: Mapping[str, int]
    sampled_tokens: int
    learner_gauges: Mapping[str, float] = field(default_factory=dict)


def run_status(
    core: BrokerCore,
    facts: Facts,
    beats: Mapping[PeerKey, Heartbeat],
    peers: Mapping[PeerKey, PeerStatus],
    weights: WeightsStatus | None = None,
) -> RunStatus:
    """The whole picture. `peers` gives each peer's fixed facts, silence and credit; heartbeats fill in the rest."""
    lanes = ("train", "demo")
    groups = core.groups.counts
    nbytes = core.groups.nbytes()
    fates = {"trained": groups["train"]["trained"]}
    fates |= {f"void ({reason})": n for reason, n in sorted(core.groups.voids["train"].items())}
    fates |= {"warm start": groups["demo"]["trained"], "evaluated": groups["eval"]["reported"]}
    phase = core.phase.phase if core.phase is not None else "waiting"
    links = chain(core, beats)
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
        queued_bytes=nbytes["queued"],
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
        leases={lane: _leases(core, lane) for lane in ("train", "eval", "demo") if core.leases.counts[lane]},
        attempts={how: n for how, n in core.leases.attempts.items() if n},
        queues={
            lane: {state: groups[lane][state] for state in ACTIVE} for lane in ("train", "eval", "demo") if groups[lane]
        },
        group_bytes=nbytes,
        demand={lane: n for lane, n in core.demand.items() if n},
        jobs_by_domain=core.jobs.by_domain(),
        lag=lag_of(facts.learner_gauges),
        weights=weights,
        dead_letters=[msgspec.convert(letter, LetterStatus) for letter in core.letters],
        waits=links,
        chain=sentence(links),
    )


def _leases(core: BrokerCore, lane: Lane) -> dict[str, int]:
    """Leases of a lane by state; those in flight also by whether they are out or wait to go out (again)."""
    counts = {state: n for state, n in core.leases.counts[lane].items() if n}
    waiting = len(core.leases.waiting[lane])
    return counts | {"out": counts.get("in flight", 0) - waiting, "waiting": waiting}


def lag_of(gauges: Mapping[str, float]) -> LagStatus | None:
    """The lag of the learner's last step, from the gauges that it reports; None before the first."""
    share, length = metrics.LEARNER_LAG_SHARE.removesuffix("*"), metrics.LEARNER_LAG_LENGTH.removesuffix("*")
    shares = {
        str(int(n)): v for name, v in gauges.items() if name.startswith(share) and (n := name[len(share) :]).isdecimal()
    }
    lengths = {
        int(n): v for name, v in gauges.items() if name.startswith(length) and (n := name[len(length) :]).isdecimal()
    }
    if not shares:
        return None
    return LagStatus(
        mean=gauges.get(metrics.LEARNER_LAG_MEAN, 0.0),
        p99=gauges.get(metrics.LEARNER_LAG_P99, 0.0),
        max=gauges.get(metrics.LEARNER_LAG_MAX, 0.0),
        shares={lag: round(v, 4) for lag, v in sorted(shares.items(), key=lambda item: int(item[0])) if v > 0},
        by_length=[round(lengths[decile], 4) for decile in sorted(lengths)],
    )


def _peer(core: BrokerCore, key: PeerKey, peer: PeerStatus, beat: Heartbeat | None) -> PeerStatus:
    beat = beat or Heartbeat("STARTING")
    record = core.peers.get(key)
    return msgspec.structs.replace(
        peer,
        state=beat.state,
        progress=beat.progress,
        progress_age_s=round(beat.progress_age_s, 3) if math.isfinite(beat.progress_age_s) else 0.0,
        waiting_for=beat.waiting_for,
        version=beat.version.ordinal if beat.version is not None else None,
        digest=beat.version.digest if beat.version is not None else "",
        in_flight=len(core.leases.held.get(key, ())) + len(core.jobs.running.get(key, ())),
        slots=record.slots if record is not None else 0,
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
