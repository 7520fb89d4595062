"""How `temper status` draws a `RunStatus`: facts first, then a row a peer, fitted to the width and height of a terminal.

Drawing is pure. Everything that comes from a peer is escaped. On a terminal too low for all peers those that need a look
come first and the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text
from temper.cli.view import duration
from temper.common.log import clean
from temper.common.reports import LagStatus, LetterStatus, PeerStatus, RunStatus, WeightsStatus

LABEL = 9
WIDE = 120  # columns, from which on a peer's row has everything
SILENT_S = 3.0
PEER_LINES = 8  # that facts leave to the peers, heads included
FACT_LINES = 3  # one fact takes at most so many lines when the height is limited
BARS = "▁▂▃▄▅▆▇█"
STATES = {"READY": "green", "STARTING": "yellow", "DRAINING": "cyan", "STOPPED": "dim", "FAILED": "bold red"}
ROLES = ("learner", "broker", "actor", "eval", "sandbox")
ROLE_NAMES = {"broker": "relay", "eval": "evaluator"}


@dataclass(frozen=True, slots=True)
class View:
    """`status` as a renderable. `height`: lines at most, None for as many as it takes; `note`: a line of its own."""

    status: RunStatus
    height: int | None = None
    note: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines."""
        width = options.max_width
        lines = [_head(self.status)]
        if self.note:
            lines.append(Text(self.note, style="bold red"))
        for label, fact in facts(self.status):
            wrapped = fact.wrap(console, max(width - LABEL, 20))
            shown = list(wrapped) if self.height is None else list(wrapped)[:FACT_LINES]
            if len(wrapped) > len(shown):
                shown[-1] = Text.assemble(shown[-1].plain[: width - LABEL - 4], " ...")
            for i, part in enumerate(shown):
                lines.append(Text.assemble((f"{label if i == 0 else '':<{LABEL}}", "dim"), part))
        room = None
        if self.height is not None:
            lines = lines[: max(self.height - min(len(self.status.peers) + 1, PEER_LINES), 1)]
            room = self.height - len(lines)
        yield Group(*(_cut(line, width) for line in lines))
        if room is None or room > 1:
            yield _table(self.status.peers, width, room)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _head(status: RunStatus) -> Text:
    return Text.assemble(
        ("temper ", "dim"),
        (clean(status.name or status.run_id or "?", 40), "bold"),
        "  ",
        (status.phase or "starting", "bold cyan"),
        f"  step {status.steps_done}/{status.max_steps}  version {status.version}  up {duration(status.uptime_s)}",
    )


