"""When a supervised process is started again, when a run ends, and in which order its processes stop. Pure.

`Policy` takes what happened (with the time) and answers with actions; `supervisor` carries them out. The rules:

- the learner is essential: its death ends the run with its cause; so does a broker that ends for a reason which a
  restart would meet again (configuration, environment);
- a broker that was killed or crashed is restarted at once on its ledger; the others reconnect and go on;
- an actor, sandbox worker or evaluator is restarted with back-off, at most `RESTARTS` times in a row (a process that
  was READY for `STABLE_S` starts the row anew); when the last of a role is given up, the run ends;
- a process that exits before its first READY ends the run at once;
- the learner's exit with code 0 is the end of the run: the others get `GRACE_S` to drain, then are told to in order;
- the first interrupt drains in order (actors, eval, sandbox, learner, broker), the second kills.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["broker", "learner", "actor", "eval", "sandbox"]
Mode = Literal["running", "finishing", "draining", "aborting", "over"]

ESSENTIAL: frozenset[Role] = frozenset({"learner"})
STOP_ORDER: tuple[Role, ...] = ("actor", "eval", "sandbox", "learner", "broker")
RESTARTS = 3
BACKOFF_S = (1.0, 3.0, 9.0)
BROKER_BACKOFF_S = (0.1, 1.0, 3.0)  # everybody waits for it
LASTING_CODES = (2, 4)  # configuration, environment: a restart would meet them again
CLEAN_S = 5.0  # a clean exit may be the run's end, which the others tell a moment later
STABLE_S = 30.0
GRACE_S = 3.0
ABORT_S = 2.0
INTERRUPTED_CODE = 128 + signal.SIGINT
PEER_LOST_CODE = 3


@dataclass(frozen=True, slots=True)
class Start:
    """Start the process."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the process to drain (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process at once (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Show one line; `tail` asks for the last log lines of `name` with it."""

    text: str
    name: str = ""
    tail: bool = False


Action = Start | Terminate | Kill | Say


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the run is over; `blamed` is the process that caused it, if one did."""

    exit_code: int
    reason: str
    blamed: str = ""


@dataclass(slots=True)
class Child:
    """What the policy knows of one process."""

    name: str
    role: Role
    alive: bool = False
    ready: bool = False  # this incarnation said READY
    was_ready: bool = False  # any incarnation did
    ready_at: float = 0.0
    failures: int = 0  # exits in a row
    restart_at: float | None = None
    given_up: bool = False
    told: bool = False  # SIGTERM was sent to this incarnation
    kill_at: float | None = None


def describe_exit(code: int) -> str:
    """An exit status in words: ``exit code 2 (configuration)``, ``killed by SIGKILL``."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    meaning = {0: "clean", 1: "bug", 2: "configuration", 3: "peer lost", 4: "environment"}.get(code)
    return f"exit code {code}" + (f" ({meaning})" if meaning else "")


