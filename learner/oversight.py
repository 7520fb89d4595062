"""Watches a run for learning that goes wrong, and says so.

Signals: train reward rises while held-out accuracy falls, almost every group without contrast, entropy gone, updates
skipped, log-probabilities of engine and learner apart. An alarm is a line for people; it is raised once and again only
after it cleared. Pure and checkpointed; the daemon logs what `step` and `evaluation` return.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from temper.common import metrics as names
from temper.learner.step import StepReport

WINDOW = 20  # steps of the running means
RISE = 0.05  # reward gained since the last evaluation ...
FALL = 0.10  # ... while accuracy lost this much: the reward is being gamed
FLAT_SHARE = 0.95  # groups without variance
ENTROPY_NATS = 1e-3
GAP_NATS = 0.1


class Oversight:
    """The running view of a run."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.raised: list[str] = []  # keys of alarms that stand
        self.last_eval: dict[str, tuple[float, float]] = {}  # domain -> (accuracy, train reward at that time)

    def step(self, report: StepReport) -> list[str]:
        """New alarms after a step."""
        means = report.metrics
        trained = means.get("learner/groups/trained", (0.0, 0.0))[0]
        flat = means.get("learner/groups/zero_variance", (0.0, 0.0))[0]
        if trained:
            self._mean("flat", flat / trained)
        for key, name in (("entropy", names.LEARNER_ENTROPY), ("gap", names.LEARNER_GAP)):
            value = report.mean(name)
            if value is not None:
                self._mean(key, value)
        for name in means:
            if name.startswith("learner/reward/"):
                self._mean(name, report.mean(name) or 0.0)
        skipped = means.get(names.LEARNER_SKIPPED, (0.0, 0.0))[0]
        found = [
            self._alarm(
                "flat",
                self.means.get("flat", 0.0) > FLAT_SHARE,
                f"{self.means.get('flat', 0.0):.0%} of the groups have no contrast: nothing is left to learn from them "
                "(make the tasks harder or easier)",
            ),
            self._alarm(
                "entropy",
                self.means.get("entropy", 1.0) < ENTROPY_NATS,
                f"the policy's entropy is {self.means.get('entropy', 0.0):.2g} nats: it no longer explores",
            ),
            self._alarm(
                "gap",
                self.means.get("gap", 0.0) > GAP_NATS,
                f"engine and learner disagree by {self.means.get('gap', 0.0):.3f} nats a token on the same weights",
            ),
            self._alarm("skipped", skipped > 0, "an update was skipped: its gradient was not finite"),
        ]
        return [text for text in found if text]

    def evaluation(self, accuracy: Mapping[str, float | None]) -> list[str]:
        """New alarms after an evaluation (domain -> held-out accuracy)."""
        found = []
        for domain, value in accuracy.items():
            reward = self.means.get(f"learner/reward/{domain}")
            if value is None or reward is None:
                continue
            before = self.last_eval.get(domain)
            self.last_eval[domain] = (value, reward)
            if before is None:
                continue
            gamed = reward - before[1] > RISE and before[0] - value > FALL
            found.append(
                self._alarm(
                    f"gamed {domain}",
                    gamed,
                    f"domain {domain}: train reward rose from {before[1]:.2f} to {reward:.2f} while held-out accuracy "
                    f"fell from {before[0]:.2f} to {value:.2f}: look at its samples, the reward may be gamed",
                )
            )
        return [text for text in found if text]

    def state(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"means": dict(self.means), "raised": list(self.raised), "last_eval": dict(self.last_eval)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.means = dict(state["means"])
        self.raised = list(state["raised"])
        self.last_eval = {domain: (pair[0], pair[1]) for domain, pair in state["last_eval"].items()}

    def _mean(self, key: str, value: float) -> None:
        old = self.means.get(key)
        self.means[key] = value if old is None else old + (value - old) / WINDOW

    def _alarm(self, key: str, on: bool, text: str) -> str | None:
        if not on:
            if key in self.raised:
                self.raised.remove(key)
            return None
        if key in self.raised:
            return None
        self.raised.append(key)
        return text
