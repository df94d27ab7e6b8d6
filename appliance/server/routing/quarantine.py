"""Group testing of requests that crash engines.

After a crash the open requests resume on the next engine. A request that was in flight during two crashes is a
candidate, whatever it gained in between: each crash adds 1 to its weight, and the weight halves every HALF_LIFE tokens.
A poison request crashes the engine at the same point each time, either at a position of its reply or after a number of
tokens since it was placed. So candidates whose last two crashes agree are tested first: the less likely half of them
runs while the others are queued. A group that gets past its crash points is cleared. A group that crashes is halved
again. A single request runs alone, after a control run that shows how long the engine runs without it. It is isolated
after enough crashes alone that agree. Then all others are tested as one group.

Crashes of test groups are exempt from the restart limit. They count again if the tests isolate no request. Crashes
before the tests are charged, and attributed to the request once it is isolated.

This module is pure: no clock and no sockets. Keys are the router's names of its open requests.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

MARGIN = 8
"""Tokens beyond the crash points that clear a request: a crash loses the tokens of up to two steps, which may have
several tokens each."""
TOLERANCE = 4
"""Two crashes agree if they differ by at most this many tokens."""
HALF_LIFE = 256
"""Tokens gained after which a crash counts half."""
CANDIDATE_WEIGHT = 1.5
"""Two crashes that are at most HALF_LIFE tokens apart."""
STRONG, WEAK = 2, 1
"""Points of one crash alone.

The first crash is strong if the control ran at least CONTROL times as long without a crash. Later ones are strong if
they came after a similar time, or after the same time where the control was shorter than that.
"""
PROOF, STREAK = 4, 4
"""Points, and agreeing crashes in a row (in company or alone), after which a request is isolated."""
PROOF_ALONE = 6
"""Points after which a request is isolated regardless of its crashes in company."""
RECENT_CRASHES, MOST_EXTRA = 32, 8
"""Each of the last RECENT_CRASHES that hit no request adds STRONG to both numbers of points, at most MOST_EXTRA times.