class Policy:
    """The supervisor's decisions. Every method takes the time in seconds (any clock that only rises)."""

    def __init__(self, children: Sequence[tuple[str, Role]], drain_timeout_s: float) -> None:
        self.children = {name: Child(name, role) for name, role in children}
        self.drain_timeout_s = drain_timeout_s
        self.mode: Mode = "running"
        self.run_over = False  # the learner has announced the end: clean exits are expected
        self.ending: Ending | None = None
        self._stop_from: float | None = None  # when the staged stop may begin
        self._missing_learner_at: float | None = None  # the broker left cleanly: the learner has until then

    # ---------------------------------------------------------------- events

    def start(self, now: float) -> list[Action]:
        """Start everything; the order does not matter, daemons wait for each other."""
        return [self._start(child) for child in self.children.values()]

    def ready(self, name: str, now: float) -> list[Action]:
        """A process said READY."""
        child = self.children[name]
        if not child.alive or child.ready:
            return []
        child.ready = child.was_ready = True
        child.ready_at = now
        return []

    def exited(self, name: str, code: int, now: float) -> list[Action]:
        """A process has ended with `code` (negative: the signal that killed it)."""
        child = self.children[name]
        if not child.alive:
            return []
        stable = child.ready and now - child.ready_at >= STABLE_S
        was_told = child.told
        child.alive = child.ready = child.told = False
        child.kill_at = None
        if self.mode != "running":
            if code not in (0, -signal.SIGTERM) and not (was_told and code in (-signal.SIGKILL, INTERRUPTED_CODE)):
                return [Say(f"{name} ended with {describe_exit(code)} while the run was stopping", name)]
            return []
        if child.role == "learner" and code == 0:
            self.mode = "finishing"
            self.ending = Ending(0, "max_steps reached")
            self._stop_from = now + GRACE_S
            self._forget_restarts()
            return []
        if child.role == "broker" and code == 0 and child.was_ready:
            self.run_over = True  # it leaves by itself only when the run is over; the learner may need a while to go
            self._missing_learner_at = now + self.drain_timeout_s
            self._forget_restarts()
            return []
        if self.run_over and code == 0:
            return []
        if not child.was_ready:
            return self._abort(child, code, f"{name} ended before it was ready: {describe_exit(code)}", now)
        if child.role in ESSENTIAL or (child.role == "broker" and code in LASTING_CODES):
            return self._abort(child, code, f"{name} died: {describe_exit(code)}", now)
        child.failures = 1 if stable else child.failures + 1
        if child.failures > RESTARTS:
            return self._give_up(child, code, now)
        backoff = (BROKER_BACKOFF_S if child.role == "broker" else BACKOFF_S)[child.failures - 1]
        delay = backoff if code else max(backoff, CLEAN_S)
        child.restart_at = now + delay
        return [
            Say(
                f"{name} ended: {describe_exit(code)}; restart {child.failures} of {RESTARTS} in {delay:g} s",
                name,
                tail=True,
            )
        ]

    def over(self) -> None:
        """The broker reports that the run is over: processes that leave cleanly from now on are not restarted."""
        self.run_over = True

    def interrupt(self, now: float) -> list[Action]:
        """Ctrl-C or SIGTERM: the first drains in order, the second kills."""
        if self.mode == "over":
            return []
        if self.mode == "running":
            self.mode = "draining"
            self.ending = Ending(INTERRUPTED_CODE, "interrupted")
            self._stop_from = now
            self._forget_restarts()
            return [Say("draining: actors, eval, sandbox, learner, broker; once more to stop at once"), *self.tick(now)]
        if self.mode == "finishing" and self._stop_from is not None and now < self._stop_from:
            self._stop_from = now
            return self.tick(now)
        if self.mode == "draining":
            self.ending = Ending(INTERRUPTED_CODE, "interrupted twice: processes were killed")
        return [Kill(child.name) for child in self.children.values() if child.alive]

    def tick(self, now: float) -> list[Action]:
        """Time has passed: due restarts, the next stage of a stop, deadlines."""
        if self.mode == "running":
            return self._tick_running(now)
        actions: list[Action] = []
        for child in self.children.values():
            if child.alive and child.kill_at is not None and now >= child.kill_at:
                actions.append(Say(f"{child.name} did not drain in time: killed", child.name))
                actions.append(Kill(child.name))
                child.kill_at = now + ABORT_S
        if not any(child.alive for child in self.children.values()):
            self.mode = "over"
        elif self.mode in ("finishing", "draining") and self._stop_from is not None and now >= self._stop_from:
            actions += self._next_stage(now)
        return actions

    # ---------------------------------------------------------------- rules

    def _start(self, child: Child) -> Start:
        child.alive = True
        child.ready = child.told = False
        child.restart_at = child.kill_at = None
        return Start(child.name)

    def _tick_running(self, now: float) -> list[Action]:
        if self._missing_learner_at is not None and now >= self._missing_learner_at:
            broker = next(child for child in self.children.values() if child.role == "broker")
            return self._abort(broker, PEER_LOST_CODE, f"{broker.name} ended before the learner", now)
        actions: list[Action] = []
        for child in self.children.values():
            if child.restart_at is not None and now >= child.restart_at:
                actions.append(self._start(child))
        return actions

    def _next_stage(self, now: float) -> list[Action]:
        """SIGTERM to the first role in `STOP_ORDER` that still has processes; the next role waits for it."""
        for role in STOP_ORDER:
            stage = [child for child in self.children.values() if child.role == role and child.alive]
            for child in stage:
                if not child.told:
                    child.told = True
                    child.kill_at = now + self.drain_timeout_s
            if stage:
                return [Terminate(child.name) for child in stage if child.kill_at == now + self.drain_timeout_s]
        return []

    def _give_up(self, child: Child, code: int, now: float) -> list[Action]:
        child.given_up = True
        text = f"{child.name} given up after {RESTARTS} restarts in a row: {describe_exit(code)}"
        others = [
            other
            for other in self.children.values()
            if other.role == child.role and (other.alive or other.restart_at is not None)
        ]
        if others:
            return [Say(text, child.name, tail=True)]
        return self._abort(child, code, text, now)

    def _abort(self, child: Child, code: int, reason: str, now: float) -> list[Action]:
        self.mode = "aborting"
        exit_code = code if 1 <= code <= 4 else PEER_LOST_CODE if code < 0 else 1
        self.ending = Ending(exit_code, reason, child.name)
        self._forget_restarts()
        actions: list[Action] = []
        for other in self.children.values():
            if other.alive:
                other.told = True
                other.kill_at = now + ABORT_S
                actions.append(Terminate(other.name))
        if not actions:
            self.mode = "over"
        return actions

    def _forget_restarts(self) -> None:
        for child in self.children.values():
            child.restart_at = None
