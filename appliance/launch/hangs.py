"""When an engine counts as hung: it has work and finishes no step, it has none and does not finish its own probes, or
its start makes no progress. It is judged by its heartbeat (engine/api/heartbeat.py), so a slow engine that makes
progress is never killed.

A step may take as long as the longest of these: the budget, `SLOWER` times the longest step so far, `SLOWER` times the
slowest step that the plan expects (the roofline, which real steps exceed). An engine whose threads run, wait for a CPU
or wait for pages from a disk is slow rather than hung: it gets `SLOWER` times as long again.

Pure: clock, heartbeats and activity are the caller's.
"""

from dataclasses import dataclass

import msgspec

from engine.api.heartbeat import Heartbeat, State

SLOWER = 5
"""How many times as long as expected something may take."""


class Budgets(msgspec.Struct, frozen=True):
    """Longest times without a sign of progress, in seconds; 0 is no limit."""

    loading_s: float = 300.0
    busy_s: float = 20.0
    idle_s: float = 30.0
    """Three of the engine's probes fall into this time."""
    testing_s: float = 120.0
    gateway_s: float = 20.0
    step_s: float = 0.0
    """The slowest step of an engine that the plan expects."""

    @property
    def probe_s(self) -> float:
        """The time between probes: two fail before an idle engine counts as hung."""
        return self.idle_s / 3


@dataclass
class Watched:
    """One life of an engine: its last beat, when it came, and the longest step."""

    pid: int
    since_s: float
    beat: Heartbeat | None = None
    longest_s: float = 0.0


class Hangs:
    """The engines that run now, by program."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._watched: dict[str, Watched] = {}

    def started(self, program: str, pid: int, now_s: float) -> None:
        self._watched[program] = Watched(pid, now_s)

    def ended(self, program: str) -> None:
        self._watched.pop(program, None)

    def pid(self, program: str) -> int | None:
        """The process of a program that runs."""
        watched = self._watched.get(program)
        return watched.pid if watched else None

    def silent_s(self, program: str, now_s: float) -> float:
        """Seconds since the last beat that `look` saw."""
        watched = self._watched.get(program)
        return now_s - watched.since_s if watched else 0.0

    def look(self, program: str, beat: Heartbeat | None, now_s: float, *, active: bool = False) -> str:
        """Return why the program counts as hung, or "". A beat of another process is ignored: an earlier engine wrote
        it. `active`: the engine's threads have recently used CPU time, or waited for it or for a disk."""
        watched = self._watched.get(program)
        if watched is None:
            return ""
        if beat is not None and beat.pid == watched.pid and beat != watched.beat:
            if watched.beat is not None and watched.beat.state is State.BUSY:
                watched.longest_s = max(watched.longest_s, now_s - watched.since_s)
            watched.beat, watched.since_s = beat, now_s
            return ""
        silent_s = now_s - watched.since_s
        state = watched.beat.state if watched.beat else State.LOADING
        match state:
            case State.LOADING:
                budget_s, text, key = self._budgets.loading_s, "its start made no progress", "stalled_loading"
            case State.TESTING:
                budget_s, text = self._budgets.testing_s, "no step of its self-test was finished"
                key = "stalled_testing"
            case State.BUSY:
                budget_s, text, key = self._budgets.busy_s, "no step was finished", "stalled_busy"
                budget_s = budget_s and max(budget_s, SLOWER * max(watched.longest_s, self._budgets.step_s))
            case State.IDLE:
                budget_s, text, key = self._budgets.idle_s, "it did not answer its probes", "stalled_idle"
        if not budget_s or silent_s < budget_s * (SLOWER if active else 1):
            return ""
        return f"hung: {text} for {silent_s:.0f} s (health.{key})"
