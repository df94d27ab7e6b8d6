"""Timelines of requests: events of a request in the gateway and in engines, on one clock.

Engines report events of a sequence under the router's key. Gateway and engines read the same monotonic clock of the
machine.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.api.events import Admitted, Blocked, Event, Finish, Outgrown, Preempted, Queued, Told, counted

MOST_EVENTS = 200  # of one sequence; longer timelines omit events in the middle


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """The request arrived."""

    prompt: int
    emitted: int  # tokens that it already had
    open: int  # other sequences that were running

    def __str__(self) -> str:
        others = f"; {counted(self.open, 'other')} under way" if self.open else ""
        again = f", going on behind token {self.emitted:,}" if self.emitted else ""
        return f"arrives with {counted(self.prompt, 'prompt token')}{again}{others}"


class Held(msgspec.Struct, frozen=True, tag="held"):
    """No engine could take the request; it is queued in the router."""

    def __str__(self) -> str:
        return "no engine serves: it is held"


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    engine: str
    emitted: int

    def __str__(self) -> str:
        return f"engine {self.engine} takes it" + (f", behind token {self.emitted:,}" if self.emitted else "")


class Interrupted(msgspec.Struct, frozen=True, tag="interrupted"):
    """The request's engine is gone, after `emitted` tokens."""

    engine: str
    why: str
    emitted: int

    def __str__(self) -> str:
        return f"engine {self.engine} is gone behind token {self.emitted:,} ({self.why}): it is held"


class Tried(msgspec.Struct, frozen=True, tag="tried"):
    """The request is a quarantine candidate: engines crashed while they computed it."""

    alone: bool

    def __str__(self) -> str:
        return f"engines died under it: it is tried {'alone' if self.alone else 'apart from others'}"


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    def __str__(self) -> str:
        return "first token"


class Over(msgspec.Struct, frozen=True, tag="over"):
    finish: Finish
    tokens: int

    def __str__(self) -> str:
        return f"over ({self.finish}) with {counted(self.tokens, 'token')}"


Happening = Event | Arrived | Held | Placed | Interrupted | Tried | FirstToken | Over

# State of a sequence after each event. Other events do not change the state.
_STATES = {
    Arrived: "gateway",
    Held: "held",
    Interrupted: "held",
    Placed: "gateway",
    Queued: "queued",
    Blocked: "blocked",
    Preempted: "preempted",
    Outgrown: "queued",
    Admitted: "prefill",
    FirstToken: "decode",
}


@dataclass
class Story:
    """Timeline of one sequence."""

    id: str
    events: list[tuple[float, Happening]] = field(default_factory=list)  # (monotonic seconds, event), in order of time
    left_out: int = 0  # number of events that are missing after the first half of MOST_EVENTS

    def add(self, at: float, what: Happening) -> None:
        if len(self.events) == MOST_EVENTS:
            del self.events[MOST_EVENTS // 2]
            self.left_out += 1
        self.events.append((at, what))

    def told(self) -> dict[str, Any]:
        """Return the timeline as JSON: times in milliseconds since arrival, and the time in each state."""
        events = sorted(self.events, key=lambda event: event[0])
        start = events[0][0]
        shown = [
            {"at_ms": round(1000 * (at - start), 1), **msgspec.to_builtins(what), "text": str(what)}
            for at, what in events
        ]
        left_out = {"left_out": self.left_out} if self.left_out else {}
        return {"id": self.id, "spent_ms": self._spent(events), "events": shown, **left_out}

    def summary(self, now: float) -> dict[str, Any]:
        """Return a short form: state (`over` with `finish`, or the current one), tokens and times.

        Times are milliseconds since arrival, to the first token and to the end, or null for an event that has not
        happened.
        """
        events = sorted(self.events, key=lambda event: event[0])
        start, state = events[0][0], "gateway"
        told: dict[str, Any] = {"prompt_tokens": None, "tokens": None, "finish": None, "ttft_ms": None}
        duration: float | None = None
        for at, what in events:
            state = _STATES.get(type(what), state)
            if state == "prefill" and told["ttft_ms"] is not None:
                state = "decode"
            match what:
                case Arrived():
                    told["prompt_tokens"] = what.prompt
                case FirstToken():
                    told["ttft_ms"] = round(1000 * (at - start), 1)
                case Over():
                    state, duration = "over", at - start
                    told |= {"tokens": what.tokens, "finish": what.finish}
        times = {
            "age_ms": round(1000 * (now - start), 1),
            "duration_ms": None if duration is None else round(1000 * duration, 1),
        }
        return {"id": self.id, "state": state, **told, **times}

    def _spent(self, events: list[tuple[float, Happening]]) -> dict[str, float]:
        """Return milliseconds by state.

        After its first token a resumed sequence counts as decoding, even while its prompt is recomputed.
        """
        found: dict[str, float] = {}
        state, since, started = "", 0.0, False
        for at, what in events:
            if state:
                found[state] = found.get(state, 0.0) + 1000 * (at - since)
            started = started or isinstance(what, FirstToken)
            state = _STATES.get(type(what), state)
            if isinstance(what, Over):
                state = ""
            if state == "prefill" and started:
                state = "decode"
            since = at
        return {name: round(value, 1) for name, value in found.items()}


class Stories:
    """Timelines of the last `most` sequences, by the router's keys (`<id>#<number>`)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def begin(self, key: str) -> None:
        if self._most:
            self._stories[key] = Story(public(key))
            self._trim()

    def keep(self, most: int) -> None:
        """Set the number of timelines that are kept."""
        self._most = most
        self._trim()

    def _trim(self) -> None:
        while len(self._stories) > self._most:
            self._stories.popitem(last=False)

    def add(self, key: str, at: float, what: Happening) -> None:
        story = self._stories.get(key)
        if story is not None:
            story.add(at, what)

    def told(self, told: Told) -> None:
        """Add events that an engine reports."""
        for key, at, event in told.events:
            match event:
                case Blocked():
                    holders = tuple((public(id), blocks) for id, blocks in event.holders)
                    event = msgspec.structs.replace(event, holders=holders)
                case Preempted():
                    event = msgspec.structs.replace(event, by=public(event.by))
            self.add(key, at, event)

    def newest(self) -> Iterator[Story]:
        """Return all non-empty timelines, the newest first."""
        return (story for story in reversed(self._stories.values()) if story.events)

    def of(self, request: str) -> Iterator[Story]:
        """Return the sequences of a request, by the request's ID or the ID of one sequence.

        The newest request comes last.
        """
        for story in self._stories.values():
            if story.id == request or story.id.rpartition("-")[0] == request:
                yield story


def public(key: str) -> str:
    """Return the ID of a sequence as its client knows it, from the router's key."""
    return key.rpartition("#")[0] or key
