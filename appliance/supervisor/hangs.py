"""Detection of hung engines: an engine is hung if it has work and finishes no step, if it is idle and does not finish
its own probes, or if its start makes no progress. Only its heartbeat (engine/api/heartbeat.py) is used, so a slow
engine that makes progress is never killed.

The limit of a step is the largest of: the budget, `SLOW_FACTOR` times the longest step so far, and `SLOW_FACTOR` times
the slowest step that the plan expects (a roofline estimate, which real steps exceed). An engine whose threads run, wait
for a CPU or wait for pages from a disk is slow rather than hung: its limit is multiplied by `SLOW_FACTOR`.

This module is pure: the caller supplies clock, heartbeats and activity.
"""

from dataclasses import dataclass

import msgspec

from engine.api.heartbeat import Heartbeat, State

SLOW_FACTOR = 5
"""Factor between the expected duration and the limit."""


class Budgets(msgspec.Struct, frozen=True):
    """Maximum time without progress, in seconds; 0 disables the limit."""

    loading_s: float = 300.0
    busy_s: float = 20.0
    idle_s: float = 30.0  # allows for three probes of the engine
    testing_s: float = 120.0
    gateway_s: float = 20.0
    step_s: float = 0.0  # slowest step of an engine that the plan expects

    @property
    def probe_s(self) -> float:
        """Return the time between probes. Two probes fail before an idle engine counts as hung."""
        return self.idle_s / 3


@dataclass
class EngineProgress:
    """State of one engine process: its last heartbeat, when that arrived, and its longest step."""

    pid: int
    since_s: float
    heartbeat: Heartbeat | None = None
    longest_s: float = 0.0


class HangDetector:
    """Heartbeats of the running engines, by program."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._watched: dict[str, EngineProgress] = {}

    def started(self, program: str, pid: int, now_s: float) -> None:
        self._watched[program] = EngineProgress(pid, now_s)

    def ended(self, program: str) -> None:
        self._watched.pop(program, None)

    def pid(self, program: str) -> int | None:
        """Return the process id of a running program."""
        watched = self._watched.get(program)
        return watched.pid if watched else None

    def silent_s(self, program: str, now_s: float) -> float:
        """Return the seconds since the last heartbeat that `check` saw."""
        watched = self._watched.get(program)
        return now_s - watched.since_s if watched else 0.0

    def check(self, program: str, heartbeat: Heartbeat | None, now_s: float, *, active: bool = False) -> str:
        """Return why the program counts as hung, or "". A heartbeat of another process id is ignored, because an
        earlier engine wrote it. `active` says that the engine's threads have recently used CPU time, or waited for it
        or for a disk."""
        watched = self._watched.get(program)
        if watched is None:
            return ""
        if heartbeat is not None and heartbeat.pid == watched.pid and heartbeat != watched.heartbeat:
            if watched.heartbeat is not None and watched.heartbeat.state is State.BUSY:
                watched.longest_s = max(watched.longest_s, now_s - watched.since_s)
            watched.heartbeat, watched.since_s = heartbeat, now_s
            return ""
        silent_s = now_s - watched.since_s
        state = watched.heartbeat.state if watched.heartbeat else State.LOADING
        match state:
            case State.LOADING:
                budget_s, text, key = self._budgets.loading_s, "its start made no progress", "stalled_loading"
            case State.TESTING:
                budget_s, text = self._budgets.testing_s, "no step of its self-test finished"
                key = "stalled_testing"
            case State.BUSY:
                budget_s, text, key = self._budgets.busy_s, "no step finished", "stalled_busy"
                budget_s = budget_s and max(budget_s, SLOW_FACTOR * max(watched.longest_s, self._budgets.step_s))
            case State.IDLE:
                budget_s, text, key = self._budgets.idle_s, "it finished no idle probe", "stalled_idle"
        if not budget_s or silent_s < budget_s * (SLOW_FACTOR if active else 1):
            return ""
        return f"hung: {text} for {silent_s:.0f} s (health.{key})"
