"""Timelines of requests: events of a request in the gateway and in engines, on one clock.

Engines report events of a sequence under the router's key. Gateway and engines read the same monotonic clock of the
machine.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.api.events import Admitted, Blocked, Event, Finish, Outgrown, Preempted, Queued, TimelineEvents, counted

MAX_EVENTS = 200  # of one sequence; longer timelines omit events in the middle


class MediaLoaded(msgspec.Struct, frozen=True, tag="media"):
    """Media were loaded before the request arrived. The times are of the item that took longest."""

    items: int
    cached: int
    fetch_ms: float
    process_ms: float

    def __str__(self) -> str:
        cached = f", {self.cached:,} of them processed before" if self.cached else ""
        times = f"{self.fetch_ms:,.1f} ms to fetch, {self.process_ms:,.1f} ms to process"
        return f"loads {counted(self.items, 'media item')}{cached}: {times}"


class Arrived(msgspec.Struct, frozen=True, tag="arrived"):
    """The request arrived."""

    prompt: int
    emitted: int  # tokens that it already had
    open: int  # other sequences that were running
    adapter: str = ""  # LoRA adapter

    def __str__(self) -> str:
        others = f"; {counted(self.open, 'other')} in progress" if self.open else ""
        own = f" for adapter {self.adapter}" if self.adapter else ""
        again = f", resumed after token {self.emitted:,}" if self.emitted else ""
        return f"arrives with {counted(self.prompt, 'prompt token')}{own}{again}{others}"


class Pending(msgspec.Struct, frozen=True, tag="held"):
    """No engine could take the request; it is queued in the router."""

    def __str__(self) -> str:
        return "queued: no engine is ready"


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    engine: str
    emitted: int

    def __str__(self) -> str:
        return f"assigned to engine {self.engine}" + (f", after token {self.emitted:,}" if self.emitted else "")


class Interrupted(msgspec.Struct, frozen=True, tag="interrupted"):
    """The request's engine is gone, after `emitted` tokens."""

    engine: str
    why: str
    emitted: int

    def __str__(self) -> str:
        return f"engine {self.engine} exited after token {self.emitted:,} ({self.why}): queued again"


class Tested(msgspec.Struct, frozen=True, tag="tried"):
    """The request is a quarantine candidate: engines crashed while they computed it."""

    alone: bool

    def __str__(self) -> str:
        return f"isolation test {'alone' if self.alone else 'in a group'}: engines crashed while running it"


class FirstToken(msgspec.Struct, frozen=True, tag="first_token"):
    def __str__(self) -> str:
        return "first token"


class Finished(msgspec.Struct, frozen=True, tag="over"):
    finish: Finish
    tokens: int

    def __str__(self) -> str:
        return f"finished ({self.finish}) with {counted(self.tokens, 'token')}"


TimelineEvent = Event | MediaLoaded | Arrived | Pending | Placed | Interrupted | Tested | FirstToken | Finished

# State of a sequence after each event. Other events do not change the state.
_STATES = {
    MediaLoaded: "media",
    Arrived: "gateway",
    Pending: "held",
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
class Timeline:
    """Timeline of one sequence."""

    id: str
    events: list[tuple[float, TimelineEvent]] = field(
        default_factory=list
    )  # (monotonic seconds, event), in order of time
    left_out: int = 0  # number of events that are missing after the first half of MOST_EVENTS

    def add(self, at: float, event: TimelineEvent) -> None:
        if len(self.events) == MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
            self.left_out += 1
        self.events.append((at, event))

    def as_dict(self) -> dict[str, Any]:
        """Return the timeline as JSON: times in milliseconds since arrival, and the time in each state."""
        events = sorted(self.events, key=lambda event: event[0])
        start = events[0][0]
        shown = [
            {"at_ms": round(1000 * (at - start), 1), **msgspec.to_builtins(event), "text": str(event)}
            for at, event in events
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
        found: dict[str, Any] = {"prompt_tokens": None, "tokens": None, "finish": None, "ttft_ms": None}
        duration: float | None = None
        for at, event in events:
            state = _STATES.get(type(event), state)
            if state == "prefill" and found["ttft_ms"] is not None:
                state = "decode"
            match event:
                case Arrived():
                    found["prompt_tokens"] = event.prompt
                case FirstToken():
                    found["ttft_ms"] = round(1000 * (at - start), 1)
                case Finished():
                    state, duration = "over", at - start
                    found |= {"tokens": event.tokens, "finish": event.finish}
        times = {
            "age_ms": round(1000 * (now - start), 1),
            "duration_ms": None if duration is None else round(1000 * duration, 1),
        }
        return {"id": self.id, "state": state, **found, **times}

    def _spent(self, events: list[tuple[float, TimelineEvent]]) -> dict[str, float]:
        """Return milliseconds by state.

        After its first token a resumed sequence counts as decoding, even while its prompt is recomputed.
        """
        found: dict[str, float] = {}
        state, since, started = "", 0.0, False
        for at, event in events:
            if state:
                found[state] = found.get(state, 0.0) + 1000 * (at - since)
            started = started or isinstance(event, FirstToken)
            state = _STATES.get(type(event), state)
            if isinstance(event, Finished):
                state = ""
            if state == "prefill" and started:
                state = "decode"
            since = at
        return {name: round(value, 1) for name, value in found.items()}


class Timelines:
    """Timelines of the last `most` sequences, by the router's keys (`<id>#<number>`)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def begin(self, key: str) -> None:
        if self._most:
            self._timelines[key] = Timeline(public(key))
            self._trim()

    def keep(self, most: int) -> None:
        """Set the number of timelines that are kept."""
        self._most = most
        self._trim()

    def _trim(self) -> None:
        while len(self._timelines) > self._most:
            self._timelines.popitem(last=False)

    def add(self, key: str, at: float, event: TimelineEvent) -> None:
        timeline = self._timelines.get(key)
        if timeline is not None:
            timeline.add(at, event)

    def add_reported(self, reported: TimelineEvents) -> None:
        """Add events that an engine reports."""
        for key, at, event in reported.events:
            match event:
                case Blocked():
                    holders = tuple((public(id), blocks) for id, blocks in event.holders)
                    event = msgspec.structs.replace(event, holders=holders)
                case Preempted():
                    event = msgspec.structs.replace(event, by=public(event.by))
            self.add(key, at, event)

    def newest(self) -> Iterator[Timeline]:
        """Return all non-empty timelines, the newest first."""
        return (timeline for timeline in reversed(self._timelines.values()) if timeline.events)

    def of(self, request: str) -> Iterator[Timeline]:
        """Return the sequences of a request, by the request's ID or the ID of one sequence.

        The newest request comes last.
        """
        for timeline in self._timelines.values():
            if timeline.id == request or timeline.id.rpartition("-")[0] == request:
                yield timeline


def public(key: str) -> str:
    """Return the ID of a sequence as its client knows it, from the router's key."""
    return key.rpartition("#")[0] or key