Where engines are killed at random, a request has to crash more often before it counts as the cause.
"""
CONTROL = 3.0
CONTROL_S = (1.0, 5.0)
"""Minimum and maximum seconds of a control run."""
SAME_TIME, SIMILAR_TIME, SHORT_S = 0.2, 0.35, 0.1
"""Two durations are the same, or similar, if they differ by at most this share of the longer one, or by SHORT_S."""
REMEMBERED_CRASHES = 256
UNCLEAR_CRASHES = 3
"""Crashes of a group without agreement among its requests, after which the group is halved anyway."""


@dataclass(frozen=True)
class InFlight:
    """A request on an engine that crashed."""

    key: str
    position: int  # tokens of its reply so far
    gain: int  # tokens that this engine computed
    seconds: float  # since it was placed on this engine


@dataclass(frozen=True)
class Crash:
    """One crash from the point of view of one request."""

    number: int
    position: int
    gain: int
    seconds: float
    alone: bool

    def agrees(self, other: "Crash") -> bool:
        same_position = abs(self.position - other.position) <= TOLERANCE
        return same_position or self.agrees_in_gain(other)

    def agrees_in_gain(self, other: "Crash") -> bool:
        return abs(self.gain - other.gain) <= TOLERANCE


@dataclass
class Record:
    """Crashes of one open request."""

    weight: float = 0.0
    streak: list[Crash] = field(default_factory=list)  # agreeing crashes in a row, the latest last
    proof: int = 0  # points of the crashes in which it ran alone
    clear_gain: int = 0  # tokens that it has to exceed in a test to be cleared
    charged: list[int] = field(default_factory=list)  # numbers of its crashes that were not exempt

    def add(self, crash: Crash, in_test: bool) -> None:
        self.clear_gain = max(crash.gain, self.clear_gain if in_test else 0)
        if self.streak:
            tokens = crash.position - self.streak[-1].position
            self.weight *= 0.5 ** (max(0, tokens) / HALF_LIFE)
        self.weight += 1.0
        if self.streak and not crash.agrees(self.streak[-1]):
            self.streak, self.proof = [], 0
        self.streak.append(crash)

    def discard_proof(self) -> None:
        self.streak, self.proof = self.streak[-1:], 0

    @property
    def is_candidate(self) -> bool:
        return self.weight >= CANDIDATE_WEIGHT

    @property
    def is_likely(self) -> bool:
        return self.is_candidate and len(self.streak) > 1

    @property
    def likelihood(self) -> tuple[bool, int, float]:
        """Sort key of candidates.

        Two crashes at the same gain say more than two at the same position: all requests that got no token between two
        crashes share their position.
        """
        gains = self.streak[-1].agrees_in_gain(self.streak[-2]) if len(self.streak) > 1 else False
        return gains, len(self.streak), self.weight


@dataclass(frozen=True)
class CrashResult:
    """Result of accounting for one crash."""

    exempt: bool = False  # a test group caused the crash
    isolated: str = ""  # the request that is proven to crash engines, or ""
    attributed: tuple[str, ...] = ()  # engines of earlier, counted crashes that this request caused


@dataclass(frozen=True)
class Settlement:
    """Corrections for the restart limit at the end of the tests."""

    restored: tuple[str, ...]  # engines of exempt crashes that count again because all requests have passed
    # engines of crashes that no longer count: a likely candidate caused them and ended before its test
    attributed: tuple[str, ...]


@dataclass(frozen=True)
class TestGroup:
    """Requests to run now.

    If `alone`, nothing else runs on the engine, and a control run of `control_s` comes first.
    """

    keys: tuple[str, ...]
    alone: bool = False
    control_s: float = 0.0


class Quarantine:
    """The tests of one router's requests: at most one group runs at a time."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._positive: list[list[str]] = []  # groups with at least one poison request; the next one to test is last
        self._unknown: list[str] = []  # candidates that are tested as one group when there is no positive one
        self._group: set[str] = set()  # runs now
        self._rest: list[str] = []  # second half of the positive group whose first half is `_group`
        self._alone = ""
        self._control_s = 0.0
        self._crashes = 0
        self._unclear = 0
        self._recent: deque[bool] = deque(maxlen=RECENT_CRASHES)  # True for a crash that hit no request
        self._isolated = 0  # since the tests began
        self._exempt: list[str] = []  # engines of crashes since the tests began
        self._escaped = False  # a likely candidate ended before its test
        self._attributed: list[str] = []  # engines of crashes before the tests that such a candidate caused
        self._charged: dict[int, str] = {}  # engine by number of the crash

    @property
    def on(self) -> bool:
        """Requests are being tested."""
        return bool(self._group or self._rest or self._positive or self._unknown)

    @property
    def alone(self) -> str:
        """The request that runs alone on its engine, or ""."""
        return self._alone

    def is_candidate(self, key: str) -> bool:
        waiting = (self._rest, self._unknown, *self._positive)
        return key in self._group or any(key in keys for keys in waiting)

    def is_tested(self, key: str) -> bool:
        """Return if a candidate belongs to the group that runs now."""
        return key in self._group

    def crashed(self, engine: str, in_flight: Sequence[InFlight]) -> CrashResult:
        """Record that an engine crashed with these requests.

        A crash without any proves that engines crash by themselves.
        """
        self._recent.append(not in_flight)
        if not in_flight:
            for record in self._records.values():
                record.discard_proof()
            return CrashResult()
        self._crashes += 1
        keys = [each.key for each in in_flight]
        alone, in_test = keys == [self._alone], not self._group.isdisjoint(keys)
        for each in in_flight:
            crash = Crash(self._crashes, each.position, each.gain, each.seconds, alone)
            self._records.setdefault(each.key, Record()).add(crash, in_test)
        if not in_test:
            self._charge(engine, keys)
            self._find_candidates(keys)
            return CrashResult()
        self._exempt.append(engine)
        isolated = self._alone if alone and self._proves(self._records[self._alone]) else ""
        self._group_crashed(keys)
        if not isolated:
            return CrashResult(exempt=True)
        self._isolated += 1
        attributed = self._attribute(self._records[isolated])
        self.ended(isolated)
        return CrashResult(True, isolated, attributed)

    def next_group(self, available: Collection[str], idle: bool) -> TestGroup | None:
        """Return the group to run now, or None while one runs.

        `available` are the requests that the engine could take. `idle` means that the engine runs nothing else, so that
        a single request can run alone.
        """
        if self._group:
            return None
        keys = self._take_positive(available) or self._take_unknown(available)
        if not keys:
            return None
        self._group = set(keys)
        if len(keys) > 1 or not idle:
            return TestGroup(tuple(keys))
        self._alone = keys[0]
        shortest, longest = CONTROL_S
        wanted = CONTROL * self._records[self._alone].streak[-1].seconds
        self._control_s = min(longest, max(shortest, wanted))
        return TestGroup(tuple(keys), True, self._control_s)

    def withdraw(self) -> None:
        """Return the group to the queue of tests because it was not run."""
        self._positive.append([*self._group])
        self._group.clear()
        self._end_test()

    def gained(self, key: str, tokens: int) -> bool:
        """Update the token count of a request. Return True if that ended a test, so that other requests may run."""
        record = self._records.get(key)
        if record is None or key not in self._group:
            return False
        crash = record.streak[-1]
        if tokens <= crash.position + record.clear_gain + MARGIN:
            return False
        record.weight, record.proof = 1.0, 0
        record.streak = [crash]
        return self._leave_group(key)

    def ended(self, key: str) -> bool:
        """Remove a request that has ended. Return True if that ended a test."""
        record = self._records.pop(key, None)
        if record is not None and record.is_likely and self.is_candidate(key):
            self._escaped = True
            self._attributed += self._attribute(record)
        for keys in (self._rest, self._unknown, *self._positive):
            if key in keys:
                keys.remove(key)
        self._positive = [keys for keys in self._positive if keys]
        return self._leave_group(key)

    def settle(self) -> Settlement | None:
        """Return the corrections for the restart limit once the tests are over, or None while they run."""
        if self.on or not (self._exempt or self._attributed):
            return None
        restored = () if self._isolated or self._escaped else tuple(self._exempt)
        settlement = Settlement(restored, tuple(self._attributed))
        self._isolated = self._unclear = 0
        self._escaped = False
        self._exempt, self._attributed = [], []
        return settlement

    def _charge(self, engine: str, keys: Iterable[str]) -> None:
        self._charged[self._crashes] = engine
        self._charged.pop(self._crashes - REMEMBERED_CRASHES, None)
        for key in keys:
            self._records[key].charged.append(self._crashes)

    def _attribute(self, record: Record) -> tuple[str, ...]:
        """The engines of crashes that this request caused and that counted until now."""
        numbers = [number for number in record.charged if number in self._charged]
        return tuple(self._charged.pop(number) for number in numbers)

    def _find_candidates(self, keys: Iterable[str]) -> None:
        """Add candidates from the requests of a crash outside a test."""
        candidates = [key for key in keys if self._records[key].is_candidate and not self.is_candidate(key)]
        likely = [key for key in candidates if self._records[key].is_likely]
        if likely:
            self._positive.append(self._by_likelihood(likely))
        self._unknown += [key for key in candidates if key not in likely]

    def _group_crashed(self, keys: Sequence[str]) -> None:
        tested = [key for key in keys if key in self._group]
        absent = [key for key in self._group if key not in keys]
        beside = [key for key in keys if not self.is_candidate(key)]
        halved = bool(self._rest) or len(self._group) == 1
        self._unknown += [*self._rest, *absent, *beside]
        self._rest = []
        self._group.clear()
        self._end_test()
        likely = tested if halved else [key for key in tested if self._records[key].is_likely]
        if not likely:
            self._unclear += 1
            likely = tested if self._isolated or self._unclear >= UNCLEAR_CRASHES else []
        if likely:
            self._positive.append(self._by_likelihood(likely))
        self._unknown += [key for key in tested if key not in likely]

    def _proves(self, record: Record) -> bool:
        """Add the points of a crash alone and return if they are enough to isolate the request."""
        crash = record.streak[-1]
        controlled = self._control_s >= CONTROL * crash.seconds
        before = record.streak[-2] if len(record.streak) > 1 and record.streak[-2].alone else None
        if before is not None:
            difference = abs(crash.seconds - before.seconds)
            allowed = SIMILAR_TIME if controlled else SAME_TIME
            strong = difference <= max(SHORT_S, allowed * max(crash.seconds, before.seconds))
        else:
            strong = controlled
        record.proof += STRONG if strong else WEAK
        proof = record.proof - STRONG * min(MOST_EXTRA, sum(self._recent))
        return proof >= PROOF_ALONE or (proof >= PROOF and len(record.streak) >= STREAK)

    def _take_positive(self, available: Collection[str]) -> list[str]:
        """Return the less likely half of the next positive group. Unavailable requests are tested later."""
        while self._positive:
            keys = self._positive.pop()
            found = [key for key in keys if key in available]
            self._unknown += [key for key in keys if key not in available]
            if found:
                half = max(1, len(found) // 2)
                self._rest = found[half:]
                return found[:half]
        return []

    def _take_unknown(self, available: Collection[str]) -> list[str]:
        found = [key for key in self._unknown if key in available]
        self._unknown = [key for key in self._unknown if key not in available]
        return found

    def _leave_group(self, key: str) -> bool:
        if key not in self._group:
            return False
        self._group.discard(key)
        if self._group:
            return False
        self._end_test()
        return True

    def _end_test(self) -> None:
        self._alone, self._control_s = "", 0.0
        if self._rest:
            self._positive.append(self._rest)
            self._rest = []

    def _by_likelihood(self, keys: Iterable[str]) -> list[str]:
        """Sort by likelihood, the most likely request last."""
        return sorted(keys, key=lambda key: self._records[key].likelihood)
