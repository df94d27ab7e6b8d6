"""Whether the ranks of an engine still go on together: a judgement over what was heard, without a clock of its own.

Time is handed in as it passes, so that an engine whose processes were all suspended (a paused container) and go on
together is not taken for one whose ranks are silent.
"""

from collections import deque

SILENT_S = 5.0  # without a sign of life from a rank that serves
LOADING_SILENT_S = 60.0  # while it loads: an import or a conversion may hold the interpreter for long
BEHIND_S = 30.0  # since others finished the step that a rank still has
STEP_S = 600.0  # in which no rank finished a step


class RankWatchdog:
    """Rank 0 is the engine's own process: it is heard of by what it finishes, and never judged to be silent. Methods
    that return text say what is wrong, or None."""

    def __init__(self, size: int) -> None:
        self._others = range(1, size)
        self._silent = [0.0] * size
        self._serving = [False] * size
        self._sent = 0
        self._done = [0] * size
        self._behind = [0.0] * size  # since others finished a step that the rank has not
        self._open = 0.0  # since a step was last finished by anybody, while there is one to finish
        self._drawn: list[deque[int]] = [deque() for _ in range(size)]  # of steps that not all have finished

    def heard(self, rank: int) -> None:
        self._silent[rank] = 0.0

    def serving(self, rank: int) -> None:
        self._serving[rank] = True

    def sent(self) -> None:
        """A step went to all ranks."""
        self._sent += 1

    def finished(self, rank: int, drawn: int) -> str | None:
        """A rank finished its next step, with this checksum of its tokens."""
        self._done[rank] += 1
        self._behind[rank] = self._open = 0.0
        self._drawn[rank].append(drawn)
        while all(self._drawn):
            own, *others = (steps.popleft() for steps in self._drawn)
            other = next((rank for rank, sums in enumerate(others, start=1) if sums != own), None)
            if other is not None:
                step = min(self._done)
                return f"rank {other} drew other tokens than rank 0 in step {step}: the ranks went apart"
        return None

    def passed(self, seconds: float) -> str | None:
        """So much time went by."""
        leader = max(self._done)
        self._open = self._open + seconds if leader < self._sent else 0.0
        for rank in self._others:
            self._silent[rank] += seconds
            limit = SILENT_S if self._serving[rank] else LOADING_SILENT_S
            if self._silent[rank] > limit:
                return f"rank {rank} has given no sign of life for {limit:g} s: it is stopped, or its process hangs"
            self._behind[rank] = self._behind[rank] + seconds if self._done[rank] < leader else 0.0
            if self._behind[rank] > BEHIND_S:
                step = self._done[rank] + 1
                return f"rank {rank} has not finished step {step}, which others finished {BEHIND_S:g} s ago"
        if self._open > STEP_S:
            return f"no rank has finished step {leader + 1} within {STEP_S:g} s: the ranks wait for each other"
        return None