def size(nbytes: float) -> str:
    """Bytes for people: ``12 kB``, ``3.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if nbytes >= 100 or unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def age(seconds: float) -> str:
    """Seconds for people: ``0.4s``, ``12s``, ``3:05``."""
    return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s" if seconds < 60 else duration(seconds)


def counts(found: Mapping[str, int]) -> str:
    """``12 ok, 3 wrong``."""
    return ", ".join(f"{n:,} {clean(name, 60)}" for name, n in found.items() if n) or "none"


def facts(status: RunStatus) -> Iterator[tuple[str, Text]]:
    """(label, what is to say) of the run, the most telling first."""
    if status.chain or status.reason:
        yield "waits", Text(clean(status.chain or status.reason))
    yield "leases", Text(_leases(status))
    yield "groups", Text(_groups(status))
    if status.lag is not None:
        yield "lag", _lag(status.lag)
    if status.weights is not None and status.weights.ordinal is not None:
        yield "weights", Text(_chain(status.weights))
        yield "", Text(_swaps(status.weights))
        yield "", Text(_needs(status.weights))
    if status.jobs or status.jobs_by_domain or status.jobs_queued or status.jobs_running:
        yield "jobs", Text(_jobs(status))
    if status.samples:
        yield "samples", Text(f"{counts(status.samples)}; {status.sampled_tokens:,} tokens sampled")
    for name, why in status.paused_domains.items():
        yield "paused", Text(clean(f"domain {name}: {why}"), style="yellow")
    if status.letters:
        many = len(status.dead_letters) or len(status.letters)
        yield "letters", Text(clean(f"{many} dead (--dead-letters), last: {status.letters[-1]}"), style="yellow")


def _leases(status: RunStatus) -> str:
    lanes = []
    for lane, found in status.leases.items():
        ended = {state: found.get(state, 0) for state in ("accepted", "quarantined", "cancelled")}
        told = f"{found.get('out', 0)} out, {found.get('waiting', 0)} wait"
        if any(ended.values()):
            told += f", {counts(ended)}"
        lanes.append(f"{lane} {told}")
    again = {how: status.attempts.get(how, 0) for how in ("returned", "expired")}
    return "; ".join([*lanes, f"attempts: {counts(again)}"] if any(again.values()) else lanes) or "none yet"


def _groups(status: RunStatus) -> str:
    now = [
        f"{lane} " + ", ".join(f"{found.get(state, 0)} {state}" for state in ("assembling", "queued", "leased"))
        for lane, found in status.queues.items()
        if any(found.values())
    ]
    queued = f"queue {status.queued_groups} groups ({size(status.queued_bytes)})"
    asked = "".join(f", {n} more asked for ({lane})" for lane, n in status.demand.items())
    return "; ".join([queued + asked, *now, f"ended: {counts(status.groups)}"])


def bars(values: list[float]) -> str:
    """Values as little bars, the largest one full."""
    top = max(values, default=0.0)
    return "".join(BARS[min(int(value / top * 7.99), 7)] if top > 0 else BARS[0] for value in values)


def _lag(lag: LagStatus) -> Text:
    text = Text(f"mean {lag.mean:.2f}, p99 {lag.p99:.0f}, max {lag.max:.0f} versions")
    shares = {key: share for key, share in lag.shares.items() if share >= 0.005}
    marks = bars(list(shares.values()))
    for mark, (key, share) in zip(marks, shares.items(), strict=True):
        text.append(f"  {'16+' if key == '16' else key} ")
        text.append(mark, style="cyan")
        text.append(f" {share:.0%}")
    if lag.by_length:
        text.append("  by length ")
        text.append(bars(lag.by_length), style="cyan")
        text.append(f" {lag.by_length[0]:.1f}..{lag.by_length[-1]:.1f}")
    return text


def _chain(weights: WeightsStatus) -> str:
    way = (
        f"snapshot {weights.snapshot} ({size(weights.snapshot_bytes)})"
        if weights.snapshot is not None
        else "no snapshot"
    )
    if weights.deltas:
        way += f" + {weights.deltas} deltas ({size(weights.delta_bytes)})"
    return (
        f"version {weights.ordinal} {weights.digest[:8]} = {way}, a copy is {size(weights.full_bytes)}; "
        f"{weights.versions} versions, {size(weights.disk_bytes)} on disk"
    )


def _swaps(weights: WeightsStatus) -> str:
    ratio = weights.full_bytes / weights.newest_bytes if weights.newest_bytes else 0.0
    text = (
        f"last {size(weights.newest_bytes)} ({ratio:,.0f}x smaller, {weights.newest_density:.2%} changed); encode "
        f"{weights.encode_s:.2f}s, publish {weights.publish_s:.2f}s, fetch {weights.fetch_s:.2f}s, stage "
        f"{weights.stage_s:.2f}s, pause {weights.pause_s * 1000:.0f} ms"
    )
    return text + (f"; reseeds: {counts(weights.reseeds)}" if weights.reseeds else "")


def _needs(weights: WeightsStatus) -> str:
    held = []
    for version, who in weights.needed.items():
        ordinal, _, digest = version.partition(" ")
        names = ", ".join(clean(name, 40) for name in who[:4]) + (f" and {len(who) - 4} more" if len(who) > 4 else "")
        held.append(f"{ordinal}{' ' + digest[:8] if digest else ''} ({names})")
    flow = f"{size(weights.stored_bytes)} in, {size(weights.served_bytes)} out"
    return "; ".join([flow, "needed: " + ", ".join(held)] if held else [flow])


def _jobs(status: RunStatus) -> str:
    now = [
        f"{clean(domain, 40)} {found.get('running', 0)} running, {found.get('waiting', 0)} waiting"
        for domain, found in status.jobs_by_domain.items()
    ]
    return "; ".join([*(now or ["none now"]), f"done: {counts(status.jobs)}"])


def _order(peer: PeerStatus) -> tuple[int, str]:
    return (ROLES.index(peer.role) if peer.role in ROLES else len(ROLES), peer.name)


def _ailing(peer: PeerStatus) -> bool:
    return peer.silent_s > SILENT_S or peer.state not in ("READY", "STARTING")


def _table(peers: list[PeerStatus], width: int, room: int | None) -> Table:
    """At most `room` lines, one of them the heads."""
    shown = sorted(peers, key=_order)
    left = 0
    if room is not None and len(shown) > room - 1:
        left = len(shown) - max(room - 2, 0)
        shown = sorted(shown, key=lambda peer: (not _ailing(peer), *_order(peer)))[: max(room - 2, 0)]
    wide = width >= WIDE
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    heads = ["peer", "state", "version", "heard", "holds", "age"]
    heads += ["host:pid", "via", "credit", "progress", "waits for"] if wide else ["doing"]
    for head in heads:
        stretch = {"doing": 1, "progress": 3, "waits for": 3}.get(head)
        table.add_column(
            head,
            no_wrap=True,
            overflow="ellipsis",
            ratio=stretch,
            justify="right" if head in ("heard", "age") else "left",
        )
    for peer in shown:
        table.add_row(*_cells(peer, wide=wide))
    if left:
        table.add_row(Text(f"and {left} more", style="dim"), *[""] * (len(heads) - 1))
    return table


def _cells(peer: PeerStatus, *, wide: bool) -> list[Text]:
    role = ROLE_NAMES.get(peer.role, peer.role)
    name = clean(peer.name, 40)
    version = "-" if peer.version is None else f"{peer.version} {clean(peer.digest)[:8]}"
    cells = [
        Text(name if name.startswith(role) else f"{name} ({role})"),
        Text(peer.state, style=STATES.get(peer.state, "")),
        Text(version),
        Text(age(peer.silent_s), style="bold red" if peer.silent_s > SILENT_S else ""),
        Text(f"{peer.in_flight}/{peer.slots}" if peer.slots else str(peer.in_flight) if peer.in_flight else "-"),
    ]
    progress = clean(peer.progress) or "-"
    room = f"broker: room for {size(peer.blocked_bytes)}" if peer.blocked_bytes else ""
    waits = "; ".join(filter(None, [room, clean(peer.waiting_for)]))
    cells.append(Text(age(peer.progress_age_s) if peer.progress else "-"))
    if not wide:
        return [*cells, Text(f"waits for {waits}" if waits else progress)]
    queued = f", {peer.queued_messages} queued" if peer.queued_messages else ""
    return [
        *cells,
        Text(clean(f"{peer.host}:{peer.pid}", 40)),
        Text(clean(" < ".join(peer.via), 40) or "-"),
        Text(f"{peer.credit_messages} ({size(peer.credit_bytes)}){queued}"),
        Text(progress),
        Text(waits or "-"),
    ]


def letter(found: LetterStatus) -> str:
    """One dead letter as a line."""
    return clean(
        f"lease {found.lease_id} ({found.lane}, {found.domain}, seed {found.task_seed}): {found.reason} after "
        f"{found.attempts} attempts: {found.error}"
    )
