"""When an engine hangs: it has work and finishes no step, it has none and does not finish its own probes, or its start
makes no progress. Judged by its pulse (engine/api/pulse.py) alone, so a slow engine that moves is never taken for one.

Pure: the clock and the pulses are the caller's.
"""

from dataclasses import dataclass

import msgspec

from engine.api.pulse import Beat, State

SLOWER = 5
"""A step may take so many times as long as the longest one yet, whatever the budget says."""


class Budgets(msgspec.Struct, frozen=True):
    """Longest times without a beat, in seconds; 0 never ends. `idle` holds three of the engine's probes."""

    loading_s: float = 300.0
    busy_s: float = 90.0
    idle_s: float = 60.0
    testing_s: float = 120.0

    @property
    def probe_s(self) -> float:
        """The time between probes: two fail before an idle engine counts as hung."""
        return self.idle_s / 3


@dataclass
class Watched:
    """One life of an engine: its last beat, when it came, and the longest step."""

    pid: int
    since_s: float
    beat: Beat | None = None
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

    def look(self, program: str, beat: Beat | None, now_s: float) -> str:
        """Why the program counts as hung, or "". A beat of another process is that of the life before."""
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
                budget_s = budget_s and max(budget_s, SLOWER * watched.longest_s)
            case State.IDLE:
                budget_s, text, key = self._budgets.idle_s, "it did not answer its probes", "stalled_idle"
        if not budget_s or silent_s < budget_s:
            return ""
        return f"hung: {text} for {silent_s:.0f} s (health.{key})"
