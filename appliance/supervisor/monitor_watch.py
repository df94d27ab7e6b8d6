"""Watchdog of the launcher over the restart monitor: detects frequent restarts and missing messages.

This module is pure: the caller supplies the clock, which counts only time in which the launcher itself was running.
"""

MAX_STARTS = 10
WINDOW_S = 60.0
SILENT_S = 60.0
"""The monitor sends a message every few seconds."""


class MonitorWatchdog:
    def __init__(self) -> None:
        self._starts: list[float] = []
        self._heard_s = 0.0
        self._killed = False

    def started(self, now_s: float) -> str:
        """Record a start of the monitor. Return why the appliance must end, or ""."""
        self._heard_s = now_s
        self._starts = [*(start for start in self._starts if now_s - start < WINDOW_S), now_s]
        if len(self._starts) <= MAX_STARTS:
            return ""
        return f"the restart monitor exited {MAX_STARTS} times within {WINDOW_S:g} s"

    def alive(self, now_s: float) -> None:
        self._heard_s, self._killed = now_s, False

    def silent(self, now_s: float) -> bool:
        """Return whether the monitor must be killed now, so that Supervisor starts it again."""
        if now_s - self._heard_s < SILENT_S or self._killed:
            return False
        self._heard_s, self._killed = now_s, True
        return True

    def lost(self, now_s: float) -> str:
        """Return why the appliance must end (the monitor was killed and still sends nothing), or ""."""
        if self._killed and now_s - self._heard_s >= SILENT_S:
            return f"the restart monitor sent no message for {2 * SILENT_S:g} s"
        return ""
