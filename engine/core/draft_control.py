"""Adaptive drafts (`speculation.method: auto`): pause drafts that do not raise the rate of tokens.

A step of R rows takes t seconds without drafts and c seconds more per draft token. If A of D draft tokens are
accepted, the rate rises if (R + A) / (t + c D) > R / t, which is A / D > c R / t. The right side is the break-even of a
load level (number of rows, rounded up to a power of two minus one). The i-th token of a draft is accepted with
probability p^i, where p is the measured acceptance of the request. A draft has the tokens with p^i > break-even;
without any, the request pauses. At a level whose break-even is 1 or more, all drafts pause.

A new request begins with the acceptance of recent drafts of all requests, as if 2 of its tokens were verified. If that
does not pay, the request begins with a draft of one token, as after a pause.

All times come from events, so a replay makes the same decisions.
"""

import math

import msgspec

PLAIN_STEPS = 4  # measured steps without drafts before the first draft of a level
DRAFTED_STEPS = 3  # measured steps with drafts before drafts may pause
REFRESH = 256  # steps after which the time without drafts is measured again
WINDOW = 16  # steps, or drafts, of the moving averages
OUTLIER = 3.0  # a time is counted as at most this multiple of the average; of a draft, also as a step without drafts
FIRST_PAUSE, LAST_PAUSE = 16, 512  # of a request in tokens, of a level in steps; doubled each time
MISSES = 16  # drafts without a match after which a request pauses
DECAY = 0.8  # weight of earlier drafts of a request, per draft
FIRST_DRAFT = 4  # maximum tokens of a draft while a level or a request has no verified one
LEAST_BREAK_EVEN = 0.05  # a measured one may be 0 by chance
PRIOR = (1.8, 2.0)  # accepted and tried tokens that the first request begins with: soon outweighed
PROBE = (0.45, 0.5)  # accepted and tried tokens after a pause: the first draft, of one token, decides


class LoadLevel(msgspec.Struct, array_like=True):
    """Measured times at one number of rows, in seconds."""

    plain: float = 0.0  # step without drafts
    plain_steps: int = 0
    plain_at: int = 0  # last step without drafts
    token: float = 0.0  # additional time per draft token
    drafted_steps: int = 0
    resume: int = 0  # step from which drafts may be tried again
    pause: int = FIRST_PAUSE


class ControlState(msgspec.Struct):
    """The state of `DraftControl`, for a recording."""

    levels: dict[int, LoadLevel]
    applied: float | None = None  # time of the last result, if requests were still running
    acceptance: float = PRIOR[0] / PRIOR[1]  # moving average over the verified drafts of all requests


class Acceptance(msgspec.Struct, array_like=True):
    """Acceptance of the drafts of one request."""

    accepted: float = PRIOR[0]  # moving sums
    tried: float = PRIOR[1]  # accepted tokens, and those that were rejected first
    misses: int = 0  # consecutive attempts without a draft
    resume: int = 0  # length from which the request may have drafts
    pause: int = FIRST_PAUSE
    begun: bool = False  # the first draft of the request is planned

    @property
    def rate(self) -> float:
        """Probability that a draft token is accepted after accepted ones."""
        return self.accepted / self.tried

    def begin(self, recent: float, break_even: float) -> None:
        """Set the acceptance before the first draft. recent: of the drafts of all requests."""
        self.begun, pays = True, recent > max(break_even, LEAST_BREAK_EVEN)
        self.accepted, self.tried = (recent * PRIOR[1], PRIOR[1]) if pays else PROBE

    def verified(self, drafted: int, accepted: int) -> None:
        self.accepted = self.accepted * DECAY + accepted
        self.tried = self.tried * DECAY + accepted + (accepted < drafted)
        if accepted == drafted:
            self.pause = FIRST_PAUSE

    def proposed(self, count: int, length: int) -> None:
        """Count an attempt to draft."""
        self.misses = 0 if count else self.misses + 1
        if self.misses >= MISSES:
            self.misses = 0
            self._wait(length)

    def length(self, break_even: float, length: int) -> int | None:
        """Return the number of draft tokens that pay; None: no limit. length: of the sequence.

        The first drafts of a request, or after a pause, are short, because little is known of their acceptance."""
        rate = self.rate
        most = 1 if self.tried <= PROBE[1] else FIRST_DRAFT if self.tried <= PRIOR[1] else None
        break_even = max(break_even, LEAST_BREAK_EVEN)
        if rate >= 1:
            return most
        if break_even < rate:
            pays = int(math.log(break_even) / math.log(rate))
            return pays if most is None else min(pays, most)
        self._wait(length)
        self.accepted, self.tried = PROBE
        return 0

    def _wait(self, length: int) -> None:
        self.resume, self.pause = length + self.pause, min(LAST_PAUSE, 2 * self.pause)


class DraftControl:
    """Measures step times, and decides at which load levels drafts are tried."""

    def __init__(self) -> None:
        self.state = ControlState({})

    def allows(self, rows: int, step: int) -> bool:
        """Return whether this step may have drafts."""
        level = self.state.levels.get(rows.bit_length())
        if level is None or level.plain_steps < PLAIN_STEPS or step - level.plain_at > REFRESH:
            return False
        return step >= level.resume

    def break_even(self, rows: int) -> float:
        """Return the share of accepted draft tokens above which drafts pay at this number of rows."""
        level = self.state.levels.get(rows.bit_length())
        if level is None or level.drafted_steps < DRAFTED_STEPS or not level.plain:
            return 0.0
        return level.token * rows / level.plain

    def verified(self, drafted: int, accepted: int) -> None:
        """Update the acceptance that new requests begin with. All drafts have equal weight, because a few long drafts
        would otherwise outweigh many short wrong ones."""
        share = accepted / (accepted + (accepted < drafted)) if drafted else 0.0
        self.state.acceptance += (share - self.state.acceptance) / WINDOW

    def applied(self, rows: int, drafts: int | None, step: int, started: float, now: float, *, running: bool) -> None:
        """Measure a step. drafts: number of its draft tokens; None for a step that also computes prompts. started: time
        of its planning. running: True if requests are running after it."""
        before, self.state.applied = self.state.applied, now if running else None
        if drafts is None or not rows:
            return
        seconds = now - (started if before is None else before)
        level = self.state.levels.setdefault(rows.bit_length(), LoadLevel())
        if not drafts:
            level.plain = _average(level.plain, level.plain_steps, seconds, OUTLIER * level.plain)
            level.plain_steps += 1
            level.plain_at = step
        elif level.plain_steps:
            token = max(0.0, seconds - level.plain) / drafts
            most = max(OUTLIER * level.token, level.plain / drafts)  # the average may be 0
            level.token = _average(level.token, level.drafted_steps, token, most)
            level.drafted_steps += 1
            self._pause(level, rows, step)

    def _pause(self, level: LoadLevel, rows: int, step: int) -> None:
        """Pause the drafts of a level at which even accepted ones do not pay."""
        if level.drafted_steps < DRAFTED_STEPS:
            return
        if level.token * rows < level.plain:
            level.pause = FIRST_PAUSE
        else:
            level.resume, level.pause = step + level.pause, min(LAST_PAUSE, 2 * level.pause)
            level.drafted_steps = DRAFTED_STEPS - 1  # the next draft decides again


def _average(mean: float, count: int, value: float, most: float) -> float:
    """Return the moving average after one more value. most: counted of a value, unless it is one of the first."""
    if count >= DRAFTED_STEPS:
        value = min(value, most)
    return mean + (value - mean) / min(count + 1, WINDOW)
