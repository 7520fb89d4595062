"""What a run shows: rates and ETA from differences, both drawings from the same picture, nothing forged by a peer's text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from temper.cli import view
from temper.cli.inspect import summary_lines
from temper.cli.status_view import View
from temper.common.reports import DomainSummary, LagStatus, PeerStatus, Progress, RunStatus, Summary, WeightsStatus


def picture() -> view.Picture:
    made = view.Picture("demo", 100, "runs/demo")
    made.started = 0.0
    made.processes = [
        view.ProcessState("broker", "ready"),
        view.ProcessState("actor-1", "restarting", "restarts in 3 s"),
    ]
    made.take_progress(
        Progress("step", 10.0 + n, step=n, reward={"reverse": n / 20}, lag_mean=1.5, lag_max=3, tokens=100)
        for n in range(1, 11)
    )
    made.take_progress([Progress("eval", 12.0, when="before", version=3, accuracy={"reverse": 0.31, "code": None})])
    for second in range(5):
        status = RunStatus(
            phase="train",
            steps_done=10,
            sampled_tokens=1000 * second,
            queued_groups=7,
            queued_bytes=2_000_000,
            jobs={"ok": 30 * second},
        )
        made.take_status(status, float(second))
    return made


def drawn(renderable: object, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


def test_what_a_peer_says_is_no_markup() -> None:
    made = picture()
    peer = PeerStatus("learner", "learner", waiting_for="[/x] [bold]actors\x1b[2J")
    made.take_status(RunStatus(phase="train", peers=[peer]), 6.0)
    assert r"[/x] [bold]actors\x1b[2J" in drawn(view.panel(made, 75.0))


def test_what_a_summary_says_cannot_drive_a_terminal() -> None:
    row = DomainSummary(reason="\x1b[2Jgone", accuracy_before=0.5)
    summary = Summary(
        exit_reason="\x1b]0;x", exit_code=2, groups={"trained": 3, "void_no_contrast": 1}, domains={"a": row}
    )
    lines = summary_lines(summary)
    assert all(line.isprintable() for line in lines)
    assert "groups      3 trained, 1 void_no_contrast" in lines
    assert r"domain      a: trained, 50.0% -> - (\x1b[2Jgone)" in lines


def test_both_forms_show_the_same_facts() -> None:
    made = picture()
    for text in (view.line(made, 75.0), drawn(view.panel(made, 75.0))):
        for part in (
            "train",
            "step 10/100",
            "1:15",
            "sampled 1,000",
            "30 jobs/s",
            "7 groups (2.0 MB)",
            "mean 1.5, max 3",
        ):
            assert part in text, (part, text)
        assert "reverse 0.31  code -" in text


def test_a_floor_is_shown_apart_from_what_is_trained() -> None:
    made = picture()
    after = Progress("eval", 13.0, when="after", accuracy={"reverse": 0.9, "bench": 0.0}, floors=["bench"])
    made.take_progress([after])
    facts = dict(view.facts(made))
    assert (facts["eval after"], facts["floor after"]) == ("reverse 0.90", "bench 0.00")
    assert "floor before" not in facts


def test_every_fact_has_a_line_of_its_own_in_the_panel() -> None:
    made = picture()
    lines = [line.strip("│ ") for line in drawn(view.panel(made, 75.0)).splitlines()]
    for name, value in view.facts(made):
        assert any(line.startswith(name) and line.endswith(value) for line in lines), name


def test_eta_follows_the_pace_of_the_recent_steps() -> None:
    made = view.Picture("demo", 100, "")
    assert made.eta_s() is None
    made.take_progress([Progress("step", 10.0, step=1), Progress("step", 30.0, step=11)])
    assert made.eta_s() == (100 - 11) * 2.0


def test_rates_forget_what_is_older_than_the_window_and_never_go_below_zero() -> None:
    rates = view.Rates()
    assert rates.of("x") is None
    for second in range(30):
        rates.add(float(second), {"x": 10.0 * second if second < 15 else 150.0})
    assert rates.of("x") == 0.0
    rates.add(30.0, {"x": 0.0})
    assert rates.of("x") == 0.0


def test_a_silent_broker_is_shown_as_such() -> None:
    made = picture()
    made.take_status(None, 80.0)
    assert "does not answer" in drawn(view.panel(made, 81.0))


def test_status_escapes_what_peers_say() -> None:
    evil = "\x1b[2J[red]gone[/red]\nforged"
    peer = PeerStatus("actor-1", "actor", "READY", progress=evil, waiting_for=evil, in_flight=3, version=4)
    text = drawn(
        View(RunStatus(name="demo", phase="train", peers=[peer], letters=[evil], paused_domains={"d": evil})), 300
    )
    assert "\x1b" not in text
    assert "[red]gone[/red]" in text
    assert not any(line.startswith("forged") for line in text.splitlines())
    assert "actor-1" in text


def test_durations_and_rates() -> None:
    assert [view.duration(s) for s in (0, 75.9, 3600, 7325)] == ["0:00", "1:15", "1:00:00", "2:02:05"]
    assert [view.rate(v) for v in (None, 3.14, 1234.5)] == ["-", "3.1", "1,234"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 12), (160, 50), (120, 8)])
@pytest.mark.parametrize("peers", [0, 3, 200])
def test_status_fits_the_terminal_and_shows_first_who_needs_a_look(width: int, height: int, peers: int) -> None:
    crowd = [PeerStatus(f"actor-{i}", "actor", "READY", progress="x" * 200, silent_s=0.1) for i in range(peers)]
    sick = PeerStatus("sandbox-9", "sandbox", "READY", silent_s=7.0)
    status = RunStatus(
        name="demo",
        phase="train",
        chain="the learner waits for actors: " + "groups " * 100,
        peers=[*crowd, sick],
        lag=LagStatus(1.5, 3, 4, {"0": 0.25, "1": 0.5, "16": 0.25}, [0.5] * 9 + [2.0]),
        weights=WeightsStatus(5, 7, "ab" * 16, 3, 2, 1000, 3, 500, 4000, 1500, needed={"5 abab": ["actor-1"] * 9}),
        leases={"train": {"out": 3, "waiting": 1, "in flight": 4}},
    )
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=False).print(View(status, height, "no answer"))
    lines = out.getvalue().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert any("sandbox-9" in line for line in lines)
        assert peers < 100 or any("more" in line for line in lines)
        told = " ".join(out.getvalue().split())
        assert "16+ " in told and "by length" in told


def test_status_in_full_shows_everybody() -> None:
    crowd = [PeerStatus(f"actor-{i}", "actor", "READY", via=["relay-1"]) for i in range(50)]
    text = drawn(View(RunStatus(peers=crowd)))
    assert all(f"actor-{i} " in text for i in range(50)) and "relay-1" in text
