"""Detect ranks of an engine that hang or diverge, from their messages and without a clock.

The caller passes elapsed time, so that a common pause of all processes (a paused container) is not taken for silence.
"""

from collections import deque

SILENT_S = 5.0  # without a message from a rank that serves
LOADING_SILENT_S = 60.0  # without a message from a rank that loads: an import or a conversion may block the interpreter
BEHIND_S = 30.0  # since other ranks finished a step that this rank has not
STEP_S = 600.0  # since any rank finished a step, while one is open


class RankWatchdog:
    """Rank 0 is the engine's own process: only its finished steps are reported, and it is never considered silent.
    Methods that return text return the description of a failure, or None."""

    def __init__(self, size: int) -> None:
        self._others = range(1, size)
        self._silent = [0.0] * size
        self._serving = [False] * size
        self._sent = 0
        self._done = [0] * size
        self._behind = [0.0] * size  # since other ranks finished a step that this rank has not
        self._open = 0.0  # since any rank finished a step, while one is open
        self._drawn: list[deque[int]] = [deque() for _ in range(size)]  # checksums of steps that not all have finished

    def message_received(self, rank: int) -> None:
        self._silent[rank] = 0.0

    def started_serving(self, rank: int) -> None:
        self._serving[rank] = True

    def step_sent(self) -> None:
        """Count a step that was sent to all ranks."""
        self._sent += 1

    def step_finished(self, rank: int, drawn: int) -> str | None:
        """Count a step that a rank finished. drawn: checksum of its tokens."""
        self._done[rank] += 1
        self._behind[rank] = self._open = 0.0
        self._drawn[rank].append(drawn)
        while all(self._drawn):
            own, *others = (steps.popleft() for steps in self._drawn)
            other = next((rank for rank, sums in enumerate(others, start=1) if sums != own), None)
            if other is not None:
                step = min(self._done)
                return f"rank {other} sampled other tokens than rank 0 in step {step}: the ranks diverged"
        return None

    def time_passed(self, seconds: float) -> str | None:
        """Add elapsed time."""
        leader = max(self._done)
        self._open = self._open + seconds if leader < self._sent else 0.0
        for rank in self._others:
            self._silent[rank] += seconds
            limit = SILENT_S if self._serving[rank] else LOADING_SILENT_S
            if self._silent[rank] > limit:
                return f"rank {rank} has sent no message for {limit:g} s: it is stopped, or its process hangs"
            self._behind[rank] = self._behind[rank] + seconds if self._done[rank] < leader else 0.0
            if self._behind[rank] > BEHIND_S:
                step = self._done[rank] + 1
                return f"rank {rank} has not finished step {step}, which others finished {BEHIND_S:g} s ago"
        if self._open > STEP_S:
            return f"no rank has finished step {leader + 1} within {STEP_S:g} s: the ranks wait for one another"
        return None
