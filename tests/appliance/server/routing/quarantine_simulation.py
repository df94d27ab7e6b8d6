"""A simulated service with one engine: steps of a fixed time, requests that crash the engine, and random kills.

The simulation drives Quarantine as the router does, and keeps the crashes that the restart limit would count.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.server.routing.quarantine import InFlight, Quarantine

STEP_S = 0.02
LOST_TOKENS = (0, 0, 1, 2)
"""Tokens of the last steps that a crash takes with it, one of these at random."""


@dataclass
class Request:
    """`crashes(position, gain)` returns True if the engine crashes when it computes the next token."""

    length: int
    crashes: Callable[[int, int], bool] | None = None
    prefill_steps: int = 0
    arrival_s: float = 0.0
    position: int = 0
    placed: int = 0  # position at which the engine took it
    placed_s: float = 0.0
    steps: int = 0  # on this engine
    paused_s: float = 0.0
    end: str = ""


def poison_after(tokens: int) -> Callable[[int, int], bool]:
    """Crash after this many tokens on each engine."""
    return lambda position, gain: gain >= tokens


def poison_at(token: int) -> Callable[[int, int], bool]:
    """Crash at this token of the reply."""
    return lambda position, gain: position >= token


@dataclass
class Simulation:
    requests: dict[str, Request]
    rng: random.Random
    start_s: float = 2.0
    kill_every_s: float = 0.0  # on average; 0: never
    kills_left: int = 1_000_000
    kill_starting: bool = True  # kills hit engines that start or are idle as well
    quarantine: Quarantine = field(default_factory=Quarantine)
    now: float = 0.0
    crashes: int = 0
    charged: int = 0
    most_charged: int = 0

    def __post_init__(self) -> None:
        self.queue: list[str] = []
        self.open: dict[str, Request] = {}
        self.up_s = 0.0
        self.control_until = 0.0
        self.control_for = ""

    def run(self, most_s: float = 3600.0) -> "Simulation":
        coming = sorted(self.requests, key=lambda key: self.requests[key].arrival_s)
        while any(not request.end for request in self.requests.values()):
            assert self.now < most_s, f"not over: {self.queue} are queued, {list(self.open)} run"
            while coming and self.requests[coming[0]].arrival_s <= self.now:
                self.queue.append(coming.pop(0))
            if self.now >= self.up_s:
                self._release()
            for key in self.queue:
                self.requests[key].paused_s += STEP_S
            self.now += STEP_S
            if self._killed() or (self.now >= self.up_s and self._poisoned()):
                self._crash()
            elif self.now >= self.up_s:
                self._step()
        return self

    @property
    def isolated(self) -> set[str]:
        return {key for key, request in self.requests.items() if request.end == "isolated"}

    def _killed(self) -> bool:
        serving = bool(self.open or self.control_for) and self.now >= self.up_s
        if not self.kill_every_s or not self.kills_left or not (serving or self.kill_starting):
            return False
        killed = self.rng.random() < STEP_S / self.kill_every_s
        self.kills_left -= killed
        return killed

    def _poisoned(self) -> bool:
        return any(
            request.crashes is not None and request.crashes(request.position, request.position - request.placed)
            for request in self.open.values()
            if request.steps >= request.prefill_steps
        )

    def _release(self) -> None:
        quarantine = self.quarantine
        if not self.control_for:
            group = quarantine.next_group(self.queue, idle=not self.open)
            if group is not None and group.alone:
                self.control_for, self.control_until = group.keys[0], self.now + group.control_s
        if self.control_for and self.now >= self.control_until:
            key, self.control_for = self.control_for, ""
            self._place(key)
        for key in list(self.queue):
            tested = quarantine.is_candidate(key)
            if key != quarantine.alone and (quarantine.is_tested(key) if tested else not quarantine.alone):
                self._place(key)

    def _place(self, key: str) -> None:
        if key in self.queue:
            self.queue.remove(key)
            request = self.open[key] = self.requests[key]
            request.placed, request.placed_s, request.steps = request.position, self.now, 0

    def _step(self) -> None:
        for key, request in list(self.open.items()):
            request.steps += 1
            if request.steps <= request.prefill_steps:
                continue
            request.position += 1
            if request.position >= request.length:
                request.end = "finished"
                del self.open[key]
                self.quarantine.ended(key)
            else:
                self.quarantine.gained(key, request.position)
        self._restore()

    def _restore(self) -> None:
        settlement = self.quarantine.settle()
        if settlement is not None:
            self.charged += len(settlement.restored) - len(settlement.attributed)
        self.most_charged = max(self.most_charged, self.charged)

    def _crash(self) -> None:
        self.crashes += 1
        if self.control_for:
            self.control_for = ""
            self.quarantine.withdraw()
        lost = self.rng.choice(LOST_TOKENS)
        in_flight = []
        for key, request in self.open.items():
            request.position = max(request.placed, request.position - lost)
            gain = request.position - request.placed
            in_flight.append(InFlight(key, request.position, gain, self.now - request.placed_s))
        result = self.quarantine.crashed("engine-0", in_flight)
        self.charged += not result.exempt
        self.most_charged = max(self.most_charged, self.charged)
        self.charged -= len(result.attributed)
        if result.isolated:
            self.requests[result.isolated].end = "isolated"
            del self.open[result.isolated]
        self.queue += self.open
        self.open.clear()
        self.up_s = self.now + self.start_s
        self._restore()
